//! Messages that land in application buffers. With tonic-rdma's codec, the field lies in the buffer
//! on every path. The buffer always comes back.

use std::future::{Future, poll_fn};
use std::task::Poll;
use std::time::Duration;

use tokio_stream::{StreamExt, iter};
use tonic::{Code, Request, Response, Status};
use tonic_rdma::{
    Copied, FinishError, IntoLandIn, LandIn, LandRequest, LandableBuf, Outcome, Path, WhyCopied,
    WhyEmpty,
};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::codec::CodecKind;
use tonic_rdma_tests::connect;
use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::harness::{Client, Server, TestEnv, client_of};
use tonic_rdma_tests::load::with_timeout;
use tonic_rdma_tests::pb::Message;
use tonic_rdma_tests::pb::conformance_server::ConformanceServer;
use tonic_rdma_tests::service::UnaryOnly;
use tonic_rdma_tests::service::script::{echo, gate, payload, send, send_many, steps};

cases![for Some(Fabric::OURS);
    fields_of_every_length,
    longer_than_the_buffer,
    calls_that_end_early,
    sixty_at_once,
    the_first_message_of_a_stream,
    one_buffer_for_two_calls,
    one_buffer_for_many_replies,
    one_mapped_buffer_for_many_replies,
    requests_of_every_length,
    requests_of_sixty_clients,
    requests_that_end_early,
    one_buffer_for_many_requests,
    one_mapped_buffer_for_many_requests,
    an_allocator_that_refuses_or_panics,
];

/// Requests a reply with a field of this many bytes.
fn ask(size: usize) -> Message {
    steps("", [send(size as u64, size)])
}

fn naming<T>(land_in: &LandIn<T>, message: Message) -> Request<Message>
where
    T: AsMut<[u8]> + Send + 'static,
{
    let mut request = Request::new(message);
    land_in.attach(&mut request);
    request
}

/// Whether pinned memory is limited, so that registering a buffer can fail.
fn is_limited() -> bool {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max locked memory")).unwrap();
    !line.contains("unlimited")
}

/// Checks the outcome of a buffer for a field of this many bytes. `few` says that memory is not
/// scarce.
fn check(fabric: Fabric, outcome: &Outcome, size: usize, few: bool) {
    let simulated = matches!(fabric, Fabric::Sim | Fabric::SimSmall);
    let lands = (simulated || fabric == Fabric::Verbs) && size > 4096;
    match outcome {
        Outcome::Empty { why: WhyEmpty::Codec, .. } => {
            assert_eq!(fabric.codecs().0, CodecKind::Plain);
        }
        Outcome::Empty { why: WhyEmpty::NoField, .. } => assert_eq!(size, 0),
        Outcome::Landed { len, .. } => {
            assert_eq!(*len, size);
            assert!(lands, "{outcome:?}");
        }
        Outcome::Copied { len, why: WhyCopied::NotRegistered(why), .. } => {
            assert_eq!(*len, size);
            assert!(fabric == Fabric::Verbs && !few && is_limited(), "{size}: {outcome:?}");
            assert!(why.contains("the limit on pinned memory is"), "{why}");
        }
        Outcome::Copied { len, why, .. } => {
            assert_eq!(*len, size);
            let because = match fabric {
                Fabric::Tcp => WhyCopied::Tcp,
                Fabric::Shm | Fabric::ShmTwo => WhyCopied::SharedMemory,
                _ => WhyCopied::NotApart,
            };
            assert!(!lands && *why == because, "{size}: {outcome:?}");
        }
        other => panic!("{size}: {other:?}"),
    }
}

