//! A call over TCP that the server refuses was not processed. It is retried, however much of its
//! body has been sent.

use std::sync::Mutex;

use bytes::Bytes;
use h2::Reason;
use h2::server::SendResponse;
use http::{HeaderMap, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper_util::rt::TokioIo;
use tokio::io::DuplexStream;
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::body::Body;
use tower::{ServiceExt, service_fn};

use crate::{Channel, Endpoint, Policy};

/// Number of calls that are refused before one is answered.
const REFUSED: usize = 3;

/// Refuses the first calls, each when the first part of its body has arrived, and echoes later
/// ones. Reports for each call whether it was refused.
async fn serve(io: DuplexStream, begun: UnboundedSender<bool>) {
    let mut connection = h2::server::handshake(io).await.unwrap();
    for call in 0.. {
        let Some(Ok((request, mut respond))) = connection.accept().await else { break };
        let begun = begun.clone();
        tokio::spawn(async move {
            let mut body = request.into_body();
            let first = body.data().await.unwrap().unwrap();
            begun.send(call < REFUSED).unwrap();
            match call < REFUSED {
                true => respond.send_reset(Reason::REFUSED_STREAM),
                false => echo(first, body, respond).await,
            }
        });
    }
}

async fn echo(first: Bytes, mut body: h2::RecvStream, mut respond: SendResponse<Bytes>) {
    let mut all = first.to_vec();
    while let Some(data) = body.data().await {
        all.extend(data.unwrap());
    }
    let head = Response::builder().header("content-type", "application/grpc").body(()).unwrap();
    let mut reply = respond.send_response(head, false).unwrap();
    reply.send_data(all.into(), false).unwrap();
    reply
        .send_trailers(HeaderMap::from_iter([(
            "grpc-status".parse().unwrap(),
            "0".parse().unwrap(),
        )]))
        .unwrap();
}

async fn connect(begun: UnboundedSender<bool>) -> Channel {
    let (near, far) = tokio::io::duplex(64 << 10);
    tokio::spawn(serve(far, begun));
    let near = Mutex::new(Some(TokioIo::new(near)));
    let connector = service_fn(move |_| {
        let near = near.lock().unwrap().take();
        async { near.ok_or(std::io::ErrorKind::ConnectionRefused) }
    });
    let connector = tower::ServiceBuilder::new().map_err(std::io::Error::from).service(connector);
    let endpoint = Endpoint::from_static("http://refused").policy(Policy::Off);
    endpoint.connect_with_connector(connector).await.unwrap()
}

fn request(body: Body) -> Request<Body> {
    Request::post("/a.B/C").header("te", "trailers").body(body).unwrap()
}

async fn sent_again(channel: Channel, response: Response<Body>, body: &str) {
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), body);
    let stats = channel.stats();
    assert_eq!((stats.calls_tcp, stats.calls_moved), (1, REFUSED as u64));
}

#[tokio::test]
async fn a_call_that_was_sent_to_its_end() {
    let (begun, _all) = mpsc::unbounded_channel();
    let channel = connect(begun).await;
    let response = channel.clone().oneshot(request(Body::new(Full::from("one")))).await.unwrap();
    sent_again(channel, response, "one").await;
}

#[tokio::test]
async fn a_call_whose_body_has_only_begun() {
    let (begun, mut all) = mpsc::unbounded_channel();
    let channel = connect(begun).await;
    let (more, frames) = mpsc::channel(4);
    let frames = ReceiverStream::new(frames)
        .map(|part: &'static str| Ok::<_, Status>(Frame::data(part.into())));
    let call = tokio::spawn(channel.clone().oneshot(request(Body::new(StreamBody::new(frames)))));
    more.send("one").await.unwrap();
    while all.recv().await.unwrap() {}
    more.send("two").await.unwrap();
    drop(more);
    sent_again(channel, call.await.unwrap().unwrap(), "onetwo").await;
}
