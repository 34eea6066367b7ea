//! The server's side of a call.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use tokio::time::sleep;
use tokio_stream::{Stream, StreamExt};
use tonic::body::Body;
use tonic::codec::Codec;
use tonic::server::NamedService;
use tonic::{Code, Status, Streaming};
use tonic_rdma::LandIn;
use tower::Service;

use crate::load::{CALL, CallPlan, Reading};
use crate::named;
use crate::pattern::{self, Key};
use crate::world::World;

type Messages = Pin<Box<dyn Stream<Item = Result<Message, Status>> + Send>>;
type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// A message with one `bytes` field, which the zero-copy codec does not copy.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Message {
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) body: Bytes,
}

/// One of the two codecs: tonic's, or the zero-copy codec.
pub(crate) trait AnyCodec:
    Codec<Encode = Message, Decode = Message, Encoder: Send + 'static, Decoder: Send + 'static>
    + Default
    + Send
    + 'static
{
}

impl AnyCodec for tonic_prost::ProstCodec<Message, Message> {}
impl AnyCodec for tonic_rdma::codec::ProstCodec<Message, Message> {}

/// A service that answers calls according to the plan.
#[derive(Clone)]
pub(crate) struct Planned(pub(crate) Arc<World>);

impl NamedService for Planned {
    const NAME: &'static str = "sim.Planned";
}

impl Service<Request<Body>> for Planned {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<Body>) -> Answer {
        let world = self.0.clone();
        Box::pin(async move {
            let id = req.headers().get(CALL).and_then(|v| v.to_str().ok()?.parse().ok());
            let Some(call) = id.and_then(|id: usize| world.plan.calls.get(id)).cloned() else {
                // This call is a probe.
                return Ok(Status::ok("").into_http());
            };
            world.checker.note(|| format!("call {} is served", call.id));
            world.call_log().served(call.id);
            // The path is `/sim.Planned/` and a kind of call, such as `Unary`. `Zero` follows the
            // kind for the zero-copy codec. `Raw` uses no codec.
            let method = req.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
            Ok(match method.strip_suffix("Zero") {
                _ if method == "Raw" => raw(world, call, req).await,
                Some(kind) => {
                    serve::<tonic_rdma::codec::ProstCodec<Message, Message>>(kind, world, call, req)
                        .await
                }
                None => {
                    serve::<tonic_prost::ProstCodec<Message, Message>>(&method, world, call, req)
                        .await
                }
            })
        })
    }
}

async fn serve<C: AnyCodec>(
    kind: &str,
    world: Arc<World>,
    call: CallPlan,
    req: Request<Body>,
) -> Response<Body> {
    let mut grpc = tonic::server::Grpc::new(C::default())
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(usize::MAX);
    let one = |world: Arc<World>, call: CallPlan| {
        move |mut request: tonic::Request<Message>| {
            watch(&world, &call, request.extensions_mut());
            let requests = tokio_stream::once(Ok(request.into_inner()));
            answer(world.clone(), call.clone(), Box::pin(requests))
        }
    };
    let many = |world: Arc<World>, call: CallPlan| {
        move |mut request: tonic::Request<Streaming<Message>>| {
            watch(&world, &call, request.extensions_mut());
            answer(world.clone(), call.clone(), Box::pin(request.into_inner()))
        }
    };
    let single = |reply: Result<tonic::Response<Messages>, Status>| async move {
        match reply?.into_inner().next().await {
            Some(message) => Ok(tonic::Response::new(message?)),
            None => Err(Status::internal("a plan without a response")),
        }
    };
    match kind {
        "Unary" => {
            let handler = one(world, call);
            let service = tower::service_fn(move |r| {
                let reply = handler(r);
                async move { single(reply.await).await }
            });
            grpc.unary(service, req).await
        }
        "Up" => {
            let handler = many(world, call);
            let service = tower::service_fn(move |r| {
                let reply = handler(r);
                async move { single(reply.await).await }
            });
            grpc.client_streaming(service, req).await
        }
        "Down" => grpc.server_streaming(tower::service_fn(one(world, call)), req).await,
        _ => grpc.streaming(tower::service_fn(many(world, call)), req).await,
    }
}

