//! Real verbs, on the device that `GUEST_DEVICE` names: run it in the guest
//! (`tests/guest/run --device rxe -- ...`). Built with the feature `guest-tests` only. Without a
//! device every test fails.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use common::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use tonic_rdma_fabric::{
    Addr, ConnectError, Fabric, FabricError, Link, LinkConfig, LinkError, Transport, Verb, Work,
    WriteSource,
};
use tonic_rdma_memory::{Access, LendableBuf, LendableMemory, Memory};

/// Tests run one at a time, because some count the resources of the process.
static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

fn transport(side: &Side) -> Transport {
    let transport = side.fabric.info().unwrap().transport;
    assert!(matches!(transport, Transport::RoCE | Transport::IWarp), "{transport}");
    transport
}

/// Runs shared tests with both ends on the device, with links that sleep at once and with links
/// that poll first.
macro_rules! on_the_device {
    ($($name:ident)*) => { $(
        #[tokio::test]
        async fn $name() {
            let _turn = TURN.lock().await;
            let side = on_guest_device();
            for limit in [Duration::ZERO, Duration::from_millis(2)] {
                BUSY_POLL_LIMIT.set(limit);
                common::$name(&side, &side).await;
            }
        }
    )* };
}

on_the_device! {
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
    a_dropped_attempt_is_harmless
    an_unanswered_request_times_out
}

#[tokio::test]
async fn a_trial_makes_everything_and_leaves_nothing() {
    let _turn = TURN.lock().await;
    let self_test = Fabric::self_test(&guest_device()).unwrap();
    assert!(
        self_test.limits.is_some_and(|limits| limits.max_qp > 0 && limits.max_mr_size > 0),
        "{self_test:?}"
    );
    let failed: Vec<_> = self_test.steps.iter().filter(|step| step.error.is_some()).collect();
    assert!(failed.is_empty(), "{failed:?}");
    let calls: Vec<String> = self_test.steps.iter().map(|step| step.verb.to_string()).collect();
    assert_eq!(calls.first().map(String::as_str), Some("ibv_open_device"));
    assert_eq!(calls.last().map(String::as_str), Some("ibv_create_qp"));
    assert_eq!(calls.len(), 6, "{calls:?}");
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    Fabric::self_test(&guest_device()).unwrap();
    assert_eq!(descriptors(), before);
    let unknown = Fabric::self_test("nope0").map(drop).unwrap_err();
    assert!(matches!(unknown, FabricError::NoSuchDevice { .. }), "{unknown}");
}

#[tokio::test]
async fn devices_are_listed() {
    let _turn = TURN.lock().await;
    let devices = Fabric::devices().unwrap();
    let listed = devices.iter().find(|d| d.name == guest_device()).expect("listed");
    assert!(listed.is_usable(), "{listed:?}");
    assert!(listed.ports[0].mtu >= 256 && !listed.ports[0].gids.is_empty(), "{listed:?}");

    let ip = listed.addresses[0];
    let here = Fabric::local_addresses(Some(&guest_device())).unwrap();
    let at = here.iter().find(|at| at.ip == ip).expect("it lies on the device");
    assert_eq!((at.device.as_str(), at.prefix), (guest_device().as_str(), 24));
    assert_eq!(at.iwarp, listed.transport == Transport::IWarp);
    assert_eq!(Fabric::at(ip).unwrap().name(), guest_device());
    for source in [None, Some(ip)] {
        let toward = Fabric::toward(SocketAddr::new(ip, 1), source, None, TIMEOUT).await.unwrap();
        assert_eq!(toward.name(), guest_device());
    }
    let nobodys = "192.0.2.1".parse().unwrap();
    let nowhere = Fabric::toward(SocketAddr::new(ip, 1), Some(nobodys), None, TIMEOUT).await;
    assert!(matches!(nowhere, Err(ConnectError::NotOnRdma { .. } | ConnectError::NoRoute { .. })));

    let other = Fabric::toward(SocketAddr::new(ip, 1), None, Some("nope0"), TIMEOUT).await;
    let other = other.map(drop).unwrap_err();
    assert!(matches!(other, ConnectError::OtherDevice { .. }), "{other}");
    let unknown = Fabric::open(Some("nope0")).map(drop).unwrap_err();
    assert!(
        matches!(&unknown, FabricError::NoSuchDevice { found, .. } if found.contains(&guest_device())),
        "{unknown}"
    );
    let elsewhere = Fabric::at("192.0.2.1".parse().unwrap()).map(drop).unwrap_err();
    assert!(matches!(elsewhere, FabricError::NotOnRdma { .. }), "{elsewhere}");
    let side = on_guest_device();
    let elsewhere =
        side.fabric.listen(&Addr::Ip("192.0.2.1:0".parse().unwrap())).map(drop).unwrap_err();
    assert!(matches!(elsewhere, FabricError::NotOnRdma { .. }), "{elsewhere}");
}

