//! Random bytes and altered messages: each is accepted or closes the connection; nothing panics.

use bytes::Bytes;
use proptest::prelude::*;
use proptest::sample::Index;

use super::pair::*;
use crate::config::Config;
use crate::frame::{Composer, Frame, Reader};
use crate::ids::{ResetCode, StreamId};

/// Small numbers match existing ids; large ones test the limits.
fn number() -> impl Strategy<Value = u32> {
    prop_oneof![8 => 0..8u32, 2 => 12_280..12_300u32, 1 => 19_990..70_000u32, 1 => any::<u32>()]
}

fn begin() -> impl Strategy<Value = u32> {
    prop_oneof![20 => Just(0), 4 => 0..64u32, 1 => 60..70u32, 1 => any::<u32>()]
}

/// Fields that are added to the table, references to them, and invalid fields.
fn indexed_block() -> impl Strategy<Value = Bytes> {
    let field = prop_oneof![
        6 => Just(vec![192]),
        6 => Just(vec![136, 0, 1, 1, 0, b'x']),
        6 => Just(vec![1, 1, 0, b'x']),
        4 => Just(vec![128]),
        1 => any::<Vec<u8>>(),
    ];
    proptest::collection::vec(field, 0..6).prop_map(|fields| fields.concat().into())
}

fn frame() -> impl Strategy<Value = Frame> {
    let bytes = || (0..300usize).prop_map(|len| pattern(7, len));
    let stream =
        || prop_oneof![40 => 1..5u32, 2 => 5..9u32, 1 => any::<u32>().prop_map(|id| id.max(1))];
    let flag = any::<bool>;
    prop_oneof![
        4 => (stream(), flag(), flag(), bytes()).prop_map(|(stream, end, more, block)| {
            Frame::Headers { stream, end: end && !more, more, indexed: false, lands: false, block }
        }),
        4 => (stream(), flag(), indexed_block()).prop_map(|(stream, end, block)| {
            Frame::Headers { stream, end, more: false, indexed: true, lands: false, block }
        }),
        4 => (stream(), flag(), bytes()).prop_map(|(stream, end, data)| Frame::Data { stream, end, data }),
        2 => (stream(), number()).prop_map(|(stream, increment)| Frame::Window { stream, increment }),
        1 => (stream(), number()).prop_map(|(stream, code)| Frame::Reset { stream, code }),
        3 => (stream(), number(), begin()).prop_map(|(stream, len, begin)| {
            Frame::Request { stream, len: len.into(), begin, field: None }
        }),
        4 => (0..5u32, number(), number(), number(), any::<u64>()).prop_map(|(stream, id, rkey, len, addr)| {
            Frame::Grant { stream, id, rkey, len, addr: addr >> 1 }
        }),
        3 => (stream(), flag(), number(), number(), begin()).prop_map(|(stream, end, id, len, begin)| {
            Frame::Done { stream, end, id, len, begin }
        }),
        1 => number().prop_map(|id| Frame::Abort { id }),
        1 => number().prop_map(|id| Frame::Recall { id }),
        1 => (flag(), any::<u64>()).prop_map(|(ack, token)| Frame::Ping { ack, token }),
        1 => (flag(), number(), bytes()).prop_map(|(ack, code, text)| {
            Frame::GoAway { ack, code, text: text.slice(..text.len().min(240)) }
        }),
        1 => (number(), bytes()).prop_map(|(code, text)| {
            Frame::Close { code, text: text.slice(..text.len().min(240)) }
        }),
    ]
}

fn message(frames: &[Frame], credits: u16) -> Bytes {
    let mut slot = vec![0; 32_768];
    let mut composer = Composer::new(&mut slot);
    for frame in frames {
        composer.add(frame);
    }
    let len = composer.finish(credits);
    slot.truncate(len);
    slot.into()
}

/// Makes the end under attack do some work of its own.
fn work(p: &mut Pair, end: usize, step: usize) {
    match (end, step % 4) {
        (CLIENT, 0) => {
            if let Ok(id) = p.client().open(block("head"), false) {
                p.client()
                    .send_data(
                        id,
                        pattern(1, 900 * step + 40_000 * (step % 3)),
                        step.is_multiple_of(2),
                        false,
                    )
                    .unwrap();
            }
        }
        (_, 1) => {
            for id in (1..6).map(StreamId) {
                let conn = &mut p.ends[end].conn;
                let _ = conn.send_headers(id, block("head"), false);
                let _ = conn.send_data(id, pattern(2, 5000 * step), true, step.is_multiple_of(5));
            }
        }
        (_, 2) => p.ends[end].conn.reset(StreamId(1 + step as u32 % 5), ResetCode::CANCEL),
        _ => {
            let id = StreamId(1 + step as u32 % 5);
            if p.ends[end].stalled.insert(id.get()) && step.is_multiple_of(3) {
                p.ends[end].unstall(id);
            }
        }
    }
}

