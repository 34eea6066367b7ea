//! The kinds of calls, header blocks, limits, windows and credits.

use std::time::Duration;

use super::super::*;
use super::pair::*;
use crate::config::Config;
use crate::error::CloseCode;
use crate::frame::MAX_HEADER_BLOCK;
use crate::ids::{ResetCode, StreamId};

#[test]
fn a_small_unary_call_is_one_send_each_way() {
    let mut p = Pair::small();
    p.settle();
    let before = (p.client().stats().messages_sent, p.server().stats().messages_sent);
    let id = p.open("head", false);
    p.send(CLIENT, id, pattern(1, 100));
    p.until("the request", |p| p.ends[SERVER].streams.get(&1).is_some_and(|app| app.ended));
    p.answer(id, pattern(2, 200));
    p.settle();
    let after = (p.client().stats().messages_sent, p.server().stats().messages_sent);
    assert_eq!((after.0 - before.0, after.1 - before.1), (1, 1));
    assert_eq!(p.ends[SERVER].app(id).body, pattern(1, 100));
    let answer = p.ends[CLIENT].app(id);
    assert_eq!(
        (&answer.blocks[..], &answer.body[..]),
        (&[block("head"), block("trailers")][..], &pattern(2, 200)[..])
    );
    assert!(answer.ended && answer.reset.is_none());
    p.assert_clean();
}

#[test]
fn the_client_sends_first() {
    let mut p = Pair::small();
    p.server().go_away(crate::CloseCode::Ok, "");
    assert!(!p.drive(SERVER));
    assert!(p.drive(CLIENT));
    p.deliver(SERVER);
    assert!(p.drive(SERVER));
    p.assert_clean();
}

#[test]
fn both_halves_stream() {
    let mut p = Pair::small();
    let id = p.open("head", false);
    let (mut up, mut down) = (Vec::new(), Vec::new());
    for round in 0..50 {
        let len = [1, 900, 1007, 1008, 1009, 5000, 70_000][round % 7];
        let (a, b) = (pattern(round as u32, len), pattern(!(round as u32), len + round));
        up.extend_from_slice(&a);
        down.extend_from_slice(&b);
        p.client().send_data(id, a, round % 2 == 0, false).unwrap();
        p.settle();
        if round == 0 {
            p.server().send_headers(id, block("head"), false).unwrap();
        }
        p.server().send_data(id, b, round % 3 == 0, false).unwrap();
        if round % 5 == 0 {
            p.settle();
        }
    }
    p.client().finish(id).unwrap();
    p.settle();
    assert!(p.ends[SERVER].app(id).ended && !p.ends[CLIENT].app(id).ended);
    // The client's half has ended, and the server continues.
    let more = pattern(99, 20_000);
    down.extend_from_slice(&more);
    p.server().send_data(id, more, false, false).unwrap();
    p.settle();
    assert_eq!(p.client().pending().streams, 1);
    p.server().send_headers(id, block("trailers"), true).unwrap();
    p.settle();
    assert_eq!(p.ends[SERVER].app(id).body, up);
    assert_eq!(p.ends[CLIENT].app(id).body, down);
    p.assert_clean();
}

#[test]
fn trailers_only() {
    let mut p = Pair::small();
    let id = p.open("head", true);
    p.settle();
    assert_eq!(p.client().send_data(id, pattern(1, 1), false, false), Err(SendError::Closed));
    p.server().send_headers(id, block("status"), true).unwrap();
    p.settle();
    let app = p.ends[CLIENT].app(id);
    assert!(app.ended && app.body.is_empty());
    assert_eq!(app.blocks, [block("status")]);
    p.assert_clean();
}

