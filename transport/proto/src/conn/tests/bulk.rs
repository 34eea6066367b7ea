//! Grants on request, standing grants, partial grants, and fairness between transfers.

use std::time::Duration;

use bytes::Bytes;

use super::super::*;
use super::pair::*;
use crate::config::Config;
use crate::frame::Frame;
use crate::ids::{ResetCode, StreamId};

/// Makes a call with a request body of `len` bytes and an empty response body.
fn upload(p: &mut Pair, len: usize) -> StreamId {
    let id = p.open("head", false);
    let body = pattern(len as u32, len);
    p.send(CLIENT, id, body.clone());
    p.settle();
    assert!(p.ends[SERVER].app(id).body == body, "{len} bytes changed on the way");
    p.answer(id, Bytes::new());
    p.settle();
    id
}

fn with_standing(standing_grants: u8) -> Config {
    Config { standing_grants, ..small() }
}

#[test]
fn only_the_first_transfer_requests_a_grant() {
    let mut p = Pair::small();
    let first = upload(&mut p, 100_000);
    assert_eq!(p.count(CLIENT, "REQUEST"), 1);
    assert_eq!(p.ends[SERVER].app(first).landed, [(100_000, Flow::Bulk)]);
    for len in [100_000, 50_000, 99_999, 2000, 100_000] {
        let id = upload(&mut p, len);
        assert_eq!(p.ends[SERVER].app(id).landed, [(len as u32, Flow::Bulk)]);
    }
    assert_eq!(p.count(CLIENT, "REQUEST"), 1);
    // Four standing grants exist, and each one that is used is replaced.
    assert_eq!(p.server().pending().grants, 4);
    assert_eq!(p.client().pending().peer_grants, 4);
    assert_eq!(p.count(SERVER, "GRANT"), 1 + 4 + 5);
    p.assert_clean();
}

/// A flush of a small call does no work for grants and events: it asks only whether there are any.
#[test]
fn a_connection_of_small_calls_wants_no_memory() {
    let mut p = Pair::small();
    for _ in 0..5 {
        let id = p.open("head", false);
        p.send(CLIENT, id, pattern(1, 100));
        while p.step() {
            assert!(p.ends.iter().all(|end| !end.conn.may_want_memory()));
        }
        p.answer(id, Bytes::new());
        p.settle();
        assert!(p.ends.iter().all(|end| !end.conn.has_events()));
    }
    let id = p.open("head", false);
    p.send(CLIENT, id, pattern(1, 100_000));
    p.until("an event", |p| p.ends[SERVER].conn.has_events());
    p.until("a REQUEST", |p| p.ends[SERVER].conn.may_want_memory());
    p.settle();
}

#[test]
fn standing_grants_can_be_turned_off() {
    let mut p = Pair::new(with_standing(0), with_standing(0), 1 << 20);
    for _ in 0..5 {
        upload(&mut p, 100_000);
    }
    assert_eq!((p.count(CLIENT, "REQUEST"), p.count(SERVER, "GRANT")), (5, 5));
    assert_eq!(p.server().pending(), Pending::default());
    p.assert_clean();
}

#[test]
fn short_standing_grants_are_replaced() {
    let mut p = Pair::small();
    upload(&mut p, 20_000);
    upload(&mut p, 20_000);
    assert_eq!(p.count(CLIENT, "REQUEST"), 1);
    // Each transfer that had to request memory replaces one standing grant.
    for n in 1..=4 {
        upload(&mut p, 150_000);
        assert!(p.count(SERVER, "RECALL") <= n);
    }
    let asked = p.count(CLIENT, "REQUEST");
    assert!(asked <= 5, "{asked}");
    for _ in 0..10 {
        upload(&mut p, 150_000);
    }
    assert_eq!(p.count(CLIENT, "REQUEST"), asked);
    p.assert_clean();
}