#[tokio::test]
async fn a_wildcard_listener_takes_requests() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut listener = side.fabric.listen(&Addr::Ip("0.0.0.0:0".parse().unwrap())).unwrap();
    let port = listener.local_addr().ip().unwrap().port();
    let addr = Addr::Ip(SocketAddr::new(side.ip(), port));
    let config = config();
    let accept =
        async { listener.accept().await.unwrap().accept(&config, &side.pool, b"", TIMEOUT).await };
    let (accepted, connected) = tokio::join!(accept, side.connect(&addr));
    let (mut s, mut c) = (End::new(accepted.unwrap()), End::new(connected.unwrap().link));
    c.send(0, b"x").await;
    assert_eq!(s.receive().await.unwrap(), b"x");
}

/// libsiw takes one offset for an error, which the queues of some 60 links reach (see
/// `src/verbs/siw.rs`).
#[tokio::test]
async fn a_hundred_links_stand_at_once() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let small = LinkConfig {
        recv_slots: 4,
        send_slots: 4,
        slot_size: 512,
        staging: 0,
        send_queue: 8,
        ..config()
    };
    let mut listener = side.listen();
    let mut links = Vec::new();
    for _ in 0..100 {
        links.push(pair_over(&mut listener, &side, &side, &small).await);
    }
    for (server, client) in &mut links {
        client.send(0, b"one of many").await;
        assert_eq!(server.receive().await.unwrap(), b"one of many");
    }
}

/// No attribute of a device tells how long inline data may be, and Soft-iWARP takes less than is
/// asked for.
#[tokio::test]
async fn inline_data_is_as_long_as_the_device_takes() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut listener = side.listen();
    let mut granted = async |inline| {
        let config = LinkConfig { inline, ..small() };
        let (_, client) = pair_over(&mut listener, &side, &side, &config).await;
        client.link.caps().max_inline as u32
    };
    let longest = granted(256).await;
    assert!(longest >= 64, "{longest}");
    assert_eq!(granted(longest).await, longest);
    assert_eq!(granted(longest - 1).await, longest - 1);
    assert_eq!(granted(256).await, longest);
    println!("at most {longest} of 256 bytes inline");
    match transport(&side) {
        Transport::IWarp => assert!(longest < 256, "it was not searched"),
        _ => assert_eq!(longest, 256),
    }
}

/// Completion queues of the device, as the kernel counts them.
fn completion_queues() -> usize {
    let shown = Command::new("rdma").args(["resource", "show", &guest_device()]).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    let mut words = shown.split_whitespace().skip_while(|word| *word != "cq");
    words.nth(1).unwrap_or_else(|| panic!("no number of queues: {shown}")).parse().unwrap()
}

fn rand_bool() -> bool {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(0).is_multiple_of(2)
}

/// Links of which two fill a completion queue.
fn small() -> LinkConfig {
    LinkConfig {
        recv_slots: 4,
        recv_extra: 0,
        send_slots: 4,
        staging: 0,
        send_queue: 8,
        max_cq_entries: 2 * (4 + 8),
        ..config()
    }
}

