//! Send memory of one pool that is sent by the device of another.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use bytes::{BufMut, Bytes};
use common::pinning::wait_until;
use common::small;
use tonic_rdma_memory::{Access, Pool};

const LEN: usize = 64 << 10;

fn filled(pool: &Pool, len: usize) -> Bytes {
    let mut buf = pool.try_alloc(len).unwrap();
    buf.put_bytes(7, len);
    buf.freeze()
}

#[test]
fn an_arena_is_registered_at_its_first_use_until_it_is_removed() {
    let ((one, ones), (two, twos)) = (small(), small());
    let bytes = filled(&one, LEN);
    assert!(two.resolve(&bytes).is_none(), "the pools do not know each other");
    two.share_send_memory(&one);
    two.share_send_memory(&one);
    let arena = ones.entry(one.resolve(&bytes).unwrap().lkey()).unwrap();
    for part in [bytes.clone(), bytes.slice(5..6), bytes.slice(LEN - 1..)] {
        let found = two.resolve(&part).unwrap();
        assert_eq!((found.addr(), found.len()), (part.as_ptr() as u64, part.len()));
        let entry = twos.entry(found.lkey()).unwrap();
        assert_eq!((entry.start, entry.len), (arena.start, arena.len), "all of the arena");
        assert_eq!(entry.access, Access::LocalRead);
        assert!(twos.covers(found.lkey(), found.iova(), found.len()));
        assert_eq!(found.lend_key(), None);
    }
    assert_eq!(twos.registrations(), 1, "once");
    assert_eq!(two.stats().application, 0);
    assert!(one.resolve(&filled(&two, LEN)).is_some(), "and the other way");

    // A work request keeps the arena, even after the application has dropped its bytes.
    let in_flight = two.resolve(&bytes).unwrap();
    drop(bytes);
    let budget = one.config().send;
    one.try_alloc(budget).unwrap_err();
    assert_eq!(in_flight.as_ref(), &[7; LEN]);
    assert!(twos.covers(in_flight.lkey(), in_flight.iova(), in_flight.len()));
    drop(in_flight);
    // The arena is removed to make room for a buffer as long as the budget.
    let whole = one.try_alloc(budget).unwrap();
    assert_eq!(twos.bytes(), two.stats().registered, "deregistered with the arena");
    drop((whole, one, two));
    for registrar in [ones, twos] {
        registrar.assert_settled();
    }
}

/// Either pool may end first.
#[test]
fn pools_end_in_any_order() {
    for first in [0, 1] {
        let ((one, ones), (two, twos)) = (small(), small());
        two.share_send_memory(&one);
        let (a, b) = (filled(&one, LEN), filled(&two, LEN));
        let found = (one.resolve(&b).unwrap(), two.resolve(&a).unwrap());
        let mut ends: [Box<dyn std::any::Any>; 2] =
            [Box::new((one, a, found.0)), Box::new((two, b, found.1))];
        ends.rotate_left(first);
        drop(ends);
        ones.assert_settled();
        twos.assert_settled();
    }
}

#[test]
fn a_slow_device_registers_on_a_thread() {
    let ((one, ones), (two, twos)) = (small(), small());
    twos.slow();
    two.share_send_memory(&one);
    let bytes = filled(&one, LEN);
    wait_until("it is registered", || two.resolve(&bytes).is_some());
    assert_eq!(twos.registrations(), 1);
    drop((bytes, one, two));
    // The thread may still hold the bytes for a moment.
    wait_until("all is deregistered", || ones.bytes() + twos.bytes() == 0);
    ones.assert_settled();
    twos.assert_settled();
}

/// After a refusal the message is copied, and the next message does not ask again.
#[test]
fn a_refusal_is_no_error_and_is_not_repeated_at_once() {
    let ((one, _), (two, twos)) = (small(), small());
    two.share_send_memory(&one);
    let bytes = filled(&one, LEN);
    twos.fail(true);
    assert!(two.resolve(&bytes).is_none());
    twos.fail(false);
    assert!(two.resolve(&bytes).is_none(), "asked again within ten seconds");
    assert_eq!(twos.registrations(), 0);
    // The refusal does not apply to another arena.
    assert!(two.resolve(&filled(&one, 300 << 10)).is_some());
    twos.assert_clean();
}

/// Control memory and landing memory are registered only with their own pool's device.
#[test]
fn only_send_memory_is_registered_elsewhere() {
    let ((one, _), (two, twos)) = (small(), small());
    two.share_send_memory(&one);
    let mut control = one.control(4096).unwrap();
    control.put_bytes(1, 4096);
    assert!(two.resolve(&control.freeze()).is_none());
    let mut landing = one.landing();
    let buf = landing.alloc(LEN, LEN).unwrap().unwrap();
    let landed = buf.filled(LEN).lend();
    assert!(one.resolve(&landed).is_some());
    assert!(two.resolve(&landed).is_none());
    assert_eq!(twos.registrations(), 0);
}