/// The server ends its response while the client still sends. The client receives the whole
/// response, then a RESET for the rest of its request.
#[test]
fn an_early_response_stops_the_client() {
    for body in [0, 10, 500_000] {
        let mut p = Pair::small();
        let id = p.open("head", false);
        for n in 0..5 {
            p.client().send_data(id, pattern(n, 300_000), true, false).unwrap();
        }
        p.until("some of the body", |p| {
            p.ends[SERVER].streams.get(&1).is_some_and(|app| app.body.len() > 300_000)
        });
        p.answer(id, pattern(8, body));
        p.settle();
        let app = p.ends[CLIENT].app(id);
        assert!(app.ended);
        assert_eq!(app.body, pattern(8, body));
        assert_eq!(app.reset, Some(ResetCode::NO_ERROR));
        assert!(!p.client().is_open_for_sending(id));
        assert_eq!(p.ends[SERVER].app(id).reset, None);
        p.assert_clean();
    }
}

#[test]
fn a_released_response_is_still_sent() {
    let mut p = Pair::small();
    let id = p.open("head", false);
    p.client().send_data(id, pattern(1, 50_000), true, false).unwrap();
    p.settle();
    p.answer(id, pattern(2, 3_000_000));
    p.server().release(id, ResetCode::CANCEL);
    p.settle();
    assert_eq!(p.ends[CLIENT].app(id).body, pattern(2, 3_000_000));
    assert!(p.ends[CLIENT].app(id).ended);
    // An unfinished response is reset.
    let id = p.open("head", true);
    p.settle();
    p.server().send_headers(id, block("head"), false).unwrap();
    p.server().release(id, ResetCode::INTERNAL);
    p.settle();
    assert_eq!(p.ends[CLIENT].app(id).reset, Some(ResetCode::INTERNAL));
    // A client that releases a call cancels it, even if its request is complete.
    let id = p.open("head", true);
    p.settle();
    p.client().release(id, ResetCode::CANCEL);
    p.settle();
    assert_eq!(p.ends[SERVER].app(id).reset, Some(ResetCode::CANCEL));
    p.assert_clean();
}

#[test]
fn header_blocks_of_every_size() {
    for slot_size in [512, 1024, 8192] {
        let config = Config { slot_size, ..small() };
        let mut p = Pair::new(config.clone(), config, 1 << 20);
        let slot = slot_size as usize;
        for len in [0, 1, slot - 17, slot - 16, slot - 15, 2 * slot, 40_000, MAX_HEADER_BLOCK] {
            let (head, trailers) = (pattern(1, len), pattern(2, len));
            let id = p.client().open(head.clone(), true).unwrap();
            p.settle();
            assert_eq!(p.ends[SERVER].app(id).blocks, std::slice::from_ref(&head));
            p.server().send_headers(id, head.clone(), false).unwrap();
            p.server().send_headers(id, trailers.clone(), true).unwrap();
            p.settle();
            assert_eq!(p.ends[CLIENT].app(id).blocks, [head, trailers]);
        }
        let long = pattern(3, MAX_HEADER_BLOCK + 1);
        let refused =
            SendError::HeadersTooLong { len: MAX_HEADER_BLOCK + 1, limit: MAX_HEADER_BLOCK as u32 };
        assert_eq!(p.client().open(long.clone(), true), Err(refused));
        let id = p.open("head", true);
        p.settle();
        assert_eq!(p.server().send_headers(id, long, true), Err(refused));
        p.server().send_headers(id, block("still open"), true).unwrap();
        p.assert_clean();
    }
}

#[test]
fn a_long_header_block_does_not_block_other_streams() {
    let mut p = Pair::small();
    let first = p.open("first", false);
    p.settle();
    let long = p.client().open(pattern(1, MAX_HEADER_BLOCK), true).unwrap();
    let late = p.open("late", true);
    p.send(CLIENT, first, pattern(2, 64));
    p.until("the short ones", |p| {
        p.ends[SERVER].app(first).ended && p.ends[SERVER].streams.contains_key(&late.get())
    });
    assert!(!p.ends[SERVER].streams.contains_key(&long.get()));
    p.settle();
    assert_eq!(p.ends[SERVER].app(long).blocks, [pattern(1, MAX_HEADER_BLOCK)]);
    for id in [first, long, late] {
        p.answer(id, pattern(3, 10));
    }
    p.assert_clean();
}