#[test]
fn long_transfers_use_no_standing_grants() {
    let config = Config { standing_max: 150_000, ..small() };
    let mut p = Pair::new(config.clone(), config, 1 << 20);
    // These messages are longer than the longest standing grant.
    for n in 1..=3 {
        upload(&mut p, 200_000);
        assert_eq!(p.count(CLIENT, "REQUEST"), n);
        assert_eq!(p.server().pending().grants, 0);
    }
    // Messages of up to `standing_max` bytes use standing grants, so only the first of these
    // messages sends a REQUEST.
    for _ in 0..3 {
        upload(&mut p, 150_000);
        assert_eq!(p.count(CLIENT, "REQUEST"), 4);
    }
    p.assert_clean();
}

#[test]
fn idle_standing_grants_are_recalled() {
    let mut p = Pair::small();
    upload(&mut p, 100_000);
    assert!(p.ends[SERVER].memory.used > 0);
    for second in 1..10 {
        p.advance(Duration::from_secs(1));
        p.settle();
        assert_eq!(p.count(SERVER, "RECALL"), 0, "after {second} s");
        // Small calls do not count as bulk.
        let id = p.open("head", true);
        p.settle();
        p.answer(id, pattern(1, 100));
        p.settle();
    }
    p.advance(Duration::from_secs(1));
    p.settle();
    assert_eq!(p.count(SERVER, "RECALL"), 4);
    assert_eq!((p.ends[SERVER].memory.used, p.server().pending().grants), (0, 0));
    assert_eq!(p.client().pending().peer_grants, 0);
    // Bulk traffic brings the standing grants back.
    upload(&mut p, 100_000);
    assert_eq!(p.count(CLIENT, "REQUEST"), 2);
    upload(&mut p, 100_000);
    assert_eq!(p.count(CLIENT, "REQUEST"), 2);
    p.assert_clean();
}

#[test]
fn standing_grants_can_be_recalled() {
    let mut p = Pair::small();
    upload(&mut p, 100_000);
    p.server().recall_standing();
    p.server().recall_standing();
    p.settle();
    assert_eq!((p.count(SERVER, "RECALL"), p.count(CLIENT, "ABORT")), (4, 4));
    assert_eq!(p.ends[SERVER].memory.used, 0);
    p.assert_clean();
}

/// A grant that is used while RECALL is in flight ends with a single DONE, after which its id may
/// be reused.
#[test]
fn recall_crosses_done() {
    let mut p = Pair::small();
    upload(&mut p, 100_000);
    p.hold[CLIENT] = true;
    p.server().recall_standing();
    p.settle();
    let id = p.open("head", false);
    p.send(CLIENT, id, pattern(3, 100_000));
    let other = p.open("other", false);
    p.send(CLIENT, other, pattern(4, 300_000));
    p.settle();
    assert_eq!(p.ends[SERVER].app(id).landed, [(100_000, Flow::Bulk)]);
    p.hold[CLIENT] = false;
    p.settle();
    assert_eq!(p.ends[SERVER].app(other).body, pattern(4, 300_000));
    for id in [id, other] {
        p.answer(id, Bytes::new());
    }
    p.assert_clean();
}

#[test]
fn scarce_memory_is_granted_in_parts() {
    for budget in [16 << 10, 20 << 10, 64 << 10, 300 << 10] {
        for (standing, copy_out) in [(0, true), (0, false), (4, true), (4, false)] {
            let mut p = Pair::new(with_standing(standing), with_standing(standing), budget);
            for end in &mut p.ends {
                end.copy_out = copy_out;
            }
            let ids: Vec<StreamId> = (0..4).map(|_| p.open("head", false)).collect();
            for (n, id) in ids.iter().enumerate() {
                p.client()
                    .send_data(*id, pattern(n as u32, 10_000 << n), n % 2 == 0, false)
                    .unwrap();
                p.client().send_data(*id, pattern(n as u32, 3000), false, false).unwrap();
                p.client().send_data(*id, pattern(n as u32, 500_000), n % 2 == 1, true).unwrap();
            }
            p.settle();
            for (n, id) in ids.iter().enumerate() {
                let body = &p.ends[SERVER].app(*id).body;
                assert_eq!(body[..10_000 << n], pattern(n as u32, 10_000 << n));
                assert_eq!(
                    body[(10_000 << n) + 3000..],
                    pattern(n as u32, 500_000),
                    "{budget} {standing} {copy_out}"
                );
                p.answer(*id, pattern(n as u32, 200_000));
            }
            p.settle();
            assert!(p.ends[SERVER].memory.peak <= budget);
            assert!(p.ends[CLIENT].app(ids[3]).body == pattern(3, 200_000));
            p.assert_clean();
        }
    }
}

