//! Bytes that are lent instead of sent.

use super::super::leases::MAX_LEASES;
use super::super::*;
use super::pair::*;
use crate::config::Config;
use crate::error::Breach;
use crate::frame::LENT_MESSAGE;
use crate::ids::{ResetCode, StreamId};
use crate::payload::{LentBody, LentPlace, Payload};

const FIELD: usize = 300_000;

/// A message with a field of `len` bytes that may be lent, between two short segments.
fn message(seed: u32, len: usize) -> (Payload, Vec<u8>) {
    let (head, tail) = (pattern(!seed, 12), pattern(seed + 7, 9));
    let field = pattern_at(0, seed, len);
    let mut payload = Payload::new();
    payload.push(head.clone(), false);
    payload.push_aligned(field.clone(), true);
    payload.last_is_lendable();
    payload.push(tail.clone(), false);
    (payload, [&head[..], &field[..], &tail[..]].concat())
}

/// A pair whose client lends up to `limit` bytes.
fn lending(limit: usize) -> Pair {
    let mut p = Pair::small();
    p.ends[CLIENT].loans.limit = limit;
    p
}

fn send(p: &mut Pair, seed: u32, end: bool) -> (StreamId, Vec<u8>) {
    let id = p.open("head", false);
    let (payload, bytes) = message(seed, FIELD);
    p.client().send_payload(id, payload, end).unwrap();
    (id, bytes)
}

fn flows(p: &Pair, id: StreamId) -> Vec<Flow> {
    p.ends[SERVER].app(id).landed.iter().map(|(_, flow)| *flow).collect()
}

#[test]
fn a_field_is_lent_and_nothing_else_is_needed() {
    let mut p = lending(1 << 20);
    let (id, bytes) = send(&mut p, 1, true);
    assert!(p.client().waits_to_lend());
    p.settle();
    assert!(!p.client().waits_to_lend());
    let app = p.ends[SERVER].app(id);
    assert!(app.ended && app.body == bytes);
    assert_eq!(app.landed, [(bytes.len() as u32, Flow::Lent)]);
    let frames = ["LENT", "REQUEST", "DONE"].map(|frame| p.count(CLIENT, frame));
    assert_eq!((frames, p.count(SERVER, "RETURN"), p.count(SERVER, "GRANT")), ([1, 0, 0], 1, 0));
    assert_eq!(p.ends[SERVER].memory.peak, 0, "no landing memory");
    let stats = [p.client().stats(), p.server().stats()];
    assert_eq!([stats[0].lent, stats[1].borrowed], [bytes.len() as u64; 2]);
    p.answer(id, pattern(1, 10));
    p.assert_clean();
}

/// A stream lends nothing while it waits for the peer to allow one more stream.
#[test]
fn a_stream_that_waits_lends_nothing_yet() {
    let mut p = Pair::new(small(), Config { max_streams: 1, ..small() }, 1 << 30);
    p.ends[CLIENT].loans.limit = 4 << 20;
    let first = p.open("head", true);
    let (id, mut bytes) = send(&mut p, 1, false);
    let (payload, more) = message(2, FIELD);
    p.client().send_payload(id, payload, true).unwrap();
    assert!(!p.client().waits_to_lend());
    p.settle();
    assert_eq!((p.count(CLIENT, "LENT"), p.client().stats().lent), (0, 0));
    p.answer(first, pattern(1, 10));
    p.settle();
    bytes.extend(more);
    let app = p.ends[SERVER].app(id);
    assert!(app.ended && app.body == bytes);
    assert_eq!((flows(&p, id), p.count(CLIENT, "LENT")), (vec![Flow::Lent; 2], 2));
    p.answer(id, pattern(1, 10));
    p.assert_clean();
}

/// A stream may begin while a message is composed, because another stream ends in that message. Its
/// piece then waits for the next turn of the driver, and [`Connection::has_queued_lends`] reports
/// this.
#[test]
fn a_stream_that_begins_within_a_flush_asks_for_another_one() {
    let mut p = Pair::new(small(), Config { max_streams: 1, ..small() }, 1 << 30);
    p.ends[CLIENT].loans.limit = 4 << 20;
    let first = p.open("head", false);
    let (id, bytes) = send(&mut p, 1, true);
    p.settle();
    // The server ends its half early. END and the RESET after it travel in separate messages.
    p.server().send_headers(first, block("head"), true).unwrap();
    p.hold[CLIENT] = true;
    p.drive(SERVER);
    assert!(p.deliver(CLIENT) && p.client().is_waiting(id));
    p.client().finish(first).unwrap();
    p.drive(CLIENT);
    assert!(p.client().is_transmitted(id) && p.client().has_queued_lends());
    p.hold[CLIENT] = false;
    p.settle();
    assert_eq!((p.ends[SERVER].app(id).body.clone(), flows(&p, id)), (bytes, vec![Flow::Lent]));
    p.answer(id, pattern(1, 10));
    p.assert_clean();
}