/// Watches the buffer that the first request lands in, if there is one.
fn watch(world: &Arc<World>, call: &CallPlan, extensions: &mut tonic::Extensions) {
    if let Some(land_in) = extensions.remove::<LandIn<Vec<u8>>>() {
        named::watch_request(world, land_in, call.id);
    }
}

fn planned_status(call: &CallPlan) -> Result<(), Status> {
    match call.code {
        Code::Ok => Ok(()),
        code => Err(Status::new(code, "as planned")),
    }
}

/// Reads and checks one request; `None` at the end of the stream.
async fn take(
    world: &World,
    call: &CallPlan,
    requests: &mut Messages,
    index: usize,
) -> Result<Option<Message>, Status> {
    let Some(message) = requests.next().await.transpose()? else {
        return Ok(None);
    };
    match call.requests.get(index) {
        Some(len) => {
            let key = Key { call: call.id, down: false, index };
            world.check(pattern::check(key, *len, &message.body));
        }
        None => world.wrong(format!("call {}: the server got more than {index} requests", call.id)),
    }
    world.keep(message.body.clone(), call.retain_for);
    if !call.read_delay.is_zero() {
        sleep(call.read_delay).await;
    }
    Ok(Some(message))
}

async fn answer(
    world: Arc<World>,
    call: CallPlan,
    mut requests: Messages,
) -> Result<tonic::Response<Messages>, Status> {
    if !call.handler_delay.is_zero() {
        sleep(call.handler_delay).await;
    }
    let (mut read, mut echoed) = (0, None);
    if call.reading == Reading::First {
        while take(&world, &call, &mut requests, read).await?.is_some() {
            read += 1;
        }
        world.call_log().read_whole(&call, read);
    }
    let single = matches!(call.kind, crate::load::Kind::Unary | crate::load::Kind::ClientStreaming);
    if single {
        // The response is one message, or a status.
        if call.reading == Reading::Between {
            take(&world, &call, &mut requests, 0).await?;
        }
        if call.reading == Reading::Echo {
            echoed = take(&world, &call, &mut requests, 0).await?;
            world.call_log().read_whole(&call, usize::from(echoed.is_some()));
        }
        planned_status(&call)?;
    }
    let planned = if call.reading == Reading::Echo { 0 } else { call.responses.len() };
    let stream = async_stream::try_stream! {
        if let Some(message) = echoed {
            yield message;
        }
        if call.reading == Reading::Echo && !single {
            while let Some(message) = take(&world, &call, &mut requests, read).await? {
                read += 1;
                yield message;
            }
            world.call_log().read_whole(&call, read);
        }
        for (index, len) in call.responses.iter().take(planned).enumerate() {
            if call.reading == Reading::Between
                && !single
                && take(&world, &call, &mut requests, read).await?.is_some()
            {
                read += 1;
            }
            if !call.response_gap.is_zero() {
                sleep(call.response_gap).await;
            }
            yield Message { body: pattern::message(Key { call: call.id, down: true, index }, *len) };
        }
        if call.reading == Reading::Between && !single {
            while take(&world, &call, &mut requests, read).await?.is_some() {
                read += 1;
            }
            world.call_log().read_whole(&call, read);
        }
        planned_status(&call)?;
    };
    Ok(tonic::Response::new(Box::pin(stream)))
}

/// Splits a body into messages, without copying a message that lies in one frame.
pub(crate) fn messages(mut body: Body) -> Pin<Box<dyn Stream<Item = Result<Part, Status>> + Send>> {
    Box::pin(async_stream::try_stream! {
        let mut frames: Vec<Bytes> = Vec::new();
        while let Some(frame) = body.frame().await {
            let frame = match frame? .into_data() {
                Ok(data) => data,
                Err(frame) => {
                    if let Ok(trailers) = frame.into_trailers() {
                        yield Part::Trailers(trailers);
                    }
                    continue;
                }
            };
            frames.push(frame);
            while let Some(message) = split(&mut frames) {
                yield Part::Message(message);
            }
        }
        if frames.iter().any(|f| !f.is_empty()) {
            Err(Status::data_loss("a body that ends within a message"))?;
        }
    })
}

/// A part of a body.
#[derive(Debug)]
pub(crate) enum Part {
    /// The pieces of one message.
    Message(Vec<Bytes>),
    Trailers(HeaderMap),
}

