//! Tests landing memory that is scarce, or is being registered.

use super::*;
use crate::path::reason::Side;

/// The first stream in the queue finds no memory. The grants of the stream behind it take so much
/// of the limit for all streams together that the first stream may not have memory any more.
#[tokio::test]
async fn a_stream_that_may_have_no_memory_claims_none() {
    const LONG: usize = 900_000;
    const SHORT: usize = 600_000;
    let s = setup(SimConfig::default(), 4 << 20).await;
    let fabrics = [&s.server_device, &s.client_device].map(|device| Fabric::Sim(device.clone()));
    let pair = connect_to(&fabrics, &s.pools, |options| {
        options.proto.standing_grants = 0;
        (options.proto.bulk_window, options.proto.whole) = (1 << 20, 0);
        options.proto.unread_total = 1 << 20;
    });
    let Pair { client, server, .. } = pair.await;
    // One chunk is left for the short message, and other connections have the rest.
    collect(client.call(request("/collect", full(pattern(SHORT)))).await.unwrap()).await;
    let mut other = s.pools[0].landing();
    let rest = [64 << 10, 4 << 10]
        .map(|len| std::iter::from_fn(|| other.alloc(len, len).unwrap()).collect::<Vec<_>>());
    other.stop_waiting();
    // Make the server receive both messages at once.
    s.server_device.freeze(true);
    let call = |len| tokio::spawn(client.call(request("/hang", full(pattern(len)))));
    let calls = [LONG, SHORT].map(call);
    tokio::time::sleep(Duration::from_millis(20)).await;
    s.server_device.freeze(false);
    until("the short one has landed", || s.pools[0].stats().filled >= SHORT).await;
    assert!(!other.others_claim());
    calls.iter().for_each(JoinHandle::abort);
    drop((rest, other, client));
    assert_eq!(server.await.unwrap().code(), ReasonCode::GoAway);
    s.finish().await;
}

/// Large frames follow each other, and memory becomes free only as the reader reads.
#[tokio::test(start_paused = true)]
async fn a_stream_of_large_frames_never_waits_for_a_timer() {
    for total in [2 << 20, 8_126_464, 64 << 20] {
        let s = setup(SimConfig::default(), total).await;
        let started = tokio::time::Instant::now();
        let frame = pattern(1_048_586);
        let frames = tokio_stream::iter((0..64).map({
            let frame = frame.clone();
            move |_| Ok::<_, Status>(Frame::data(frame.clone()))
        }));
        let response =
            s.client.call(request("/echo", Body::new(StreamBody::new(frames)))).await.unwrap();
        let mut body = response.into_body();
        let mut got = 0;
        while let Some(frame) = body.frame().await {
            got += frame.unwrap().into_data().unwrap().len();
        }
        assert_eq!(got, 64 * frame.len());
        drop(body);
        // The clock moves only when every task waits, which would mean that a task was not woken.
        assert!(
            started.elapsed() < Duration::from_secs(1),
            "{total}: stalled for {:?}",
            started.elapsed()
        );
        s.finish().await;
    }
}

/// Waits until a connection takes no more calls, checks that a further call is not sent, and
/// returns the reason.
async fn leaves(client: &FastClient) -> Reason {
    until("it takes no more calls", || client.ending().is_some()).await;
    let reason = client.closed().await;
    assert_eq!(client.ending(), Some(reason.clone()), "the channel is told at once");
    match client.call(request("/collect", full(&b"hello"[..]))).await {
        Err(CallError::NotSent(_, again)) => assert_eq!(again, reason),
        other => panic!("{other:?}"),
    }
    reason
}

/// If one end cannot register memory any more, calls end as they would over TCP, including calls
/// that have begun, because their messages come in control messages. New calls take another path,
/// with a reason that names the cause, until there is memory again.
#[tokio::test]
async fn a_device_that_registers_no_more_costs_no_call() {
    for (server_fails, slow) in [(true, false), (true, true), (false, false), (false, true)] {
        let s = setup(SimConfig::default(), 64 << 20).await;
        let failing = if server_fails { &s.server_device } else { &s.client_device };
        if slow {
            // The pool's thread registers the memory, and reports it later.
            failing.hold_registrations(false);
        }
        failing.fail_registrations(0, u64::MAX);
        let body = pattern(3 << 20);
        // The calls begin together. A call that is not transmitted yet takes another path. No call
        // fails.
        let calls = (0..3).map(|_| s.client.call(request("/collect", full(body.clone()))));
        for (n, answer) in futures_util::future::join_all(calls).await.into_iter().enumerate() {
            let answer = match answer {
                Ok(answer) => answer,
                Err(CallError::NotSent(..)) if n > 0 => continue,
                Err(other) => panic!("{n}: {other:?}"),
            };
            let (got, trailers) = collect(answer).await;
            assert!(got == body, "{server_fails} {slow}");
            assert_eq!(trailers.unwrap()["grpc-status"], "0");
        }
        let reason = leaves(&s.client).await;
        let (side, code) = match server_fails {
            true => (Side::Peer, ReasonCode::ProcessLimit),
            // The device refuses with ENOMEM.
            false => (Side::Local, ReasonCode::Memlock),
        };
        assert_eq!((reason.side(), reason.code()), (side, code), "{reason}");
        assert!(reason.detail().contains("registering") && reason.detail().contains("os error 12"));
        // A new connection would get the same answer until memory is available.
        let pool = &s.pools[usize::from(!server_fails)];
        assert!(pool.may_land().unwrap_err().to_string().contains("registering"));
        failing.fail_registrations(0, 0);
        pool.may_land().unwrap();
        let Setup { client, server, pools, .. } = s;
        drop(client);
        let ended = server.await.unwrap();
        let code = if server_fails { ReasonCode::Memlock } else { ReasonCode::GoAway };
        assert_eq!(ended.code(), code, "{ended}");
        until("all is returned", || pools.iter().all(|pool| pool.stats().leased == 0)).await;
    }
}

