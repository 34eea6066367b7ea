//! Replies that land in buffers of the caller: whatever the path, the field lies in the buffer, and
//! the buffer comes back.

use std::future::{Future, poll_fn};
use std::task::Poll;
use std::time::Duration;

use tokio_stream::{StreamExt, iter};
use tonic::{Code, Request};
use tonic_rdma::{Copied, FinishError, LandIn, Outcome, WhyCopied, WhyEmpty};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::codec::CodecKind;
use tonic_rdma_tests::connect;
use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::harness::{TestEnv, client_of};
use tonic_rdma_tests::load::with_timeout;
use tonic_rdma_tests::pb::Message;
use tonic_rdma_tests::service::script::{echo, gate, payload, send, send_many, steps};

const FABRICS: &[Fabric] = &[
    Fabric::Tcp,
    Fabric::Sim,
    Fabric::SimDelayed,
    Fabric::SimPlain,
    Fabric::SimSmall,
    Fabric::Shm,
    Fabric::ShmSmall,
    Fabric::ShmTwo,
    Fabric::Verbs,
];

cases![for Some(FABRICS);
    fields_of_every_length,
    longer_than_the_buffer,
    calls_that_end_early,
    sixty_at_once,
    the_first_message_of_a_stream,
    one_buffer_for_two_calls,
];

/// A reply with a field of this many bytes.
fn ask(size: usize) -> Message {
    steps("", [send(size as u64, size)])
}

fn naming(land_in: &LandIn<Vec<u8>>, message: Message) -> Request<Message> {
    let mut request = Request::new(message);
    land_in.attach(&mut request);
    request
}

/// What becomes of a buffer for a field of this many bytes in the longest message that fits no
/// control slot.
fn check(fabric: Fabric, outcome: &Outcome, size: usize) {
    let (client, server) = fabric.codecs();
    let lands = matches!(fabric, Fabric::Sim | Fabric::SimSmall | Fabric::Verbs) && size > 4096;
    match outcome {
        Outcome::Empty { why: WhyEmpty::Codec, .. } => assert_eq!(client, CodecKind::Plain),
        Outcome::Empty { why: WhyEmpty::NoField, .. } => assert_eq!(size, 0),
        Outcome::Landed { len, .. } => {
            assert_eq!((*len, server), (size, CodecKind::ZeroCopy));
            assert!(lands, "{outcome:?}");
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
        let mut land_in = LandIn::new(buffer);
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
        check(fabric, &finished.outcome, size);
        buffer = finished.buffer;
        assert_eq!(buffer.as_ptr().addr(), start);
        let filled = finished.outcome.filled();
        assert!(buffer[..filled] == payload(size as u64, size).payload[..filled], "{size}");
        let named = (stats() - before).named;
        let copied = matches!(finished.outcome, Outcome::Copied { .. });
        assert_eq!(named, if copied { size as u64 } else { 0 }, "{size}");
    }
}

async fn longer_than_the_buffer(env: &TestEnv) {
    let server = env.server().await;
    let mut client = client_of(connect!(env, server));
    let plain = env.fabric().codecs().0 == CodecKind::Plain;
    for size in [1001, 300_000] {
        let mut land_in = LandIn::new(vec![7; 1000]);
        let reply = client.unary(naming(&land_in, ask(size))).await.unwrap().into_inner();
        reply.expect(size as u64, size);
        let finished = land_in.finish().await.unwrap();
        assert_eq!(finished.outcome.filled(), 0);
        if !plain {
            let text = format!("{:?}", finished.outcome);
            assert!(text.contains(&format!("field: {size}, buffer: 1000")), "{text}");
        }
        let mut land_in = LandIn::new(vec![7; 1000]).or_fail();
        let reply = client.unary(naming(&land_in, ask(size))).await;
        match reply {
            Ok(reply) => {
                assert!(plain);
                reply.into_inner().expect(size as u64, size);
            }
            Err(status) => {
                assert_eq!(status.code(), Code::OutOfRange, "{status}");
                let text = format!("a field of {size} bytes does not fit a buffer of 1000 bytes");
                assert!(status.message().contains(&text), "{status}");
            }
        }
        let finished = land_in.finish().await.unwrap();
        assert_eq!(finished.buffer, vec![7; 1000], "it was left alone");
    }
    client.unary(ask(9)).await.unwrap().into_inner().expect(9, 9);
}

/// Dropped before and while the field is transferred, by deadline, by the server's error: the
/// buffer comes back, and the connection goes on.
async fn calls_that_end_early(env: &TestEnv) {
    let server = env.server().await;
    let mut client = client_of(connect!(env, server));
    // Never sent.
    let mut land_in = LandIn::new(vec![7; 1000]);
    drop(naming(&land_in, ask(5)));
    let outcome = land_in.finish().await.unwrap().outcome;
    assert!(matches!(outcome, Outcome::Empty { why: WhyEmpty::NoMessage, .. }), "{outcome:?}");
    for round in 0..40u32 {
        let size = 1 << 20;
        let mut land_in = LandIn::new(vec![7; size]);
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
                check(fabric, &finished.outcome, size);
                let filled = finished.outcome.filled();
                let bytes = payload(size as u64, size).payload;
                assert!(finished.buffer[..filled] == bytes[..filled]);
                land_in = LandIn::new(finished.buffer);
            }
        }
    });
    // On this thread, whose stubs have the client's codec.
    let mut calls: Vec<_> = calls.map(Box::pin).collect();
    let all = poll_fn(|cx| {
        calls.retain_mut(|call| call.as_mut().poll(cx).is_pending());
        if calls.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    });
    all.await;
}

async fn the_first_message_of_a_stream(env: &TestEnv) {
    let server = env.server().await;
    let mut client = client_of(connect!(env, server));
    let mut land_in = LandIn::new(vec![0; 100_000]);
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
    let echoes = steps("", [echo(2)]).with_payload(5, 60_000);
    let mut land_in = LandIn::new(vec![0; 100_000]);
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
    let mut land_in = LandIn::new(vec![0; 50_000]);
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
    // Whichever began first.
    let size = if finished.outcome.filled() == 40_000 { 40_000 } else { 50_000 };
    check(fabric, &finished.outcome, size);
}
