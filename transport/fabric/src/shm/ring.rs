//! The ring that SENDs travel through: its layout, and its two ends.
//!
//! The memory is seen as words of 8 bytes, all atomic: another process may write to any of them at
//! any time.
//!
//! | words | written by | what |
//! |---|---|---|
//! | 0 | sender | tail: messages published, counted from 0 |
//! | 1 | sender | CHUNK messages that it had put on the socket when it published the tail |
//! | 2 | sender | when it last woke the receiver: nanoseconds of CLOCK_MONOTONIC |
//! | 8 | receiver | head: messages whose slots are free again |
//! | 16 | both | not 0: the receiver waits, and is to be woken as this says (`wakeup::member`) |
//! | 24 | receiver | the processor it last ran on |
//! | 32 .. 32 + slots | sender | bytes in each slot |
//! | then, from the next multiple of 8 | sender | the slots, `slot_size` bytes each |
//!
//! Tail, head, the waiting flag and the processor each have a cache line of their own. Message `n`
//! lies in slot `n % slots`.
//!
//! A message may name the key of a chunk that went by the socket. The count of CHUNK messages
//! orders the two ways: the receiver gives no message of a tail before it has as many chunks as the
//! sender counted with it.

use crate::atomics::{AtomicU64, Ordering};
use crate::shm::wakeup::wait_flag;

const TAIL: usize = 0;
const CHUNKS: usize = 1;
const WOKEN_AT: usize = 2;
const HEAD: usize = 8;
const WAITING: usize = 16;
const CPU: usize = 24;
const LENGTHS: usize = 32;

/// Bytes of all slots, at most: the peer's ring takes address space here.
const MAX_RING: u64 = 64 << 20;

/// Memory of a ring.
pub(crate) trait Words {
    /// All of it.
    fn words(&self) -> &[AtomicU64];
}

impl Words for Vec<AtomicU64> {
    fn words(&self) -> &[AtomicU64] {
        self
    }
}

/// Number and size of a ring's slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) slots: u32,
    /// Bytes, a multiple of 64.
    pub(crate) slot_size: u32,
}

impl Shape {
    fn slots_at(self) -> usize {
        (LENGTHS + self.slots as usize).next_multiple_of(8)
    }

    fn slot_words(self) -> usize {
        self.slot_size as usize / 8
    }

    /// As HELLO and ACCEPT have it.
    pub(crate) fn to_bytes(self) -> [u8; 8] {
        let ([a, b, c, d], [e, f, g, h]) = (self.slots.to_le_bytes(), self.slot_size.to_le_bytes());
        [a, b, c, d, e, f, g, h]
    }

    /// Bytes that the ring takes.
    pub(crate) fn bytes(self) -> usize {
        (self.slots_at() + self.slots as usize * self.slot_words()) * 8
    }

    /// Whether both numbers are within the bounds of [`LinkConfig`](crate::LinkConfig), and the
    /// slots within [`MAX_RING`].
    pub(crate) fn is_sound(self) -> bool {
        (1..=1 << 16).contains(&self.slots)
            && (64..=1 << 20).contains(&self.slot_size)
            && self.slot_size.is_multiple_of(64)
            && u64::from(self.slots) * u64::from(self.slot_size) <= MAX_RING
    }

    fn index(self, message: u64) -> usize {
        (message % u64::from(self.slots)) as usize
    }
}

/// A rule of the ring that the peer broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RingBreach {
    /// Published more than there are RECVs, or took messages back.
    #[error("the tail of its SENDs went from {from} to {to}, with {posted} RECVs posted")]
    Tail { from: u64, to: u64, posted: u64 },
    /// A message longer than a slot.
    #[error("a SEND of {len} bytes into a RECV of {slot_size}")]
    Length { len: u64, slot_size: u32 },
    /// Freed what was not sent, or took a RECV back.
    #[error("the head of its RECVs went from {from} to {to}, with {sent} messages sent")]
    Head { from: u64, to: u64, sent: u64 },
}

/// The receiving end.
#[derive(Debug)]
pub(crate) struct Reader<W> {
    memory: W,
    shape: Shape,
    /// Messages taken out.
    read: u64,
    /// Messages whose RECVs are posted again; published as the head.
    freed: u64,
    /// The tail as last read.
    tail: u64,
    /// The CHUNK messages that belong before it.
    chunks: u64,
}

