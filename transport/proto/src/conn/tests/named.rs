//! Fields that land in memory which the receiver names.

use super::super::*;
use super::pair::*;
use crate::config::Config;
use crate::frame::Frame;
use crate::ids::{ResetCode, StreamId};
use crate::payload::Payload;

const FIELD: usize = 300_000;

/// A message with a field of [`FIELD`] bytes between two short segments.
fn message(seed: u32) -> (Payload, Vec<u8>) {
    message_with(seed, 12, 9)
}

/// A message with this many bytes before and after the field.
fn message_with(seed: u32, head: usize, tail: usize) -> (Payload, Vec<u8>) {
    let (head, tail) = (pattern(!seed, head), pattern(seed + 7, tail));
    let field = pattern(seed, FIELD);
    let mut payload = Payload::new();
    payload.push(head.clone(), false);
    payload.push_aligned(field.clone(), true);
    payload.push(tail.clone(), false);
    (payload, [&head[..], &field[..], &tail[..]].concat())
}

/// A client that names memory in this way, and a server that has answered with one message.
fn answered(naming: Naming, budget: usize) -> (Pair, StreamId, Vec<u8>) {
    answered_with(naming, budget, message(1))
}

fn answered_with(
    naming: Naming,
    budget: usize,
    (payload, bytes): (Payload, Vec<u8>),
) -> (Pair, StreamId, Vec<u8>) {
    let config = Config { recv_slots: 64, max_recvs: 64, ..small() };
    let mut p = Pair::new(config.clone(), config, budget);
    let id = p.open_naming("head", naming);
    p.settle();
    let server = p.server();
    server.send_headers(id, block("head"), false).unwrap();
    server.send_payload(id, payload, true).unwrap();
    (p, id, bytes)
}

/// Up to 256 bytes around the field go by SEND, so such a message takes only one grant. More bytes
/// around the field land in grants of their own.
#[test]
fn the_field_lands_in_named_memory_and_the_rest_around_it() {
    for (head, tail, around) in [(12, 9, 0), (0, 0, 0), (256, 0, 0), (0, 256, 0), (200, 57, 2)] {
        let message = message_with(1, head, tail);
        let (mut p, id, bytes) = answered_with(Naming::Whole, 1 << 20, message);
        p.settle();
        let app = p.ends[CLIENT].app(id);
        assert!(app.ended && app.body == bytes);
        let named = (FIELD as u32, Flow::Named);
        let landed = [(head as u32, Flow::Bulk), named, (tail as u32, Flow::Bulk)];
        assert_eq!(app.landed, if around == 0 { &landed[1..2] } else { &landed[..] });
        assert_eq!((p.count(SERVER, "REQUEST"), p.count(CLIENT, "GRANT")), (1, 1 + around));
        let stats = p.server().stats();
        let by_send = if around == 0 { head + tail } else { 0 } as u64;
        assert_eq!((stats.around_sent, stats.short_sent()), (by_send, 0));
        p.assert_clean();
    }
}

/// A client learns that its peer names memory from the first short grant that ends where the field
/// begins.
#[test]
fn requests_land_in_memory_that_the_server_names() {
    let server = Config { names_requests: true, ..small() };
    let mut p = Pair::new(small(), server, 1 << 20);
    p.ends[SERVER].names = |id| (id.get() != 3).then_some(Naming::Whole);
    let mut grants = 0;
    // The third call's field does not land in named memory, but its message is also cut.
    for (nth, expected) in [3, 1, 1, 1].into_iter().enumerate() {
        let id = p.open("head", false);
        let (payload, bytes) = message(nth as u32);
        p.client().send_payload(id, payload, true).unwrap();
        p.settle();
        p.answer(id, pattern(1, 100));
        p.settle();
        let app = p.ends[SERVER].app(id);
        assert!(app.ended && app.body == bytes, "{nth}");
        let named = app.landed.contains(&(FIELD as u32, Flow::Named));
        assert_eq!(named, id.get() != 3);
        assert_eq!(p.count(SERVER, "GRANT") - grants, expected, "{nth}");
        grants += expected;
    }
    p.assert_clean();
}

/// Several messages of a stream are requested in advance, with the bytes between their fields.
#[test]
fn several_messages_are_requested_at_a_time() {
    let mut p = Pair::new(small(), small(), 1 << 20);
    let id = p.open_naming("head", Naming::Whole);
    p.settle();
    p.ends[SERVER].limit(16, 4, 64 << 10, 0);
    p.server().send_headers(id, block("head"), false).unwrap();
    let mut sent = Vec::new();
    for seed in 0..3 {
        let (payload, bytes) = message(seed);
        p.server().send_payload(id, payload, seed == 2).unwrap();
        sent.extend(bytes);
    }
    p.settle();
    assert_eq!(p.count(SERVER, "REQUEST"), 3, "before anything is written");
    p.ends[SERVER].limit(16, 4, 64 << 10, 1 << 20);
    p.settle();
    assert!(p.ends[CLIENT].app(id).body == sent);
    p.assert_clean();
}