/// Standing grants hold all memory, and a long transfer waits for some. Shorter transfers that are
/// queued behind it must not take standing grants.
#[test]
fn waiting_transfers_hold_no_standing_grants() {
    let mut p = Pair::new(with_standing(3), with_standing(3), 64 << 10);
    upload(&mut p, 20_000);
    upload(&mut p, 20_000);
    assert_eq!(p.ends[SERVER].memory.used, 3 * 20_480);
    let id = p.open("head", false);
    for (n, len) in [200_000, 15_000, 16_000, 17_000, 18_000].into_iter().enumerate() {
        p.client().send_data(id, pattern(n as u32, len), true, false).unwrap();
    }
    p.client().finish(id).unwrap();
    p.settle();
    assert_eq!(p.ends[SERVER].app(id).body.len(), 266_000);
    assert!(p.ends[SERVER].app(id).ended);
    p.answer(id, Bytes::new());
    p.assert_clean();
}

/// Memory that stalled readers hold is granted to nobody else. All transfers continue once these
/// readers read.
#[test]
fn transfers_wait_for_memory_that_readers_hold() {
    let config = Config { bulk_window: 65_536, ..with_standing(0) };
    let mut p = Pair::new(config.clone(), config, 128 << 10);
    let ids: Vec<StreamId> = (0..4).map(|_| p.open("head", false)).collect();
    for id in &ids {
        p.ends[SERVER].stalled.insert(id.get());
        p.send(CLIENT, *id, pattern(id.get(), 200_000));
    }
    p.settle();
    assert!(p.ends[SERVER].memory.used > 100 << 10);
    for id in &ids {
        p.ends[SERVER].unstall(*id);
    }
    p.settle();
    for id in ids {
        assert_eq!(p.ends[SERVER].app(id).body, pattern(id.get(), 200_000));
        p.answer(id, Bytes::new());
    }
    p.assert_clean();
}

/// A pair whose streams have a common limit of `unread_total` unread bytes, and 64 KiB each.
fn with_total(unread_total: u64) -> Pair {
    let config =
        Config { bulk_window: 65_536, unread_total, stream_window: 4096, ..with_standing(0) };
    Pair::new(config.clone(), config, 64 << 20)
}

/// The total of unread data is bounded over all streams. Reading and the release of streams make
/// room again.
#[test]
fn unread_data_of_all_streams_is_bounded() {
    let mut p = with_total(150_000);
    let ids: Vec<StreamId> = (0..8).map(|_| p.open("head", false)).collect();
    let came = |p: &Pair| ids.iter().map(|id| p.ends[SERVER].app(*id).body.len()).sum::<usize>();
    for id in &ids {
        p.ends[SERVER].stalled.insert(id.get());
        p.send(CLIENT, *id, pattern(id.get(), 60_000));
    }
    p.settle();
    assert_eq!(came(&p), 120_000, "two of them, and no small piece of a third");
    // Small messages still pass.
    let small = upload(&mut p, 100);
    assert_eq!(p.ends[SERVER].app(small).body.len(), 100);
    // One stream ends unread and another is read, which makes room for two more streams.
    p.client().reset(ids[0], ResetCode::CANCEL);
    p.settle();
    assert_eq!(came(&p), 120_000, "what came of it is still there");
    p.server().release(ids[0], ResetCode::CANCEL);
    p.ends[SERVER].unstall(ids[1]);
    p.settle();
    assert_eq!(came(&p), 240_000);
    for id in &ids[2..] {
        p.ends[SERVER].unstall(*id);
    }
    p.settle();
    for id in &ids[1..] {
        assert_eq!(p.ends[SERVER].app(*id).body, pattern(id.get(), 60_000));
        p.answer(*id, Bytes::new());
    }
    p.assert_clean();
}