#[tokio::test]
async fn a_full_completion_queue_is_followed_by_another() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut listener = side.listen();
    let before = completion_queues();
    let mut links = Vec::new();
    for n in 1..=6 {
        links.push(pair_over(&mut listener, &side, &side, &small()).await);
        assert_eq!(completion_queues(), before + n, "two links fill a queue");
    }
    for round in 0..20_u8 {
        for (server, client) in &mut links {
            let posted: Vec<u64> =
                (0..4).map(|slot| client.post(slot, &[round, slot as u8])).collect();
            for slot in 0..4 {
                assert_eq!(server.receive().await.unwrap(), [round, slot]);
            }
            client.done(posted[3]).await.unwrap();
        }
    }
    // The places of links that are gone are used again.
    links.drain(2..4);
    links.push(pair_over(&mut listener, &side, &side, &small()).await);
    links.push(pair_over(&mut listener, &side, &side, &small()).await);
    assert_eq!(completion_queues(), before + 6);
    drop(links);
    assert_eq!(completion_queues(), before);
    let too_small = LinkConfig { max_cq_entries: 11, ..small() };
    let addr = listener.local_addr();
    let error = side.connect_with(&addr, &too_small, b"").await.map(drop).unwrap_err();
    assert!(matches!(error, ConnectError::Config(_)), "{error}");
}

#[tokio::test]
async fn links_have_no_descriptors_of_their_own() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut listener = side.listen();
    let shared = LinkConfig { max_cq_entries: 1 << 15, ..small() };
    let mut links = vec![pair_over(&mut listener, &side, &side, &shared).await];
    let (descriptors, queues) = (descriptors(), completion_queues());
    for _ in 0..3 {
        links.push(pair_over(&mut listener, &side, &side, &shared).await);
    }
    assert_eq!(completion_queues(), queues, "eight links fit into the first one");
    assert_eq!(self::descriptors(), descriptors);
}

/// Pairs that exchange messages while others end in each way there is.
#[tokio::test]
async fn a_link_that_dies_takes_no_other_with_it() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut listener = side.listen();
    let shared = LinkConfig { max_cq_entries: 1 << 15, ..small() };
    let mut stay = Vec::new();
    for _ in 0..4 {
        stay.push(pair_over(&mut listener, &side, &side, &shared).await);
    }
    for round in 0..24_u8 {
        let (mut s, mut c) = pair_over(&mut listener, &side, &side, &shared).await;
        c.send(0, b"first").await;
        assert_eq!(s.receive().await.unwrap(), b"first");
        // Work of both ends is in flight when it ends, and nobody takes its completions.
        for slot in 0..4 {
            c.post(slot, &[round; 300]);
        }
        match round % 6 {
            0 => c.link.disconnect(),
            1 => s.link.disconnect(),
            2 => drop(c),
            3 => drop(s),
            // More than the peer has RECVs for.
            4 => {
                c.post(0, b"too many");
                c.death().await;
            }
            // A WRITE that is refused.
            _ => {
                let src = WriteSource::Staged { offset: 0, len: 64 };
                c.queue(Work::Write { src, remote_addr: 4096, rkey: 0xdead }, true).unwrap();
                c.link.ring_doorbell().unwrap();
                c.death().await;
            }
        }
        for (server, client) in &mut stay {
            for slot in 0..4 {
                client.post(slot, &[round, slot as u8]);
            }
            for slot in 0..4 {
                assert_eq!(server.receive().await.unwrap(), [round, slot]);
            }
            server.send(0, &[round]).await;
            assert_eq!(client.receive().await.unwrap(), [round]);
        }
    }
}