async fn fields_of_every_length(env: &TestEnv) {
    let fabric = env.fabric();
    let server = env.server().await;
    let channel = connect!(env, server);
    let mut client = client_of(channel.clone());
    let stats = || match &channel {
        AnyChannel::Rdma(channel) => {
            let stats = channel.stats();
            let mut copied = stats.copied_fast;
            copied += stats.copied_tcp;
            copied
        }
        AnyChannel::Stock(_) => Copied::default(),
    };
    let plain = env.fabric().codecs().0 == CodecKind::Plain;
    let mut buffer = vec![0; 3 << 20];
    for size in [0, 1, 100, 4095, 4097, 20_000, 200_000, 3 << 20, 200_001, 5] {
        let start = buffer.as_ptr().addr();
        let land_in = LandIn::new(buffer);
        let before = stats();
        let reply = client.unary(naming(&land_in, ask(size))).await.unwrap().into_inner();
        reply.expect(size as u64, size);
        assert_eq!(reply.payload.as_ptr().addr() == start, !plain && size > 0, "{size}");
        let parts = (reply.payload.slice(..size / 2), reply.payload.clone());
        drop(reply);
        if !plain && size > 1 {
            assert!(matches!(land_in.finish().await, Err(FinishError::Viewed(1..))));
        }
        drop(parts);
        let finished = land_in.finish().await.unwrap();
        assert_eq!(land_in.finish().await.unwrap_err(), FinishError::Taken);
        check(fabric, &finished.outcome, size, size < 1 << 20);
        buffer = finished.buffer;
        assert_eq!(buffer.as_ptr().addr(), start);
        let filled = finished.outcome.filled();
        assert!(buffer[..filled] == payload(size as u64, size).payload[..filled], "{size}");
        let named = (stats() - before).named;
        let copied = matches!(finished.outcome, Outcome::Copied { .. });
        assert_eq!(named, if copied { size as u64 } else { 0 }, "{size}");
    }
}

/// Checks the status of a call whose field of `field` bytes is longer than its buffer.
fn check_too_long(status: &Status, field: usize, buffer: usize) {
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    let text = format!("a field of {field} bytes does not fit a buffer of {buffer} bytes");
    assert!(status.message().contains(&text), "{status}");
}

async fn longer_than_the_buffer(env: &TestEnv) {
    let server = env.server().await;
    let mut client = client_of(connect!(env, server));
    let plain = env.fabric().codecs().0 == CodecKind::Plain;
    for size in [1001, 300_000] {
        let land_in = LandIn::new(vec![7; 1000]);
        let reply = client.unary(naming(&land_in, ask(size))).await;
        match reply {
            Ok(reply) => {
                assert!(plain);
                reply.into_inner().expect(size as u64, size);
            }
            Err(status) => {
                assert!(!plain, "{status}");
                check_too_long(&status, size, 1000);
            }
        }
        let finished = land_in.finish().await.unwrap();
        assert_eq!(finished.buffer, vec![7; 1000], "it was left alone");
        assert_eq!(finished.outcome.filled(), 0);
        if !plain {
            let text = format!("{:?}", finished.outcome);
            assert!(text.contains(&format!("field: {size}, buffer: 1000")), "{text}");
        }
    }
    client.unary(ask(9)).await.unwrap().into_inner().expect(9, 9);
}

/// Calls end early: they are dropped before or during the transfer of the field, or end by their
/// deadline or by the server's error. The buffer comes back, and the connection continues.
async fn calls_that_end_early(env: &TestEnv) {
    let server = env.server().await;
    let mut client = client_of(connect!(env, server));
    // This request is never sent.
    let land_in = LandIn::new(vec![7; 1000]);
    drop(naming(&land_in, ask(5)));
    let outcome = land_in.finish().await.unwrap().outcome;
    assert!(matches!(outcome, Outcome::Empty { why: WhyEmpty::NoMessage, .. }), "{outcome:?}");
    for round in 0..40u32 {
        let size = 1 << 20;
        let land_in = LandIn::new(vec![7; size]);
        let script = match round % 4 {
            0 => steps("", [gate("never")]),
            _ => ask(size),
        };
        let mut request = naming(&land_in, script);
        if round % 4 == 1 {
            request.set_timeout(Duration::from_micros(u64::from(round) * 100));
        }
        {
            let call = client.unary(request);
            tokio::pin!(call);
            let turns = if round % 4 == 3 { 2000 } else { round };
            for _ in 0..turns {
                if poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx).is_ready())).await {
                    break;
                }
                tokio::task::yield_now().await;
            }
        }
        let finished = with_timeout("the buffer does not come back", land_in.finish()).await;
        let finished = finished.unwrap();
        let filled = finished.outcome.filled();
        let bytes = payload(size as u64, size).payload;
        assert!(finished.buffer[..filled] == bytes[..filled], "{round}");
    }
    client.unary(ask(200_000)).await.unwrap().into_inner().expect(200_000, 200_000);
}

/// Waits for all calls on this thread, because stubs that are created on it have the client's
/// codec.
async fn join(calls: impl Iterator<Item = impl Future<Output = ()>>) {
    let mut calls: Vec<_> = calls.map(Box::pin).collect();
    let all = poll_fn(|cx| {
        calls.retain_mut(|call| call.as_mut().poll(cx).is_pending());
        if calls.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    });
    all.await;
}