/// A message that a reader waits for lands, however much of the other streams is unread.
#[test]
fn what_a_reader_waits_for_lands_beyond_the_total() {
    let mut p = with_total(150_000);
    let stalled: Vec<StreamId> = (0..4).map(|_| p.open("head", false)).collect();
    for id in &stalled {
        p.ends[SERVER].stalled.insert(id.get());
        p.send(CLIENT, *id, pattern(id.get(), 60_000));
    }
    p.settle();
    assert!(p.server().waits_for_readers());
    for _ in 0..3 {
        let id = upload(&mut p, 140_000);
        assert_eq!(p.ends[SERVER].app(id).body.len(), 140_000);
    }
    // The last stream is read before the third stream, which still waits for its turn or its
    // reader.
    p.ends[SERVER].unstall(stalled[3]);
    p.settle();
    let lens = |p: &Pair| stalled.iter().map(|id| p.ends[SERVER].app(*id).body.len()).collect();
    let came: Vec<usize> = lens(&p);
    assert_eq!(came, [60_000, 60_000, 0, 60_000]);
    p.ends[SERVER].unstall(stalled[2]);
    p.settle();
    assert!(!p.server().waits_for_readers());
    for id in &stalled {
        p.ends[SERVER].unstall(*id);
        p.answer(*id, Bytes::new());
    }
    p.assert_clean();
}

/// Streams begin with a small window. The window of a stream that is read grows, and the growth
/// counts towards the total of all streams.
#[test]
fn the_window_of_a_stream_that_is_read_grows_within_the_total() {
    const FLOOR: u32 = 4096;
    let total = 65_536;
    let config = Config {
        stream_window: FLOOR,
        max_stream_window: 50_000,
        unread_total: total,
        ..with_standing(0)
    };
    let mut p = Pair::new(config.clone(), config, 1 << 20);
    let ids: Vec<StreamId> = (0..4).map(|_| p.open("head", false)).collect();
    p.settle();
    for round in 0..200 {
        for id in &ids {
            p.client().send_data(*id, pattern(round, 900), false, false).unwrap();
        }
        p.settle();
    }
    assert_eq!(p.server().landing.unread.windows, total, "the first streams had most of it");
    p.server().held();
    // The streams are read no longer, so each may have its window unread.
    for id in &ids {
        p.ends[SERVER].stalled.insert(id.get());
        let before = p.ends[SERVER].app(*id).body.len();
        for round in 0..100 {
            p.client().send_data(*id, pattern(round, 900), false, false).unwrap();
        }
        p.settle();
        let unread = p.ends[SERVER].app(*id).body.len() - before;
        assert!(unread >= FLOOR as usize / 2 && unread <= 50_000, "{unread}");
    }
    let stalled = p.open("head", false);
    p.ends[SERVER].stalled.insert(stalled.get());
    for round in 0..100 {
        p.client().send_data(stalled, pattern(round, 900), false, false).unwrap();
    }
    p.settle();
    assert_eq!(p.ends[SERVER].app(stalled).body.len(), FLOOR as usize);
    for id in ids.iter().chain([&stalled]) {
        p.ends[SERVER].unstall(*id);
        p.settle();
        p.client().send_data(*id, Bytes::new(), true, false).unwrap();
        p.settle();
        p.answer(*id, Bytes::new());
    }
    p.settle();
    assert_eq!(p.server().landing.unread.windows, 0);
    p.assert_clean();
}

/// A complete response counts until it is read or released.
#[test]
fn unread_data_of_ended_streams_counts_towards_the_total() {
    let mut p = with_total(150_000);
    let ids: Vec<StreamId> = (0..8).map(|_| p.open("head", true)).collect();
    let came = |p: &Pair| ids.iter().map(|id| p.ends[CLIENT].app(*id).body.len()).sum::<usize>();
    p.settle();
    for id in &ids {
        p.ends[CLIENT].stalled.insert(id.get());
        p.answer(*id, pattern(id.get(), 60_000));
    }
    p.settle();
    assert_eq!(came(&p), 120_000);
    // One stream is read and another is released, which makes room for two more streams.
    let ended: Vec<StreamId> =
        ids.iter().copied().filter(|id| p.ends[CLIENT].app(*id).ended).collect();
    assert_eq!(ended.len(), 2);
    p.ends[CLIENT].unstall(ended[0]);
    p.client().release(ended[1], ResetCode::CANCEL);
    p.settle();
    assert_eq!(came(&p), 240_000);
    assert_eq!(p.client().held(), 120_000);
    for id in &ids {
        p.ends[CLIENT].unstall(*id);
    }
    p.settle();
    for id in &ids {
        assert_eq!(p.ends[CLIENT].app(*id).body, pattern(id.get(), 60_000));
    }
    p.assert_clean();
}