/// Attempts are given up at any moment, while the answers to them arrive on another thread. Nothing
/// of them is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_that_are_given_up_leave_nothing() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut listener = side.listen();
    let (addr, before) = (listener.local_addr(), completion_queues());
    let server = tokio::spawn(async move {
        let side = on_guest_device();
        while let Ok(incoming) = listener.accept().await {
            match rand_bool() {
                true => incoming.reject(b""),
                false => drop(incoming.accept(&small(), &side.pool, b"", TIMEOUT).await),
            }
        }
    });
    for n in 0..300 {
        let limit = Duration::from_micros(n % 30 * 200);
        let _ = tokio::time::timeout(limit, side.connect_with(&addr, &small(), b"")).await;
    }
    server.abort();
    let _ = server.await;
    // On iWARP a thread of its own ends an attempt that is unanswered.
    let gone = async {
        while side.pool.stats().control > 0 || completion_queues() > before {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, gone).await.expect("something is left of an attempt");
}

/// The connection manager does not know which ports TCP uses, but on iWARP no port may be used by
/// both.
#[tokio::test]
async fn ports_that_tcp_uses_are_passed_over() {
    const RANGE: &str = "/proc/sys/net/ipv4/ip_local_port_range";
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let before = std::fs::read_to_string(RANGE).unwrap();
    std::fs::write(RANGE, "40000 40063").unwrap();
    let taken: Vec<_> = (40000..40064)
        .filter(|port| port % 4 == 0)
        .map(|port| std::net::TcpListener::bind((side.ip(), port)).unwrap())
        .collect();
    for _ in 0..24 {
        let mut listener = side.listen();
        let addr = listener.local_addr();
        let (accepted, connected) = tokio::join!(
            async {
                let incoming = listener.accept().await.unwrap();
                incoming.accept(&config(), &side.pool, b"", TIMEOUT).await
            },
            async { side.connect(&addr).await.unwrap() }
        );
        drop((accepted.unwrap(), connected));
    }
    std::fs::write(RANGE, before).unwrap();
    assert_eq!(taken.len(), 16);
}

#[tokio::test]
async fn a_dead_address_times_out() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    // An address on the device's network that nobody has.
    let std::net::IpAddr::V4(ip) = side.ip() else { panic!("the guest's addresses are IPv4") };
    let [a, b, c, _] = ip.octets();
    let dead = Addr::Ip(SocketAddr::from(([a, b, c, 77], 18515)));
    let timeout = Duration::from_secs(2);
    let error = side
        .fabric
        .connect(&dead, &config(), &side.pool, b"", timeout)
        .await
        .map(drop)
        .unwrap_err();
    assert!(
        matches!(error, ConnectError::Timeout { .. } | ConnectError::NoRoute { .. }),
        "{error}"
    );
    assert!(error.to_string().contains(&dead.to_string()), "{error}");
}

#[tokio::test]
async fn an_address_off_the_device_is_refused() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let error =
        side.connect(&Addr::Ip("192.0.2.9:1".parse().unwrap())).await.map(drop).unwrap_err();
    let expected = matches!(
        error,
        ConnectError::NoRoute { .. }
            | ConnectError::NotOnRdma { .. }
            | ConnectError::OtherDevice { .. }
    );
    assert!(expected, "{error}");
}

/// A wrong key, a wrong address, a local key, and a key that has expired.
#[tokio::test]
async fn writes_outside_the_grant_hurt_the_link_only() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let local = side.pool.try_alloc(4096).unwrap();
    let (local_addr, lkey) = (local.addr(), local.lkey());
    let wrong: [Aim<'_>; 3] =
        [&|l| (l.addr(), l.rkey() ^ 0x00ff_ff00), &|l| (l.addr() + (1 << 40), l.rkey()), &|_| {
            (local_addr, lkey)
        }];
    for (i, aim) in wrong.into_iter().enumerate() {
        let (target, writer) = a_bad_write(&side, &side, aim).await;
        match transport(&side) {
            Transport::RoCE => {
                let LinkError::Completion { verb, code, .. } = &writer else {
                    panic!("{i}: {writer}")
                };
                assert_eq!((*verb, *code), (Verb::Write, 10), "remote access error");
                let told = matches!(
                    target,
                    LinkError::Completion { verb: Verb::Recv, .. } | LinkError::Disconnected { .. }
                );
                assert!(told, "{i}: {target}");
            }
            _ => {
                assert!(matches!(writer, LinkError::Disconnected { .. }), "{i}: {writer}");
                assert!(matches!(target, LinkError::Disconnected { .. }), "{i}: {target}");
            }
        }
    }
    common::sends_of_all_sizes(&side, &side).await;
}

