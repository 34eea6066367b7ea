//! Real verbs on the device that `GUEST_DEVICE` names. Run this test in the guest (`tests/guest/run
//! --device rxe -- ...`). It is built only when it is named. Without a device every test fails.
//!
//! | module | what |
//! |---|---|
//! | `connecting` | listeners, and attempts at a connection |
//! | `queues` | queue pairs and completion queues |
//! | `memory` | what is registered, and what peers may reach of it |

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;
mod connecting;
mod memory;
mod queues;

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
    an_accepted_link_that_is_dropped_at_once_ends
    a_dropped_attempt_is_harmless
    an_unanswered_request_times_out
    a_bare_connection_moves_bytes_both_ways
    a_bare_connection_is_not_for_longer_writes
    a_bare_connection_is_charged_for_each_write
    a_bare_connection_ends_for_nonsense
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

/// libsiw mistakes one mapping offset for an error. The queues of some 60 links reach that offset
/// (see `src/verbs/siw.rs`).
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

/// If a WRITE is not signalled, TCP under Soft-iWARP may still read the WRITE's pages after its
/// completion. So each WRITE of a page or more is signalled there (see `src/verbs/siw.rs`).
#[tokio::test]
async fn soft_iwarp_alone_signals_each_write_of_a_page() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let iwarp = Fabric::local_addresses(Some(&guest_device())).unwrap()[0].iwarp;
    let (mut s, mut c) = greeted_pair(&side, &side).await;
    let landing = side.landing(4096);
    grant(&mut s, &mut c, landing.rkey()).await;
    let (remote_addr, rkey) = (landing.addr(), landing.rkey());
    for (len, all) in [(4095, false), (4096, iwarp)] {
        let payload = side.payload(len, 7);
        let (before, depth) = (c.sent.len(), c.link.caps().send_queue);
        let mut last = 0;
        for _ in 0..depth {
            let src = WriteSource::Bytes(side.pool.resolve(&payload).unwrap());
            last = c.queue(Work::Write { src, remote_addr, rkey }, false).unwrap();
        }
        c.link.ring_doorbell().unwrap();
        c.done(last).await.unwrap();
        let completions = c.sent.len() - before;
        assert_eq!(completions == depth, all, "{completions} of {depth}, {len} bytes");
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
    // A separate thread ends each attempt that has failed.
    let mut looks = 0;
    while descriptors() > before {
        looks += 1;
        assert!(looks < 1000, "{} descriptors after rejections, {before} before", descriptors());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
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

/// The number of the device's completion queues, as the kernel counts them.
fn completion_queues() -> usize {
    let shown = Command::new("rdma").args(["resource", "show", &guest_device()]).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    let mut words = shown.split_whitespace().skip_while(|word| *word != "cq");
    words.nth(1).unwrap_or_else(|| panic!("no number of queues: {shown}")).parse().unwrap()
}

/// A configuration with which two links fill a completion queue.
fn small() -> LinkConfig {
    LinkConfig {
        recv_slots: 4,
        recv_extra: 0,
        send_slots: 4,
        staging: 0,
        send_queue: 8,
        max_cq_entries: 2 * (1 + 4 + 8),
        ..config()
    }
}