async fn sixty_at_once(env: &TestEnv) {
    let fabric = env.fabric();
    let server = env.server().await;
    let client = client_of(connect!(env, server));
    let calls = (0..60usize).map(|n| {
        let mut client = client.clone();
        async move {
            let size = 10_000 + 7001 * n;
            let mut land_in = LandIn::new(vec![0; size + n % 3]);
            for _ in 0..3 {
                let reply = client.unary(naming(&land_in, ask(size))).await.unwrap().into_inner();
                reply.expect(size as u64, size);
                drop(reply);
                let finished = land_in.finish().await.unwrap();
                check(fabric, &finished.outcome, size, false);
                let filled = finished.outcome.filled();
                let bytes = payload(size as u64, size).payload;
                assert!(finished.buffer[..filled] == bytes[..filled]);
                land_in = LandIn::new(finished.buffer);
            }
        }
    });
    join(calls).await;
}

async fn the_first_message_of_a_stream(env: &TestEnv) {
    let server = env.server().await;
    let mut client = client_of(connect!(env, server));
    let land_in = LandIn::new(vec![0; 100_000]);
    let script = steps("", [send_many(1, 100_000, 3), send(9, 10)]);
    let reply = client.download(naming(&land_in, script)).await.unwrap();
    let messages: Vec<Message> = reply.into_inner().map(Result::unwrap).collect().await;
    for (seed, message) in [1, 2, 3].into_iter().zip(&messages) {
        message.expect(seed, 100_000);
    }
    messages[3].expect(9, 10);
    drop(messages);
    let finished = land_in.finish().await.unwrap();
    let filled = finished.outcome.filled();
    assert!(finished.buffer[..filled] == payload(1, 100_000).payload[..filled]);
    // A later message may be longer than the buffer.
    let land_in = LandIn::new(vec![0; 1000]);
    let script = steps("", [send(3, 100), send(4, 300_000)]);
    let reply = client.download(naming(&land_in, script)).await.unwrap();
    let messages: Vec<Message> = reply.into_inner().map(Result::unwrap).collect().await;
    messages[0].expect(3, 100);
    messages[1].expect(4, 300_000);
    drop(messages);
    land_in.finish().await.unwrap();
    let echoes = steps("", [echo(2)]).with_payload(5, 60_000);
    let land_in = LandIn::new(vec![0; 100_000]);
    let mut request = Request::new(iter([echoes, payload(6, 70_000)]));
    land_in.attach(&mut request);
    let reply = client.chat(request).await.unwrap();
    let messages: Vec<Message> = reply.into_inner().map(Result::unwrap).collect().await;
    messages[0].expect(5, 60_000);
    messages[1].expect(6, 70_000);
    drop(messages);
    land_in.finish().await.unwrap();
}

async fn one_buffer_for_two_calls(env: &TestEnv) {
    let fabric = env.fabric();
    let server = env.server().await;
    let client = client_of(connect!(env, server));
    let land_in = LandIn::new(vec![0; 50_000]);
    let calls = [50_000, 40_000].map(|size| {
        let (request, mut client) = (naming(&land_in, ask(size)), client.clone());
        async move { client.unary(request).await.unwrap().into_inner() }
    });
    let [first, second] = calls;
    let (first, second) = tokio::join!(first, second);
    let replies = [first, second];
    replies[0].expect(50_000, 50_000);
    replies[1].expect(40_000, 40_000);
    let plain = env.fabric().codecs().0 == CodecKind::Plain;
    let apart = replies[0].payload.as_ptr() != replies[1].payload.as_ptr();
    assert!(apart, "each has its own bytes");
    if !plain {
        assert!(matches!(land_in.finish().await, Err(FinishError::Viewed(1..))));
    }
    drop(replies);
    let finished = land_in.finish().await.unwrap();
    // The buffer holds the field of the call that began first.
    let size = if finished.outcome.filled() == 40_000 { 40_000 } else { 50_000 };
    check(fabric, &finished.outcome, size, true);
}

/// The application bytes that the pools of the client's context have registered, and the number of
/// registrations so far.
async fn registered(channel: &AnyChannel) -> (usize, u64) {
    let AnyChannel::Rdma(channel) = channel else { return (0, 0) };
    let stats = channel.context().pool_stats().await;
    let stats = stats.iter().map(|(_, stats)| (stats.application, stats.registrations));
    stats.fold((0, 0), |sum, stats| (sum.0 + stats.0, sum.1 + stats.1))
}

