//! Calls and their bodies.

use super::*;

#[tokio::test]
async fn bytes_of_every_size_come_back() {
    for config in [SimConfig::default(), SimConfig { seed: 3, delay: 4, ..SimConfig::default() }] {
        let s = setup(config, 64 << 20).await;
        for len in
            [0, 1, 100, 4000, 4079, 4080, 4081, 5000, 65_536, 1 << 20, (1 << 20) + 5, 5_000_000]
        {
            let body = pattern(len);
            let response = s.client.call(request("/collect", full(body.clone()))).await.unwrap();
            let (got, trailers) = collect(response).await;
            assert_eq!(got.len(), len);
            assert!(got == body, "{len}");
            assert_eq!(trailers.unwrap()["grpc-status"], "0");
        }
        assert!(s.counters.snapshot().bytes_sent_write > 7_000_000);
        s.finish().await;
    }
}

#[tokio::test]
async fn a_small_call_is_one_send_each_way() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let call = async || {
        let response = s.client.call(request("/collect", full(&b"hello"[..]))).await.unwrap();
        collect(response).await
    };
    call().await;
    let before = s.net.stats().sends;
    for _ in 0..1000 {
        call().await;
    }
    assert_eq!(s.net.stats().sends - before, 2000);
    s.finish().await;
}

#[tokio::test]
async fn a_small_pool_carries_large_bodies() {
    let s = setup(SimConfig::default(), 2 << 20).await;
    let body = pattern(10_000_000);
    let mut calls = Vec::new();
    for _ in 0..4 {
        calls.push(tokio::spawn(s.client.call(request("/echo", full(body.clone())))));
    }
    for call in calls {
        let response = call.await.unwrap().unwrap();
        assert!(collect(response).await.0 == body);
    }
    s.finish().await;
}

#[tokio::test]
async fn many_calls_at_once() {
    let s = setup(SimConfig { seed: 5, delay: 2, ..SimConfig::default() }, 64 << 20).await;
    let mut calls = Vec::new();
    for i in 0..2000 {
        let body = pattern(i * 7 % 20_000);
        let call = s.client.call(request("/collect", full(body.clone())));
        calls.push(tokio::spawn(async move {
            let (got, _) = collect(call.await.unwrap()).await;
            assert!(got == body);
        }));
    }
    for call in calls {
        call.await.unwrap();
    }
    s.finish().await;
}

#[tokio::test]
async fn both_halves_stream() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let (tx, rx) = mpsc::channel::<Result<Frame<Bytes>, Status>>(1);
    let body = Body::new(StreamBody::new(ReceiverStream::new(rx)));
    tx.send(Ok(Frame::data(Bytes::from_static(b"a")))).await.unwrap();
    let response = s.client.call(request("/echo", body)).await.unwrap();
    let mut incoming = response.into_body();
    for len in [1, 10, 100_000] {
        if len > 1 {
            tx.send(Ok(Frame::data(pattern(len)))).await.unwrap();
        }
        let mut got = 0;
        while got < len {
            got += incoming.frame().await.unwrap().unwrap().into_data().unwrap().len();
        }
    }
    drop(tx);
    assert!(incoming.frame().await.is_none());
    drop(incoming);
    s.finish().await;
}

#[tokio::test]
async fn cancelling_drops_the_handler() {
    let mut s = setup(SimConfig::default(), 64 << 20).await;
    let call = tokio::spawn(s.client.call(request("/hang", full(&b"x"[..]))));
    let (got, _) =
        collect(s.client.call(request("/collect", full(&b"y"[..]))).await.unwrap()).await;
    assert_eq!(&got[..], b"y");
    call.abort();
    s.dropped.recv().await.unwrap();
    s.finish().await;
}

#[tokio::test]
async fn a_panic_fails_only_its_call() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    match s.client.call(request("/panic", Body::empty())).await {
        Err(CallError::Status(status)) => assert_eq!(status.code(), tonic::Code::Cancelled),
        other => panic!("{other:?}"),
    }
    collect(s.client.call(request("/collect", full(&b"y"[..]))).await.unwrap()).await;
    s.finish().await;
}

#[tokio::test]
async fn trailers_only() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let response = s.client.call(request("/nothing", Body::empty())).await.unwrap();
    assert_eq!(response.headers()["grpc-status"], "5");
    assert!(response.body().is_end_stream());
    drop(response);
    s.finish().await;
}

/// A unary handler starts once the end of the request has arrived. Until then its call holds the
/// message, and so memory.
#[tokio::test]
async fn the_end_comes_with_the_last_bytes() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let mut calls = Vec::new();
    for len in [0, 10, 5000, 100_000, 1_048_585].into_iter().cycle().take(40) {
        let mut request = request("/end", full(pattern(len)));
        request.headers_mut().insert("len", len.to_string().parse().unwrap());
        calls.push(tokio::spawn(s.client.call(request)));
    }
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap().headers()["grpc-status"], "0");
    }
    s.finish().await;
}

/// Other tasks get turns between the parts of a long body that the reader copies.
#[tokio::test]
async fn a_long_body_leaves_others_their_turns() {
    let setup = setup(SimConfig::default(), 64 << 20).await;
    let response = setup.client.call(request("/collect", full(pattern(16 << 20)))).await.unwrap();
    let mut body = response.into_body();
    let mut longest = body.frame().await.unwrap().unwrap().into_data().unwrap().len();
    let turns = Arc::new(AtomicUsize::new(0));
    let other = {
        let turns = turns.clone();
        tokio::spawn(async move {
            loop {
                turns.fetch_add(1, Relaxed);
                tokio::task::yield_now().await;
            }
        })
    };
    while let Some(frame) = body.frame().await {
        longest = longest.max(frame.unwrap().into_data().map_or(0, |data| data.len()));
    }
    assert_eq!(longest, 16 << 10);
    assert!(turns.load(Relaxed) >= 15, "{turns:?}");
    other.abort();
    drop(body);
    setup.finish().await;
}