#[test]
fn bodies_around_the_eager_limit() {
    // The slots of the two sides differ: the peer's slot size counts.
    for (mine, theirs) in [(1024, 1024), (512, 4096), (4096, 512)] {
        let (client, server) =
            (Config { slot_size: mine, ..small() }, Config { slot_size: theirs, ..small() });
        let mut p = Pair::new(client, server, 1 << 20);
        let limit = p.client().eager_limit();
        assert_eq!(limit, theirs as usize - 16);
        for (len, eager) in [(limit - 1, true), (limit, true), (limit + 1, false)] {
            let before = p.client().stats();
            let id = p.open("head", false);
            p.send(CLIENT, id, pattern(1, len));
            p.settle();
            assert_eq!(p.ends[SERVER].app(id).body, pattern(1, len));
            p.answer(id, pattern(2, len));
            p.settle();
            assert_eq!(p.ends[CLIENT].app(id).body, pattern(2, len));
            let after = p.client().stats();
            assert_eq!(after.eager_sent - before.eager_sent, if eager { len as u64 } else { 0 });
            assert_eq!(after.write_sent - before.write_sent, if eager { 0 } else { len as u64 });
        }
        p.assert_clean();
    }
}

/// Creates a server that allows three streams, and a client that has opened five streams and has
/// sent a whole body of `len` bytes on each of the first three.
fn crowded(len: usize) -> (Pair, Vec<StreamId>) {
    let mut p = Pair::new(small(), Config { max_streams: 3, ..small() }, 1 << 20);
    let ids: Vec<StreamId> = (0..5).map(|_| p.open("head", false)).collect();
    ids[..3].iter().for_each(|id| p.send(CLIENT, *id, pattern(id.get(), len)));
    p.settle();
    (p, ids)
}

fn waiting(p: &mut Pair, ids: &[StreamId]) -> Vec<bool> {
    ids.iter().map(|id| p.client().is_waiting(*id)).collect()
}

#[test]
fn streams_beyond_the_peers_limit_wait_and_begin_in_their_order() {
    for len in [10, 50_000] {
        let (mut p, ids) = crowded(len);
        ids[3..].iter().for_each(|id| p.send(CLIENT, *id, pattern(id.get(), len)));
        p.settle();
        assert_eq!(waiting(&mut p, &ids), [false, false, false, true, true]);
        assert_eq!(p.ends[SERVER].streams.len(), 3);
        assert_eq!(p.count(CLIENT, "HEADERS"), 3);
        assert_eq!(p.client().pending().streams, 5);
        // The end of a stream at the server is not enough: the client must know of it.
        p.hold[CLIENT] = true;
        p.client().reset(ids[0], ResetCode::CANCEL);
        p.settle();
        assert!(p.client().is_waiting(ids[3]), "the server has not answered the RESET");
        p.hold[CLIENT] = false;
        p.settle();
        assert_eq!(waiting(&mut p, &ids[3..]), [false, true]);
        // A new stream does not overtake one that waits.
        let last = p.open("head", true);
        for (id, next) in [(ids[1], ids[4]), (ids[2], last)] {
            assert!(p.client().is_waiting(next));
            p.answer(id, pattern(1, 10));
            p.settle();
            assert!(!p.client().is_waiting(next));
        }
        for id in [ids[3], ids[4]] {
            assert_eq!(p.ends[SERVER].app(id).body, pattern(id.get(), len));
        }
        for id in [ids[3], ids[4], last] {
            p.answer(id, pattern(1, 10));
        }
        p.assert_clean();
    }
}