/// The buffer stays registered. Only the first reply registers it, and it comes back deregistered.
async fn one_buffer_for_many_replies(env: &TestEnv) {
    let check = |outcome: &Outcome, size| check(env.fabric(), outcome, size, true);
    many_replies(env, vec![0; SIZE], check).await;
}

fn is_shm(fabric: Fabric) -> bool {
    fabric.fast() == Some(Path::Shm)
}

/// Over shared memory the server maps the buffer, and writes its content.
async fn one_mapped_buffer_for_many_replies(env: &TestEnv) {
    let check = |outcome: &Outcome, size| match outcome {
        Outcome::Landed { len, .. } if is_shm(env.fabric()) => assert_eq!(*len, size),
        outcome if is_shm(env.fabric()) => {
            let plain = matches!(outcome, Outcome::Empty { why: WhyEmpty::Codec, .. });
            assert!(plain && env.fabric().codecs().0 == CodecKind::Plain, "{outcome:?}");
        }
        outcome => check(env.fabric(), outcome, size, true),
    };
    many_replies(env, LandableBuf::zeroed(SIZE).unwrap(), check).await;
}

/// The length of the longest message to a buffer that stays registered.
const SIZE: usize = 200_000;

async fn many_replies<T: AsMut<[u8]> + Send + 'static>(
    env: &TestEnv,
    mut buffer: T,
    check: impl Fn(&Outcome, usize),
) {
    let fabric = env.fabric();
    let server = env.server().await;
    let channel = connect!(env, server);
    let mut client = client_of(channel.clone());
    let (before, _) = registered(&channel).await;
    let start = buffer.as_mut().as_ptr().addr();
    let land_in = LandIn::new(buffer).keep_registered();
    let mut first = None;
    for call in 0..10 {
        let size = SIZE - call * 1000;
        let reply = client.unary(naming(&land_in, ask(size))).await.unwrap().into_inner();
        reply.expect(size as u64, size);
        let plain = fabric.codecs().0 == CodecKind::Plain;
        assert_eq!(reply.payload.as_ptr().addr() == start, !plain, "{call}");
        drop(reply);
        let outcome = land_in.outcome().await;
        check(&outcome, size);
        if let Outcome::Landed { .. } = outcome {
            let (application, registrations) = registered(&channel).await;
            assert_eq!(application - before, SIZE, "it stays registered");
            let first = *first.get_or_insert(registrations);
            assert!(registrations - first < 5, "{call} calls: {registrations} and {first}");
        }
    }
    let mut finished = land_in.finish().await.unwrap();
    let (buffer, last) = (finished.buffer.as_mut(), SIZE - 9000);
    assert_eq!(buffer.as_ptr().addr(), start);
    let filled = finished.outcome.filled();
    assert!(buffer[..filled] == payload(last as u64, last).payload[..filled]);
    assert_eq!(registered(&channel).await.0, before);
}

/// The answer of [`receive`] to a request that came without a buffer.
const NO_BUFFER: &str = "without a buffer";

/// Reports to the client the outcome of its request's buffer, if there was one.
async fn receive(mut request: Request<Message>) -> Result<Response<Message>, Status> {
    let land_in = request.extensions_mut().remove::<LandIn<Vec<u8>>>();
    let mapped = request.extensions_mut().remove::<LandIn<LandableBuf>>();
    let keeps = request.metadata().contains_key("keeps");
    let message = request.into_inner();
    let (seed, size) = (message.seed, message.payload.len());
    message.expect(seed, size);
    let view = message.payload.as_ptr().addr();
    drop(message);
    if let Some(mapped) = mapped {
        return Ok(Response::new(left(&mapped, view).await));
    }
    let Some(land_in) = land_in else { return Ok(Response::new(steps(NO_BUFFER, []))) };
    if keeps {
        return Ok(Response::new(left(&land_in, view).await));
    }
    let finished = land_in.finish().await.map_err(|error| Status::internal(error.to_string()))?;
    let filled = finished.outcome.filled();
    if size > 0 {
        let lies_there = finished.buffer.as_ptr().addr() == view;
        assert_eq!(filled > 0, lies_there, "{:?}", finished.outcome);
    }
    assert!(finished.buffer[..filled] == payload(seed, size).payload[..filled]);
    let told = match finished.outcome {
        Outcome::Landed { .. } => "landed".to_owned(),
        Outcome::Copied { why, .. } => format!("{why:?}"),
        Outcome::Empty { why, .. } => format!("{why:?}"),
        other => format!("{other:?}"),
    };
    Ok(Response::new(Message { total: filled as u64, ..steps(&told, []) }))
}