/// Removes the first message, if it is complete.
fn split(frames: &mut Vec<Bytes>) -> Option<Vec<Bytes>> {
    let have: usize = frames.iter().map(Bytes::len).sum();
    if have < 5 {
        return None;
    }
    let head: Vec<u8> = frames.iter().flat_map(|f| f.iter().copied()).take(5).collect();
    let len = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
    if have < 5 + len {
        return None;
    }
    let cut = |frames: &mut Vec<Bytes>, mut len: usize| {
        let mut taken = Vec::new();
        while len > 0 {
            let first = &mut frames[0];
            let piece = first.split_to(len.min(first.len()));
            len -= piece.len();
            if first.is_empty() {
                frames.remove(0);
            }
            taken.push(piece);
        }
        taken
    };
    cut(frames, 5);
    Some(cut(frames, len))
}

/// The five bytes in front of a message.
pub(crate) fn prefix(len: usize) -> Bytes {
    let mut head = BytesMut::with_capacity(5);
    head.put_u8(0);
    head.put_u32(len as u32);
    head.freeze()
}

/// Pieces shorter than this count as small for h2, which ends a connection on which too many small
/// pieces are unread.
const SMALL: usize = 256;

/// The pieces, with small ones joined to the next. If other streams leave only a few bytes of a
/// connection's HTTP/2 window, a message comes in pieces of a few bytes.
fn joined(pieces: &[Bytes]) -> Vec<Bytes> {
    let mut joined: Vec<Bytes> = Vec::new();
    for piece in pieces {
        match joined.last_mut() {
            Some(last) if last.len() < SMALL => *last = [&last[..], &piece[..]].concat().into(),
            _ => joined.push(piece.clone()),
        }
    }
    joined
}

/// The whole message in one piece.
pub(crate) fn whole(pieces: &[Bytes]) -> Bytes {
    match pieces {
        [one] => one.clone(),
        _ => pieces.concat().into(),
    }
}

async fn raw(world: Arc<World>, call: CallPlan, req: Request<Body>) -> Response<Body> {
    let mut requests = messages(req.into_body());
    let frames = async_stream::stream! {
        if !call.handler_delay.is_zero() {
            sleep(call.handler_delay).await;
        }
        let mut read = 0;
        let mut echoed = 0;
        let mut status = Ok(());
        if matches!(call.reading, Reading::First | Reading::Echo) {
            loop {
                match requests.next().await {
                    Some(Ok(Part::Message(pieces))) => {
                        let key = Key { call: call.id, down: false, index: read };
                        match call.requests.get(read) {
                            Some(len) => world.check(pattern::check(key, *len, &whole(&pieces))),
                            None => world.wrong(format!("call {}: too many requests", call.id)),
                        }
                        read += 1;
                        if call.reading == Reading::Echo {
                            yield Ok(Frame::data(prefix(pieces.iter().map(Bytes::len).sum())));
                            for piece in joined(&pieces) {
                                yield Ok(Frame::data(piece));
                            }
                            echoed += 1;
                        }
                        pieces.into_iter().for_each(|piece| world.keep(piece, call.retain_for));
                        if !call.read_delay.is_zero() {
                            sleep(call.read_delay).await;
                        }
                    }
                    Some(Ok(Part::Trailers(_))) => {}
                    Some(Err(error)) => {
                        status = Err(error);
                        break;
                    }
                    None => {
                        world.call_log().read_whole(&call, read);
                        break;
                    }
                }
            }
        }
        if status.is_ok() {
            for (index, len) in call.responses.iter().enumerate().skip(echoed) {
                if !call.response_gap.is_zero() {
                    sleep(call.response_gap).await;
                }
                yield Ok(Frame::data(prefix(*len)));
                let message = pattern::message(Key { call: call.id, down: true, index }, *len);
                if !message.is_empty() {
                    yield Ok::<_, Status>(Frame::data(message));
                }
            }
            status = planned_status(&call);
        }
        let status = status.err().unwrap_or_else(|| Status::ok(""));
        let mut trailers = HeaderMap::new();
        // Code and message are valid header values.
        let _ = status.add_header(&mut trailers);
        yield Ok(Frame::trailers(trailers));
    };
    let mut response = Response::new(Body::new(StreamBody::new(Box::pin(frames))));
    response
        .headers_mut()
        .insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}