/// The field counts in no window and needs no landing memory: 16 KiB are enough for the rest.
#[test]
fn a_field_may_be_longer_than_all_landing_memory() {
    let (mut p, id, bytes) = answered_with(Naming::Whole, 16 << 10, message_with(1, 300, 9));
    p.settle();
    assert!(p.ends[CLIENT].app(id).body == bytes);
    assert!(p.ends[CLIENT].memory.peak <= 8192);
    p.assert_clean();
}

/// The server has given standing grants that are long enough, but they are not used.
#[test]
fn standing_grants_are_left_alone() {
    let mut p = Pair::small();
    for _ in 0..3 {
        let id = p.open("head", true);
        p.settle();
        p.answer(id, pattern(9, FIELD + 100));
        p.settle();
    }
    let requests = p.count(SERVER, "REQUEST");
    assert!(p.client().pending().grants > 0, "there are standing grants");
    let id = p.open_naming("head", Naming::Whole);
    p.settle();
    let (payload, bytes) = message(3);
    p.server().send_headers(id, block("head"), false).unwrap();
    p.server().send_payload(id, payload, true).unwrap();
    p.settle();
    assert_eq!(p.count(SERVER, "REQUEST"), requests + 1);
    assert_eq!(p.ends[CLIENT].app(id).landed[0], (FIELD as u32, Flow::Named));
    assert!(p.ends[CLIENT].app(id).body == bytes);
    p.assert_clean();
}

#[test]
fn memory_that_is_refused_late_or_short_delays_nothing_for_good() {
    // A single byte is less than the minimum length of a grant.
    for naming in [Naming::Refuse, Naming::Late(u32::MAX), Naming::Parts(1), Naming::Parts(100_000)]
    {
        let (mut p, id, bytes) = answered(naming, 1 << 20);
        let other = p.open("other", true);
        p.settle();
        assert_eq!((&p.ends[0].error, &p.ends[1].error), (&None, &None), "{naming:?}");
        p.answer(other, pattern(5, 100_000));
        p.settle();
        assert!(p.ends[CLIENT].app(id).body == bytes, "{naming:?}");
        assert!(p.ends[CLIENT].app(other).body == pattern(5, 100_000), "{naming:?}");
        let named = p.ends[CLIENT].app(id).landed.iter().any(|(_, flow)| *flow == Flow::Named);
        assert_eq!(named, !matches!(naming, Naming::Refuse | Naming::Parts(1)));
        p.assert_clean();
    }
}

/// After a grant is recalled before it has been written completely, memory is named again for the
/// missing part.
#[test]
fn a_recall_returns_named_memory_too() {
    for room in [0, 64 << 10] {
        let (mut p, id, bytes) = answered(Naming::Whole, 1 << 20);
        p.ends[SERVER].limit(16, 4, 64 << 10, room);
        p.settle();
        p.hold[CLIENT] = true;
        p.settle();
        p.client().recall_grants(|_| true);
        p.hold[CLIENT] = false;
        p.settle();
        p.ends[SERVER].limit(16, 4, 64 << 10, 1 << 20);
        p.settle();
        let app = p.ends[CLIENT].app(id);
        assert!(app.body == bytes && app.ended, "{room}");
        let named: u32 = app.landed.iter().filter(|(_, f)| *f == Flow::Named).map(|(n, _)| n).sum();
        assert_eq!(named as usize, FIELD);
        p.assert_clean();
    }
}

/// Memory that is named while a recall is under way is not granted. Otherwise the peer, which has
/// returned the bytes before the field, would write these bytes to the named memory.
#[test]
fn memory_is_named_during_a_recall_of_the_bytes_before_the_field() {
    let (mut p, id, bytes) =
        answered_with(Naming::Late(u32::MAX), 1 << 20, message_with(1, 300, 9));
    p.ends[SERVER].limit(16, 4, 64 << 10, 0);
    p.until("the grant for the bytes before the field", |p| p.count(CLIENT, "GRANT") == 1);
    p.client().recall_grants(|_| true);
    p.settle();
    assert_eq!(p.count(SERVER, "ABORT"), 1);
    p.ends[SERVER].limit(16, 4, 64 << 10, 1 << 20);
    p.settle();
    let app = p.ends[CLIENT].app(id);
    assert_eq!(app.landed, [(300, Flow::Bulk), (FIELD as u32, Flow::Named), (9, Flow::Bulk)]);
    assert!(app.body == bytes && app.ended);
    p.assert_clean();
}

