//! Shared memory within one process: the contract of every provider, attacks by peers, and
//! wake-ups. The tests that need a second process are in shm_processes.rs.
#![cfg(all(target_os = "linux", feature = "shm"))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::Duration;

use common::*;
use tonic_rdma_fabric::shm::{ShmDevice, ShmStats};
use tonic_rdma_fabric::{
    Addr, AnyLink, ConnectError, Fabric, FabricError, Lending, Link, LinkConfig, LinkError,
    ShmAccess, Verb, Work, WriteSource,
};

/// A side. Links that the test makes from now on have this busy-poll limit.
fn polling(limit: Duration) -> Side {
    BUSY_POLL_LIMIT.set(limit);
    sharing(ShmAccess::SameUser)
}

/// The default busy-poll limit.
const LIMIT: Duration = Duration::from_millis(2);

fn sharing(access: ShmAccess) -> Side {
    Side::new(Fabric::Shm(ShmDevice::new(access, Lending::Off)))
}

fn side() -> Side {
    polling(LIMIT)
}

fn stats(end: &End) -> ShmStats {
    match &end.link {
        AnyLink::Shm(link) => link.stats(),
        other => panic!("{other:?}"),
    }
}

/// Runs a shared test with and without busy polling, between two devices and on one device.
macro_rules! everywhere {
    ($($name:ident)*) => { $(
        #[tokio::test]
        async fn $name() {
            for limit in [Duration::ZERO, LIMIT] {
                let (server, client) = (polling(limit), polling(limit));
                common::$name(&server, &client).await;
                common::$name(&server, &server).await;
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

#[tokio::test]
async fn addresses_of_other_kinds_are_refused() {
    let side = side();
    let ip = Addr::Ip("127.0.0.1:1".parse().unwrap());
    let error = side.fabric.listen(&ip).map(drop).unwrap_err();
    assert!(matches!(error, FabricError::WrongAddress { provider: "shm", .. }), "{error}");
    let error = side.connect(&ip).await.map(drop).unwrap_err();
    assert!(matches!(error, ConnectError::Fabric(FabricError::WrongAddress { .. })), "{error}");
}

#[tokio::test]
async fn writes_outside_a_grant_end_the_link() {
    let side = side();
    let local = side.pool.try_alloc(4096).unwrap();
    let (local_addr, lkey) = (local.addr(), local.lkey());
    let wrong: [Aim<'_>; 5] = [
        &|l| (l.addr(), l.rkey() ^ 0x5555),
        &|l| (l.addr() + (1 << 40), l.rkey()),
        &|l| (l.addr() - 1, l.rkey()),
        &|l| (u64::MAX - 10, l.rkey()),
        &|_| (local_addr, lkey),
    ];
    for aim in wrong {
        let (target, writer) = a_bad_write(&side, &side, aim).await;
        assert!(
            matches!(writer, LinkError::Completion { verb: Verb::Write, code: 10, .. }),
            "{writer}"
        );
        assert!(matches!(target, LinkError::Disconnected { .. }), "{target}");
    }
}

/// A connection's keys are useless to another connection, and expire with their memory (R12).
#[tokio::test]
async fn regions_are_for_one_peer_while_they_last() {
    let (server, client) = (polling(Duration::ZERO), polling(Duration::ZERO));
    let (mut s, mut c) = greeted_pair(&server, &client).await;
    let (mut s2, mut c2) = greeted_pair(&server, &client).await;
    let mut account = server.pool.landing();
    let landing = account.alloc(4096, 4096).unwrap().unwrap();
    let (remote_addr, rkey) = (landing.addr(), landing.rkey());
    s.link.share(rkey).unwrap();
    grant(&mut s, &mut c, rkey).await;
    let error = s2.link.share(rkey).unwrap_err();
    assert!(matches!(error, LinkError::Misuse { .. }), "{error}");
    assert!(matches!(s.link.share(rkey + 1000).unwrap_err(), LinkError::Misuse { .. }));
    let write = || Work::Write { src: WriteSource::Any(vec![7; 100].into()), remote_addr, rkey };
    c.queue(write(), false).unwrap();
    let error = c2.queue(write(), false).unwrap_err();
    assert!(matches!(error, LinkError::Completion { code: 10, .. }), "{error}");
    drop(landing);
    assert!(account.trim() > 0);
    // This end tells the peer at this end's next poll, and the peer reads the message when it next
    // waits.
    assert!(s.is_quiet().await);
    for _ in 0..200 {
        assert!(c.is_quiet().await);
        tokio::task::yield_now().await;
    }
    let error = c.queue(write(), false).unwrap_err();
    assert!(matches!(error, LinkError::Completion { code: 10, .. }), "{error}");
    s.death().await;
}

/// A link looks for its end only now and then while messages arrive. All messages are received, and
/// their slots posted again, before the end is reported.
#[tokio::test]
async fn all_messages_come_before_the_end() {
    let (server, client) = (polling(Duration::ZERO), polling(Duration::ZERO));
    for before in 0..=70 {
        let (mut s, mut c) = greeted_pair(&server, &client).await;
        for n in 0..before {
            s.post(n % 8, b"before");
            assert_eq!(c.receive().await.unwrap(), b"before");
        }
        for n in 0..3 {
            s.post(n, &[n as u8]);
        }
        drop(s);
        for n in 0..3 {
            assert_eq!(c.receive().await.unwrap(), [n], "after {before}");
        }
        let error = c.death().await;
        assert!(matches!(error, LinkError::Disconnected { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_send_without_a_recv_kills_the_link() {
    let (server, client) = (side(), side());
    let (mut s, mut c) = greeted_pair(&server, &client).await;
    for i in 0..config().recv_slots as usize {
        c.queue_send(i, b"flood", false).unwrap();
    }
    let error = c.queue_send(20, b"flood", false).unwrap_err();
    assert!(matches!(error, LinkError::Completion { verb: Verb::Send, code: 13, .. }), "{error}");
    for _ in 0..config().recv_slots {
        assert_eq!(s.receive_and_hold().await.unwrap().1, b"flood", "those before it went through");
    }
    assert!(matches!(s.death().await, LinkError::Disconnected { .. }));
}

#[tokio::test]
async fn a_message_longer_than_the_peers_slot_is_misuse() {
    let (server, client) = (side(), side());
    let mut listener = server.listen();
    let addr = listener.local_addr();
    let small = LinkConfig { slot_size: 64, ..config() };
    let accept =
        async { listener.accept().await.unwrap().accept(&small, &server.pool, b"", TIMEOUT).await };
    let (accepted, connected) = tokio::join!(accept, client.connect(&addr));
    let (mut s, mut c) = (End::new(accepted.unwrap()), End::new(connected.unwrap().link));
    c.send(0, &[7; 64]).await;
    assert_eq!(s.receive_and_hold().await.unwrap().1, [7; 64]);
    let error = c.queue_send(1, &[7; 65], true).unwrap_err();
    assert!(
        matches!(error, LinkError::Misuse { .. }) && error.to_string().contains("RECVs of 64"),
        "{error}"
    );
}

#[tokio::test]
async fn policies_are_applied_at_both_ends() {
    let me =
        std::fs::metadata("/proc/self").map(|m| std::os::unix::fs::MetadataExt::uid(&m)).unwrap();
    // Root is always admitted, so a test that runs as root checks only that.
    let open = sharing(ShmAccess::Users(vec![me]));
    common::sends_of_all_sizes(&open, &open).await;
    let closed = sharing(ShmAccess::Users(vec![me + 1]));
    if me == 0 {
        common::sends_of_all_sizes(&closed, &open).await;
    } else {
        let mut listener = closed.listen();
        let addr = listener.local_addr();
        let error = tokio::select! {
            refused = open.connect(&addr) => refused.map(drop).unwrap_err(),
            _ = listener.accept() => panic!("let in"),
        };
        assert!(error.to_string().contains(&format!("user {me}")), "{error}");
        let listener = open.listen();
        let error = closed.connect(&listener.local_addr()).await.map(drop).unwrap_err();
        assert!(matches!(error, ConnectError::NotAllowed { uid, .. } if uid == me), "{error}");
    }
    let anybody = sharing(ShmAccess::Any);
    common::sends_of_all_sizes(&anybody, &anybody).await;
}

#[tokio::test]
async fn a_ring_that_is_too_long_is_refused_here() {
    let side = side();
    let config = LinkConfig { recv_slots: 65536, slot_size: 1 << 20, ..config() };
    let listener = side.listen();
    let error =
        side.connect_with(&listener.local_addr(), &config, b"").await.map(drop).unwrap_err();
    assert!(matches!(error, ConnectError::Config(_) | ConnectError::Memory(_)), "{error}");
}

/// No wake-up is lost, and the wake-ups that are sent are counted. Returns how many messages
/// arrived while an end polled.
async fn a_hundred_thousand_round_trips(limit: Duration) -> u64 {
    const ROUNDS: u32 = 100_000;
    let (server, client) = (polling(limit), polling(limit));
    let (mut s, mut c) = greeted_pair(&server, &client).await;
    let echo = tokio::spawn(async move {
        for i in 0..ROUNDS {
            let data = s.receive().await.unwrap();
            assert_eq!(data, i.to_be_bytes());
            s.send(0, &data).await;
            s.sent.clear();
        }
        s
    });
    let ask = tokio::spawn(async move {
        for i in 0..ROUNDS {
            c.send(0, &i.to_be_bytes()).await;
            assert_eq!(c.receive().await.unwrap(), i.to_be_bytes());
            c.sent.clear();
        }
        c
    });
    let mut polled = 0;
    for end in [echo.await.unwrap(), ask.await.unwrap()] {
        let stats = stats(&end);
        polled += stats.polled;
        assert!(stats.sends >= u64::from(ROUNDS), "{stats:?}");
        assert_eq!(
            stats.wakes + stats.wakes_spared,
            stats.sends,
            "one message to a batch: {stats:?}"
        );
    }
    polled
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_that_sleep_lose_no_wakeup() {
    assert_eq!(a_hundred_thousand_round_trips(Duration::ZERO).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_that_poll_lose_no_wakeup() {
    // With a single processor, links do not poll.
    if std::thread::available_parallelism().unwrap().get() == 1 {
        assert_eq!(a_hundred_thousand_round_trips(LIMIT).await, 0);
        return;
    }
    // While other programs use all processors, both ends may run on one processor, and then they do
    // not poll.
    for _ in 0..5 {
        if a_hundred_thousand_round_trips(LIMIT).await > 0 {
            return;
        }
    }
    panic!("in five runs no end polled");
}

/// A receiver that is awake is not woken.
#[tokio::test]
async fn only_those_that_wait_are_woken() {
    let (server, client) = (polling(Duration::ZERO), polling(Duration::ZERO));
    let (mut s, mut c) = greeted_pair(&server, &client).await;
    assert!(s.is_quiet().await, "it waits from here on");
    let before = stats(&c);
    for i in 0..8 {
        c.post(i, b"x");
    }
    let after = stats(&c);
    assert_eq!(after.wakes - before.wakes, 1);
    assert_eq!(after.wakes_spared - before.wakes_spared, 7);
    for _ in 0..8 {
        s.receive().await.unwrap();
    }
}

/// A waiting end does not poll, and an end that has sent something polls for the answer.
#[tokio::test]
async fn idle_ends_wait() {
    let (server, client) = (side(), side());
    let (mut s, mut c) = greeted_pair(&server, &client).await;
    for end in [&mut s, &mut c] {
        while stats(end).waits == 0 {
            assert!(end.is_quiet().await);
        }
        let waits = stats(end).waits;
        assert!(end.is_quiet().await);
        assert_eq!(stats(end).waits, waits + 1, "it does not look again");
    }
}