#[test]
fn nothing_is_sent_or_reserved_for_a_stream_that_waits() {
    let (mut p, ids) = crowded(50_000);
    let before = (p.client().stats(), p.count(CLIENT, "REQUEST"), p.client().output.queued());
    p.send(CLIENT, ids[3], pattern(1, 50_000));
    p.send(CLIENT, ids[4], pattern(1, 10));
    assert_eq!(p.client().output.queued(), before.2);
    assert!(!p.client().output.has_output());
    assert!(!p.client().is_transmitted(ids[3]));
    p.settle();
    let after = (p.client().stats(), p.count(CLIENT, "REQUEST"), p.client().output.queued());
    assert_eq!(after.0.messages_sent, before.0.messages_sent);
    assert_eq!((after.1, after.2), (before.1, before.2));
    // The peer never hears of a stream that is reset while it waits.
    for id in &ids[3..] {
        p.client().reset(*id, ResetCode::CANCEL);
    }
    p.settle();
    assert_eq!((p.count(CLIENT, "RESET"), p.ends[SERVER].streams.len()), (0, 3));
    let next = p.open("head", true);
    for id in &ids[..3] {
        p.answer(*id, pattern(1, 10));
    }
    p.settle();
    assert!(p.ends[SERVER].streams.contains_key(&next.get()));
    p.answer(next, pattern(1, 10));
    p.assert_clean();
}

#[test]
fn streams_that_wait_are_refused_when_the_server_goes_away() {
    let (mut p, ids) = crowded(50_000);
    p.server().go_away(CloseCode::Ok, "enough");
    p.settle();
    assert_eq!(p.ends[CLIENT].refused, ids[3..]);
    ids[..3].iter().for_each(|id| p.answer(*id, pattern(1, 10)));
    p.settle();
    assert_eq!(p.ends[SERVER].streams.len(), 3);
    assert!(p.server().is_drained());
    p.assert_clean();
}

#[test]
fn a_client_that_goes_away_lets_waiting_streams_begin_or_refuses_them() {
    for refuses in [false, true] {
        let (mut p, ids) = crowded(50_000);
        ids[3..].iter().for_each(|id| p.send(CLIENT, *id, pattern(id.get(), 50_000)));
        p.client().go_away(CloseCode::Ok, "enough");
        if refuses {
            p.client().refuse_waiting();
        }
        p.settle();
        let expected = if refuses { &ids[3..] } else { &[] };
        assert_eq!(p.ends[CLIENT].refused, expected);
        assert!(!p.client().is_drained());
        ids[..3].iter().for_each(|id| p.answer(*id, pattern(1, 10)));
        p.settle();
        if !refuses {
            ids[3..].iter().for_each(|id| p.answer(*id, pattern(1, 10)));
            p.settle();
            assert_eq!(p.ends[SERVER].app(ids[4]).body, pattern(ids[4].get(), 50_000));
        }
        assert!(p.client().is_drained());
        p.assert_clean();
    }
}

/// Streams that waited and were cancelled, in any order, leave nothing behind.
#[test]
fn streams_that_were_cancelled_while_they_waited_hold_no_memory() {
    let mut p = Pair::new(small(), Config { max_streams: 1, ..small() }, 1 << 20);
    let first = p.open("head", true);
    let mut ids: Vec<StreamId> = (0..10_000).map(|_| p.open("head", true)).collect();
    let middle = ids.split_off(5_000);
    for id in ids.into_iter().rev().chain(middle) {
        p.client().reset(id, ResetCode::CANCEL);
    }
    p.settle();
    p.answer(first, pattern(1, 10));
    p.settle();
    assert_eq!(p.ends[SERVER].streams.len(), 1);
    assert!(p.client().streams.capacity() > 10_000);
    p.advance(Duration::from_secs(60));
    p.settle();
    assert!(p.client().streams.capacity() < 100);
    p.assert_clean();
}

/// Opens streams whether or not the server's limit has room, in varying orders of events.
#[test]
fn the_stream_limit_is_never_exceeded() {
    let limits = Config { max_streams: 2, ..small() };
    let mut p = Pair::new(small(), limits, 1 << 20);
    let mut opened = 0;
    for round in 0..400 {
        if round % 3 == 0 {
            let id = p.open("head", opened % 2 == 0);
            opened += 1;
            if opened % 3 == 0 {
                p.client().reset(id, ResetCode::CANCEL);
            }
        }
        for _ in 0..round % 5 {
            p.step();
        }
        let waiting: Vec<u32> = p.ends[SERVER].streams.keys().copied().collect();
        for id in waiting {
            let id = StreamId(id);
            if p.server().is_open_for_sending(id) {
                if id.get().is_multiple_of(4) {
                    p.server().reset(id, ResetCode::INTERNAL);
                } else {
                    p.answer(id, pattern(1, 10));
                }
            }
        }
    }
    assert!(opened > 100, "{opened}");
    p.settle();
    let left: Vec<u32> = p.ends[SERVER].streams.keys().copied().collect();
    for id in left.into_iter().map(StreamId) {
        if p.server().is_open_for_sending(id) {
            p.answer(id, pattern(1, 10));
        }
    }
    p.assert_clean();
}