/// Describes a buffer that is left for the next request.
async fn left<T: AsMut<[u8]> + Send + 'static>(land_in: &LandIn<T>, view: usize) -> Message {
    let outcome = land_in.outcome().await;
    let told = match outcome {
        Outcome::Landed { .. } => "landed".to_owned(),
        Outcome::Copied { ref why, .. } => format!("{why:?}"),
        ref other => format!("{other:?}"),
    };
    Message { total: outcome.filled() as u64, seed: view as u64, ..steps(&told, []) }
}

const UNARY: &str = "/tonic_rdma.conformance.v1.Conformance/Unary";

/// Allocates the buffer that a client asks for, of at most 4 MiB.
fn allocate(request: &LandRequest<'_>) -> Option<Vec<u8>> {
    let wanted = request.headers.get("buffer")?.to_str().ok()?;
    assert_ne!(wanted, "panic", "asked to");
    let len = wanted.parse().ok().filter(|len| *len <= 4 << 20)?;
    assert!(request.field.is_none_or(|field| field > 0));
    Some(vec![0; len])
}

async fn receiver(env: &TestEnv) -> Server {
    receiver_with(env, allocate).await
}

async fn receiver_with<B: IntoLandIn>(
    env: &TestEnv,
    allocate: impl Fn(&LandRequest<'_>) -> Option<B> + Send + Sync + 'static,
) -> Server {
    let listening = env.listen().await;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let service = ConformanceServer::new(UnaryOnly(receive))
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(usize::MAX);
    let mut server = env.rdma_server().layer(env.log().layer()).land_in(UNARY, allocate);
    let serving =
        server.add_service(service).serve_with_incoming_shutdown(listening.incoming, async move {
            let _ = stopped.await;
        });
    Server::spawn(listening.addr, stop, serving)
}

/// Sends a field of this many bytes, and a wish for a buffer.
async fn put(client: &mut Client, size: usize, buffer: impl ToString) -> Result<Message, Status> {
    let mut request = Request::new(payload(size as u64, size));
    let buffer = buffer.to_string().parse().unwrap();
    request.metadata_mut().insert("buffer", buffer);
    Ok(client.unary(request).await?.into_inner())
}

/// Makes a first call. Once it is answered, the codec of the service is known.
async fn warm(client: &mut Client) {
    let reply = put(client, 100_000, 100_000).await.unwrap();
    assert_eq!(reply.script.unwrap().id, NO_BUFFER);
}

/// Checks the server's report about a buffer that was long enough. `few` says that memory is not
/// scarce.
fn check_told(fabric: Fabric, reply: &Message, size: usize, few: bool) {
    let told = &reply.script.as_ref().unwrap().id;
    if fabric.codecs().1 == CodecKind::Plain {
        return assert_eq!(told, NO_BUFFER);
    }
    let lands = size > 4096 && matches!(fabric, Fabric::Sim | Fabric::SimSmall | Fabric::Verbs);
    let expected = match fabric {
        _ if size == 0 => "NoField",
        _ if lands => "landed",
        Fabric::Tcp => "Tcp",
        Fabric::Shm | Fabric::ShmTwo => "SharedMemory",
        _ => "NotApart",
    };
    let short = told.contains("the limit on pinned memory is");
    assert!(told == expected || (short && !few && is_limited()), "{size}: {told}");
    assert_eq!(reply.total as usize, size);
}

async fn requests_of_every_length(env: &TestEnv) {
    let server = receiver(env).await;
    let mut client = client_of(connect!(env, server));
    warm(&mut client).await;
    for size in [0, 1, 100, 4095, 4097, 20_000, 200_000, 3 << 20, 200_001, 5] {
        let reply = put(&mut client, size, size + size % 2).await.unwrap();
        check_told(env.fabric(), &reply, size, size < 1 << 20);
        // The next buffer is too short.
        if size > 0 && env.fabric().codecs().1 == CodecKind::ZeroCopy {
            let status = put(&mut client, size, size - 1).await.unwrap_err();
            check_too_long(&status, size, size - 1);
        }
    }
}

async fn requests_of_sixty_clients(env: &TestEnv) {
    let server = receiver(env).await;
    let fabric = env.fabric();
    let client = client_of(connect!(env, server));
    warm(&mut client.clone()).await;
    let calls = (0..60usize).map(|n| {
        let mut client = client.clone();
        async move {
            let size = 10_000 + 7001 * n;
            for _ in 0..3 {
                let reply = put(&mut client, size, size).await.unwrap();
                check_told(fabric, &reply, size, false);
            }
        }
    });
    join(calls).await;
}

/// Requests are given up before and while the field is transferred. Each later request has its own
/// buffer, filled with its own bytes.
async fn requests_that_end_early(env: &TestEnv) {
    let server = receiver(env).await;
    let mut client = client_of(connect!(env, server));
    warm(&mut client).await;
    for round in 0..60u32 {
        let size = 500_000;
        {
            let mut request = Request::new(payload(9, size));
            request.metadata_mut().insert("buffer", "500000".parse().unwrap());
            if round % 3 == 1 {
                request.set_timeout(Duration::from_micros(u64::from(round) * 50));
            }
            let call = client.unary(request);
            tokio::pin!(call);
            for _ in 0..round {
                if poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx).is_ready())).await {
                    break;
                }
                tokio::task::yield_now().await;
            }
        }
        if round % 10 == 9 {
            let reply = put(&mut client, size, size).await.unwrap();
            check_told(env.fabric(), &reply, size, false);
        }
    }
}

