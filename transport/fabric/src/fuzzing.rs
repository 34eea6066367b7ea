//! Entry points of the fuzz targets. This module is not part of the public interface.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::link_config::Takes;
use crate::shm::offers::Taken;
use crate::shm::ring::{Put, Reader, RingBreach, Shape, Words, Writer};
use crate::shm::socket::wire::Message;

/// Memory that a stranger also writes to. The memory has exactly the given length, so an access
/// beyond the end panics.
#[derive(Clone)]
struct Memory(Arc<[AtomicU64]>);

impl Words for Memory {
    fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

/// The remaining fuzz input.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn number(&mut self) -> Option<u64> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*first))
    }
}

/// Runs both ends of a ring whose memory has arbitrary contents. Between any two steps, a stranger
/// may write to this memory.
///
/// The input states the number of slots, their size, how much memory is missing, and whether the
/// memory initially holds the rest of the input or zeros. Steps with their operands follow. The run
/// stops at the end of the input, or when one end finds a breach, which would end a real link.
///
/// # Panics
/// If there is an access or a message out of bounds, or if the messages outnumber the RECVs.
pub fn ring(data: &[u8]) {
    let _ = run(Input(data));
}

fn run(mut input: Input<'_>) -> Option<()> {
    let slots = u32::from(input.byte()?) % 20;
    let shape = Shape { slots, slot_size: u32::from(input.byte()?) % 5 * 64 };
    let missing = usize::from(input.byte()?.saturating_sub(250));
    let fill: Vec<u8> = if input.byte()?.is_multiple_of(2) { input.0.to_vec() } else { vec![0; 8] };
    let fill: Vec<u64> =
        fill.chunks_exact(8).filter_map(|w| Some(u64::from_ne_bytes(w.try_into().ok()?))).collect();
    let words = (shape.bytes() / 8).saturating_sub(missing);
    let word = |n: usize| fill.get(n % fill.len().max(1)).copied().unwrap_or(0);
    let memory = Memory((0..words).map(|n| AtomicU64::new(word(n))).collect());

    let reader = Reader::new(memory.clone(), shape);
    let writer = Writer::new(memory.clone(), shape);
    let sound = shape.is_sound() && missing == 0;
    assert_eq!((reader.is_some(), writer.is_some()), (sound, sound), "{shape:?} in {words} words");
    let mut ends = Ends { reader: reader?, writer: writer?, shape, held: 0, chunks: 0 };
    loop {
        let op = input.byte()?;
        match op % 8 {
            // The stranger writes a small number, which is likely to be valid, or any number.
            0 => memory.0[usize::from(input.byte()?) % words]
                .store(u64::from(input.byte()?) % 40, Ordering::Relaxed),
            1 => {
                let at = usize::from(input.byte()?) * 3 % words;
                memory.0[at].store(input.number()?, Ordering::Relaxed);
            }
            op => ends.step(op, input.byte()?).ok()?,
        }
    }
}

struct Ends {
    reader: Reader<Memory>,
    writer: Writer<Memory>,
    shape: Shape,
    /// Number of messages that were taken and whose slots are not posted again.
    held: u32,
    /// Number of CHUNK messages that the reader has handled.
    chunks: u64,
}

impl Ends {
    fn step(&mut self, op: u8, operand: u8) -> Result<(), RingBreach> {
        let Shape { slots, slot_size } = self.shape;
        match op {
            2 | 3 => {
                // The operand says how many more CHUNK messages the reader has handled. The next
                // message may wait for further CHUNK messages.
                self.chunks = self.chunks.wrapping_add(u64::from(operand));
                if let Some(message) = self.reader.next(self.chunks)? {
                    assert!(message.slot < slots && message.len <= slot_size, "{message:?}");
                    let mut bytes = vec![0; message.len as usize];
                    message.copy_to(&mut bytes);
                    self.held += 1;
                    assert!(self.held <= slots, "more messages than RECVs");
                }
            }
            4 => {
                // A driver may post slots again in any order. Here, either all slots are posted
                // again or none.
                let all = operand.is_multiple_of(2);
                self.reader.free(|_| all);
                self.held = if all { 0 } else { self.held };
            }
            5 => {
                if self.reader.wait(1) {
                    self.reader.stop_waiting();
                }
                self.reader.runs_on(u64::from(operand));
            }
            6 => {
                let len = usize::from(operand) * 2 % (slot_size as usize + 1);
                let put = self.writer.put(&vec![operand; len])?;
                assert!(matches!(put, Put::Done | Put::Full));
            }
            _ => {
                let _ = self.writer.publish();
                let _ = self.writer.peer_runs_on();
                if operand.is_multiple_of(4) {
                    let keep = self.writer.rest().map(|(_, keep)| keep);
                    assert!(keep.is_none_or(|keep| keep < self.shape.bytes()), "{keep:?}");
                }
            }
        }
        Ok(())
    }
}

/// Decodes messages on the socket of a connection. The first byte of the input says which kinds of
/// memory this end and its peer take. The rest is a sequence of messages, each prefixed with its
/// length in one byte.
///
/// # Panics
/// If encoding a decoded message gives different bytes, or if an end accepts a kind of message that
/// it does not take, or refuses a kind that it takes.
pub fn socket(data: &[u8]) {
    let mut input = Input(data);
    let Some(first) = input.byte() else { return };
    let takes = |bits: u8| Takes { lent: bits & 1 != 0, named: bits & 2 != 0 };
    let taken = Taken { own: takes(first), peer: takes(first >> 2) };
    while let Some(len) = input.byte() {
        let (bytes, rest) = input.0.split_at(usize::from(len).min(input.0.len()));
        input.0 = rest;
        let Some(message) = Message::decode(bytes) else { continue };
        // The text of a refusal may differ, because it is decoded leniently and truncated.
        if !matches!(message, Message::Refused { .. }) {
            assert_eq!(message.encode(), bytes, "{message:?}");
        }
        let is_taken = match &message {
            Message::Lend { .. } | Message::Unlend { .. } => taken.own.lent,
            Message::Name { .. } | Message::Unname { .. } => taken.own.named,
            Message::Taken { .. } => taken.peer.lent || taken.peer.named,
            _ => true,
        };
        match taken.check(message.clone()) {
            Ok(passed) => assert!(is_taken && passed == message, "{message:?} passes"),
            Err(why) => assert!(!is_taken && why.contains("(a setting: "), "{message:?}: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        /// Both ends stay within the bounds or name a breach, whatever the memory holds and
        /// whatever is written to it at the same time.
        #[test]
        fn arbitrary_memory_is_read_within_bounds(input in proptest::collection::vec(any::<u8>(), 0..400)) {
            super::ring(&input);
        }
    }
}