#[test]
fn a_stalled_reader_blocks_only_its_own_stream() {
    let config = Config { stream_window: 8192, bulk_window: 65_536, ..small() };
    let mut p = Pair::new(config.clone(), config, 1 << 20);
    let stalled = p.open("stalled", false);
    p.ends[SERVER].stalled.insert(stalled.get());
    let bulky = p.open("bulky", false);
    p.ends[SERVER].stalled.insert(bulky.get());
    // Send more than the windows hold, in small pieces and in large ones.
    for n in 0..40 {
        p.client().send_data(stalled, pattern(n, 1000), false, false).unwrap();
    }
    p.client().send_data(bulky, pattern(1, 1_000_000), true, false).unwrap();
    p.settle();
    assert_eq!(p.ends[SERVER].app(stalled).body.len(), 8192);
    let held = p.ends[SERVER].app(bulky).body.len();
    assert!((32_768..=65_536).contains(&held), "{held}");
    for n in 0..50 {
        let id = p.open("brisk", false);
        p.send(CLIENT, id, pattern(n, 10_000));
        p.settle();
        assert!(p.ends[SERVER].app(id).ended);
        p.answer(id, pattern(n, 10_000));
        p.settle();
        assert_eq!(p.ends[CLIENT].app(id).body, pattern(n, 10_000));
    }
    assert_eq!(p.ends[SERVER].app(stalled).body.len(), 8192);
    p.ends[SERVER].unstall(stalled);
    p.ends[SERVER].unstall(bulky);
    p.settle();
    assert_eq!(p.ends[SERVER].app(stalled).body.len(), 40_000);
    assert_eq!(p.ends[SERVER].app(bulky).body, pattern(1, 1_000_000));
    for id in [stalled, bulky] {
        p.client().finish(id).unwrap();
        p.settle();
        p.answer(id, pattern(1, 10));
    }
    p.assert_clean();
}

/// A driver that reports more bytes as read than were received does no harm.
#[test]
fn consuming_more_than_received_does_not_grow_the_window() {
    let mut p = Pair::small();
    let id = p.open("head", false);
    p.client().send_data(id, pattern(1, 500), false, false).unwrap();
    p.settle();
    for _ in 0..10 {
        p.server().consume(id, u32::MAX, Flow::Window);
        p.server().consume(id, u32::MAX, Flow::Bulk);
    }
    p.settle();
    assert!(p.count(SERVER, "WINDOW") <= 1);
    p.client().finish(id).unwrap();
    p.settle();
    p.answer(id, pattern(1, 1));
    p.assert_clean();
}

#[test]
fn a_full_queue_reports_writable_once() {
    let mut p = Pair::small();
    let id = p.open("head", false);
    p.ends[SERVER].stalled.insert(id.get());
    let mut queued = 0;
    while p.client().has_room(id) {
        p.client().send_data(id, pattern(queued, 100_000), true, false).unwrap();
        queued += 1;
    }
    assert_eq!(queued, 11);
    assert_eq!(p.ends[CLIENT].streams.get(&1).map(|app| app.writable), None);
    p.ends[SERVER].unstall(id);
    p.settle();
    // One event follows the transmission of the head, and one reports the room in the queue.
    assert_eq!(p.ends[CLIENT].app(id).writable, 2);
    assert!(p.client().has_room(id));
    p.client().finish(id).unwrap();
    p.settle();
    assert_eq!(p.ends[SERVER].app(id).body.len(), 1_100_000);
    p.answer(id, pattern(1, 1));
    p.assert_clean();
}