/// Sends a WRITE and then a SEND over a connection of its own. `None`: both arrived.
async fn end_of_a_write(side: &Side, remote_addr: u64, rkey: u32) -> Option<LinkError> {
    let (mut s, mut c) = greeted_pair(side, side).await;
    let src = WriteSource::Bytes(side.pool.resolve(&side.payload(4096, 0xa5)).unwrap());
    c.queue(Work::Write { src, remote_addr, rkey }, false).unwrap();
    c.queue_send(1, b"behind it", true).unwrap();
    c.link.ring_doorbell().unwrap();
    let received =
        tokio::time::timeout(TIMEOUT, s.receive()).await.expect("neither arrives nor ends");
    match received {
        Ok(message) => {
            assert_eq!(message, b"behind it");
            None
        }
        Err(_) => Some(c.death().await),
    }
}

/// All queue pairs share a protection domain, so every peer may use the key of another connection's
/// landing memory: only the address protects it. The peer guesses near its own memory, with one
/// connection for each guess.
#[tokio::test]
async fn landing_memory_of_another_connection_is_not_found() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let len = side.pool.config().chunk;
    let (mut s, mut c) = greeted_pair(&side, &side).await;
    // Lease the chunks one after the other, each for an account of its own, as two connections do.
    let victim = side.landing(len);
    let own = side.landing(len);
    assert_ne!(victim.rkey(), own.rkey());
    // Other memory may be mapped between the two.
    let near = (0..24).map(|chunks| chunks * len as u64);
    let guesses = near.flat_map(|by| [own.addr().wrapping_sub(by), own.addr().wrapping_add(by)]);
    for guess in guesses {
        match (end_of_a_write(&side, guess, victim.rkey()).await, transport(&side)) {
            (Some(LinkError::Completion { verb: Verb::Write, code: 10, .. }), Transport::RoCE) => {}
            // The sender learns only that the connection has ended.
            (Some(LinkError::Disconnected { .. }), Transport::IWarp) => {}
            (None, _) => {
                panic!("{guess:#x} is the victim's: its memory is at {:#x}", victim.addr())
            }
            (Some(other), _) => panic!("{other}"),
        }
    }
    // The victim's connection continues, and only its own peer's data has been written.
    let src = WriteSource::Bytes(side.pool.resolve(&side.payload(4096, 1)).unwrap());
    c.queue(Work::Write { src, remote_addr: victim.addr() + 4096, rkey: victim.rkey() }, false)
        .unwrap();
    c.queue_send(1, b"landed", true).unwrap();
    c.link.ring_doorbell().unwrap();
    assert_eq!(s.receive().await.unwrap(), b"landed");
    // With the right address the WRITE succeeds.
    let hit = end_of_a_write(&side, victim.addr() + 8192, victim.rkey()).await;
    assert!(hit.is_none(), "{hit:?}");
    let landed = victim.filled(len).lend();
    assert!(landed[..4096].iter().all(|b| *b == 0), "changed before what was written");
    assert!(landed[4096..8192] == pattern(4096, 1)[..]);
    assert!(landed[8192..12288] == pattern(4096, 0xa5)[..]);
    assert!(landed[12288..].iter().all(|b| *b == 0), "changed behind what was written");
}