/// If the total leaves too little for the first request, shorter ones behind it are still granted.
#[test]
fn a_request_beyond_the_total_does_not_block_shorter_ones() {
    let mut p = with_total(150_000);
    let stalled: Vec<StreamId> = (0..3).map(|_| p.open("head", false)).collect();
    for id in &stalled {
        p.ends[SERVER].stalled.insert(id.get());
        p.send(CLIENT, *id, pattern(id.get(), 60_000));
    }
    p.settle();
    assert_eq!(p.ends[SERVER].app(stalled[2]).body.len(), 0, "it waits in front");
    for _ in 0..3 {
        upload(&mut p, 20_000);
    }
    for id in &stalled {
        p.ends[SERVER].unstall(*id);
    }
    p.settle();
    for id in stalled {
        assert_eq!(p.ends[SERVER].app(id).body, pattern(id.get(), 60_000));
        p.answer(id, Bytes::new());
    }
    p.assert_clean();
}

/// The longest body that the defaults allow to land in one piece, and a longer one.
#[test]
fn long_bodies_land_in_as_few_pieces_as_the_window_allows() {
    let mut p = Pair::new(Config::default(), Config::default(), 1 << 30);
    let one = upload(&mut p, 8 << 20);
    assert_eq!(p.ends[SERVER].app(one).landed, [(8 << 20, Flow::Bulk)]);
    let more = upload(&mut p, 20 << 20);
    let pieces = p.ends[SERVER].app(more).landed.len();
    assert!(pieces <= 4, "{pieces}");
    p.assert_clean();
}

/// A single message may exceed the window, but only if no other message is unread.
#[test]
fn a_single_unread_message_may_exceed_the_window() {
    let config = Config { bulk_window: 1 << 20, whole: 4 << 20, ..with_standing(0) };
    let mut p = Pair::new(config.clone(), config, 1 << 30);
    let id = p.open("head", false);
    p.ends[SERVER].stalled.insert(id.get());
    for n in 0..3 {
        p.client().send_data(id, pattern(n, 4 << 20), true, n == 2).unwrap();
    }
    p.settle();
    assert_eq!(p.ends[SERVER].app(id).landed, [(4 << 20, Flow::Bulk)]);
    p.ends[SERVER].unstall(id);
    p.settle();
    assert_eq!(p.ends[SERVER].app(id).landed, [(4 << 20, Flow::Bulk); 3]);
    p.answer(id, Bytes::new());
    p.assert_clean();
}

#[test]
fn a_small_call_overtakes_a_large_transfer() {
    let mut p = Pair::new(Config::default(), Config::default(), 64 << 20);
    let large = p.open("large", false);
    let body = pattern(1, 64 << 20);
    p.send(CLIENT, large, body.clone());
    let part = |p: &Pair, at: usize| p.ends[at].conn.stats().write_sent;
    p.until("the large one runs", |p| part(p, CLIENT) > 16 << 20);
    for _ in 0..3 {
        let before = part(&p, CLIENT);
        let sends = p.client().stats().messages_sent;
        let small = p.open("small", false);
        p.send(CLIENT, small, pattern(2, 64));
        p.until("the small request", |p| {
            p.ends[SERVER].streams.get(&small.get()).is_some_and(|app| app.ended)
        });
        p.answer(small, pattern(3, 64));
        p.until("the small response", |p| {
            p.ends[CLIENT].streams.get(&small.get()).is_some_and(|app| app.ended)
        });
        // The bound covers the data in flight when the small call began, and about as much again
        // during its round trip.
        let beside = part(&p, CLIENT) - before;
        assert!(beside <= 4 << 20, "{beside}");
        assert!(p.client().stats().messages_sent - sends <= 64);
        assert!(!p.ends[SERVER].app(large).ended);
    }
    p.settle();
    assert!(p.ends[SERVER].app(large).body == body);
    p.answer(large, Bytes::new());
    p.assert_clean();
}

