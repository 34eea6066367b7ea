//! The client's side of a call.

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Request};
use http_body::Frame;
use http_body_util::StreamBody;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_stream::{Stream, StreamExt};
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::{Code, Status};
use tonic_rdma::{Channel, LandIn, LendableBuf};
use tower::ServiceExt;

use crate::load::{CALL, CallPlan, Kind};
use crate::named;
use crate::oracle::{Outcome, is_too_long};
use crate::pattern::{self, Key};
use crate::service::{AnyCodec, Message, Part, messages, prefix, whole};
use crate::world::World;

/// Makes a planned call, and records how it ended.
pub(crate) async fn make(world: Arc<World>, channel: Channel, call: CallPlan) {
    sleep_until(world.started + call.at).await;
    world.checker.note(|| format!("begins by {:?}: {call:?}", channel.path().path));
    world.call_log().begun(call.id);
    let drop_after = async {
        match call.drop_after {
            Some(after) => sleep(after).await,
            None => std::future::pending().await,
        }
    };
    let land_in = named::for_response(&call);
    let outcome = tokio::select! {
        biased;
        outcome = perform(&world, channel, &call, land_in.as_ref()) => outcome,
        () = drop_after => Outcome::Dropped,
    };
    world.checker.note(|| format!("call {} ends: {outcome:?}", call.id));
    // Whether it was the response, and not the request, that did not fit its buffer.
    let too_long = matches!(&outcome, Outcome::Status(status) if is_too_long(status))
        && !call.request_is_too_long(world.plan.buffers_at_servers());
    world.call_log().ended(call.id, outcome);
    if let Some(land_in) = land_in {
        let down = call.reading != crate::load::Reading::Echo;
        named::watch(&world, land_in, Key { call: call.id, down, index: 0 }, too_long).await;
    }
}

type Named<'a> = Option<&'a LandIn<Vec<u8>>>;

async fn perform(
    world: &Arc<World>,
    channel: Channel,
    call: &CallPlan,
    named: Named<'_>,
) -> Outcome {
    let result = match call.kind {
        Kind::Raw => raw(world, channel, call).await,
        _ if call.client_zero_copy => {
            type Zero = tonic_rdma::codec::ProstCodec<Message, Message>;
            through_tonic::<Zero>(world, channel, call, named).await
        }
        _ => {
            type Plain = tonic_prost::ProstCodec<Message, Message>;
            through_tonic::<Plain>(world, channel, call, named).await
        }
    };
    match result {
        Ok(true) => Outcome::Status(Status::ok("")),
        Ok(false) => Outcome::DroppedAfterResponses,
        Err(status) => Outcome::Status(status),
    }
}

/// Application memory that is overwritten when its owner gets it back, so that any later reader,
/// such as a device, sends wrong bytes.
struct Reused(Vec<u8>);

impl AsRef<[u8]> for Reused {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Reused {
    fn drop(&mut self) {
        self.0.fill(0xa5);
        std::hint::black_box(&mut self.0);
    }
}

/// Returns the bytes of a request. They lie in the channel's pool if the plan says so and the pool
/// has room. For other calls with an even number, they lie in registered application memory: in
/// memory that may be lent to the peer, or at an odd address. Otherwise they lie on the heap.
async fn request(channel: &Channel, call: &CallPlan, index: usize) -> Bytes {
    let key = Key { call: call.id, down: false, index };
    let len = call.requests[index];
    if !call.pinned
        && call.id % 4 == 2
        && len > 0
        && let Ok(mut own) = LendableBuf::zeroed(len)
    {
        pattern::fill(key, &mut own);
        if let Ok(registered) = channel.context().register_lendable(own.freeze()).await {
            return registered.slice(..);
        }
    }
    if !call.pinned && call.id.is_multiple_of(2) {
        // The message lies at the same place modulo a cache line in each run of a seed.
        const LINE: usize = 64;
        let mut own = vec![0; len + LINE + 1];
        let at = own.as_ptr().align_offset(LINE) + 1;
        pattern::fill(key, &mut own[at..at + len]);
        // Registrations fail in some runs.
        if let Ok(registered) = channel.context().register(Reused(own)).await {
            return registered.slice(at..at + len);
        }
    }
    if call.pinned
        && let Ok(mut buf) = channel.pool().try_alloc(len)
    {
        buf.resize_zeroed(len);
        pattern::fill(key, buf.as_mut_slice());
        return buf.freeze();
    }
    pattern::message(key, len)
}

fn requests(channel: Channel, call: CallPlan) -> Pin<Box<dyn Stream<Item = Message> + Send>> {
    Box::pin(async_stream::stream! {
        for index in 0..call.requests.len() {
            if !call.request_gap.is_zero() {
                sleep(call.request_gap).await;
            }
            yield Message { body: request(&channel, &call, index).await };
        }
    })
}

/// Checks the responses of a call, and paces their reading.
struct Reader<'a> {
    world: &'a World,
    call: &'a CallPlan,
    read: usize,
}