impl<W: Words> Reader<W> {
    /// `None` when the memory is too small.
    pub(crate) fn new(memory: W, shape: Shape) -> Option<Self> {
        let enough = shape.is_sound() && memory.words().len() * 8 >= shape.bytes();
        enough.then_some(Reader { memory, shape, read: 0, freed: 0, tail: 0, chunks: 0 })
    }

    /// Takes the next message, if there is one that does not wait for a chunk; `chunks`: CHUNK
    /// messages of the peer's that have been dealt with.
    ///
    /// # Errors
    /// The peer broke a rule.
    pub(crate) fn next(&mut self, chunks: u64) -> Result<Option<Message<'_>>, RingBreach> {
        if self.tail == self.read {
            let tail = self.word(TAIL).load(Ordering::Acquire);
            let (new, posted) = (tail.wrapping_sub(self.read), self.posted());
            if new > posted {
                return Err(RingBreach::Tail { from: self.read, to: tail, posted });
            }
            self.tail = tail;
            if new == 0 {
                return Ok(None);
            }
            self.chunks = self.word(CHUNKS).load(Ordering::Relaxed);
        }
        if self.awaits_chunk(chunks) {
            return Ok(None);
        }
        let index = self.shape.index(self.read);
        let len = self.word(LENGTHS + index).load(Ordering::Relaxed);
        if len > u64::from(self.shape.slot_size) {
            return Err(RingBreach::Length { len, slot_size: self.shape.slot_size });
        }
        self.read = self.read.wrapping_add(1);
        let at = self.shape.slots_at() + index * self.shape.slot_words();
        let words = self.memory.words().get(at..at + self.shape.slot_words()).unwrap_or_default();
        Ok(Some(Message { slot: index as u32, len: len as u32, words }))
    }

    /// Whether the next message waits for more than `chunks` CHUNK messages. A peer that counts
    /// some that it has not sent holds up its own messages.
    pub(crate) fn awaits_chunk(&self, chunks: u64) -> bool {
        self.tail != self.read && self.chunks.wrapping_sub(chunks).cast_signed() > 0
    }

    /// RECVs that the peer may still use.
    fn posted(&self) -> u64 {
        u64::from(self.shape.slots) - self.read.wrapping_sub(self.freed)
    }

    /// Whether a message may be there. Cheap: one load.
    pub(crate) fn has_pending_recv(&self) -> bool {
        self.tail != self.read || self.word(TAIL).load(Ordering::Relaxed) != self.tail
    }

    /// RECVs were posted again: `posted` says of each slot whether it is. Heads move in order.
    pub(crate) fn free(&mut self, posted: impl Fn(u32) -> bool) {
        let before = self.freed;
        while self.freed != self.read && posted(self.shape.index(self.freed) as u32) {
            self.freed = self.freed.wrapping_add(1);
        }
        if self.freed != before {
            self.word(HEAD).store(self.freed, Ordering::Release);
        }
    }

    /// Announces that this end waits: from now on the peer wakes it, in the way that `value` says.
    /// False when a message may have come meanwhile; this end then does not wait.
    pub(crate) fn wait(&self, value: u64) -> bool {
        wait_flag::raise(self.word(WAITING), value);
        let waits = !self.has_pending_recv();
        if !waits {
            self.stop_waiting();
        }
        waits
    }

    /// Announces that this end waits no more.
    pub(crate) fn stop_waiting(&self) {
        wait_flag::lower(self.word(WAITING));
    }

    /// When the peer last woke this end, as the peer says, in nanoseconds of CLOCK_MONOTONIC; 0:
    /// never.
    pub(crate) fn woken_at(&self) -> u64 {
        self.word(WOKEN_AT).load(Ordering::Relaxed)
    }

    /// Tells the peer which processor this end runs on.
    pub(crate) fn runs_on(&self, cpu: u64) {
        let word = self.word(CPU);
        if word.load(Ordering::Relaxed) != cpu {
            word.store(cpu, Ordering::Relaxed);
        }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        // Within bounds: the memory holds the whole shape.
        &self.memory.words()[index]
    }
}