/// As SECURITY.md counts: each bit of the page number varies.
#[tokio::test]
async fn addresses_of_landing_memory_are_random() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let named: Vec<u64> = (0..40).map(|_| side.landing(4096).addr()).collect();
    let top = u64::BITS - named.iter().max().unwrap().leading_zeros();
    match transport(&side) {
        Transport::IWarp => {
            assert!(top >= 39, "{top}: User Mode Linux has 39, other x86-64 kernels 47")
        }
        _ => assert_eq!(top, 64),
    }
    for bit in 12..top {
        let set = named.iter().filter(|addr| (*addr >> bit) & 1 == 1).count();
        assert!(set > 0 && set < named.len(), "bit {bit} of {top} is always the same: {named:x?}");
    }
}

#[tokio::test]
async fn a_send_without_a_recv_kills_the_link() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    // Also if nobody waits for the completions.
    for signal in [true, false] {
        let (mut s, mut c) = greeted_pair(&side, &side).await;
        for i in 0..config().recv_slots as usize + 1 {
            c.queue_send(i, b"flood", signal).unwrap();
        }
        c.link.ring_doorbell().unwrap();
        let error = c.death().await;
        match transport(&side) {
            Transport::RoCE => {
                assert!(matches!(error, LinkError::Completion { code: 13, .. }), "{error}")
            }
            _ => assert!(matches!(error, LinkError::Disconnected { .. }), "{error}"),
        }
        drop(c);
        for _ in 0..config().recv_slots {
            assert_eq!(s.receive_and_hold().await.unwrap().1, b"flood");
        }
        let error = s.death().await;
        assert!(matches!(error, LinkError::Disconnected { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_message_longer_than_the_slot_kills_the_link() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut listener = side.listen();
    let addr = listener.local_addr();
    let small = LinkConfig { slot_size: 64, ..config() };
    let accept =
        async { listener.accept().await.unwrap().accept(&small, &side.pool, b"", TIMEOUT).await };
    let (accepted, connected) = tokio::join!(accept, side.connect(&addr));
    let (mut s, mut c) = (End::new(accepted.unwrap()), End::new(connected.unwrap().link));
    c.post(1, &[7; 65]);
    let receiver = s.death().await;
    assert!(!matches!(receiver, LinkError::Closed { .. }), "{receiver}");
    drop(s);
    c.death().await;
}

/// The application at the other end cannot block this end.
#[tokio::test]
async fn a_peer_that_does_not_look_holds_nobody_up() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let (mut s, mut c) = greeted_pair(&side, &side).await;
    for i in 0..config().recv_slots as usize {
        c.send(i, &[i as u8; 100]).await;
    }
    for i in 0..config().recv_slots as usize {
        assert_eq!(s.receive().await.unwrap(), [i as u8; 100]);
    }
}

/// On iWARP the listener's port is a TCP port: anybody may connect and send anything.
#[tokio::test]
async fn strangers_on_the_port_are_harmless() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut listener = side.listen();
    let addr = listener.local_addr();
    for words in [b"".as_slice(), b"GET / HTTP/1.1\r\n\r\n", &[0xff; 4096]] {
        let stranger = tokio::net::TcpStream::connect(addr.ip().unwrap()).await;
        match transport(&side) {
            Transport::IWarp => drop(stranger.unwrap().try_write(words)),
            _ => assert!(stranger.is_err(), "RoCE's ports are not TCP's"),
        }
    }
    let (mut s, mut c) = pair_over(&mut listener, &side, &side, &config()).await;
    c.send(0, b"x").await;
    assert_eq!(s.receive().await.unwrap(), b"x");
}

/// Connecting to a TCP server that is not an RDMA listener fails within the timeout. This server
/// hangs up: an answer that is not an MPA frame crashes the siw driver of Linux 6.1, and the guest
/// with it.
#[tokio::test]
async fn a_tcp_server_is_no_rdma_listener() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let server = tokio::net::TcpListener::bind(SocketAddr::new(side.ip(), 0)).await.unwrap();
    let addr = Addr::Ip(server.local_addr().unwrap());
    let hang_up = async {
        loop {
            drop(server.accept().await.unwrap());
        }
    };
    let error = tokio::select! {
        outcome = side.connect(&addr) => outcome.map(drop).unwrap_err(),
        () = hang_up => unreachable!("the server goes on"),
    };
    match transport(&side) {
        Transport::IWarp => {
            let named = matches!(
                error,
                ConnectError::Failed { .. }
                    | ConnectError::Rejected { .. }
                    | ConnectError::Timeout { .. }
            );
            assert!(named && error.to_string().contains(&addr.to_string()), "{error}");
        }
        _ => assert!(matches!(error, ConnectError::Refused { .. }), "{error}"),
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[tokio::test]
async fn connections_leave_nothing_behind() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut listener = side.listen();
    let small =
        LinkConfig { recv_slots: 4, send_slots: 4, staging: 4096, send_queue: 16, ..config() };
    let mut before = 0;
    for i in 0..200 {
        if i == 5 {
            before = descriptors();
        }
        let (mut s, mut c) = pair_over(&mut listener, &side, &side, &small).await;
        c.link.block_mut()[0] = i as u8;
        c.queue(Work::Send { offset: 0, len: 1 }, true).unwrap();
        c.link.ring_doorbell().unwrap();
        assert_eq!(s.receive().await.unwrap(), [i as u8]);
        match i % 4 {
            0 => c.link.disconnect(),
            1 => s.link.disconnect(),
            2 => drop(c),
            _ => drop(s),
        }
    }
    assert!(descriptors() <= before, "{} descriptors, {before} after the first few", descriptors());
    for _ in 0..20 {
        let addr = listener.local_addr();
        let reject = async { listener.accept().await.unwrap().reject(b"") };
        let ((), outcome) = tokio::join!(reject, side.connect(&addr));
        assert!(outcome.is_err());
    }
    assert!(descriptors() <= before, "{} descriptors after rejections", descriptors());
}

/// The pool's memory, the device and its protection domain may be dropped in any order.
#[tokio::test]
async fn any_order_of_drops_is_fine() {
    let _turn = TURN.lock().await;
    for order in 0..6 {
        let mut side = Some(on_guest_device());
        let (s, mut c) = greeted_pair(side.as_ref().unwrap(), side.as_ref().unwrap()).await;
        let mut landing = Some(side.as_ref().unwrap().landing(64 << 10));
        let (remote_addr, rkey) = landing.as_ref().map(|l| (l.addr(), l.rkey())).unwrap();
        let payload = side.as_ref().unwrap().payload(64 << 10, 3);
        let src = WriteSource::Bytes(side.as_ref().unwrap().pool.resolve(&payload).unwrap());
        c.queue(Work::Write { src, remote_addr, rkey }, false).unwrap();
        c.link.ring_doorbell().unwrap();
        let (mut s, mut c) = (Some(s), Some(c));
        // The work is still in flight. Landing memory is dropped after its queue pair (R9).
        for step in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]][order] {
            match step {
                0 => drop(side.take()),
                1 => drop(c.take()),
                _ => drop((s.take(), landing.take())),
            }
        }
        assert_eq!(payload.len(), 64 << 10);
    }
    let side = on_guest_device();
    common::sends_of_all_sizes(&side, &side).await;
}

