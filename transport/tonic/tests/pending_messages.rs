//! However calls end, none of their messages stays pending. The test has its own process because
//! the table of pending messages is shared by the whole process.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes};
use common::{Blob, Either, Fabric, Which, World, pooled};
use http::uri::PathAndQuery;
use tokio_stream::{StreamExt, iter};
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::{Code, Status};
use tonic_rdma::codec::pending_messages;

const LEN: usize = 200_000;

/// Waits until the tasks of dropped calls have ended.
async fn nothing_is_kept(after: &str) {
    let begin = Instant::now();
    while pending_messages() > 0 {
        assert!(
            begin.elapsed() < Duration::from_secs(30),
            "{} messages are kept after {after}",
            pending_messages()
        );
        // Poll, because the table of pending messages has no notification.
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// A message of arbitrary bytes.
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = ();
    type Encoder = Raw;
    type Decoder = Raw;
    fn encoder(&mut self) -> Raw {
        Raw
    }
    fn decoder(&mut self) -> Raw {
        Raw
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;
    fn encode(&mut self, item: Bytes, dst: &mut EncodeBuf<'_>) -> Result<(), Status> {
        dst.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = ();
    type Error = Status;
    fn decode(&mut self, _: &mut DecodeBuf<'_>) -> Result<Option<()>, Status> {
        Err(Status::unimplemented("not read"))
    }
}

/// Creates a world whose ends know the codec of the methods.
async fn known(fabric: Fabric) -> (World, Blob) {
    let world = World::new(fabric, Which::Ours).await;
    let blob = Blob { number: 20, ..Blob::of(pooled(&world.channel, LEN, 1).await) };
    for _ in 0..2 {
        let mut client = world.client(Which::Ours);
        client.echo(blob.clone()).await.unwrap();
        let down = client.down(blob.clone()).await.unwrap();
        assert_eq!(down.collect::<Vec<_>>().await.len(), 20);
        let chat = client.chat(iter(vec![blob.clone(); 3])).await.unwrap();
        assert_eq!(chat.collect::<Vec<_>>().await.len(), 3);
        client.up(iter(vec![blob.clone(); 3])).await.unwrap();
    }
    nothing_is_kept("calls that ended well").await;
    (world, blob)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_kept_however_calls_end() {
    for fabric in Fabric::FAST {
        let (world, blob) = known(*fabric).await;
        let mut client = world.client(Which::Ours);

        // Read two streams alternately, each with its own bytes.
        let others: Vec<Blob> =
            [2, 3].iter().map(|seed| Blob::of(common::pattern(LEN, *seed).into())).collect();
        let mut streams = Vec::new();
        for other in &others {
            streams.push(client.down(Blob { number: 10, ..other.clone() }).await.unwrap());
        }
        for _ in 0..10 {
            for (stream, other) in streams.iter_mut().zip(&others) {
                assert!(stream.message().await.unwrap().unwrap().data == other.data, "mixed up");
            }
        }
        drop(streams);
        nothing_is_kept("two streams").await;

        // Cancel calls in the middle of the response, then in the middle of the request.
        for taken in [0, 1, 7] {
            let mut down = client.down(blob.clone()).await.unwrap();
            for _ in 0..taken {
                down.message().await.unwrap().unwrap();
            }
        }
        for _ in 0..5 {
            let call = client.up(iter(vec![blob.clone(); 20]).chain(tokio_stream::pending()));
            assert!(tokio::time::timeout(Duration::from_millis(5), call).await.is_err());
        }
        nothing_is_kept("calls that were cancelled").await;

        // Take a body whose placeholder no decoder reads.
        let mut response = raw_down(&world, &blob).await;
        let frame = std::future::poll_fn(|cx| {
            http_body::Body::poll_frame(std::pin::Pin::new(response.body_mut()), cx)
        })
        .await;
        assert!(
            frame.unwrap().unwrap().into_data().unwrap().len() < 100,
            "a stand-in was expected"
        );
        assert_eq!(pending_messages(), 1);
        drop(response);
        assert_eq!(pending_messages(), 0);

        // Messages are decoded on a thread other than the one that received them.
        let mut down = client.down(blob.clone()).await.unwrap();
        for _ in 0..20 {
            let handle = tokio::runtime::Handle::current();
            let (next, back) = std::thread::spawn(move || {
                let next = handle.block_on(down.message());
                (next, down)
            })
            .join()
            .unwrap();
            assert!(next.unwrap().unwrap().data == blob.data);
            down = back;
        }
        drop(down);
        nothing_is_kept("decoding on other threads").await;

        // Send data that cannot be decoded, because it is not text.
        let mut client = world.client(Which::Ours);
        for _ in 0..3 {
            let data = Bytes::from(vec![0xff; LEN]);
            let status = client.unary("/test.Blobs/Text", Blob::of(data)).await.unwrap_err();
            assert_eq!(status.code(), Code::Internal, "{status}");
            assert!(status.message().contains("UTF-8"), "{status}");
        }
        // Then send text, so that the server learns the method.
        for _ in 0..2 {
            client.unary("/test.Blobs/Text", Blob::of(vec![b'x'; LEN].into())).await.unwrap();
        }
        let status =
            client.unary("/test.Blobs/Text", Blob::of(vec![0xff; LEN].into())).await.unwrap_err();
        assert!(status.message().contains("UTF-8"), "{status}");
        nothing_is_kept("messages that cannot be decoded").await;

        // A peer sends data that resembles a placeholder, which is decoded in the ordinary way.
        for mark in [*b"\0rdI", *b"\0rdO"] {
            let mut grpc = Grpc::new(world.channel.clone());
            grpc.ready().await.unwrap();
            let mut forged = vec![1; LEN];
            forged[..4].copy_from_slice(&mark);
            let path = PathAndQuery::from_static("/test.Blobs/Echo");
            let status =
                grpc.unary(tonic::Request::new(forged.into()), path, Raw).await.unwrap_err();
            assert_eq!(status.code(), Code::Internal);
            assert!(status.message().contains("invalid tag"), "{status}");
        }
        nothing_is_kept("forged stand-ins").await;

        // End the server during its calls.
        let mut down = client.down(Blob { number: 1000, ..blob.clone() }).await.unwrap();
        down.message().await.unwrap().unwrap();
        drop(world);
        while down.message().await.is_ok_and(|blob| blob.is_some()) {}
        drop(down);
        nothing_is_kept("a lost connection").await;
    }
}

/// The response to `Down` as the transport returns it, for a call that this crate's codec has
/// encoded.
async fn raw_down(world: &World, blob: &Blob) -> http::Response<tonic::body::Body> {
    use tower::{Service, ServiceExt};
    let encoder = Either::<Blob, Blob>::new(Which::Ours).encoder();
    let source = tokio_stream::once(Ok(blob.clone()));
    let body = tonic::codec::EncodeBody::new_client(encoder, source, None, None);
    let request = http::Request::post("http://h/test.Blobs/Down")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(tonic::body::Body::new(body))
        .unwrap();
    let mut channel = world.channel.clone();
    channel.ready().await.unwrap().call(request).await.unwrap()
}
