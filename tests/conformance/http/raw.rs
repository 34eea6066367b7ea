//! Channels and servers without stubs: heads, bodies that are cut anywhere, trailers.

use std::convert::Infallible;
use std::future::{Future, ready};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use prost::Message as _;
use tokio_stream::StreamExt;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::{Code, Status};
use tonic_rdma_tests::channel::{AnyChannel, BoxError};
use tonic_rdma_tests::harness::{TestEnv, client_of};
use tonic_rdma_tests::pb::Message;
use tonic_rdma_tests::service::Scripted;
use tonic_rdma_tests::service::script::{echo, payload, send, send_many, steps};
use tonic_rdma_tests::{connect, serve};
use tower::{Service, ServiceExt};

cases![
    request_head_reaches_the_server,
    trailers_of_a_success,
    trailers_only,
    response_cut_anywhere,
    request_cut_anywhere,
    several_messages_in_one_frame,
    empty_frames_in_between,
    response_without_trailers,
    response_cut_off_in_a_message,
    http_status_instead_of_grpc,
    unknown_status_number,
    response_body_that_fails,
    request_body_that_fails,
    request_without_a_message,
    held_frames_stay_whole,
];

type Frames = Vec<Result<Frame<Bytes>, BoxError>>;

fn body(frames: Frames) -> Body {
    Body::new(StreamBody::new(tokio_stream::iter(frames)))
}

fn data(bytes: impl Into<Bytes>) -> Result<Frame<Bytes>, BoxError> {
    Ok(Frame::data(bytes.into()))
}

fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (key, value) in pairs {
        let key = HeaderName::from_bytes(key.as_bytes()).unwrap();
        map.append(key, HeaderValue::from_str(value).unwrap());
    }
    map
}

fn trailers(pairs: &[(&str, &str)]) -> Result<Frame<Bytes>, BoxError> {
    Ok(Frame::trailers(headers(pairs)))
}

/// A message as gRPC frames it: flag, length, bytes.
fn framed(message: &Message) -> Bytes {
    let mut out = BytesMut::new();
    out.put_u8(0);
    out.put_u32(message.encoded_len() as u32);
    message.encode(&mut out).unwrap();
    out.freeze()
}

fn cut(bytes: &Bytes, size: usize) -> Frames {
    (0..bytes.len())
        .step_by(size)
        .map(|at| data(bytes.slice(at..(at + size).min(bytes.len()))))
        .collect()
}

/// A service without stubs that answers every request with the function's response.
#[derive(Clone)]
struct Bare<F>(F);

impl<F> NamedService for Bare<F> {
    const NAME: &'static str = "tonic_rdma.conformance.v1.Conformance";
}

impl<F> Service<Request<Body>> for Bare<F>
where
    F: Fn(Request<Body>) -> Response<Body>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(ready(Ok((self.0)(request))))
    }
}

fn respond(head: &[(&str, &str)], frames: Frames) -> Response<Body> {
    let mut response = Response::new(body(frames));
    *response.headers_mut() = headers(head);
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    response
}

/// A channel to a server that answers with the responses of `f`.
async fn bare<F>(env: &TestEnv, f: F) -> (tonic_rdma_tests::harness::Server, AnyChannel)
where
    F: Fn(Request<Body>) -> Response<Body> + Clone + Send + Sync + 'static,
{
    let server = serve!(env, |server| server.add_service(Bare(f)));
    let channel = connect!(env, server);
    (server, channel)
}

async fn call(channel: &AnyChannel, method: &str, frames: Frames) -> Response<Body> {
    let request = Request::post(format!("/tonic_rdma.conformance.v1.Conformance/{method}"))
        .version(http::Version::HTTP_2)
        .header("te", "trailers")
        .header("content-type", "application/grpc")
        .header("x-custom", "one")
        .header("x-custom", "two")
        .body(body(frames))
        .unwrap();
    channel.clone().oneshot(request).await.unwrap()
}

/// The joined data of a body, and its trailers.
async fn collect(response: Response<Body>) -> Result<(Bytes, Option<HeaderMap>), Status> {
    let collected = response.into_body().collect().await?;
    let trailers = collected.trailers().cloned();
    Ok((collected.to_bytes(), trailers))
}