/// Memory of the application may be mapped read-only, at any address, and the device reads it only:
/// not even a peer that knows its address and key can write to it.
#[tokio::test]
async fn a_mapped_file_is_sent_from_where_it_lies_and_cannot_be_written() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut file = tempfile::tempfile().unwrap();
    let content = pattern(100_001, 7);
    std::io::Write::write_all(&mut file, &content).unwrap();
    // SAFETY: nobody else has the file.
    let shared = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    // Linux pins this since 6.2; before, the error says what to do.
    match side.pool.register(bytes::Bytes::from_owner(shared)) {
        Ok(registered) => drop(registered),
        Err(error) => assert!(error.to_string().contains("map_copy_read_only"), "{error}"),
    }
    // SAFETY: as above.
    let map = unsafe { memmap2::MmapOptions::new().map_copy_read_only(&file) }.unwrap();
    let memory = bytes::Bytes::from_owner(map).slice(1..);
    let registered = side.pool.register(memory.clone()).unwrap();
    let source = side.pool.resolve(&memory).unwrap();
    let (mut s, mut c) = greeted_pair(&side, &side).await;
    let landing = side.landing(memory.len());
    let (remote_addr, rkey) = (landing.addr(), landing.rkey());
    c.queue(Work::Write { src: WriteSource::Bytes(source.clone()), remote_addr, rkey }, false)
        .unwrap();
    // The application has dropped everything; the work in flight has not.
    drop(registered);
    c.queue_send(1, b"landed", true).unwrap();
    c.link.ring_doorbell().unwrap();
    assert_eq!(s.receive().await.unwrap(), b"landed");
    assert!(landing.filled(memory.len()).lend()[..] == content[1..]);
    let stats = side.pool.stats();
    assert_eq!(stats.application, memory.len(), "registered while bytes with its key are left");

    let written = end_of_a_write(&side, source.iova(), source.lkey()).await;
    assert!(written.is_some(), "a peer has written to memory of the application");
    assert!(memory[..] == content[1..]);
    drop((source, s, c));
    while side.pool.stats().application > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Memory that processes of this host can be lent is written from over the network, too.
