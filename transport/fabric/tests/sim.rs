//! The in-process fabric: its faults, and the contract of every provider with and without delays.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::*;
use tonic_rdma_fabric::sim::{Event, InjectedBug, Observer, SimConfig, SimDevice, SimNet};
use tonic_rdma_fabric::{
    Addr, ConnectError, Fabric, FabricError, Link, LinkConfig, LinkError, Work, WriteSource,
};
use tonic_rdma_memory::{Pool, PoolConfig};

struct World {
    net: SimNet,
    server_device: SimDevice,
    client_device: SimDevice,
    server: Side,
    client: Side,
}

fn world(seed: u64, delay: u32) -> World {
    world_of(SimConfig { seed, delay, ..SimConfig::default() })
}

fn world_of(config: SimConfig) -> World {
    let net = SimNet::new(config);
    let server_device = net.device("sim0", "10.0.0.1".parse().unwrap());
    let client_device = net.device("sim1", "10.0.0.2".parse().unwrap());
    let server = Side::new(Fabric::Sim(server_device.clone()));
    let client = Side::new(Fabric::Sim(client_device.clone()));
    World { net, server_device, client_device, server, client }
}

/// Runs a shared test on networks with and without delays.
macro_rules! everywhere {
    ($($name:ident)*) => { $(
        #[tokio::test]
        async fn $name() {
            for (seed, delay) in [(1, 0), (2, 1), (3, 7), (4, 40)] {
                let w = world(seed, delay);
                common::$name(&w.server, &w.client).await;
                assert_eq!(w.net.stats().receiver_not_ready, 0);
            }
        }
    )* };
}

everywhere! {
    private_data_goes_both_ways
    rejections_arrive
    nobody_listens
    sends_fill_all_credits
    extra_recvs_come_and_go
    short_recvs_make_way_for_extra_ones
    extra_recvs_take_what_the_pool_can_spare
    busy_send_slots_come_and_go
    sends_of_all_sizes
    writes_land_before_the_send
    what_landed_is_sent_on
    a_full_queue_recovers
    misuse_is_told_and_harmless
    a_disconnect_is_seen
    a_drop_is_seen
    an_accepted_link_that_is_dropped_at_once_ends
    a_dropped_attempt_is_harmless
    an_unanswered_request_times_out
    a_bare_connection_moves_bytes_both_ways
    a_bare_connection_is_not_for_longer_writes
    a_bare_connection_is_charged_for_each_write
    a_bare_connection_ends_for_nonsense
}

/// The key of another connection's memory is useless without its address, which is not near the
/// peer's own memory.
#[tokio::test]
async fn landing_memory_of_another_connection_is_not_found() {
    let w = world(1, 0);
    let len = w.server.pool.config().chunk;
    let victim = w.server.landing(len);
    for chunks in 0..24 {
        let by = chunks * len as u64;
        let aims: [Aim<'_>; 2] = [&|own| (own.addr().wrapping_add(by), victim.rkey()), &|own| {
            (own.addr().wrapping_sub(by), victim.rkey())
        }];
        for aim in aims {
            let (_, writer) = a_bad_write(&w.server, &w.client, aim).await;
            assert!(matches!(writer, LinkError::Completion { code: 10, .. }), "{writer}");
        }
    }
    assert_eq!(w.net.stats().remote_access_errors, 48);
    assert!(victim.filled(len).lend().iter().all(|b| *b == 0), "nothing was written");
}

#[tokio::test]
async fn both_ends_on_one_device() {
    let w = world(1, 3);
    common::sends_fill_all_credits(&w.server, &w.server).await;
    common::writes_land_before_the_send(&w.server, &w.server).await;
}