/// Checks the invariant after a breach: the end sends one CLOSE with the text of the breach, then
/// nothing.
fn check_end(p: &mut Pair, end: usize) {
    let Some(breach) = p.ends[end].error.clone() else { return };
    p.to[1 - end].clear();
    p.ends[end].slots = 1;
    p.drive(end);
    let closes: Vec<Frame> = p.to[1 - end]
        .iter()
        .flat_map(|wire| match wire {
            Wire::Send(message) => {
                let mut reader = Reader::new(message.clone()).unwrap();
                std::iter::from_fn(move || reader.next_frame().unwrap()).collect::<Vec<_>>()
            }
            Wire::Write(_) => panic!("WRITE after a breach"),
        })
        .collect();
    // Without a credit, the end cannot send CLOSE.
    if !closes.is_empty() {
        assert_eq!(closes, [Frame::Close { code: 1, text: block(&breach.to_string()) }]);
    }
    p.ends[end].slots = 1;
    assert!(!p.drive(end) && p.ends[end].conn.next_timeout().is_none());
}

fn attacked(end: usize) -> Pair {
    let config =
        Config { slot_size: 4096, max_streams: 4, recv_slots: 64, max_recvs: 64, ..small() };
    let mut p = Pair::new(config.clone(), config, 1 << 20);
    // Streams 1 to 4 are the targets.
    for _ in 0..4 {
        p.open("head", false);
    }
    p.settle();
    if end == CLIENT {
        for id in (1..4).map(StreamId) {
            p.server().send_headers(id, block("head"), false).unwrap();
        }
        p.settle();
    }
    p.ends[end].memory.lenient = true;
    p
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_frames(
        end in 0..2usize,
        messages in prop::collection::vec((prop::collection::vec(frame(), 0..3), 0..5u16), 1..40),
    ) {
        let mut p = attacked(end);
        for (step, (frames, credits)) in messages.iter().enumerate() {
            work(&mut p, end, step);
            // Rarely return more credits than were spent, because that breach hides all others.
            let spent = 64 - p.ends[end].conn.credits.available() as u16;
            let credits = if step == 30 { *credits } else { spent.min(*credits) };
            p.inject_raw(1 - end, message(frames, credits));
            p.ends[end].slots = 4;
            (p.ends[end].staging, p.ends[end].room) = (4, 1 << 20);
            p.to[1 - end].clear();
            p.drive_unchecked(end);
            if p.ends[end].error.is_some() {
                break;
            }
        }
        check_end(&mut p, end);
    }

    #[test]
    fn any_bytes(
        end in 0..2usize,
        body in prop::collection::vec(any::<u8>(), 0..200),
        raw in any::<bool>(),
    ) {
        let mut p = attacked(end);
        let mut bytes = body;
        if !raw {
            // Add a valid header, so that the frames are decoded.
            let len = (bytes.len() + 8) as u8;
            bytes.splice(0..0, [0, 0, 0, 0, len, 0, 0, 0]);
        }
        p.inject_raw(1 - end, bytes.into());
        check_end(&mut p, end);
    }

    /// An honest conversation in which messages are altered, truncated, duplicated or replaced in
    /// flight.
    #[test]
    fn changed_messages(
        changes in prop::collection::vec((0..2usize, 1..60usize, 0..5u8, any::<Index>(), any::<u8>()), 1..4),
        seed in any::<u32>(),
    ) {
        let config = Config { max_streams: 8, write_chunk: 16 << 10, ..small() };
        let mut p = Pair::new(config.clone(), config, 256 << 10);
        for end in &mut p.ends {
            end.memory.lenient = true;
            end.copy_out = true;
        }
        for n in 0..4u32 {
            let id = p.open("head", false);
            p.send(CLIENT, id, pattern(seed, (seed.rotate_left(n * 5) % 60_000) as usize));
        }
        for (end, steps, change, at, value) in changes {
            for _ in 0..steps {
                p.step_unchecked();
                if p.ends[SERVER].conn.is_open_for_sending(StreamId(1)) && p.ends[SERVER].streams.contains_key(&1) {
                    let server = p.server();
                    let _ = server.send_headers(StreamId(1), block("head"), false);
                    let _ = server.send_data(StreamId(1), pattern(seed, 30_000), true, true);
                }
            }
            let queue = &mut p.to[end];
            let Some(Wire::Send(message)) = queue.front() else { continue };
            let mut bytes = message.to_vec();
            if bytes.len() < 8 {
                continue;
            }
            match change {
                0 => {
                    let at = at.index(bytes.len());
                    bytes[at] ^= value.max(1);
                }
                1 => bytes.truncate(at.index(bytes.len())),
                2 => {
                    // Duplicate the message.
                    let copy = Wire::Send(message.clone());
                    queue.push_front(copy);
                    continue;
                }
                3 => bytes = vec![value; bytes.len()],
                _ => {
                    // Truncate the message anywhere, and correct its length field.
                    let at = 8 + at.index(bytes.len() - 7);
                    bytes.truncate(at);
                    let len = bytes.len() as u32;
                    bytes[4..8].copy_from_slice(&len.to_le_bytes());
                }
            }
            queue[0] = Wire::Send(bytes.into());
        }
        for _ in 0..4000 {
            p.step_unchecked();
        }
        for end in 0..2 {
            check_end(&mut p, end);
        }
    }
}