/// Memory that is named for the second message while a grant of the first message is recalled is
/// not granted: the peer would take the grant for the first message, as a breach of the protocol.
#[test]
fn memory_is_named_during_a_recall_of_an_earlier_message() {
    for room in [0, 64 << 10] {
        let mut p = Pair::small();
        let id = p.open_naming("head", Naming::Late(u32::MAX));
        p.settle();
        p.server().send_headers(id, block("head"), false).unwrap();
        let [(first, mut bytes), (second, more)] = [1, 2].map(|seed| message_with(seed, 0, 0));
        p.server().send_payload(id, first, false).unwrap();
        p.server().send_payload(id, second, true).unwrap();
        bytes.extend(more);
        p.ends[SERVER].limit(16, 4, 64 << 10, room);
        p.until("the grant for the first message", |p| p.count(CLIENT, "GRANT") == 1);
        p.client().recall_grants(|_| true);
        p.settle();
        p.ends[SERVER].limit(16, 4, 64 << 10, 1 << 20);
        p.settle();
        assert_eq!((&p.ends[CLIENT].error, &p.ends[SERVER].error), (&None, &None), "{room}");
        let app = p.ends[CLIENT].app(id);
        assert!(app.body == bytes && app.ended, "{room}");
        assert!(app.landed.iter().all(|(_, flow)| *flow == Flow::Named), "{room}");
        p.assert_clean();
    }
}

/// Memory for the second part of a field comes back if a recall has returned the first part.
/// Otherwise the peer would write the first part to it.
#[test]
fn memory_is_named_after_a_recall_of_an_earlier_part() {
    for room in [0, 64 << 10] {
        let (mut p, id, bytes) = answered_with(Naming::Whole, 1 << 20, message_with(1, 0, 0));
        p.ends[SERVER].limit(16, 4, 64 << 10, room);
        p.until("the request", |p| p.count(SERVER, "REQUEST") == 1);
        p.deliver(CLIENT);
        let first = p.ends[CLIENT].memory.name(0, 100_000);
        assert_eq!(p.client().poll_named().unwrap().offset, 0);
        p.client().provide_named(id, first);
        assert_eq!(p.client().poll_named().unwrap().offset, 100_000);
        p.drive(CLIENT);
        p.hold[CLIENT] = true;
        p.settle();
        p.client().recall_grants(|_| true);
        p.hold[CLIENT] = false;
        p.settle();
        assert_eq!(p.client().pending().grants, 0, "the recall is over: {room}");
        let second = p.ends[CLIENT].memory.name(100_000, FIELD as u32 - 100_000);
        p.client().provide_named(id, second);
        p.ends[SERVER].limit(16, 4, 64 << 10, 1 << 20);
        p.settle();
        let app = p.ends[CLIENT].app(id);
        assert!(app.body == bytes && app.ended, "{room}");
        let landed: Vec<u32> = app.landed.iter().map(|(len, _)| *len).collect();
        let parts = [room as u32, (FIELD - room) as u32];
        assert_eq!(landed, if room == 0 { &parts[1..] } else { &parts[..] });
        p.assert_clean();
    }
}

/// The call ends while its memory is being registered, or has been granted.
#[test]
fn a_reset_brings_named_memory_back() {
    for naming in [Naming::Late(u32::MAX), Naming::Whole] {
        let (mut p, id, _) = answered(naming, 1 << 20);
        p.ends[SERVER].limit(16, 4, 64 << 10, 0);
        p.until("the request", |p| p.count(SERVER, "REQUEST") > 0);
        for _ in 0..12 {
            p.step();
        }
        p.client().release(id, ResetCode::CANCEL);
        p.ends[SERVER].limit(16, 4, 64 << 10, 1 << 20);
        p.assert_clean();
    }
}

/// The range that a REQUEST states need not be a field: the bytes are the same, wherever they land.
#[test]
fn a_field_may_be_anywhere_in_the_request() {
    use crate::frame::Field;
    for field in [Field { at: 0, len: 1 }, Field { at: 0, len: 9000 }, Field { at: 8999, len: 1 }] {
        let mut p = Pair::small();
        let id = p.open_naming("head", Naming::Whole);
        p.settle();
        let head = Frame::Headers {
            stream: id.get(),
            end: false,
            more: false,
            indexed: false,
            lands: false,
            block: block("head"),
        };
        let field = Some(field);
        let request = Frame::Request { stream: id.get(), len: 9000, begin: 0, field };
        p.inject(SERVER, &[head, request]);
        p.ends[CLIENT].take_events();
        p.drive(CLIENT);
        assert!(p.count(CLIENT, "GRANT") >= 1);
        assert!(p.client().landing.grants.iter().all(|(_, grant)| grant.given.len > 0));
        let granted: u32 = p.client().landing.grants.iter().map(|(_, grant)| grant.given.len).sum();
        assert_eq!(granted, 9000);
    }
}