#[tokio::test]
async fn writes_are_checked() {
    let w = world(1, 2);
    let wrong: [Aim<'_>; 4] = [
        &|l| (l.addr(), l.rkey() ^ 1),
        &|l| (l.addr() + (1 << 40), l.rkey()),
        &|l| (l.addr() - 1, l.rkey()),
        &|l| (u64::MAX - 10, l.rkey()),
    ];
    for (i, aim) in wrong.into_iter().enumerate() {
        let (target, writer) = a_bad_write(&w.server, &w.client, aim).await;
        let LinkError::Completion { verb, code, .. } = &writer else { panic!("{writer}") };
        assert_eq!((verb.to_string().as_str(), *code), ("RDMA WRITE", 10), "remote access error");
        assert!(matches!(target, LinkError::Completion { code: 5, .. }), "{target}");
        assert_eq!(w.net.stats().remote_access_errors, i as u64 + 1);
    }
}

/// Memory that was returned accepts no more WRITEs, and a local key does not allow WRITEs (R9,
/// R12).
#[tokio::test]
async fn keys_end_with_their_registration() {
    let w = world(1, 0);
    let local = w.server.pool.try_alloc(4096).unwrap();
    let (addr, lkey) = (local.addr(), local.lkey());
    let (_, writer) = a_bad_write(&w.server, &w.client, &|_| (addr, lkey)).await;
    assert!(matches!(writer, LinkError::Completion { code: 10, .. }), "{writer}");

    let (mut s, mut c) = greeted_pair(&w.server, &w.client).await;
    let pool = Pool::new(PoolConfig::default(), w.server.fabric.registrar()).unwrap();
    let landing = pool.landing().alloc(4096, 4096).unwrap().unwrap();
    let (remote_addr, rkey) = (landing.addr(), landing.rkey());
    drop(landing);
    drop(pool);
    let src = WriteSource::Bytes(w.client.pool.resolve(&w.client.payload(64, 1)).unwrap());
    c.queue(Work::Write { src, remote_addr, rkey }, true).unwrap();
    c.link.ring_doorbell().unwrap();
    let writer = c.death().await;
    assert!(matches!(writer, LinkError::Completion { code: 10, .. }), "{writer}");
    s.death().await;
}

