//! The offset of messages in landing memory, and peers that state a wrong offset.

use bytes::Bytes;

use super::super::*;
use super::pair::*;
use crate::config::Config;
use crate::error::Breach;
use crate::frame::Frame;
use crate::ids::{GrantId, StreamId};
use crate::payload::Payload;

const HEAD: usize = 22;

/// Makes a call whose request body consists of a short head and an aligned segment at an address
/// that is `place` modulo 4096. The response body is empty.
fn call(p: &mut Pair, place: usize, len: usize) -> StreamId {
    let id = p.open("head", false);
    let (head, segment) = (pattern(1, HEAD), pattern_at(place, 2, len));
    let mut payload = Payload::new();
    payload.push(head.clone(), false);
    payload.push_aligned(segment.clone(), true);
    p.aligned.push(segment.clone());
    p.client().send_payload(id, payload, true).unwrap();
    p.settle();
    assert!(p.ends[SERVER].app(id).body == [head, segment].concat());
    p.answer(id, Bytes::new());
    p.settle();
    id
}

fn asks_for(align: u16, standing_grants: u8) -> Config {
    Config { align, standing_grants, ..small() }
}

/// [`Pair`] checks the address of each WRITE of an aligned segment.
#[test]
fn segments_land_aligned_on_request_and_in_standing_grants() {
    for align in [1, 2, 32, 64, 512, 4096] {
        for place in [0, 1, 38, 64, 100, 4095] {
            let mut p = Pair::new(asks_for(64, 4), asks_for(align, 4), 1 << 20);
            for _ in 0..5 {
                call(&mut p, place, 100_000);
            }
            assert_eq!(
                p.count(CLIENT, "REQUEST"),
                1,
                "the others found a standing grant that is long enough"
            );
            assert_eq!(p.aligned_written, 500_000);
            p.assert_clean();
        }
    }
}

/// Each part begins at the remainder at which the previous part would continue, also in memory that
/// is granted again after a RECALL.
#[test]
fn parts_keep_the_phase() {
    for align in [1, 64, 4096] {
        for budget in [16 << 10, 20 << 10, 64 << 10] {
            let mut p = Pair::new(asks_for(1, 0), asks_for(align, 0), budget);
            let id = call(&mut p, 7, 300_000);
            assert!(p.ends[SERVER].app(id).landed.len() > 4);
            assert_eq!(p.aligned_written, 300_000);
            p.assert_clean();
        }
        let mut p = Pair::new(asks_for(1, 0), asks_for(align, 0), 1 << 20);
        p.ends[CLIENT].limit(8, 1, 16 << 10, 16 << 10);
        let id = p.open("head", false);
        let segment = pattern_at(7, 2, 300_000);
        let mut payload = Payload::new();
        payload.push(pattern(1, HEAD), true);
        payload.push_aligned(segment.clone(), true);
        p.aligned.push(segment.clone());
        p.client().send_payload(id, payload, true).unwrap();
        p.until("some WRITEs", |p| p.aligned_written > 50_000);
        p.server().recall_grants(|_| true);
        p.settle();
        assert!(p.count(SERVER, "GRANT") > 1 && p.count(SERVER, "RECALL") == 1);
        assert_eq!(
            (p.aligned_written, p.ends[SERVER].app(id).body.len()),
            (300_000, HEAD + 300_000)
        );
        p.answer(id, Bytes::new());
        p.assert_clean();
    }
}

#[test]
fn each_end_has_an_alignment_of_its_own() {
    let mut p = Pair::new(asks_for(4096, 4), asks_for(1, 4), 1 << 20);
    for _ in 0..3 {
        let id = p.open("head", false);
        let mut bodies = Vec::new();
        for end in [CLIENT, SERVER] {
            let segment = pattern_at(99, 2, 50_000);
            let mut payload = Payload::new();
            payload.push(pattern(1, HEAD), false);
            payload.push_aligned(segment.clone(), true);
            p.aligned.push(segment);
            if end == SERVER {
                p.server().send_headers(id, block("head"), false).unwrap();
            }
            p.ends[end].conn.send_payload(id, payload.clone(), true).unwrap();
            p.settle();
            bodies.push(payload.into_segments().flatten().collect::<Vec<u8>>());
        }
        assert!(
            p.ends[SERVER].app(id).body == bodies[0] && p.ends[CLIENT].app(id).body == bodies[1]
        );
    }
    assert_eq!(p.aligned_written, 300_000);
    p.assert_clean();
}

/// The wanted memory includes the padding in front of the message. The grant does not.
#[test]
fn alignment_padding_is_allocated_but_not_granted() {
    let mut p = Pair::new(asks_for(64, 0), asks_for(4096, 0), 0);
    let id = p.open("head", false);
    let mut payload = Payload::new();
    payload.push(pattern(1, HEAD), false);
    payload.push_aligned(pattern(2, 50_000), true);
    p.client().send_payload(id, payload, true).unwrap();
    p.settle();
    let front = 4096 - HEAD as u32;
    let (len, key) = (HEAD as u32 + 50_000, WantKey::Stream(id));
    let want = LandingWant { key, want: front + len, min: front + 12_288 };
    assert_eq!(p.server().poll_landing(|_| true), Some(want));
    let memory = |key, len| GrantMemory { key, addr: 0x10_0000, rkey: 1, len };
    for short in [0, front, front + 12_287] {
        p.server().provide_landing(key, memory(7, short));
        assert_eq!(p.server().poll_event(), Some(Event::Returned { memory: 7 }), "{short}");
    }
    p.server().provide_landing(key, memory(8, 65_536));
    assert_eq!(p.server().held(), u64::from(len));
    p.hold[SERVER] = true;
    p.settle();
    let writes = p.to[SERVER].iter().filter_map(|wire| match wire {
        Wire::Write(write) => Some((write.addr, write.src.len() as u32)),
        Wire::Send(_) => None,
    });
    assert_eq!(
        writes.collect::<Vec<_>>(),
        [(0x10_0000 + u64::from(front), HEAD as u32), (0x10_1000, 50_000)]
    );
}