/// The rkeys of the WRITEs in flight to the server.
fn keys(p: &Pair) -> Vec<u32> {
    let write = |wire: &Wire| match wire {
        Wire::Write(write) => Some(write.rkey),
        Wire::Send(_) => None,
    };
    p.to[SERVER].iter().filter_map(write).collect()
}

/// Starts three transfers that have their grants and have transmitted nothing.
fn three_transfers(pinned: [bool; 3]) -> (Pair, Vec<StreamId>) {
    let config = Config { write_chunk: 16 << 10, ..with_standing(0) };
    let mut p = Pair::new(config.clone(), config, 1 << 20);
    p.ends[CLIENT].limit(8, 30, 65_536, 0);
    let ids: Vec<StreamId> = (0..3).map(|_| p.open("head", false)).collect();
    for (id, pinned) in ids.iter().zip(pinned) {
        p.client().send_data(*id, pattern(id.get(), 160 << 10), pinned, true).unwrap();
    }
    p.settle();
    assert_eq!(p.client().pending().peer_grants, 3);
    p.ends[CLIENT].limit(8, 30, 65_536, 16 << 20);
    p.hold[SERVER] = true;
    (p, ids)
}

fn finish(mut p: Pair, ids: Vec<StreamId>) {
    p.hold[SERVER] = false;
    p.settle();
    for id in ids {
        p.answer(id, Bytes::new());
    }
    p.assert_clean();
}

/// The receiver works on the first message while the second is written.
#[test]
fn transfers_of_one_length_go_one_after_the_other() {
    for pinned in [true, false] {
        let (mut p, ids) = three_transfers([pinned; 3]);
        p.settle();
        let mut keys = keys(&p);
        assert_eq!(keys.len(), 30);
        keys.dedup();
        assert_eq!(keys, [1, 2, 3]);
        finish(p, ids);
    }
}

#[test]
fn a_short_transfer_overtakes_long_ones() {
    let (mut p, mut ids) = three_transfers([true; 3]);
    p.ends[CLIENT].limit(8, 30, 65_536, 0);
    p.hold[SERVER] = false;
    ids.push(p.open("short", false));
    p.client().send_data(ids[3], pattern(9, 20 << 10), true, true).unwrap();
    p.settle();
    p.hold[SERVER] = true;
    p.ends[CLIENT].limit(8, 30, 65_536, 16 << 20);
    p.settle();
    let mut keys = keys(&p);
    keys.dedup();
    assert_eq!(keys, [4, 1, 2, 3]);
    finish(p, ids);
}

#[test]
fn copied_and_pinned_sources_take_turns() {
    let (mut p, ids) = three_transfers([true, false, true]);
    p.settle();
    for pair in keys(&p)[..20].chunks(2) {
        assert_eq!(pair.iter().filter(|key| **key == 2).count(), 1);
    }
    finish(p, ids);
}

#[test]
fn messages_and_writes_take_turns() {
    let (mut p, mut ids) = three_transfers([true; 3]);
    ids.push(p.open("small ones", false));
    for n in 0..6 {
        p.client().send_data(ids[3], pattern(n, 1000), false, n == 5).unwrap();
    }
    p.settle();
    let sends: Vec<usize> =
        (0..p.to[SERVER].len()).filter(|at| matches!(p.to[SERVER][*at], Wire::Send(_))).collect();
    assert!(sends.len() >= 6);
    for (n, at) in sends[..6].iter().enumerate() {
        assert!(*at <= 2 * n + 1, "{sends:?}");
    }
    finish(p, ids);
}

/// Streams that want more memory than there is take turns.
#[test]
fn memory_is_granted_in_turns() {
    let mut p = Pair::new(with_standing(0), with_standing(0), 64 << 10);
    p.ends[SERVER].copy_out = true;
    let ids: Vec<StreamId> = (0..3).map(|_| p.open("head", false)).collect();
    for id in &ids {
        p.send(CLIENT, *id, pattern(id.get(), 1_000_000));
    }
    let body = |p: &Pair, id: &StreamId| {
        p.ends[SERVER].streams.get(&id.get()).map_or(0, |app| app.body.len())
    };
    p.until("half of the first", |p| body(p, &ids[0]) > 500_000);
    for id in &ids {
        assert!(body(&p, id) > 300_000, "{id}: {}", body(&p, id));
    }
    finish(p, ids);
}