/// A message in a ring. Its bytes are copied out once, and nothing is concluded from them before.
#[derive(Debug)]
pub(crate) struct Message<'a> {
    pub(crate) slot: u32,
    pub(crate) len: u32,
    words: &'a [AtomicU64],
}

impl Message<'_> {
    /// Copies the message; `out` is as long as the message.
    pub(crate) fn copy_to(&self, out: &mut [u8]) {
        let mut words = self.words.iter();
        let mut whole = out.chunks_exact_mut(8);
        for (bytes, word) in (&mut whole).zip(&mut words) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        let rest = whole.into_remainder();
        if let (false, Some(word)) = (rest.is_empty(), words.next()) {
            let word = word.load(Ordering::Relaxed).to_ne_bytes();
            rest.copy_from_slice(&word[..rest.len()]);
        }
    }
}

/// The sending end: the ring is the peer's.
#[derive(Debug)]
pub(crate) struct Writer<W> {
    memory: W,
    shape: Shape,
    /// Messages written.
    written: u64,
    /// Messages published.
    published: u64,
    /// The peer's head as last read.
    head: u64,
    /// CHUNK messages sent.
    chunks: u64,
}

/// What became of a message that was to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Put {
    /// It lies in the ring.
    Done,
    /// No RECV is posted.
    Full,
}

impl<W: Words> Writer<W> {
    /// `None` when the memory is too small.
    pub(crate) fn new(memory: W, shape: Shape) -> Option<Self> {
        let enough = shape.is_sound() && memory.words().len() * 8 >= shape.bytes();
        enough.then_some(Writer { memory, shape, written: 0, published: 0, head: 0, chunks: 0 })
    }

    /// Bytes that a message may have.
    pub(crate) fn slot_size(&self) -> usize {
        self.shape.slot_size as usize
    }

    /// Copies a message of at most [`slot_size`](Self::slot_size) bytes into the next slot.
    ///
    /// # Errors
    /// The peer broke a rule.
    pub(crate) fn put(&mut self, message: &[u8]) -> Result<Put, RingBreach> {
        let slots = u64::from(self.shape.slots);
        if self.written.wrapping_sub(self.head) >= slots {
            let head = self.word(HEAD).load(Ordering::Acquire);
            if head.wrapping_sub(self.head) > self.written.wrapping_sub(self.head) {
                return Err(RingBreach::Head { from: self.head, to: head, sent: self.written });
            }
            self.head = head;
            if self.written.wrapping_sub(head) >= slots {
                return Ok(Put::Full);
            }
        }
        let index = self.shape.index(self.written);
        self.word(LENGTHS + index).store(message.len() as u64, Ordering::Relaxed);
        let at = self.shape.slots_at() + index * self.shape.slot_words();
        let mut words = self.memory.words()[at..at + self.shape.slot_words()].iter();
        let mut chunks = message.chunks_exact(8);
        for (bytes, word) in (&mut chunks).zip(&mut words) {
            let mut value = [0; 8];
            value.copy_from_slice(bytes);
            word.store(u64::from_ne_bytes(value), Ordering::Relaxed);
        }
        let rest = chunks.remainder();
        if let (false, Some(word)) = (rest.is_empty(), words.next()) {
            let mut value = [0; 8];
            value[..rest.len()].copy_from_slice(rest);
            word.store(u64::from_ne_bytes(value), Ordering::Relaxed);
        }
        self.written = self.written.wrapping_add(1);
        Ok(Put::Done)
    }

    /// A CHUNK message has gone by the socket: what is published from now on waits for it.
    pub(crate) fn chunk_sent(&mut self) {
        self.chunks = self.chunks.wrapping_add(1);
    }

    /// Whether something was written and not published.
    pub(crate) fn has_unpublished(&self) -> bool {
        self.published != self.written
    }

    /// Shows the peer what was written. Not 0 when the peer waits, and is to be woken: what it said
    /// when it began to wait.
    pub(crate) fn publish(&mut self) -> u64 {
        if !self.has_unpublished() {
            return 0;
        }
        self.published = self.written;
        self.word(CHUNKS).store(self.chunks, Ordering::Relaxed);
        self.word(TAIL).store(self.written, Ordering::Release);
        wait_flag::must_wake(self.word(WAITING))
    }