impl Reader<'_> {
    fn is_done_early(&self) -> bool {
        self.call
            .drop_after_responses
            .is_some_and(|drop_after_responses| self.read >= drop_after_responses)
    }

    fn check(&mut self, message: &Bytes) {
        let key = Key { call: self.call.id, down: true, index: self.read };
        match self.call.responses.get(self.read) {
            Some(len) => {
                // An echo carries the request's bytes.
                let key = Key { down: self.call.reading != crate::load::Reading::Echo, ..key };
                self.world.check(pattern::check(key, *len, message));
            }
            None => self.world.wrong(format!("call {}: too many responses", self.call.id)),
        }
        self.read += 1;
    }

    async fn pause(&self) {
        if !self.call.read_delay.is_zero() {
            sleep(self.call.read_delay).await;
        }
    }

    /// Checks that a call that ended with OK has had all its responses.
    fn finish(&self) {
        if self.read != self.call.responses.len() {
            let (got, all) = (self.read, self.call.responses.len());
            self.world
                .wrong(format!("call {}: ended well after {got} of {all} responses", self.call.id));
        }
    }
}

async fn through_tonic<C: AnyCodec>(
    world: &Arc<World>,
    channel: Channel,
    call: &CallPlan,
    named: Named<'_>,
) -> Result<bool, Status> {
    let mut grpc = Grpc::new(channel.clone())
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(usize::MAX);
    grpc.ready().await.map_err(|e| Status::from_error(e.into()))?;
    let path = match (call.kind, call.server_zero_copy) {
        (Kind::Unary, false) => "/sim.Planned/Unary",
        (Kind::Unary, true) => "/sim.Planned/UnaryZero",
        (Kind::ServerStreaming, false) => "/sim.Planned/Down",
        (Kind::ServerStreaming, true) => "/sim.Planned/DownZero",
        (Kind::ClientStreaming, false) => "/sim.Planned/Up",
        (Kind::ClientStreaming, true) => "/sim.Planned/UpZero",
        (_, false) => "/sim.Planned/Both",
        (_, true) => "/sim.Planned/BothZero",
    };
    let path = PathAndQuery::from_static(path);
    let codec = C::default();
    let mut reader = Reader { world, call, read: 0 };
    let mut responses = match call.kind {
        Kind::Unary | Kind::ClientStreaming => {
            let response = if call.kind == Kind::Unary {
                let message = Message { body: request(&channel, call, 0).await };
                grpc.unary(tagged(call, named, message), path, codec).await?
            } else {
                let stream = requests(channel, call.clone());
                grpc.client_streaming(tagged(call, named, stream), path, codec).await?
            };
            let Message { body } = response.into_inner();
            reader.check(&body);
            world.keep(body, call.retain_for);
            reader.finish();
            return Ok(true);
        }
        Kind::ServerStreaming => {
            let message = Message { body: request(&channel, call, 0).await };
            grpc.server_streaming(tagged(call, named, message), path, codec).await?.into_inner()
        }
        _ => {
            let stream = requests(channel, call.clone());
            grpc.streaming(tagged(call, named, stream), path, codec).await?.into_inner()
        }
    };
    // A call with a single response does not show when its head arrived.
    world.call_log().head(call.id);
    loop {
        if reader.is_done_early() {
            return Ok(false);
        }
        match responses.message().await? {
            Some(Message { body }) => {
                reader.check(&body);
                world.keep(body, call.retain_for);
                reader.pause().await;
            }
            None => {
                reader.finish();
                if responses.message().await.is_ok_and(|m| m.is_some()) {
                    world.wrong(format!("call {}: a response behind the end", call.id));
                }
                return Ok(true);
            }
        }
    }
}