#[tokio::test]
async fn a_send_without_a_recv_kills_the_link() {
    for delay in [0, 5] {
        let w = world(1, delay);
        let (mut s, mut c) = greeted_pair(&w.server, &w.client).await;
        for i in 0..config().recv_slots as usize + 1 {
            c.queue_send(i, b"flood", true).unwrap();
        }
        c.link.ring_doorbell().unwrap();
        let error = c.death().await;
        assert!(matches!(error, LinkError::Completion { code: 13, .. }), "{error}");
        assert_eq!(w.net.stats().receiver_not_ready, 1);
        assert_eq!(c.sent.len(), config().recv_slots as usize + 1, "those before it went through");
        for _ in 0..config().recv_slots {
            assert_eq!(s.receive_and_hold().await.unwrap().1, b"flood");
        }
        let error = s.death().await;
        assert!(matches!(error, LinkError::Disconnected { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_message_longer_than_the_slot_kills_the_link() {
    let w = world(1, 0);
    let mut listener = w.server.listen();
    let addr = listener.local_addr();
    let small = LinkConfig { slot_size: 64, ..config() };
    let accept = async {
        listener.accept().await.unwrap().accept(&small, &w.server.pool, b"", TIMEOUT).await
    };
    let (accepted, connected) = tokio::join!(accept, w.client.connect(&addr));
    let (mut s, mut c) = (End::new(accepted.unwrap()), End::new(connected.unwrap().link));
    c.send(0, &[7; 64]).await;
    assert_eq!(s.receive_and_hold().await.unwrap().1, [7; 64]);
    c.post(1, &[7; 65]);
    assert!(matches!(c.death().await, LinkError::Completion { code: 9, .. }));
    assert!(matches!(s.death().await, LinkError::Completion { code: 1, .. }));
}

#[tokio::test]
async fn the_accepting_side_must_not_speak_first() {
    let w = world(1, 0);
    let (mut s, _c) = pair(&w.server, &w.client).await;
    s.post(0, b"me first");
    let error = s.death().await;
    assert!(error.to_string().contains("iWARP"), "{error}");
}

/// The completion of a bare SEND wakes nobody, and is reported with the next message (see
/// `Link::queue`).
#[tokio::test]
async fn completions_that_nobody_waits_for_come_with_messages() {
    let w = world(1, 0);
    let (mut s, mut c) = greeted_pair(&w.server, &w.client).await;
    let every = config().send_slots as usize / 2;
    for i in 0..every {
        c.queue_send(i, b"x", false).unwrap();
    }
    c.link.ring_doorbell().unwrap();
    assert!(c.is_quiet().await && c.sent.len() == 1, "only the greeting was waited for");
    for _ in 0..every {
        s.receive().await.unwrap();
    }
    s.send(0, b"y").await;
    assert_eq!(c.receive().await.unwrap(), b"y");
    assert_eq!(c.sent.len(), 2, "one completion stands for all {every}");
    assert_eq!(c.link.send_room(), c.link.caps().send_queue);
}

/// A completion may be reported after the answer to the completed SEND.
#[tokio::test]
async fn delays_let_answers_overtake_completions() {
    let mut overtaken = 0;
    for seed in 0..20 {
        let w = world(seed, 10);
        let (mut s, mut c) = greeted_pair(&w.server, &w.client).await;
        let id = c.post(1, b"ping");
        let server = async {
            assert_eq!(s.receive().await.unwrap(), b"ping");
            s.post(1, b"pong");
            while s.poll().await.is_ok() {}
        };
        let client = async {
            assert_eq!(c.receive().await.unwrap(), b"pong");
            overtaken += usize::from(!c.sent.contains(&id));
            c.done(id).await.unwrap();
            c.link.disconnect();
        };
        tokio::join!(server, client);
    }
    assert!((1..20).contains(&overtaken), "{overtaken} of 20");
}

#[tokio::test]
async fn the_same_seed_gives_the_same_run() {
    async fn run(seed: u64) -> Vec<String> {
        let w = world(seed, 9);
        let (mut s, mut c) = greeted_pair(&w.server, &w.client).await;
        let mut log = Vec::new();
        for i in 0..10 {
            c.queue_send(i, &[i as u8], true).unwrap();
        }
        c.link.ring_doorbell().unwrap();
        while c.sent.len() < 11 {
            c.poll().await.unwrap();
            log.push(format!("{:?}", c.sent));
            while !s.is_quiet().await {
                log.push("arrived".into());
            }
        }
        log
    }
    assert_eq!(run(5).await, run(5).await);
    assert_ne!(run(5).await, run(6).await);
}

#[tokio::test]
async fn faults_strike_when_told() {
    let w = world(1, 0);

    w.client_device.kill_links_after(Some(5));
    let (mut s, mut c) = greeted_pair(&w.server, &w.client).await;
    for i in 0..5 {
        c.queue_send(i, b"x", true).unwrap();
    }
    c.link.ring_doorbell().unwrap();
    assert!(matches!(c.death().await, LinkError::Completion { code: 12, .. }));
    for _ in 0..4 {
        s.receive().await.unwrap();
    }
    assert!(matches!(s.death().await, LinkError::Disconnected { .. }));
    w.client_device.kill_links_after(None);

    w.server_device.fail_registrations(0, 1);
    let mut landing = w.server.pool.landing();
    let failed = (0..64).map(|_| landing.alloc(1 << 20, 1 << 20)).find_map(Result::err);
    assert!(failed.is_some(), "one registration fails");
    assert!(landing.alloc(4096, 4096).is_ok(), "and only one");

    w.server_device.lose_connects(true);
    let short = std::time::Duration::from_millis(50);
    let listener = w.server.listen();
    let lost = w
        .client
        .fabric
        .connect(&listener.local_addr(), &config(), &w.client.pool, b"", short)
        .await;
    assert!(matches!(lost.map(drop).unwrap_err(), ConnectError::Timeout { .. }));
    let nowhere =
        w.client.connect(&Addr::Ip("10.0.0.3:1".parse().unwrap())).await.map(drop).unwrap_err();
    assert!(matches!(nowhere, ConnectError::NoRoute { .. }), "{nowhere}");
}

#[tokio::test]
async fn a_frozen_device_says_nothing_until_it_thaws() {
    let w = world(1, 2);
    let (mut s, mut c) = greeted_pair(&w.server, &w.client).await;
    w.server_device.freeze(true);
    let id = c.post(1, b"anybody there?");
    for _ in 0..100 {
        assert!(c.is_quiet().await && s.is_quiet().await);
    }
    w.server_device.freeze(false);
    let client = async { c.done(id).await.unwrap() };
    let server = async { assert_eq!(s.receive().await.unwrap(), b"anybody there?") };
    tokio::join!(client, server);
}

#[tokio::test]
async fn a_removed_device_ends_its_links() {
    let w = world(1, 0);
    let mut listener = w.server.listen();
    let addr = listener.local_addr();
    let (mut s, mut c) = pair_over(&mut listener, &w.server, &w.client, &config()).await;
    w.server_device.remove();
    assert!(matches!(s.death().await, LinkError::DeviceRemoved { .. }));
    drop(s);
    assert!(matches!(c.death().await, LinkError::Disconnected { .. }));
    let gone =
        tokio::time::timeout(TIMEOUT, listener.accept()).await.unwrap().map(drop).unwrap_err();
    assert!(matches!(gone, FabricError::DeviceRemoved { .. }), "{gone}");
    assert!(w.client.connect(&addr).await.is_err());
}

#[tokio::test]
async fn nothing_stays_registered() {
    let w = world(1, 3);
    let (s, mut c) = greeted_pair(&w.server, &w.client).await;
    let landing = w.server.landing(1 << 20);
    let src = WriteSource::Bytes(w.client.pool.resolve(&w.client.payload(4096, 1)).unwrap());
    c.queue(Work::Write { src, remote_addr: landing.addr(), rkey: landing.rkey() }, false).unwrap();
    c.link.ring_doorbell().unwrap();
    drop((s, c, landing));
    let World { server, client, server_device, client_device, .. } = w;
    drop((server, client));
    assert_eq!((server_device.registrations(), client_device.registrations()), (0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_threads_lose_no_wakeup() {
    let w = world(1, 1);
    let (mut s, mut c) = greeted_pair(&w.server, &w.client).await;
    let echo = tokio::spawn(async move {
        for _ in 0..5000 {
            let data = s.receive().await.unwrap();
            s.send(0, &data).await;
        }
        s
    });
    for i in 0..5000u32 {
        c.send(0, &i.to_be_bytes()).await;
        assert_eq!(c.receive().await.unwrap(), i.to_be_bytes());
    }
    drop(echo.await.unwrap());
}

/// Memory that posted work reads must not change until the work has completed (R10). The audit
/// detects a change.
#[tokio::test]
async fn an_audit_sees_memory_that_changes_under_the_device() {
    for late in [false, true] {
        let w = world_of(SimConfig { audit: true, ..SimConfig::default() });
        let (mut s, mut c) = greeted_pair(&w.server, &w.client).await;
        let id = c.queue_send(3, b"as it was", true).unwrap();
        if late {
            // The message arrives before its completion is reported.
            c.link.ring_doorbell().unwrap();
            assert_eq!(s.receive().await.unwrap(), b"as it was");
        }
        assert_eq!(w.net.breaches(), Vec::<String>::new());
        let offset = 3 * config().slot_size as usize;
        c.link.block_mut()[offset] ^= 1;
        c.link.ring_doorbell().unwrap();
        c.done(id).await.unwrap();
        let breaches = w.net.breaches();
        assert!(
            !breaches.is_empty() && breaches.iter().all(|b| b.starts_with("R10")),
            "{breaches:?}"
        );
    }
}

#[tokio::test]
async fn an_audit_names_the_rule() {
    let w = world_of(SimConfig { audit: true, ..SimConfig::default() });
    let (mut s, mut c) = greeted_pair(&w.server, &w.client).await;
    for i in 0..=config().recv_slots as usize {
        c.queue_send(i, b"flood", true).unwrap();
    }
    c.link.ring_doorbell().unwrap();
    c.death().await;
    let (mut s2, _c2) = pair(&w.server, &w.client).await;
    s2.post(0, b"me first");
    s2.death().await;
    a_bad_write(&w.server, &w.client, &|l| (l.addr(), l.rkey() ^ 1)).await;
    while s.poll().await.is_ok() {}
    let rules: Vec<String> = w.net.breaches().iter().map(|b| b[..2].to_owned()).collect();
    assert_eq!(rules, ["R2", "R3", "R9"]);
}

/// Latency uses tokio's clock, which a test may pause.
#[tokio::test(start_paused = true)]
async fn latency_takes_time_and_keeps_the_order() {
    let latency = Duration::from_millis(50);
    let w = world_of(SimConfig { latency, ..SimConfig::default() });
    let (mut s, mut c) = greeted_pair(&w.server, &w.client).await;
    let begun = tokio::time::Instant::now();
    let client = async {
        for i in 0..10 {
            c.queue_send(i, &[i as u8], true).unwrap();
        }
        c.link.ring_doorbell().unwrap();
        while c.sent.len() < 11 {
            c.poll().await.unwrap();
        }
    };
    let server = async {
        for i in 0..10 {
            assert_eq!(s.receive().await.unwrap(), [i]);
        }
    };
    tokio::join!(client, server);
    // Ten messages have concurrent delays of at most 50 ms each, and so do their completions.
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(5) && took <= 2 * latency, "{took:?}");
}

#[tokio::test]
async fn a_lost_wakeup_is_made_up_for_by_the_next_poll() {
    let w = world_of(SimConfig { lost_wakeups: 1, ..SimConfig::default() });
    let (mut s, mut c) = pair(&w.server, &w.client).await;
    let waiting = tokio::spawn(async move {
        let data = s.receive().await.unwrap();
        (s, data)
    });
    tokio::task::yield_now().await;
    c.post(0, b"hello?");
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(!waiting.is_finished(), "nobody has told it");
    w.server_device.freeze(false);
    assert_eq!(waiting.await.unwrap().1, b"hello?", "whatever makes it look finds it");
}

#[tokio::test]
async fn a_device_may_give_a_shorter_queue() {
    let w = world_of(SimConfig { send_queue: Some(5), ..SimConfig::default() });
    let (_s, c) = pair(&w.server, &w.client).await;
    assert_eq!((c.link.caps().send_queue, c.link.send_room()), (5, 5));
}

#[tokio::test]
async fn cut_links_die_and_lost_disconnects_are_not_heard() {
    let w = world(1, 0);
    let (mut s, mut c) = greeted_pair(&w.server, &w.client).await;
    w.client_device.lose_disconnects(true);
    w.client_device.cut();
    assert!(matches!(c.death().await, LinkError::Completion { code: 12, .. }));
    drop(c);
    assert!(s.is_quiet().await, "nobody has told it");
    s.post(0, b"anybody there?");
    assert!(matches!(s.death().await, LinkError::Completion { code: 12, .. }));

    let (mut s, mut c) = greeted_pair(&w.server, &w.client).await;
    w.client_device.lose_disconnects(false);
    w.client_device.cut();
    c.death().await;
    drop(c);
    assert!(matches!(s.death().await, LinkError::Disconnected { .. }));
}

#[derive(Default)]
struct Ears(Mutex<Vec<String>>);

impl Observer for Ears {
    fn event(&self, event: Event<'_>) {
        let text = format!("{event:?}");
        let name = text.split([' ', '{']).next().unwrap().to_owned();
        self.0.lock().unwrap().push(name);
    }
}

#[tokio::test]
async fn a_tap_hears_everything() {
    let w = world(1, 0);
    let ears = Arc::new(Ears::default());
    w.net.observe(ears.clone());
    let (mut s, mut c) = pair(&w.server, &w.client).await;
    let landing = w.server.landing(4096);
    let src = WriteSource::Bytes(w.client.pool.resolve(&w.client.payload(64, 1)).unwrap());
    c.queue(Work::Write { src, remote_addr: landing.addr(), rkey: landing.rkey() }, false).unwrap();
    c.send(0, b"x").await;
    s.receive().await.unwrap();
    drop(c);
    s.death().await;
    drop((s, landing));
    let World { server, client, .. } = w;
    drop((server, client));
    let heard = ears.0.lock().unwrap().clone();
    let count = |name: &str| heard.iter().filter(|h| *h == name).count();
    let all = [
        "Made",
        "Joined",
        "Queued",
        "Written",
        "Sent",
        "Received",
        "Reposted",
        "Completed",
        "Died",
    ];
    assert_eq!(all.map(count), [2, 2, 2, 1, 1, 1, 1, 1, 1], "{heard:?}");
    assert_eq!(count("Destroyed"), 2);
    assert!(count("Registered") > 1 && count("Registered") == count("Deregistered"));
}

/// The completions reported when a link dies depend on the device.
#[tokio::test]
async fn completions_may_be_flushed_when_a_link_dies() {
    for (flushed, reported) in [(0, 1), (1, 0)] {
        let w = world_of(SimConfig { flushed, ..SimConfig::default() });
        let (s, mut c) = greeted_pair(&w.server, &w.client).await;
        c.sent.clear();
        c.post(0, b"arrives");
        drop(s);
        c.death().await;
        assert_eq!(c.sent.len(), reported);
    }
}

/// A WRITE whose bytes arrive in any order is complete when the message behind it is received, and
/// usually not before.
#[tokio::test]
async fn bytes_of_a_write_arrive_in_any_order() {
    let w = world_of(SimConfig { unordered: 1, ..SimConfig::default() });
    let (mut s, mut c) = greeted_pair(&w.server, &w.client).await;
    let data = w.client.payload(10_000, 3);
    let mut early = 0;
    for round in 0..20 {
        let landing = w.server.landing(10_000);
        let (remote_addr, rkey) = (landing.addr(), landing.rkey());
        let src = WriteSource::Bytes(w.client.pool.resolve(&data).unwrap());
        c.queue(Work::Write { src, remote_addr, rkey }, true).unwrap();
        c.link.ring_doorbell().unwrap();
        let landed = landing.filled(10_000).lend();
        early += usize::from(landed == data);
        c.send(0, b"done").await;
        assert_eq!(s.receive().await.unwrap(), b"done");
        assert!(landed == data, "round {round}");
    }
    assert!(early < 20, "every WRITE was there before its message");
}

#[tokio::test]
async fn promises_are_broken_once_and_when_told() {
    let w = world_of(SimConfig {
        injected_bug: Some((InjectedBug::FlipSend, 2)),
        ..SimConfig::default()
    });
    let (mut s, mut c) = pair(&w.server, &w.client).await;
    let broken = async |s: &mut End, c: &mut End| {
        c.send(0, b"ab").await;
        (s.receive().await.unwrap() != b"ab", w.net.has_broken())
    };
    assert_eq!(broken(&mut s, &mut c).await, (false, false));
    assert_eq!(broken(&mut s, &mut c).await, (false, false));
    assert_eq!(broken(&mut s, &mut c).await, (true, true));
    assert_eq!(broken(&mut s, &mut c).await, (false, true));
}