/// A piece whose head does not fit into one message of a connection at rest goes by WRITE as a
/// whole.
#[test]
fn long_heads_are_not_lent() {
    let mut p = lending(1 << 20);
    let most = small().rest_slot_size() as usize - LENT_MESSAGE;
    for (len, flow) in [(most, Flow::Lent), (most + 1, Flow::Bulk)] {
        let id = p.open("head", false);
        let (front, field) = (pattern(1, len), pattern_at(0, 2, FIELD));
        let mut payload = Payload::new();
        payload.push(front.clone(), false);
        payload.push_aligned(field.clone(), true);
        payload.last_is_lendable();
        p.client().send_payload(id, payload, true).unwrap();
        p.settle();
        assert_eq!(flows(&p, id)[0], flow, "{len}");
        assert!(p.ends[SERVER].app(id).body == [front, field].concat());
        p.answer(id, pattern(1, 10));
    }
    p.assert_clean();
}

/// A field that would not have the alignment that the receiver wants goes by WRITE.
#[test]
fn only_what_is_aligned_is_lent() {
    for (align, place, flow) in
        [(64, 64, Flow::Lent), (64, 8, Flow::Bulk), (4096, 64, Flow::Bulk), (1, 7, Flow::Lent)]
    {
        let mut p = Pair::new(small(), Config { align, ..small() }, 1 << 30);
        p.ends[CLIENT].loans.limit = 1 << 20;
        let id = p.open("head", false);
        let field = pattern_at(place, 2, FIELD);
        let mut payload = Payload::new();
        payload.push_aligned(field.clone(), true);
        payload.last_is_lendable();
        p.client().send_payload(id, payload, true).unwrap();
        p.settle();
        assert_eq!(flows(&p, id)[0], flow, "{align} {place}");
        assert!(p.ends[SERVER].app(id).body == field);
        p.answer(id, pattern(1, 10));
        p.assert_clean();
    }
}

/// A reader that keeps lent bytes makes its peer send later fields by WRITE, and blocks nothing.
#[test]
fn a_reader_that_keeps_leases_makes_the_sender_write() {
    let mut p = lending(2 * FIELD);
    p.ends[SERVER].loans.keeps = true;
    let sent: Vec<_> = (0..4).map(|n| send(&mut p, n, true)).collect();
    p.settle();
    for (id, bytes) in &sent {
        assert!(p.ends[SERVER].app(*id).body == *bytes);
    }
    assert_eq!(flows(&p, sent[1].0), [Flow::Lent]);
    assert!(!flows(&p, sent[2].0).contains(&Flow::Lent));
    assert_eq!(p.client().leases(), (2, 0));
    p.ends[SERVER].loans.keeps = false;
    p.settle();
    assert_eq!((p.client().leases(), p.server().leases()), ((0, 0), (0, 0)));
    let (id, _) = send(&mut p, 9, true);
    p.settle();
    assert_eq!(flows(&p, id), [Flow::Lent], "again, once they are back");
    for (id, _) in sent.into_iter().chain([(id, Vec::new())]) {
        p.answer(id, pattern(1, 10));
    }
    p.assert_clean();
}

/// A piece that waits until the peer has mapped its memory is overtaken by other streams, but not
/// by later pieces of its own stream.
#[test]
fn what_the_peer_has_not_mapped_waits() {
    let mut p = lending(1 << 20);
    p.ends[CLIENT].loans.postpones = usize::MAX;
    let (waits, bytes) = send(&mut p, 1, false);
    let (payload, behind) = message(2, FIELD);
    p.client().send_payload(waits, payload, true).unwrap();
    let given_up = send(&mut p, 3, true).0;
    let short = p.open("head", false);
    p.send(CLIENT, short, pattern(4, 10));
    p.settle();
    assert!(p.client().has_postponed_lends() && !p.client().wants_flush(), "nothing to do yet");
    assert!(p.ends[SERVER].app(short).ended, "others go on");
    assert!(p.ends[SERVER].app(waits).body.is_empty());
    p.client().reset(given_up, ResetCode::CANCEL);
    p.settle();
    assert_eq!(p.client().leases(), (0, 0));
    p.ends[CLIENT].loans.postpones = 0;
    p.settle();
    let app = p.ends[SERVER].app(waits);
    assert!(app.ended && app.body == [bytes, behind].concat());
    assert_eq!(flows(&p, waits), [Flow::Lent, Flow::Lent]);
    p.answer(waits, pattern(1, 10));
    p.answer(short, pattern(1, 10));
    p.assert_clean();
}