#[tokio::test]
async fn lendable_memory_is_registered_with_devices() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut buf = LendableBuf::zeroed(100_001).unwrap();
    buf.copy_from_slice(&pattern(100_001, 7));
    let memory = Arc::new(buf.freeze());
    let registered = side.pool.register_lendable(memory.clone()).unwrap();
    let bytes = LendableMemory::bytes(memory);
    assert!(side.pool.lend(&bytes).is_none(), "not over the network");
    let (mut s, mut c) = greeted_pair(&side, &side).await;
    let landing = side.landing(bytes.len());
    let (remote_addr, rkey) = (landing.addr(), landing.rkey());
    let src = WriteSource::Bytes(side.pool.resolve(&bytes).unwrap());
    c.queue(Work::Write { src, remote_addr, rkey }, false).unwrap();
    c.queue_send(1, b"landed", true).unwrap();
    c.link.ring_doorbell().unwrap();
    assert_eq!(s.receive().await.unwrap(), b"landed");
    assert!(landing.filled(bytes.len()).lend()[..] == bytes[..]);
    // As with any file that is mapped shared and read-only, this needs Linux 6.2.
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
    let file = memfd_create("test", flags).unwrap();
    ftruncate(&file, 100_001).unwrap();
    let memory = Arc::new(LendableMemory::from_file(file).unwrap());
    match side.pool.register_lendable(memory) {
        Ok(other) => drop(other),
        Err(error) => assert!(error.to_string().contains("map_copy_read_only"), "{error}"),
    }
    drop(registered);
}

/// Registration beyond the limit fails with the device's error.
#[tokio::test]
async fn registration_beyond_the_limit_is_an_error() {
    let _turn = TURN.lock().await;
    let fabric = Fabric::open(Some(&guest_device())).unwrap();
    let registrar = fabric.registrar();
    assert!(registrar.pins());
    let layout = std::alloc::Layout::from_size_align(4096, 4096).unwrap();
    // SAFETY: the layout has a size above zero. The memory is freed below.
    let memory = std::ptr::NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap();
    let range = |len, access| Memory { addr: memory, len, access, file: None };
    // SAFETY: the memory is allocated; a length that wraps is refused before any access.
    let refused = unsafe { registrar.register(range(usize::MAX - 4096, Access::Local)) };
    assert!(refused.is_err());
    // SAFETY: the memory is mapped until after the registration is dropped.
    let region = unsafe { registrar.register(range(4096, Access::RemoteWrite)) }.unwrap();
    assert_ne!(region.rkey(), 0);
    drop(region);
    // SAFETY: allocated above with this layout, and no longer registered.
    unsafe { std::alloc::dealloc(memory.as_ptr(), layout) };
}