/// A pair whose client has opened stream 2 and holds standing grant 1, of 24 KiB.
fn standing(align: u16) -> Pair {
    let mut p = Pair::new(asks_for(64, 1), asks_for(align, 1), 1 << 20);
    p.settle();
    p.ends[SERVER].memory.lenient = true;
    p.inject(CLIENT, &[head(1), Frame::Request { stream: 1, len: 20_480, begin: 1, field: None }]);
    p.drive(SERVER);
    p.inject(
        CLIENT,
        &[Frame::Done { stream: 1, end: true, id: 0, len: 20_480, begin: 0 }, head(2)],
    );
    p.drive(SERVER);
    assert_eq!(p.ends[SERVER].conn.landing.grants.ids().collect::<Vec<_>>(), [1]);
    p
}

fn done(id: u32, begin: u32, len: u32) -> Frame {
    Frame::Done { stream: 2, end: false, id, len, begin }
}

#[test]
fn begin_and_length_are_checked_against_modulus_and_grant() {
    for (align, modulus) in [(1, 64), (64, 64), (128, 128), (4096, 4096)] {
        for begin in [modulus, modulus + 1, 24_576, u32::MAX] {
            let mut p = standing(align);
            p.inject(CLIENT, &[done(1, begin, 1)]);
            let breach = Breach::DoneBegin { grant: GrantId(1), begin, limit: modulus - 1 };
            assert_eq!(p.ends[SERVER].error, Some(breach));

            let mut p = standing(align);
            p.inject(CLIENT, &[Frame::Request { stream: 2, len: 9, begin, field: None }]);
            let breach = Breach::RequestBegin { stream: StreamId(2), begin, modulus };
            assert_eq!(p.ends[SERVER].error, Some(breach));
        }
        for (begin, len) in
            [(0, 24_577), (1, 24_576), (modulus - 1, 24_578 - modulus), (5, u32::MAX), (9, 0)]
        {
            let mut p = standing(align);
            p.inject(CLIENT, &[done(1, begin, len)]);
            let breach = Breach::DoneLength { grant: GrantId(1), begin, len, granted: 24_576 };
            assert_eq!(p.ends[SERVER].error, Some(breach));
        }
        let mut p = standing(align);
        p.inject(CLIENT, &[done(1, modulus - 1, 24_577 - modulus)]);
        p.drive(SERVER);
        assert_eq!(p.ends[SERVER].error, None);
        assert_eq!(p.ends[SERVER].app(StreamId(2)).landed, [(24_577 - modulus, Flow::Bulk)]);
    }
}

/// A grant on request is written from its first byte on: the padding in front is not granted.
#[test]
fn only_standing_grants_have_a_begin() {
    let mut p = Pair::new(asks_for(64, 0), asks_for(64, 0), 1 << 20);
    p.settle();
    p.inject(CLIENT, &[head(1), Frame::Request { stream: 1, len: 20_000, begin: 63, field: None }]);
    p.drive(SERVER);
    p.inject(CLIENT, &[Frame::Done { stream: 1, end: false, id: 0, len: 1, begin: 1 }]);
    assert_eq!(
        p.ends[SERVER].error,
        Some(Breach::DoneBegin { grant: GrantId(0), begin: 1, limit: 0 })
    );
}

/// A receiver may grant memory at any address. The sender begins at the first address that is
/// congruent to the begin, or sends a REQUEST if the rest of the grant is too short.
#[test]
fn unaligned_standing_grants_are_used_from_the_first_byte_in_phase() {
    for (len, offset) in [(100_000 + 47, None), (100_000 + 48, Some(48)), (200_000, Some(48))] {
        let mut p = Pair::new(asks_for(64, 4), asks_for(64, 4), 1 << 20);
        p.settle();
        // The grant begins at 58 modulo 64. A head of 22 bytes has to begin at 42 modulo 64, which
        // is 48 bytes later.
        p.inject(SERVER, &[Frame::Grant { stream: 0, id: 9, rkey: 1, len, addr: 0x1000 - 6 }]);
        let id = p.open("head", false);
        let mut payload = Payload::new();
        payload.push(pattern(1, HEAD), true);
        payload.push_aligned(pattern(2, 100_000 - HEAD), true);
        p.client().send_payload(id, payload, true).unwrap();
        p.hold[SERVER] = true;
        p.drive(CLIENT);
        let first = p.to[SERVER].iter().find_map(|wire| match wire {
            Wire::Write(write) => Some(write.addr - (0x1000 - 6)),
            Wire::Send(_) => None,
        });
        assert_eq!((first, p.count(CLIENT, "REQUEST")), (offset, usize::from(offset.is_none())));
    }
}