fn tagged<T>(call: &CallPlan, named: Named<'_>, message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    if let Some(land_in) = named {
        land_in.attach(&mut request);
    }
    if let Ok(id) = call.id.to_string().parse() {
        request.metadata_mut().insert(CALL, id);
    }
    if let Some(deadline) = call.deadline {
        request.set_timeout(deadline);
    }
    request
}

async fn raw(world: &Arc<World>, channel: Channel, call: &CallPlan) -> Result<bool, Status> {
    let frames = {
        let (channel, call) = (channel.clone(), call.clone());
        async_stream::stream! {
            for index in 0..call.requests.len() {
                if !call.request_gap.is_zero() {
                    sleep(call.request_gap).await;
                }
                let message = request(&channel, &call, index).await;
                yield Ok::<_, Status>(Frame::data(prefix(message.len())));
                if !message.is_empty() {
                    yield Ok(Frame::data(message));
                }
            }
        }
    };
    let mut request = Request::new(Body::new(StreamBody::new(Box::pin(frames))));
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = http::Uri::from_static("/sim.Planned/Raw");
    let headers = request.headers_mut();
    headers.insert(http::header::TE, HeaderValue::from_static("trailers"));
    headers.insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(CALL, call.id.into());
    if let Some(deadline) = call.deadline
        && let Ok(value) = format!("{}m", deadline.as_millis()).parse()
    {
        headers.insert("grpc-timeout", value);
    }
    let response = channel.oneshot(request).await.map_err(|e| Status::from_error(e.into()))?;
    world.call_log().head(call.id);
    let (parts, body) = response.into_parts();
    let mut status = Status::from_header_map(&parts.headers);
    let mut reader = Reader { world, call, read: 0 };
    let mut responses = messages(body);
    loop {
        if reader.is_done_early() {
            return Ok(false);
        }
        match responses.next().await {
            Some(Ok(Part::Message(pieces))) => {
                if status.is_some() {
                    world.wrong(format!("call {}: a response behind the status", call.id));
                }
                reader.check(&whole(&pieces));
                pieces.into_iter().for_each(|piece| world.keep(piece, call.retain_for));
                reader.pause().await;
            }
            Some(Ok(Part::Trailers(trailers))) => status = from_trailers(&trailers, status),
            Some(Err(error)) => return Err(error),
            None => break,
        }
    }
    match status {
        Some(status) if status.code() == Code::Ok => {
            reader.finish();
            Ok(true)
        }
        Some(status) => Err(status),
        None => Err(Status::internal("a response without a status")),
    }
}

fn from_trailers(trailers: &HeaderMap, before: Option<Status>) -> Option<Status> {
    Status::from_header_map(trailers).or(before)
}

/// Makes an empty call, to check that the channel works.
pub(crate) async fn probe(channel: &Channel) -> Result<(), Status> {
    let mut request = Request::new(Body::empty());
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = http::Uri::from_static("/sim.Planned/Raw");
    request.headers_mut().insert(http::header::TE, HeaderValue::from_static("trailers"));
    request
        .headers_mut()
        .insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    let answer = async {
        let response =
            channel.clone().oneshot(request).await.map_err(|e| Status::from_error(e.into()))?;
        match Status::from_header_map(response.headers()) {
            Some(status) if status.code() == Code::Ok => Ok(()),
            Some(status) => Err(status),
            None => Err(Status::internal("a probe's answer without a status")),
        }
    };
    let until = Instant::now() + std::time::Duration::from_secs(60);
    tokio::time::timeout_at(until, answer)
        .await
        .unwrap_or_else(|_| Err(Status::deadline_exceeded("a probe got no answer for a minute")))
}