fn all<'a>(map: &'a HeaderMap, key: &str) -> Vec<&'a str> {
    map.get_all(key).iter().map(|v| v.to_str().unwrap()).collect()
}

async fn request_head_reaches_the_server(env: &TestEnv) {
    let (_server, channel) = bare(env, |request| {
        let (parts, _) = request.into_parts();
        let mut response = respond(
            &[("seen-method", parts.method.as_str()), ("seen-path", parts.uri.path())],
            vec![trailers(&[("grpc-status", "0")])],
        );
        response.headers_mut().insert(
            "seen-authority",
            HeaderValue::from_str(parts.uri.authority().map_or("", |a| a.as_str())).unwrap(),
        );
        for key in ["te", "content-type", "x-custom"] {
            for value in parts.headers.get_all(key) {
                let seen = HeaderName::from_bytes(format!("seen-{key}").as_bytes()).unwrap();
                response.headers_mut().append(seen, value.clone());
            }
        }
        response
    })
    .await;
    let response = call(&channel, "Anything", vec![]).await;
    assert_eq!(response.status(), 200);
    let head = response.headers();
    assert_eq!(all(head, "seen-method"), ["POST"]);
    assert_eq!(all(head, "seen-path"), ["/tonic_rdma.conformance.v1.Conformance/Anything"]);
    assert_eq!(all(head, "seen-te"), ["trailers"]);
    assert_eq!(all(head, "seen-content-type"), ["application/grpc"]);
    assert_eq!(all(head, "seen-x-custom"), ["one", "two"]);
    assert_eq!(all(head, "seen-authority"), [_server.addr().to_string()]);
}

async fn trailers_of_a_success(env: &TestEnv) {
    let (_server, channel) = bare(env, |_| {
        respond(
            &[("x-head", "h1"), ("x-head", "h2")],
            vec![
                data(framed(&payload(5, 700))),
                trailers(&[
                    ("grpc-status", "0"),
                    ("x-trail", "t1"),
                    ("x-other", "o"),
                    ("x-trail", "t2"),
                    ("x-raw-bin", "AAH/"),
                ]),
            ],
        )
    })
    .await;
    let response = call(&channel, "Unary", vec![]).await;
    assert_eq!(all(response.headers(), "x-head"), ["h1", "h2"]);
    let (data, trailers) = collect(response).await.unwrap();
    assert_eq!(data, framed(&payload(5, 700)));
    let trailers = trailers.unwrap();
    assert_eq!(all(&trailers, "x-trail"), ["t1", "t2"]);
    assert_eq!(all(&trailers, "grpc-status"), ["0"]);
    assert_eq!(all(&trailers, "x-raw-bin"), ["AAH/"]);
    assert!(!trailers.contains_key("x-head"));
    // A stub sees the same message and trailers.
    let mut replies = client_of(channel).download(Message::default()).await.unwrap().into_inner();
    replies.message().await.unwrap().unwrap().expect(5, 700);
    let trailers = replies.trailers().await.unwrap().unwrap();
    let values: Vec<_> = trailers.get_all("x-trail").iter().collect();
    assert_eq!(values, ["t1", "t2"]);
    let raw = trailers.get_bin("x-raw-bin").unwrap().to_bytes().unwrap();
    assert_eq!(&raw[..], b"\0\x01\xff");
}

async fn trailers_only(env: &TestEnv) {
    let (_server, channel) = bare(env, |_| {
        respond(&[("grpc-status", "9"), ("grpc-message", "not%20now"), ("x-t", "v")], vec![])
    })
    .await;
    let response = call(&channel, "Unary", vec![]).await;
    // As in HTTP/2, the only block of fields is the head.
    assert_eq!(all(response.headers(), "grpc-status"), ["9"]);
    let (data, trailers) = collect(response).await.unwrap();
    assert!(data.is_empty());
    assert_eq!(trailers, None);
    let status = client_of(channel).download(Message::default()).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::FailedPrecondition, "not now"));
    assert_eq!(status.metadata().get("x-t").unwrap(), "v");
}