pub(super) async fn until(what: &str, holds: impl Fn() -> bool) {
    let begin = std::time::Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(30), "{what}");
        tokio::task::yield_now().await;
    }
}

/// No call waits for the registration of another call's memory, on the same connection or another.
#[tokio::test]
async fn calls_do_not_wait_for_a_registration() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let fabrics = [&s.server_device, &s.client_device].map(|device| Fabric::Sim(device.clone()));
    let other = connect(&fabrics, &s.pools).await;
    let body = pattern(1 << 20);
    let bulk = async |client: &FastClient| {
        let response = client.call(request("/collect", full(body.clone()))).await.unwrap();
        assert!(collect(response).await.0 == body);
    };
    for _ in 0..4 {
        bulk(&other.client).await;
    }
    let leased = || s.pools[0].stats().leased;
    let before = leased();
    s.server_device.hold_registrations(true);
    let first = s.client.call(request("/collect", full(body.clone())));
    let first = tokio::spawn(async move { collect(first.await.unwrap()).await.0 });
    until("it is being registered", || s.server_device.held_registrations() == 1).await;
    assert!(leased() > before);
    let registrations = s.pools[0].stats().registrations;
    for _ in 0..20 {
        let small = s.client.call(request("/collect", full(&b"hello"[..]))).await.unwrap();
        assert_eq!(&collect(small).await.0[..], b"hello");
        bulk(&other.client).await;
    }
    assert!(!first.is_finished());
    assert_eq!(s.pools[0].stats().registrations, registrations);
    s.server_device.hold_registrations(false);
    assert!(first.await.unwrap() == body);
    // The next calls find the memory that was granted in advance.
    for _ in 0..4 {
        bulk(&s.client).await;
    }
    drop(other.client);
    assert_eq!(other.server.await.unwrap().code(), ReasonCode::GoAway);
    let pool = s.pools[0].clone();
    s.finish().await;
    until("all is returned", || pool.stats().leased == 0).await;
}

/// A stream that waits for a registration is not short of memory, so nothing makes room for it.
#[tokio::test]
async fn a_registration_is_no_shortage_of_memory() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let fabrics = [&s.server_device, &s.client_device].map(|device| Fabric::Sim(device.clone()));
    let other = connect(&fabrics, &s.pools).await;
    let body = pattern(1 << 20);
    let call = |path| other.client.call(request(path, full(body.clone())));
    call("/collect").await.unwrap();
    s.server_device.hold_registrations(true);
    // No reader takes the messages of these calls. Some calls find memory, and the others wait for
    // it.
    let calls: Vec<_> = (0..16).map(|_| tokio::spawn(call("/hang"))).collect();
    until("it is being registered", || s.server_device.held_registrations() == 1).await;
    // Wait for several of the periods after which unread data is copied.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let filled = s.pools[0].stats().filled;
    assert!((body.len()..16 * body.len()).contains(&filled), "{filled}");
    s.server_device.hold_registrations(false);
    until("all have landed", || s.pools[0].stats().filled >= 16 * body.len()).await;
    let copied = other.server_counters.snapshot().copied_fast;
    assert_eq!((copied.pressure, copied.joined), (0, 0), "{copied:?}");
    calls.iter().for_each(JoinHandle::abort);
    drop(other.client);
    assert_eq!(other.server.await.unwrap().code(), ReasonCode::GoAway);
    s.finish().await;
}

/// A standing grant that waits for its memory is given as soon as the memory is registered, not at
/// the next other event. While the test polls, the clock stands still, so no timer expires.
#[tokio::test(start_paused = true)]
async fn standing_grants_follow_a_registration() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let body = pattern(1 << 20);
    for _ in 0..4 {
        s.client.call(request("/collect", full(body.clone()))).await.unwrap();
    }
    let pool = s.pools[0].clone();
    let stats = || (pool.stats().granted, pool.stats().filled, pool.stats().leased);
    assert!(stats().0 > 0, "some is granted in advance");
    let leased = stats().2;
    s.server_device.hold_registrations(true);
    // No reader takes these messages, so further memory has to be granted in advance.
    let mut calls = Vec::new();
    while stats().2 == leased {
        let (_, filled, _) = stats();
        calls.push(tokio::spawn(s.client.call(request("/hang", full(body.clone())))));
        until("it has landed", || stats().1 > filled).await;
    }
    until("it is being registered", || s.server_device.held_registrations() == 1).await;
    let (granted, sends) = (stats().0, s.net.stats().sends);
    s.server_device.hold_registrations(false);
    until("it is granted", || stats().0 > granted).await;
    assert!(s.net.stats().sends - sends <= 1, "a message was needed");
    calls.iter().for_each(JoinHandle::abort);
    s.finish().await;
}

/// A connection that ends while its memory is being registered leaves nothing behind.
#[tokio::test]
async fn a_connection_may_end_during_a_registration() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let device = s.server_device.clone();
    device.hold_registrations(true);
    let call = tokio::spawn(s.client.call(request("/collect", full(pattern(1 << 20)))));
    until("it is being registered", || device.held_registrations() == 1).await;
    call.abort();
    let pool = s.pools[0].clone();
    s.finish().await;
    assert!(pool.stats().leased > 0, "it cannot be interrupted");
    device.hold_registrations(false);
    until("it is returned", || pool.stats().leased == 0).await;
}