/// All streams share a limit on queued output. Once the limit is reached, a stream has room only
/// while it has less than its floor queued, whatever the other streams have queued.
#[test]
fn the_queues_of_all_streams_are_limited() {
    const STREAMS: usize = 100;
    const PIECE: usize = 50_000;
    let config =
        Config { bulk_window: 65_536, unread_total: 1 << 20, stream_window: 4096, ..small() };
    let mut p = Pair::new(config.clone(), config, 64 << 20);
    let ids: Vec<StreamId> = (0..STREAMS).map(|_| p.open("head", false)).collect();
    p.ends[SERVER].stalled.extend(ids.iter().map(|id| id.get()));
    for id in &ids {
        while p.client().has_room(*id) {
            p.client().send_data(*id, pattern(id.get(), PIECE), true, false).unwrap();
        }
    }
    let queued = |p: &mut Pair| p.client().output.queued();
    let all = queued(&mut p);
    assert!((16 << 20..(16 << 20) + STREAMS * 2 * PIECE).contains(&all), "{all}");
    // The peer takes as many bytes of all streams as may be unread.
    p.settle();
    assert!(queued(&mut p) >= all - (1 << 20));
    // A stream whose queued output has been read has room, although the other streams' queues are
    // as full as before. A stream that drops its output lowers the total.
    let (first, last, dropped) = (ids[0], ids[STREAMS - 1], ids[1]);
    for id in [first, last] {
        p.ends[SERVER].unstall(id);
        p.settle();
        assert!(p.client().has_room(id));
    }
    let before = queued(&mut p);
    p.client().reset(dropped, ResetCode::CANCEL);
    assert!(queued(&mut p) < before);
    for id in ids {
        p.ends[SERVER].unstall(id);
        if id != dropped {
            p.client().finish(id).unwrap();
            p.settle();
            p.answer(id, pattern(1, 1));
        }
    }
    p.assert_clean();
}

/// A stream with less than its floor may queue more at any time. If the driver was told that the
/// stream has no room, an event reports the room.
#[test]
fn a_stream_beyond_its_floor_hears_of_room() {
    let mut p = Pair::small();
    let (filling, waiting) = (p.open("head", false), p.open("head", false));
    p.ends[SERVER].stalled.extend([filling.get(), waiting.get()]);
    p.settle();
    p.client().send_data(waiting, pattern(1, 500_000), true, false).unwrap();
    assert!(p.client().has_room(waiting));
    p.client().send_data(filling, pattern(2, 16 << 20), true, false).unwrap();
    assert!(!p.client().has_room(waiting));
    let told = p.ends[CLIENT].app(waiting).writable;
    p.ends[SERVER].unstall(waiting);
    p.settle();
    assert_eq!(p.ends[CLIENT].app(waiting).writable, told + 1);
    assert!(p.client().has_room(waiting));
    for id in [filling, waiting] {
        p.ends[SERVER].unstall(id);
        p.client().finish(id).unwrap();
        p.settle();
        p.answer(id, pattern(1, 1));
    }
    p.assert_clean();
}

/// Both sides send at the same time with the minimum of credits, until neither may send.
#[test]
fn exhausted_credits_on_both_sides_are_returned() {
    for (mine, theirs) in [(4, 4), (4, 5), (5, 4), (4, 16), (7, 4)] {
        let config =
            |recv_slots| Config { recv_slots, max_recvs: recv_slots, slot_size: 512, ..small() };
        let mut p = Pair::new(config(mine), config(theirs), 1 << 20);
        p.ends[CLIENT].limit(64, 4, 65_536, 1 << 20);
        p.ends[SERVER].limit(64, 4, 65_536, 1 << 20);
        let ids: Vec<StreamId> = (0..20).map(|_| p.open("head", false)).collect();
        p.settle();
        for round in 0..10 {
            p.hold = [true, true];
            for id in &ids {
                for end in [CLIENT, SERVER] {
                    if round == 0 && end == SERVER {
                        p.server().send_headers(*id, block("head"), false).unwrap();
                    }
                    p.ends[end].conn.send_data(*id, pattern(round, 400), false, false).unwrap();
                }
            }
            // Each side sends all that it may while nothing is delivered.
            p.settle();
            for end in [CLIENT, SERVER] {
                assert!(p.ends[end].conn.output.has_output());
                assert!(p.ends[end].conn.stats().credit_waits > 0);
            }
            p.hold = [false, false];
            p.settle();
        }
        for id in ids {
            assert_eq!(p.ends[CLIENT].app(id).body.len(), 4000);
            assert_eq!(p.ends[SERVER].app(id).body.len(), 4000);
            p.client().finish(id).unwrap();
            p.server().finish(id).unwrap();
        }
        p.assert_clean();
    }
}