async fn response_cut_anywhere(env: &TestEnv) {
    for (size, piece) in [(0, 1), (40, 1), (3000, 7), (100_000, 999), (300_000, 65_536)] {
        let (_server, channel) = bare(env, move |_| {
            let mut bytes = BytesMut::new();
            bytes.extend_from_slice(&framed(&payload(1, size)));
            bytes.extend_from_slice(&framed(&payload(2, size)));
            let mut frames = cut(&bytes.freeze(), piece);
            frames.push(trailers(&[("grpc-status", "0")]));
            respond(&[], frames)
        })
        .await;
        let response = client_of(channel).download(Message::default()).await.unwrap();
        let mut replies = response.into_inner();
        replies.message().await.unwrap().unwrap().expect(1, size);
        replies.message().await.unwrap().unwrap().expect(2, size);
        assert_eq!(replies.message().await.unwrap(), None);
    }
}

async fn request_cut_anywhere(env: &TestEnv) {
    let server = env.server().await;
    let channel = connect!(env, server);
    for (size, piece) in [(0, 1), (40, 1), (3000, 7), (100_000, 999), (300_000, 65_536)] {
        let request = framed(&steps("", [echo(1)]).with_payload(3, size));
        let response = call(&channel, "Unary", cut(&request, piece)).await;
        let (data, trailers) = collect(response).await.unwrap();
        assert_eq!(data, framed(&payload(3, size)));
        assert_eq!(all(&trailers.unwrap(), "grpc-status"), ["0"]);
    }
}

async fn several_messages_in_one_frame(env: &TestEnv) {
    let server = env.server().await;
    let channel = connect!(env, server);
    let mut bytes = BytesMut::new();
    bytes.extend_from_slice(&framed(&steps("", [echo(3)])));
    bytes.extend_from_slice(&framed(&payload(1, 100)));
    bytes.extend_from_slice(&framed(&payload(2, 90_000)));
    let response = call(&channel, "Chat", vec![data(bytes)]).await;
    let (data, trailers) = collect(response).await.unwrap();
    let mut expected = BytesMut::new();
    for message in [payload(0, 0), payload(1, 100), payload(2, 90_000)] {
        expected.extend_from_slice(&framed(&message));
    }
    assert_eq!(data, expected);
    assert_eq!(all(&trailers.unwrap(), "grpc-status"), ["0"]);
}

async fn empty_frames_in_between(env: &TestEnv) {
    let (_server, channel) = bare(env, |_| {
        let bytes = framed(&payload(1, 5000));
        respond(
            &[],
            vec![
                data(""),
                data(bytes.slice(..3)),
                data(""),
                data(bytes.slice(3..4000)),
                data(""),
                data(bytes.slice(4000..)),
                data(""),
                trailers(&[("grpc-status", "0")]),
            ],
        )
    })
    .await;
    let reply = client_of(channel).unary(Message::default()).await.unwrap();
    reply.into_inner().expect(1, 5000);
}

async fn response_without_trailers(env: &TestEnv) {
    let (_server, channel) = bare(env, |_| respond(&[], vec![data(framed(&payload(1, 10)))])).await;
    let response = call(&channel, "Download", vec![]).await;
    let (data, trailers) = collect(response).await.unwrap();
    assert_eq!(data, framed(&payload(1, 10)));
    assert_eq!(trailers, None);
}

async fn response_cut_off_in_a_message(env: &TestEnv) {
    let (_server, channel) = bare(env, |_| {
        let bytes = framed(&payload(1, 10_000));
        respond(&[], vec![data(bytes.slice(..9000)), trailers(&[("grpc-status", "0")])])
    })
    .await;
    let status = client_of(channel).unary(Message::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::Internal);
}

async fn http_status_instead_of_grpc(env: &TestEnv) {
    for (http, code) in [
        (400, Code::Internal),
        (401, Code::Unauthenticated),
        (403, Code::PermissionDenied),
        (404, Code::Unimplemented),
        (429, Code::Unavailable),
        (503, Code::Unavailable),
        (500, Code::Unknown),
    ] {
        let (_server, channel) = bare(env, move |_| {
            let mut response = respond(&[], vec![]);
            *response.status_mut() = http::StatusCode::from_u16(http).unwrap();
            response
        })
        .await;
        let response = call(&channel, "Unary", vec![]).await;
        assert_eq!(response.status(), http);
        let status = client_of(channel).unary(Message::default()).await.unwrap_err();
        assert_eq!(status.code(), code, "HTTP {http}");
    }
}

