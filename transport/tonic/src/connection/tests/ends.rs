//! Connections that drain, are lost, or whose peer is silent.

use std::sync::atomic::AtomicBool;

use super::landing::until;
use super::*;

#[tokio::test]
async fn drain_lets_calls_finish_and_takes_no_new_ones() {
    let mut s = setup(SimConfig::default(), 64 << 20).await;
    let (tx, rx) = mpsc::channel::<Result<Frame<Bytes>, Status>>(1);
    let body = Body::new(StreamBody::new(ReceiverStream::new(rx)));
    let response = s.client.call(request("/echo", body)).await.unwrap();
    s.drain.take().unwrap().send(()).unwrap();
    while s.client.is_open() {
        tokio::task::yield_now().await;
    }
    match s.client.call(request("/collect", full(&b"retry me"[..]))).await {
        Err(CallError::NotSent(request, reason)) => {
            assert_eq!(reason.code(), ReasonCode::GoAway);
            assert_eq!(request.into_body().collect().await.unwrap().to_bytes(), &b"retry me"[..]);
        }
        other => panic!("{other:?}"),
    }
    tx.send(Ok(Frame::data(Bytes::from_static(b"still here")))).await.unwrap();
    drop(tx);
    assert_eq!(&collect(response).await.0[..], b"still here");
    assert_eq!(s.server.await.unwrap().code(), ReasonCode::GoAway);
    assert_eq!(s.client.closed().await.code(), ReasonCode::GoAway);
}

#[tokio::test]
async fn a_lost_link_fails_its_calls_once_and_gives_memory_back() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let call = tokio::spawn(s.client.call(request("/hang", full(pattern(3_000_000)))));
    collect(s.client.call(request("/collect", full(&b"y"[..]))).await.unwrap()).await;
    s.server_device.remove();
    match call.await.unwrap() {
        Err(CallError::Status(status)) => assert_eq!(status.code(), tonic::Code::Unavailable),
        other => panic!("{other:?}"),
    }
    assert_eq!(s.client.closed().await.code(), ReasonCode::LinkLost);
    assert_eq!(s.server.await.unwrap().code(), ReasonCode::LinkLost);
    for pool in &s.pools {
        assert_eq!(pool.stats().in_use_bytes(), 0);
    }
    match s.client.call(request("/collect", full(&b"y"[..]))).await {
        Err(CallError::NotSent(..)) => {}
        other => panic!("{other:?}"),
    }
}

/// The peer may write until the queue pair is destroyed (R9). The destruction may take
/// milliseconds, during which no worker is blocked. If the driver is dropped during this time, the
/// drop waits.
#[tokio::test]
async fn memory_is_kept_until_a_slow_link_is_destroyed() {
    for is_dropped in [false, true] {
        let s = setup(SimConfig::default(), 64 << 20).await;
        let call = tokio::spawn(s.client.call(request("/hang", full(pattern(3_000_000)))));
        until("the request lands", || s.pools[0].stats().filled > 0).await;
        s.server_device.hold_destroy(true);
        s.server_device.remove();
        until("the link is being destroyed", || s.server_device.destroying() == 1).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        let (is_finished, leased) = (s.server.is_finished(), s.pools[0].stats().leased);
        let released = Arc::new(AtomicBool::new(false));
        let release = {
            let (device, released) = (s.server_device.clone(), released.clone());
            move || {
                released.store(true, Relaxed);
                device.hold_destroy(false);
            }
        };
        if is_dropped {
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(50));
                release();
            });
            s.server.abort();
            s.server.await.unwrap_err();
        } else {
            release();
            assert_eq!(s.server.await.unwrap().code(), ReasonCode::LinkLost);
        }
        assert!(released.load(Relaxed) && !is_finished && leased > 0);
        call.await.unwrap().unwrap_err();
        until("memory is free", || s.pools[0].stats().leased == 0).await;
    }
}

/// A program may keep a response long after its connection has ended.
#[tokio::test]
async fn a_connection_that_has_ended_claims_no_memory() {
    let s = setup(SimConfig { seed: 8, delay: 2, ..SimConfig::default() }, 4 << 20).await;
    let mut other = s.pools[1].landing();
    let held: Vec<_> = std::iter::from_fn(|| other.alloc(64 << 10, 64 << 10).unwrap()).collect();
    other.stop_waiting();
    let response = s.client.call(request("/echo", full(pattern(1 << 20)))).await.unwrap();
    while !other.others_claim() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    s.server_device.remove();
    s.server.await.unwrap();
    let until = tokio::time::Instant::now() + Duration::from_secs(60);
    while other.others_claim() && tokio::time::Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(!other.others_claim());
    let before = s.pools[1].stats().leased;
    drop(held);
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(s.pools[1].stats().leased, before, "nor does it lease what comes free");
    drop(response);
}

#[tokio::test(start_paused = true)]
async fn a_silent_peer_is_given_up() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let call = tokio::spawn(s.client.call(request("/hang", Body::empty())));
    collect(s.client.call(request("/collect", full(&b"y"[..]))).await.unwrap()).await;
    s.server_device.freeze(true);
    match call.await.unwrap() {
        Err(CallError::Status(status)) => assert_eq!(status.code(), tonic::Code::Unavailable),
        other => panic!("{other:?}"),
    }
    assert_eq!(s.client.closed().await.code(), ReasonCode::LinkLost);
}

#[tokio::test(start_paused = true)]
async fn the_last_answer_gets_to_a_peer_that_pauses() {
    let mut s = setup(SimConfig::default(), 64 << 20).await;
    let pause = |ms| tokio::time::sleep(Duration::from_millis(ms));
    let call = tokio::spawn(s.client.call(request("/slow", Body::empty())));
    pause(50).await;
    s.drain.take().unwrap().send(()).unwrap();
    pause(50).await;
    s.server_device.freeze(true);
    pause(4000).await;
    s.server_device.freeze(false);
    assert_eq!(call.await.unwrap().unwrap().headers()["grpc-status"], "0");
    s.finish().await;
}