/// The server's buffer stays registered, and requests use it one after the other.
async fn one_buffer_for_many_requests(env: &TestEnv) {
    let check = |reply: &Message, size| check_told(env.fabric(), reply, size, true);
    many_requests(env, vec![0; SIZE], check).await;
}

/// Over shared memory, the client maps the server's buffer, which stays registered.
async fn one_mapped_buffer_for_many_requests(env: &TestEnv) {
    let check = |reply: &Message, size| match is_shm(env.fabric()) {
        true if env.fabric().codecs().1 == CodecKind::ZeroCopy => {
            assert_eq!(reply.script.as_ref().unwrap().id, "landed");
            assert_eq!(reply.total as usize, size);
        }
        _ => check_told(env.fabric(), reply, size, true),
    };
    many_requests(env, LandableBuf::zeroed(SIZE).unwrap(), check).await;
}

async fn many_requests<T: AsMut<[u8]> + Send + 'static>(
    env: &TestEnv,
    buffer: T,
    check: impl Fn(&Message, usize),
) {
    let land_in = LandIn::new(buffer).keep_registered();
    let shared = land_in.clone();
    let server = receiver_with(env, move |_| Some(shared.clone())).await;
    let mut client = client_of(connect!(env, server));
    let put = |client: &mut Client, size: usize| {
        let mut request = Request::new(payload(size as u64, size));
        request.metadata_mut().insert("keeps", "1".parse().unwrap());
        let mut client = client.clone();
        async move { client.unary(request).await.unwrap().into_inner() }
    };
    let zero_copy = env.fabric().codecs().1 == CodecKind::ZeroCopy;
    assert_eq!(put(&mut client, SIZE).await.script.unwrap().id, NO_BUFFER);
    let mut places = Vec::new();
    for call in 0..10 {
        let size = SIZE - call * 1000;
        let reply = put(&mut client, size).await;
        check(&reply, size);
        places.push(reply.seed);
    }
    assert!(!zero_copy || places.iter().all(|place| *place == places[0]), "{places:?}");
    // The second request gets no buffer while the first request uses it.
    let (mut one, mut two) = (client.clone(), client.clone());
    let (one, two) = tokio::join!(put(&mut one, SIZE), put(&mut two, SIZE - 1));
    for (reply, size) in [(one, SIZE), (two, SIZE - 1)] {
        if reply.script.as_ref().unwrap().id != NO_BUFFER {
            check(&reply, size);
        }
    }
    drop(client);
    drop(server);
    let mut finished = land_in.finish().await.unwrap();
    assert_eq!(finished.buffer.as_mut().len(), SIZE);
}

async fn an_allocator_that_refuses_or_panics(env: &TestEnv) {
    let server = receiver(env).await;
    let mut client = client_of(connect!(env, server));
    warm(&mut client).await;
    for buffer in ["", "none", "4194305", "panic"] {
        let reply = put(&mut client, 100_000, buffer).await.unwrap();
        assert_eq!(reply.script.unwrap().id, NO_BUFFER, "{buffer}");
    }
    let reply = put(&mut client, 100_000, 100_000).await.unwrap();
    check_told(env.fabric(), &reply, 100_000, true);
}