#[test]
fn idle_connections_send_no_messages() {
    let mut p = Pair::small();
    for n in 0..100 {
        let id = p.open("head", true);
        p.settle();
        p.answer(id, pattern(n, 10));
        p.settle();
    }
    let sent = |p: &Pair| p.ends.iter().map(|end| end.conn.stats().messages_sent).sum::<u64>();
    // A call is one message each way, and returned credits travel in these messages.
    let before = sent(&p);
    assert!(before <= 202, "{before}");
    p.settle();
    assert_eq!(sent(&p), before);
    p.assert_clean();
}

#[test]
fn a_thousand_streams() {
    let mut p = Pair::new(small(), small(), 256 << 10);
    p.ends[CLIENT].copy_out = true;
    p.ends[SERVER].copy_out = true;
    let ids: Vec<StreamId> = (0..1000).map(|n| p.open(&format!("call {n}"), false)).collect();
    for (n, id) in ids.iter().enumerate() {
        p.send(CLIENT, *id, pattern(n as u32, [0, 10, 2000, 20_000][n % 4]));
    }
    p.settle();
    for (n, id) in ids.iter().enumerate() {
        let app = p.ends[SERVER].app(*id);
        assert_eq!(app.blocks, [block(&format!("call {n}"))]);
        assert_eq!(app.body, pattern(n as u32, [0, 10, 2000, 20_000][n % 4]));
        p.answer(*id, pattern(!(n as u32), [5000, 0, 30_000, 10][n % 4]));
    }
    p.settle();
    for (n, id) in ids.iter().enumerate() {
        let app = p.ends[CLIENT].app(*id);
        assert!(app.ended);
        assert_eq!(app.body, pattern(!(n as u32), [5000, 0, 30_000, 10][n % 4]));
    }
    p.assert_clean();
}

/// Ids increase on the wire, even if a message has no more room when a stream begins.
#[test]
fn streams_begin_in_the_order_of_their_ids() {
    let mut p = Pair::small();
    let busy = p.open("busy", false);
    for n in 0..30 {
        p.client().send_data(busy, pattern(n, 1000), false, false).unwrap();
    }
    let mut ids: Vec<StreamId> =
        (0..50).map(|n| p.client().open(pattern(n, 300), true).unwrap()).collect();
    for id in ids.extract_if(.., |id| id.get() % 7 == 0) {
        p.client().reset(id, ResetCode::CANCEL);
    }
    p.settle();
    for id in &ids {
        assert!(p.ends[SERVER].app(*id).ended);
        p.answer(*id, pattern(1, 1));
    }
    p.client().finish(busy).unwrap();
    p.settle();
    p.answer(busy, pattern(1, 1));
    p.assert_clean();
}

#[test]
fn the_same_inputs_give_the_same_outputs() {
    let run = || {
        let mut p = Pair::new(small(), small(), 128 << 10);
        for n in 0..60u32 {
            let id = p.open("head", false);
            p.send(CLIENT, id, pattern(n, 1 << (n % 18)));
            for _ in 0..n % 9 {
                p.step();
            }
            if n % 5 == 0 {
                p.client().reset(id, ResetCode::CANCEL);
            }
        }
        p.settle();
        (p.digest, p.steps, p.client().stats(), p.server().stats())
    };
    assert_eq!(run(), run());
}
