//! Grants that are recalled before they are used up.

use super::super::*;
use super::pair::*;
use crate::config::Config;
use crate::ids::StreamId;

fn config() -> Config {
    Config { recv_slots: 64, max_recvs: 64, standing_grants: 0, write_chunk: 16 << 10, ..small() }
}

/// Opens streams, on each of which the client holds a grant for a message of 200,000 bytes. The
/// client may then have WRITEs of `room` bytes in flight.
fn granted(config: Config, streams: usize, room: usize) -> (Pair, Vec<StreamId>) {
    let mut p = Pair::new(config.clone(), config, 1 << 30);
    p.ends[CLIENT].limit(16, 4, 64 << 10, 0);
    let ids: Vec<StreamId> = (0..streams).map(|_| p.open("head", false)).collect();
    for &id in &ids {
        p.send(CLIENT, id, pattern(id.get(), 200_000));
    }
    p.settle();
    assert_eq!(p.client().pending().peer_grants, streams);
    p.ends[CLIENT].limit(16, 4, 64 << 10, room);
    (p, ids)
}

fn finish(mut p: Pair, ids: &[StreamId]) {
    p.ends[CLIENT].limit(16, 4, 64 << 10, 1 << 20);
    p.settle();
    for &id in ids {
        assert!(p.ends[SERVER].app(id).body == pattern(id.get(), 200_000), "{id}");
        assert!(p.ends[SERVER].app(id).ended);
        p.answer(id, bytes::Bytes::new());
    }
    p.assert_clean();
}

#[test]
fn unwritten_grants_are_returned_and_granted_again() {
    let (mut p, ids) = granted(config(), 3, 0);
    let kept = p.server().landing.grants.iter().map(|(_, grant)| grant.memory).next().unwrap();
    p.server().recall_grants(|memory| memory != kept);
    // A second recall has no effect.
    p.server().recall_grants(|memory| memory != kept);
    let used = p.ends[SERVER].memory.used;
    p.settle();
    assert_eq!((p.count(SERVER, "RECALL"), p.count(CLIENT, "ABORT")), (2, 2));
    assert_eq!(p.ends[SERVER].memory.used, used, "granted again");
    assert_eq!(
        (p.count(SERVER, "GRANT"), p.count(CLIENT, "REQUEST")),
        (5, 3),
        "without another REQUEST"
    );
    finish(p, &ids);
}

#[test]
fn a_partly_written_grant_ends_with_a_short_done() {
    let (mut p, ids) = granted(config(), 1, 32 << 10);
    p.hold[SERVER] = true;
    p.settle();
    assert_eq!(p.client().stats().write_sent, 32 << 10);
    p.server().recall_grants(|_| true);
    p.hold[SERVER] = false;
    p.drive(SERVER);
    while p.deliver(CLIENT) {}
    p.drive(CLIENT);
    while p.deliver(SERVER) {}
    p.ends[SERVER].take_events();
    assert_eq!(p.ends[SERVER].app(ids[0]).landed, [(32 << 10, Flow::Bulk)]);
    assert_eq!((p.count(CLIENT, "DONE"), p.count(CLIENT, "ABORT")), (1, 0));
    assert_eq!(p.server().pending().grants, 0);
    finish(p, &ids);
}

/// The grants of queued transfers are recalled together with the first transfer's grant.
#[test]
fn all_grants_of_a_stream_are_recalled_together() {
    let config = Config { bulk_window: 1 << 20, ..config() };
    let mut p = Pair::new(config.clone(), config, 1 << 30);
    p.ends[CLIENT].limit(16, 4, 64 << 10, 0);
    let id = p.open("head", false);
    for seed in 0..3 {
        p.client().send_data(id, pattern(seed, 150_000), true, seed == 2).unwrap();
    }
    p.settle();
    assert_eq!(p.client().pending().peer_grants, 3);
    let first = p.server().landing.grants.iter().map(|(_, grant)| grant.memory).next().unwrap();
    p.hold[CLIENT] = true;
    p.server().recall_grants(|memory| memory == first);
    p.settle();
    assert_eq!(p.count(SERVER, "RECALL"), 3);
    assert_eq!(p.server().poll_landing(|_| true), None);
    p.hold[CLIENT] = false;
    p.ends[CLIENT].limit(16, 4, 64 << 10, 1 << 20);
    p.settle();
    let body: Vec<u8> = (0..3).flat_map(|seed| pattern(seed, 150_000)).collect();
    assert!(p.ends[SERVER].app(id).body == body);
    p.answer(id, bytes::Bytes::new());
    p.assert_clean();
}

/// A standing grant that is bound to a transfer is not returned, but written before all others.
#[test]
fn a_bound_standing_grant_is_written_first() {
    let config = Config { standing_grants: 1, ..config() };
    let mut p = Pair::new(config.clone(), config, 1 << 30);
    let id = p.open("head", false);
    p.send(CLIENT, id, pattern(1, 100_000));
    p.settle();
    p.answer(id, bytes::Bytes::new());
    p.settle();
    p.ends[CLIENT].limit(16, 4, 64 << 10, 0);
    let ids: Vec<StreamId> = (0..3).map(|_| p.open("head", false)).collect();
    for &id in &ids {
        // The first transfer requests memory, which replaces the short standing grant. The second
        // transfer finds a standing grant that is long enough.
        p.send(CLIENT, id, pattern(id.get(), 200_000));
        p.settle();
    }
    assert_eq!(p.count(CLIENT, "REQUEST"), 3);
    p.server().recall_standing();
    p.settle();
    assert_eq!(p.count(CLIENT, "ABORT"), 1, "the short one");
    // The bytes of the 13 WRITEs of up to 16 KiB that 200,000 bytes need.
    p.ends[CLIENT].limit(16, 4, 64 << 10, 208 << 10);
    p.hold[SERVER] = true;
    p.settle();
    p.hold[SERVER] = false;
    while p.deliver(SERVER) {}
    p.ends[SERVER].take_events();
    assert_eq!(p.ends[SERVER].app(ids[1]).landed, [(200_000, Flow::Bulk)]);
    finish(p, &ids);
}