/// After a DONE for less than the grant, the peer still gets the rest of what it requested.
#[test]
fn short_done_frees_the_window() {
    let config = Config { bulk_window: 65_536, ..with_standing(0) };
    let mut p = Pair::new(config.clone(), config, 1 << 20);
    p.settle();
    p.ends[SERVER].memory.lenient = true;
    p.ends[SERVER].stalled.insert(1);
    p.inject(CLIENT, &[head(1), Frame::Request { stream: 1, len: 100_000, begin: 0, field: None }]);
    p.drive(SERVER);
    assert_eq!((p.count(SERVER, "GRANT"), p.ends[SERVER].memory.used), (1, 65_536));
    p.inject(CLIENT, &[Frame::Done { stream: 1, end: false, id: 0, len: 1, begin: 0 }]);
    p.drive(SERVER);
    assert_eq!((p.count(SERVER, "GRANT"), p.server().pending().grants), (2, 1));
}

/// A source that must be copied waits for staging; a pinned source does not wait for it.
#[test]
fn pinned_sources_do_not_wait_for_staging() {
    let mut p = Pair::new(with_standing(0), with_standing(0), 8 << 20);
    p.ends[CLIENT].limit(16, 1, 16 << 10, 16 << 20);
    let (copied, pinned) = (p.open("copied", false), p.open("pinned", false));
    p.client().send_data(copied, pattern(1, 1 << 20), false, true).unwrap();
    p.client().send_data(pinned, pattern(2, 1 << 20), true, true).unwrap();
    p.until("the grants", |p| p.ends[CLIENT].conn.pending().peer_grants == 2);
    p.hold[SERVER] = true;
    p.settle();
    let bytes = |pinned: bool| -> usize {
        let lens = p.to[SERVER].iter().map(|wire| match wire {
            Wire::Write(write) if write.pinned == pinned => write.src.len(),
            _ => 0,
        });
        lens.sum()
    };
    assert_eq!((bytes(false), bytes(true)), (16 << 10, 1 << 20));
    p.hold[SERVER] = false;
    p.settle();
    assert_eq!(p.ends[SERVER].app(copied).body, pattern(1, 1 << 20));
    for id in [copied, pinned] {
        p.answer(id, Bytes::new());
    }
    p.assert_clean();
}

/// The driver provides memory that is too short, longer than wanted, or no longer wanted.
#[test]
fn provided_memory_is_checked() {
    let mut p = Pair::new(with_standing(0), with_standing(0), 0);
    let id = p.open("head", false);
    p.send(CLIENT, id, pattern(1, 50_000));
    p.settle();
    let want = p.server().poll_landing(|_| true).unwrap();
    assert_eq!(want, LandingWant { key: WantKey::Stream(id), want: 50_000, min: 12_288 });
    let memory = |key, len| GrantMemory { key, addr: 0x1000, rkey: 1, len };
    p.server().provide_landing(want.key, memory(7, 12_287));
    assert_eq!(p.server().poll_event(), Some(Event::Returned { memory: 7 }));
    p.server().provide_landing(WantKey::Standing, memory(8, 50_000));
    assert_eq!(p.server().poll_event(), Some(Event::Returned { memory: 8 }));
    p.server().provide_landing(want.key, memory(9, 65_536));
    assert_eq!((p.server().poll_event(), p.server().poll_landing(|_| true)), (None, None));
    p.server().provide_landing(want.key, memory(10, 65_536));
    assert_eq!(p.server().poll_event(), Some(Event::Returned { memory: 10 }));
    p.client().reset(id, ResetCode::CANCEL);
    p.drive(SERVER);
    while p.deliver(CLIENT) {}
    p.drive(CLIENT);
    while p.deliver(SERVER) {}
    // The grant was in flight when the stream was reset.
    assert_eq!(p.server().poll_event(), Some(Event::Reset { stream: id, code: ResetCode::CANCEL }));
    assert_eq!(p.server().poll_event(), Some(Event::Returned { memory: 9 }));
}