/// The reader keeps the bytes longer than the call.
#[test]
fn leases_outlive_their_streams() {
    let mut p = lending(1 << 20);
    p.ends[SERVER].loans.keeps = true;
    let (id, _) = send(&mut p, 1, true);
    p.settle();
    p.answer(id, pattern(2, 10));
    p.settle();
    assert_eq!((p.client().pending().streams, p.client().leases()), (0, (1, 0)));
    p.ends[SERVER].loans.keeps = false;
    p.assert_clean();
    assert_eq!(p.client().leases(), (0, 0));
}

#[test]
fn a_reset_ends_leases_that_the_peer_was_not_told_of() {
    let mut p = lending(1 << 20);
    let id = p.open("head", false);
    p.settle();
    // The lent piece's turn comes after eager data for which there is no window.
    p.ends[SERVER].stalled.insert(id.get());
    let window = Config::default().stream_window.max(small().stream_window) as usize;
    for _ in 0..window / 1000 + 2 {
        p.client().send_data(id, pattern(3, 1000), false, false).unwrap();
    }
    let (payload, _) = message(1, FIELD);
    p.client().send_payload(id, payload, false).unwrap();
    p.settle();
    assert_eq!((p.client().leases(), p.count(CLIENT, "LENT")), ((1, 0), 0));
    p.client().reset(id, ResetCode::CANCEL);
    p.settle();
    assert_eq!((p.client().leases(), p.count(CLIENT, "LENT")), ((0, 0), 0));
    p.assert_clean();
}

/// LENT is under way when the server resets the stream.
#[test]
fn what_nobody_reads_returns_at_once() {
    let mut p = lending(1 << 20);
    let id = p.open("head", false);
    p.settle();
    let (payload, _) = message(1, FIELD);
    p.client().send_payload(id, payload, true).unwrap();
    p.drive(CLIENT);
    p.server().reset(id, ResetCode::CANCEL);
    p.settle();
    assert_eq!((p.count(CLIENT, "LENT"), p.count(SERVER, "RETURN")), (1, 1));
    p.assert_clean();
}

/// A call that the peer never knew of is sent on another connection, including the bytes to lend.
#[test]
fn withdrawn_output_has_the_bytes() {
    let mut p = lending(1 << 20);
    let (id, bytes) = send(&mut p, 1, false);
    p.ends[CLIENT].lend();
    assert_eq!(p.client().leases(), (1, 0));
    let unsent = p.client().withdraw(id);
    let all: Vec<u8> = unsent
        .into_iter()
        .flat_map(|unsent| match unsent {
            Unsent::Data(payload) => payload.into_segments().collect::<Vec<_>>().concat(),
            Unsent::Trailers(_) => panic!("no trailers were queued"),
        })
        .collect();
    assert_eq!(all, bytes);
    p.client().reset(id, ResetCode::CANCEL);
    p.settle();
    assert_eq!(p.client().leases(), (0, 0));
    p.assert_clean();
}

#[test]
fn leases_are_counted_and_each_has_its_number() {
    let mut p = Pair::small();
    p.inject(CLIENT, &[head(1)]);
    let server = p.server();
    let key = server.streams.key(1).unwrap();
    let lent = |server: &mut Connection, lease| {
        let place = LentPlace { lease, key: 7, addr: 0 };
        let lent = LentBody { place, len: 1, ..LentBody::default() };
        server.on_lent(key, Box::new(lent), false)
    };
    for lease in 0..MAX_LEASES as u32 {
        lent(server, lease).unwrap();
    }
    let refused = lent(server, u32::MAX);
    assert!(matches!(refused, Err(Breach::BadLease { why: "too many that are not returned", .. })));
    server.return_lease(5);
    server.return_lease(5);
    let refused = lent(server, 6);
    assert!(matches!(refused, Err(Breach::BadLease { why: "its number is in use", .. })));
    lent(server, 5).unwrap();
}

/// The attack: the bytes around lent bytes count in no window, so a hostile peer sends many of
/// them.
#[test]
fn what_lies_around_lent_bytes_is_short() {
    let mut p = Pair::small();
    p.inject(CLIENT, &[head(1)]);
    let server = p.server();
    let key = server.streams.key(1).unwrap();
    let most = small().rest_slot_size() as usize - LENT_MESSAGE;
    for (lease, head, tail) in [(0, most, 0), (1, most - 9, 9), (2, 0, most + 1), (3, most, 1)] {
        let place = LentPlace { lease, key: 7, addr: 0 };
        let (head, tail) = (pattern(1, head), pattern(1, tail));
        let refused = head.len() + tail.len() > most;
        let result = server.on_lent(key, Box::new(LentBody { head, place, len: 1, tail }), false);
        assert_eq!(matches!(result, Err(Breach::BadLease { .. })), refused, "{result:?}");
    }
}