async fn unknown_status_number(env: &TestEnv) {
    for number in ["42", "-1", "nonsense", ""] {
        let (_server, channel) = bare(env, move |_| {
            respond(&[], vec![trailers(&[("grpc-status", number), ("grpc-message", "odd")])])
        })
        .await;
        let status = client_of(channel).unary(Message::default()).await.unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::Unknown, "odd"), "{number:?}");
    }
}

async fn response_body_that_fails(env: &TestEnv) {
    let (_server, channel) = bare(env, |_| {
        let frames = vec![data(framed(&payload(1, 10))), Err("the body broke".into())];
        // Yield, so that the first message is sent before the body fails.
        let frames = tokio_stream::iter(frames).then(|frame| async {
            tokio::task::yield_now().await;
            frame
        });
        let mut response = respond(&[], vec![]);
        *response.body_mut() = Body::new(StreamBody::new(frames));
        response
    })
    .await;
    let mut replies = client_of(channel).download(Message::default()).await.unwrap().into_inner();
    let status = loop {
        match replies.message().await {
            Ok(Some(message)) => message.expect(1, 10),
            Ok(None) => unreachable!("a broken body must not look finished"),
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), Code::Internal, "{status:?}");
}

async fn request_body_that_fails(env: &TestEnv) {
    let server = env.server().await;
    let channel = connect!(env, server);
    let first = framed(&steps(
        "u",
        [
            tonic_rdma_tests::service::script::receive_all(),
            tonic_rdma_tests::service::script::hang(),
        ],
    ));
    let frames = tokio_stream::iter([data(first)]).chain(tokio_stream::once(()).then({
        let probe = env.probe().clone();
        move |()| {
            let probe = probe.clone();
            async move {
                probe.seen("began:u").await;
                Err(BoxError::from("the body broke"))
            }
        }
    }));
    let request = Request::post("/tonic_rdma.conformance.v1.Conformance/Upload")
        .version(http::Version::HTTP_2)
        .header("te", "trailers")
        .header("content-type", "application/grpc")
        .body(Body::new(StreamBody::new(frames)))
        .unwrap();
    let outcome = channel.clone().oneshot(request).await;
    assert!(outcome.is_err(), "{outcome:?}");
    env.probe().seen("ended:u").await;
    let mut client = client_of(channel);
    client.unary(steps("", [send(1, 1)])).await.unwrap().into_inner().expect(1, 1);
}

async fn request_without_a_message(env: &TestEnv) {
    let server = serve!(env, |server| server.add_service(Scripted::server(env.probe())));
    let channel = connect!(env, server);
    let response = call(&channel, "Unary", vec![]).await;
    let status = Status::from_header_map(response.headers()).unwrap();
    assert_eq!(status.code(), Code::Internal);
    assert_eq!(env.probe().count("began:"), 0);
}

async fn held_frames_stay_whole(env: &TestEnv) {
    let server = env.server().await;
    let channel = connect!(env, server);
    let request = framed(&steps("", [send_many(1, 1 << 20, 100)]));
    let response = call(&channel, "Download", vec![data(request)]).await;
    // Keep all frames, which are more than the landing memory holds, to check that held frames are
    // not overwritten.
    let mut body = response.into_body();
    let mut held = Vec::new();
    while let Some(frame) = body.frame().await {
        held.extend(frame.unwrap().into_data());
    }
    let mut client = client_of(channel);
    for seed in 0..20 {
        let request = steps("", [echo(1)]).with_payload(seed, 1 << 20);
        client.unary(request).await.unwrap().into_inner().expect(seed, 1 << 20);
    }
    let mut all = BytesMut::new();
    for frame in held {
        all.extend_from_slice(&frame);
    }
    for seed in 1..=100 {
        let expected = framed(&payload(seed, 1 << 20));
        assert!(all.split_to(expected.len()) == expected, "message {seed} has changed");
    }
    assert!(all.is_empty());
}

/// A second service, which answers every call with ABORTED.
#[derive(Clone, Debug)]
pub(crate) struct Silent;

impl NamedService for Silent {
    const NAME: &'static str = "tonic_rdma.conformance.v1.Silent";
}

impl Service<Request<Body>> for Silent {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        ready(Ok(Status::aborted("silent").into_http()))
    }
}
