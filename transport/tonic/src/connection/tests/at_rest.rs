//! Tests how much memory a connection at rest pins, and how a busy connection gets more.

use super::*;

/// A busy connection has more RECVs and SEND slots than it starts with, and staging. A connection
/// at rest has returned all of these.
#[tokio::test(start_paused = true)]
async fn a_connection_at_rest_pins_8_kib() {
    let s = setup(SimConfig { seed: 4, delay: 2, ..SimConfig::default() }, 64 << 20).await;
    let pinned =
        |s: &Setup| s.pools.each_ref().map(|pool| (pool.stats().control, pool.stats().registered));
    const REST: usize = 8 << 10;
    for _ in 0..3 {
        let calls = (0..64).map(|_| s.client.call(request("/collect", full(pattern(3000)))));
        for call in calls.map(tokio::spawn).collect::<Vec<_>>() {
            collect(call.await.unwrap().unwrap()).await;
        }
        let [server, client] = pinned(&s);
        assert!(server.0 > REST && client.0 > REST, "{server:?} {client:?}");
        // The body is not in pool memory, so it is staged.
        let body = pattern(3 << 20);
        let response = s.client.call(request("/echo", full(body.clone()))).await.unwrap();
        assert!(collect(response).await.0 == body);
        // One PING, or one answer to a PING, retires each of the 25 RECVs. Landing memory and the
        // extra SEND slots are returned much earlier.
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(pinned(&s), [(REST, REST); 2], "in use, and registered");
    }
    assert_eq!(s.net.stats().receiver_not_ready, 0);
    s.finish().await;
}

/// Other connections have all memory that the pools can spare. So this connection has few credits,
/// and stages in a SEND slot.
#[tokio::test]
async fn without_memory_to_spare_everything_still_goes() {
    let s = setup(SimConfig { seed: 6, delay: 2, ..SimConfig::default() }, 64 << 20).await;
    let all = |pool: &Pool| {
        let blocks =
            [1 << 20, 64 << 10, 4096].map(|len| std::iter::from_fn(move || pool.spare(len)));
        blocks.into_iter().flatten().collect::<Vec<_>>()
    };
    let others = s.pools.each_ref().map(all);
    let used = s.pools.each_ref().map(|pool| pool.stats().control);
    let calls = (0..64)
        .map(|i| (pattern(i * 30_000), s.client.call(request("/echo", full(pattern(i * 30_000))))));
    for (body, call) in calls.map(|(body, call)| (body, tokio::spawn(call))).collect::<Vec<_>>() {
        assert!(collect(call.await.unwrap().unwrap()).await.0 == body);
    }
    assert_eq!(s.pools.each_ref().map(|pool| pool.stats().control), used, "nothing was to spare");
    assert_eq!(s.net.stats().receiver_not_ready, 0);
    drop(others);
    s.finish().await;
}

/// Sixty clients begin at once, with messages that do not fit the RECVs of connections at rest. The
/// server's pool has memory for only a few busy connections. All calls succeed, and every message
/// finds a RECV that is long enough.
#[tokio::test(start_paused = true)]
async fn sixty_connections_grow_at_once() {
    let config = SimConfig { seed: 8, delay: 2, ..SimConfig::default() };
    let net = SimNet::new(config);
    let devices = ["10.0.0.1", "10.0.0.2"].map(|ip| net.device(ip, ip.parse().unwrap()));
    let fabrics = devices.each_ref().map(|device| Fabric::Sim(device.clone()));
    let pools = [0, 1].map(|at: usize| {
        let total = if at == 0 { 8 << 20 } else { 256 << 20 };
        Pool::new(PoolConfig::default().total(total), fabrics[at].registrar()).unwrap()
    });
    let mut pairs = Vec::new();
    for _ in 0..60 {
        pairs.push(connect(&fabrics, &pools).await);
    }
    let control = || pools.each_ref().map(|pool| pool.stats().control);
    assert_eq!(control(), [60 * (8 << 10); 2]);
    for _ in 0..2 {
        let calls = pairs.iter().flat_map(|pair| {
            [10, 1000, 2000, 4000, 4080, 9000].map(|len| {
                let call = pair.client.call(request("/collect", full(pattern(len))));
                tokio::spawn(async move { (len, collect(call.await.unwrap()).await.0) })
            })
        });
        for call in calls.collect::<Vec<_>>() {
            let (len, body) = call.await.unwrap();
            assert!(body == pattern(len), "{len}");
        }
        let budget = pools[0].config().control;
        assert!(control()[0] > 60 * (8 << 10) && control()[0] <= budget - budget / 4);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(control(), [60 * (8 << 10); 2], "at rest again");
    }
    for pair in pairs {
        drop(pair.client);
        assert_eq!(pair.server.await.unwrap().code(), ReasonCode::GoAway);
    }
    assert_eq!(net.stats().receiver_not_ready, 0);
    assert_eq!(net.breaches(), Vec::<String>::new());
}

/// A peer that sends more than the next RECV holds ends only its own connection, which the log
/// names.
#[tokio::test(start_paused = true)]
async fn a_message_longer_than_its_recv_ends_the_connection() {
    let net = SimNet::new(SimConfig::default());
    let devices = ["10.0.0.1", "10.0.0.2"].map(|ip| net.device(ip, ip.parse().unwrap()));
    let fabrics = devices.each_ref().map(|device| Fabric::Sim(device.clone()));
    let pools = fabrics
        .each_ref()
        .map(|fabric| Pool::new(PoolConfig::default().total(8 << 20), fabric.registrar()).unwrap());
    let honest = connect(&fabrics, &pools).await;
    // This peer expects RECVs of full slots, because the settings that it uses announce no shorter
    // RECVs.
    let hostile = connect_as(
        &fabrics,
        &pools,
        |_| {},
        |settings| {
            settings.rest_slot_size = settings.slot_size;
        },
    )
    .await;
    let call = hostile.client.call(request("/collect", full(pattern(3000)))).await;
    assert!(call.is_err(), "{call:?}");
    let reason = hostile.server.await.unwrap();
    assert_eq!(reason.code(), ReasonCode::LinkLost);
    assert!(reason.to_string().contains("local length error"), "{reason}");
    let response = honest.client.call(request("/collect", full(pattern(3000)))).await.unwrap();
    assert!(collect(response).await.0 == pattern(3000));
}