    /// Whether the receiver has posted all slots again, so that none holds anything. It cannot take
    /// that back: only this end writes there.
    pub(crate) fn is_drained(&self) -> bool {
        self.published == self.written && self.word(HEAD).load(Ordering::Acquire) == self.written
    }

    /// The memory, and how many bytes of it lie in front of the slots.
    pub(crate) fn memory(&self) -> (&W, usize) {
        (&self.memory, self.shape.slots_at() * 8)
    }

    /// Tells the peer that this end is about to wake it, and when.
    pub(crate) fn set_woken_at(&self, nanos: u64) {
        self.word(WOKEN_AT).store(nanos, Ordering::Relaxed);
    }

    /// The processor that the peer last ran on, as it says.
    pub(crate) fn peer_runs_on(&self) -> u64 {
        self.word(CPU).load(Ordering::Relaxed)
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.memory.words()[index]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const SHAPE: Shape = Shape { slots: 4, slot_size: 64 };

    impl Words for Memory {
        fn words(&self) -> &[AtomicU64] {
            self
        }
    }

    fn memory(shape: Shape) -> Memory {
        Arc::new((0..shape.bytes() / 8).map(|_| AtomicU64::new(0)).collect())
    }

    type Memory = Arc<Vec<AtomicU64>>;

    fn pair() -> (Writer<Memory>, Reader<Memory>, Memory) {
        let memory = memory(SHAPE);
        (
            Writer::new(memory.clone(), SHAPE).unwrap(),
            Reader::new(memory.clone(), SHAPE).unwrap(),
            memory,
        )
    }

    fn take(reader: &mut Reader<Memory>) -> Option<(u32, Vec<u8>)> {
        let message = reader.next(0).unwrap()?;
        let mut out = vec![0; message.len as usize];
        message.copy_to(&mut out);
        Some((message.slot, out))
    }

    #[test]
    fn messages_of_every_length_go_through_in_order() {
        let (mut writer, mut reader, _) = pair();
        for len in 0..=64_u8 {
            let message: Vec<u8> = (0..len).collect();
            assert_eq!(writer.put(&message), Ok(Put::Done));
            assert_eq!(take(&mut reader), None, "not published");
            assert_eq!(writer.publish(), 0, "nobody waits");
            assert_eq!(take(&mut reader), Some((u32::from(len) % 4, message)));
            reader.free(|_| true);
        }
        assert_eq!(take(&mut reader), None);
    }

    #[test]
    fn messages_wait_for_the_chunks_before_them() {
        let (mut writer, mut reader, memory) = pair();
        writer.put(b"before").unwrap();
        writer.publish();
        writer.chunk_sent();
        assert!(reader.next(0).unwrap().is_some(), "it was published before");
        writer.put(b"behind").unwrap();
        writer.publish();
        assert!(reader.next(0).unwrap().is_none());
        assert!(reader.awaits_chunk(0) && reader.has_pending_recv() && !reader.awaits_chunk(1));
        assert!(reader.next(1).unwrap().is_some());
        reader.free(|_| true);
        // Counts that run backwards hold up nothing.
        memory[CHUNKS].store(u64::MAX, Ordering::Relaxed);
        memory[TAIL].store(3, Ordering::Relaxed);
        assert!(reader.next(1).unwrap().is_some());
    }

    #[test]
    fn a_full_ring_takes_no_more_until_the_oldest_is_posted() {
        let (mut writer, mut reader, _) = pair();
        for n in 0..4 {
            assert_eq!(writer.put(&[n]), Ok(Put::Done));
        }
        assert_eq!(writer.put(&[4]), Ok(Put::Full));
        writer.publish();
        for n in 0..4 {
            assert_eq!(take(&mut reader), Some((u32::from(n), vec![n])));
        }
        reader.free(|slot| slot != 0);
        assert_eq!(writer.put(&[4]), Ok(Put::Full), "slots are freed in order");
        reader.free(|_| true);
        assert_eq!(writer.put(&[4]), Ok(Put::Done));
    }

    /// Slots may be given back once nothing lies in them, neither published nor about to be.
    #[test]
    fn a_ring_is_drained_when_all_slots_are_posted_again() {
        let (mut writer, mut reader, memory) = pair();
        assert!(writer.is_drained());
        for n in 0..9 {
            writer.put(&[n]).unwrap();
            assert!(!writer.is_drained(), "not published");
            writer.publish();
            assert!(!writer.is_drained(), "not read");
            assert_eq!(take(&mut reader), Some((u32::from(n) % 4, vec![n])));
            assert!(!writer.is_drained(), "not posted");
            reader.free(|_| true);
            assert!(writer.is_drained());
        }
        memory[HEAD].store(10, Ordering::Relaxed);
        assert!(!writer.is_drained(), "a head that is none");
    }

    #[test]
    fn whoever_waits_is_woken_once() {
        let (mut writer, mut reader, _) = pair();
        assert!(reader.wait(7));
        writer.put(b"a").unwrap();
        assert_eq!(writer.publish(), 7);
        writer.put(b"b").unwrap();
        assert_eq!(writer.publish(), 0, "woken already");
        assert!(!reader.wait(7), "a message is there");
        take(&mut reader).unwrap();
        assert!(!reader.wait(7));
        take(&mut reader).unwrap();
        assert!(reader.wait(7));
        reader.stop_waiting();
        writer.put(b"c").unwrap();
        assert_eq!(writer.publish(), 0);
    }

    #[test]
    fn breaches_are_named() {
        let (_, mut reader, memory) = pair();
        memory[TAIL].store(5, Ordering::Relaxed);
        assert_eq!(reader.next(0).err(), Some(RingBreach::Tail { from: 0, to: 5, posted: 4 }));
        memory[TAIL].store(1, Ordering::Relaxed);
        memory[LENGTHS].store(65, Ordering::Relaxed);
        assert_eq!(reader.next(0).err(), Some(RingBreach::Length { len: 65, slot_size: 64 }));
        memory[LENGTHS].store(64, Ordering::Relaxed);
        assert!(reader.next(0).unwrap().is_some());
        memory[TAIL].store(0, Ordering::Relaxed);
        assert_eq!(reader.next(0).err(), Some(RingBreach::Tail { from: 1, to: 0, posted: 3 }));

        for head in [5, u64::MAX] {
            let (mut writer, _, memory) = pair();
            for _ in 0..4 {
                writer.put(b"x").unwrap();
            }
            memory[HEAD].store(head, Ordering::Relaxed);
            assert_eq!(writer.put(b"x"), Err(RingBreach::Head { from: 0, to: head, sent: 4 }));
        }
    }

    #[test]
    fn memory_that_is_too_small_is_refused() {
        let words = SHAPE.bytes() / 8 - 1;
        let small = || (0..words).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
        assert!(Reader::new(small(), SHAPE).is_none());
        assert!(Writer::new(small(), SHAPE).is_none());
        for shape in [
            Shape { slots: 0, ..SHAPE },
            Shape { slot_size: 65, ..SHAPE },
            Shape { slot_size: 0, ..SHAPE },
        ] {
            assert!(Reader::new(memory(SHAPE), shape).is_none());
        }
    }

    #[test]
    fn two_threads_lose_neither_messages_nor_wake_ups() {
        const MESSAGES: u64 = 100_000;
        let (mut writer, mut reader, _) = pair();
        let receiver = std::thread::spawn(move || {
            let mut next = 0;
            while next < MESSAGES {
                let Some((_, bytes)) = take(&mut reader) else {
                    if reader.wait(7) {
                        // A lost wake-up would leave this thread here for ever.
                        std::thread::park();
                    }
                    continue;
                };
                assert_eq!(bytes, next.to_le_bytes());
                next += 1;
                reader.free(|_| true);
            }
        });
        let mut sent = 0_u64;
        while sent < MESSAGES {
            match writer.put(&sent.to_le_bytes()).unwrap() {
                Put::Done => sent += 1,
                Put::Full => std::thread::yield_now(),
            }
            if writer.publish() != 0 {
                receiver.thread().unpark();
            }
        }
        receiver.join().unwrap();
    }
}
