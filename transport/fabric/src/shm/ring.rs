//! The ring that SENDs travel through: its layout, and its two ends.
//!
//! The memory is accessed as atomic words of 8 bytes, because another process may write to any of
//! these words at any time.
//!
//! `docs/protocol.md` has the layout. Tail, head, the waiting flag and the processor each have
//! their own cache line.
//!
//! The sender chooses where a message lies. Each message begins at the first cache line after the
//! previous message. A message that would not fit before the end of the ring begins at the front
//! again. Slots become free in order, so the messages in use lie together, with at most one gap,
//! which is shorter than a slot. For that gap the ring has memory for one more slot. Before a
//! message would touch a new page, the sender checks whether all slots are free again, and if so
//! goes back to the front. So a connection with few messages needs only the first pages of its
//! ring, which stay in memory and in the processor's TLB when thousands of connections take turns.
//!
//! A message may refer to the key of a chunk that was sent over the socket. The sender publishes
//! its count of CHUNK messages together with the tail. The receiver delivers the messages before
//! that tail only once it has handled that number of CHUNK messages.

use crate::atomics::{AtomicU64, Ordering};
use crate::shm::wakeup::wait_flag;

const TAIL: usize = 0;
const CHUNKS: usize = 1;
const WOKEN_AT: usize = 2;
const HEAD: usize = 8;
const WAITING: usize = 16;
const CPU: usize = 24;
const PLACES: usize = 32;

/// Maximum bytes of a ring's slots together. No user of this crate makes a larger ring. The
/// messages that this end sends allocate the pages of the peer's ring, and the kernel charges those
/// pages to this process.
pub(crate) const MAX_RING: u64 = 128 << 10;
/// Length of a cache line in bytes. No two messages share a line.
const LINE: usize = 64;
/// The size of the smallest page in bytes.
const PAGE: usize = 4096;

/// The place of a message, as encoded in a word of the ring.
#[derive(Debug, Clone, Copy)]
struct RingPlace {
    /// The offset from the first byte for messages.
    at: u32,
    len: u32,
}

impl RingPlace {
    fn of(word: u64) -> RingPlace {
        RingPlace { at: (word >> 32) as u32, len: word as u32 }
    }

    fn word(self) -> u64 {
        u64::from(self.at) << 32 | u64::from(self.len)
    }
}

/// The memory of a ring.
pub(crate) trait Words {
    /// All words of the memory.
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
    /// The size of a slot in bytes, a multiple of 64.
    pub(crate) slot_size: u32,
}

impl Shape {
    fn slots_at(self) -> usize {
        (PLACES + self.slots as usize).next_multiple_of(8)
    }

    /// The number of bytes in which messages lie.
    fn room(self) -> usize {
        (self.slots as usize + 1) * self.slot_size as usize
    }

    /// The encoding in HELLO and ACCEPT.
    pub(crate) fn to_bytes(self) -> [u8; 8] {
        let ([a, b, c, d], [e, f, g, h]) = (self.slots.to_le_bytes(), self.slot_size.to_le_bytes());
        [a, b, c, d, e, f, g, h]
    }

    /// The size of the ring in bytes.
    pub(crate) fn bytes(self) -> usize {
        self.slots_at() * 8 + self.room()
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
    /// The peer published more messages than RECVs are posted, or took messages back.
    #[error("the tail of its SENDs went from {from} to {to}, with {posted} RECVs posted")]
    Tail { from: u64, to: u64, posted: u64 },
    /// A message is longer than a slot.
    #[error("a SEND of {len} bytes into a RECV of {slot_size}")]
    Length { len: u32, slot_size: u32 },
    /// A message lies outside of the ring.
    #[error("a SEND of {len} bytes that lies at {at} in {room} bytes")]
    Place { at: u32, len: u32, room: usize },
    /// The peer freed messages that were not sent, or took a RECV back.
    #[error("the head of its RECVs went from {from} to {to}, with {sent} messages sent")]
    Head { from: u64, to: u64, sent: u64 },
}

/// The receiving end.
#[derive(Debug)]
pub(crate) struct Reader<W> {
    memory: W,
    shape: Shape,
    /// Number of messages taken.
    read: u64,
    /// Number of messages whose RECVs are posted again. Published as the head.
    freed: u64,
    /// The peer's tail when it was last read.
    tail: u64,
    /// Number of CHUNK messages that come before `tail`.
    chunks: u64,
}

impl<W: Words> Reader<W> {
    /// Returns `None` if the shape is not sound, or the memory is too small for it.
    pub(crate) fn new(memory: W, shape: Shape) -> Option<Self> {
        let enough = shape.is_sound() && memory.words().len() * 8 >= shape.bytes();
        enough.then_some(Reader { memory, shape, read: 0, freed: 0, tail: 0, chunks: 0 })
    }

    /// Takes the next message, unless that message waits for a chunk. `chunks` is the number of the
    /// peer's CHUNK messages that have been handled.
    ///
    /// # Errors
    /// The peer broke a rule.
    pub(crate) fn next(&mut self, chunks: u64) -> Result<Option<RingMessage<'_>>, RingBreach> {
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
        let RingPlace { at, len } =
            RingPlace::of(self.word(PLACES + index).load(Ordering::Relaxed));
        if len > self.shape.slot_size {
            return Err(RingBreach::Length { len, slot_size: self.shape.slot_size });
        }
        let room = self.shape.room();
        if !(at as usize).is_multiple_of(LINE) || at as usize + len as usize > room {
            return Err(RingBreach::Place { at, len, room });
        }
        self.read = self.read.wrapping_add(1);
        let first = self.shape.slots_at() + at as usize / 8;
        let words = self.memory.words().get(first..first + (len as usize).div_ceil(8));
        Ok(Some(RingMessage { slot: index as u32, len, words: words.unwrap_or_default() }))
    }

    /// Whether the next message waits for more than `chunks` CHUNK messages. A peer that counts
    /// CHUNK messages without sending them delays only its own messages.
    pub(crate) fn awaits_chunk(&self, chunks: u64) -> bool {
        self.tail != self.read && self.chunks.wrapping_sub(chunks).cast_signed() > 0
    }

    /// Number of RECVs that the peer may still use.
    fn posted(&self) -> u64 {
        u64::from(self.shape.slots) - self.read.wrapping_sub(self.freed)
    }

    /// Whether a message may have arrived. Costs one load.
    pub(crate) fn has_pending_recv(&self) -> bool {
        self.tail != self.read || self.word(TAIL).load(Ordering::Relaxed) != self.tail
    }

    /// Moves the head over RECVs that were posted again. `posted` says whether a slot was posted
    /// again. The head stops at the first slot that was not posted again.
    pub(crate) fn free(&mut self, posted: impl Fn(u32) -> bool) {
        let before = self.freed;
        while self.freed != self.read && posted(self.shape.index(self.freed) as u32) {
            self.freed = self.freed.wrapping_add(1);
        }
        if self.freed != before {
            self.word(HEAD).store(self.freed, Ordering::Release);
        }
    }

    /// Announces that this end waits. `value` encodes how the peer must wake this end. If a message
    /// may have arrived before the announcement, returns false, and this end does not wait.
    pub(crate) fn wait(&self, value: u64) -> bool {
        wait_flag::raise(self.word(WAITING), value);
        let waits = !self.has_pending_recv();
        if !waits {
            self.stop_waiting();
        }
        waits
    }

    /// Announces that this end no longer waits.
    pub(crate) fn stop_waiting(&self) {
        wait_flag::lower(self.word(WAITING));
    }

    /// The time when the peer last woke this end, according to the peer, in nanoseconds of
    /// CLOCK_MONOTONIC. 0 if the peer has never woken this end.
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
        // The index is within bounds, because the memory holds the whole shape.
        &self.memory.words()[index]
    }
}

/// A message in a ring. The bytes are copied out once, and only the copy is used.
#[derive(Debug)]
pub(crate) struct RingMessage<'a> {
    pub(crate) slot: u32,
    pub(crate) len: u32,
    words: &'a [AtomicU64],
}

impl RingMessage<'_> {
    /// Copies the message to `out`, which must be as long as the message.
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

/// The sending end, whose ring belongs to the peer.
#[derive(Debug)]
pub(crate) struct Writer<W> {
    memory: W,
    shape: Shape,
    /// Number of messages written.
    written: u64,
    /// Number of messages published.
    published: u64,
    /// The peer's head when it was last read.
    head: u64,
    /// The offset of the next message, if the message fits there. A multiple of [`LINE`].
    next: usize,
    /// The end of the bytes written since `rest` last found the ring empty.
    reach: usize,
    /// Number of CHUNK messages sent.
    chunks: u64,
}

/// The result of writing a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Put {
    /// The message is in the ring.
    Done,
    /// No RECV is posted.
    Full,
}

impl<W: Words> Writer<W> {
    /// Returns `None` if the shape is not sound, or the memory is too small for it.
    pub(crate) fn new(memory: W, shape: Shape) -> Option<Self> {
        let enough = shape.is_sound() && memory.words().len() * 8 >= shape.bytes();
        enough.then(|| Writer {
            memory,
            shape,
            written: 0,
            published: 0,
            head: 0,
            next: 0,
            reach: 0,
            chunks: 0,
        })
    }

    /// Maximum length of a message in bytes.
    pub(crate) fn slot_size(&self) -> usize {
        self.shape.slot_size as usize
    }

    /// Copies a message of at most [`slot_size`](Self::slot_size) bytes into the next slot.
    ///
    /// # Errors
    /// The peer broke a rule of the ring.
    pub(crate) fn put(&mut self, message: &[u8]) -> Result<Put, RingBreach> {
        let slots = u64::from(self.shape.slots);
        if self.in_use() >= slots {
            self.read_head()?;
            if self.in_use() >= slots {
                return Ok(Put::Full);
            }
        }
        let at = self.place(message.len())?;
        let index = self.shape.index(self.written);
        let place = RingPlace { at: at as u32, len: message.len() as u32 };
        self.word(PLACES + index).store(place.word(), Ordering::Relaxed);
        let first = self.shape.slots_at() + at / 8;
        let mut words = self.memory.words()[first..first + message.len().div_ceil(8)].iter();
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

    /// Number of slots that the peer has not freed, as far as this end knows.
    fn in_use(&self) -> u64 {
        self.written.wrapping_sub(self.head)
    }

    fn read_head(&mut self) -> Result<(), RingBreach> {
        let head = self.word(HEAD).load(Ordering::Acquire);
        if head.wrapping_sub(self.head) > self.in_use() {
            return Err(RingBreach::Head { from: self.head, to: head, sent: self.written });
        }
        self.head = head;
        Ok(())
    }

    /// Returns the offset of the next message, which has `len` bytes. The caller has checked that a
    /// slot is free.
    fn place(&mut self, len: usize) -> Result<usize, RingBreach> {
        let len = len.next_multiple_of(LINE);
        let front = self.shape.slots_at() * 8;
        let end = front + self.next + len;
        if self.next > 0 && end.div_ceil(PAGE) > (front + self.next).div_ceil(PAGE) {
            self.read_head()?;
            if self.in_use() == 0 {
                self.next = 0;
            }
        }
        if self.next + len > self.shape.room() {
            self.next = 0;
        }
        let at = self.next;
        self.next += len;
        self.reach = self.reach.max(self.next);
        Ok(at)
    }

    /// Records that a CHUNK message was sent over the socket. Messages published from now on wait
    /// for that CHUNK message.
    pub(crate) fn chunk_sent(&mut self) {
        self.chunks = self.chunks.wrapping_add(1);
    }

    /// Whether a message was written but not published.
    pub(crate) fn has_unpublished(&self) -> bool {
        self.published != self.written
    }

    /// Makes written messages visible to the peer. If the peer must be woken, returns the value
    /// with which the peer announced its wait, and otherwise 0.
    pub(crate) fn publish(&mut self) -> u64 {
        if !self.has_unpublished() {
            return 0;
        }
        self.published = self.written;
        self.word(CHUNKS).store(self.chunks, Ordering::Relaxed);
        self.word(TAIL).store(self.written, Ordering::Release);
        wait_flag::must_wake(self.word(WAITING))
    }

    /// Whether the receiver has posted all slots again, so that no slot holds a message. Only this
    /// end writes to slots, so a drained ring stays drained until this end writes.
    fn is_drained(&self) -> bool {
        self.published == self.written && self.word(HEAD).load(Ordering::Acquire) == self.written
    }

    /// Goes back to the front if the ring holds no messages. If more pages have been touched than
    /// the next message needs, returns the memory and the number of bytes to keep.
    pub(crate) fn rest(&mut self) -> Option<(&W, usize)> {
        if !self.is_drained() {
            return None;
        }
        self.next = 0;
        let front = self.shape.slots_at() * 8;
        let keep = (front + LINE).next_multiple_of(PAGE);
        let more = front + std::mem::take(&mut self.reach) > keep;
        more.then_some((&self.memory, keep))
    }

    /// Tells the peer the time at which this end wakes it.
    pub(crate) fn set_woken_at(&self, nanos: u64) {
        self.word(WOKEN_AT).store(nanos, Ordering::Relaxed);
    }

    /// The processor that the peer last ran on, according to the peer.
    pub(crate) fn peer_runs_on(&self) -> u64 {
        self.word(CPU).load(Ordering::Relaxed)
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.memory.words()[index]
    }
}

/// The processor that this thread runs on, counted from 1, because a new ring holds 0.
pub(crate) fn processor() -> u64 {
    // The C library keeps the number in memory (rseq). rustix would call the kernel's vDSO, which
    // does not exist under valgrind. SAFETY: no arguments, and nothing is written to; this rests on
    // no rule.
    let processor = unsafe { libc::sched_getcpu() };
    // If the number is unknown (-1), return 0, the value in a new ring, so that both ends wait and
    // do not poll.
    u64::try_from(processor).map_or(0, |processor| processor + 1)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;

    use super::*;
    use Ordering::Relaxed;

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
        pair_of(SHAPE)
    }

    fn pair_of(shape: Shape) -> (Writer<Memory>, Reader<Memory>, Memory) {
        let memory = memory(shape);
        let writer = Writer::new(memory.clone(), shape).unwrap();
        (writer, Reader::new(memory.clone(), shape).unwrap(), memory)
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
        // Counts that run backwards delay nothing.
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

    /// Messages of all lengths, with up to all slots in use, do not overlap, and the ring is long
    /// enough for them.
    #[test]
    fn messages_in_use_keep_apart() {
        const SHAPE: Shape = Shape { slots: 5, slot_size: 192 };
        let (mut writer, mut reader, memory) = pair_of(SHAPE);
        let mut in_use = VecDeque::new();
        let (mut wraps, mut before) = (0, 0);
        for n in 0_u64..100_000 {
            let random = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let message = vec![n as u8; (random >> 33) as usize % 193];
            if writer.put(&message).unwrap() == Put::Done {
                let place =
                    RingPlace::of(memory[PLACES + SHAPE.index(writer.written - 1)].load(Relaxed));
                wraps += u32::from(place.at < before);
                before = place.at;
                in_use.push_back((place, message));
            }
            writer.publish();
            let places = || in_use.iter().filter(|(place, _)| place.len > 0);
            for (i, (a, _)) in places().enumerate() {
                assert!((a.at + a.len) as usize <= SHAPE.room());
                for (b, _) in places().skip(i + 1) {
                    assert!(a.at + a.len <= b.at || b.at + b.len <= a.at, "{a:?} and {b:?}");
                }
            }
            // The reader lags by up to all slots for some time.
            while in_use.len() as u64 > (n / 100) % 6 {
                let (_, message) = in_use.pop_front().unwrap();
                assert_eq!(take(&mut reader).unwrap().1, message);
                reader.free(|_| true);
            }
        }
        assert!(wraps > 1_000, "{wraps}");
    }

    /// Messages that are sent one at a time stay on the first page. The other pages are freed once
    /// the messages in them are read.
    #[test]
    fn few_messages_need_one_page() {
        const SHAPE: Shape = Shape { slots: 32, slot_size: 4096 };
        let (mut writer, mut reader, memory) = pair_of(SHAPE);
        let mut send = |writer: &mut Writer<Memory>, len, held: bool| {
            writer.put(&vec![1; len]).unwrap();
            writer.publish();
            take(&mut reader).unwrap();
            if !held {
                reader.free(|_| true);
            }
        };
        let used =
            |memory: &Memory| memory.iter().rposition(|word| word.load(Relaxed) == u64::MAX / 255);
        for _ in 0..1_000 {
            send(&mut writer, 200, false);
        }
        assert!(used(&memory).is_some_and(|last| last < PAGE / 8));
        assert!(writer.rest().is_none(), "nothing to give back");
        for _ in 0..31 {
            send(&mut writer, 200, true);
        }
        assert!(used(&memory).is_some_and(|last| last >= PAGE / 8));
        assert!(writer.rest().is_none(), "all are held");
        send(&mut writer, 200, false);
        assert_eq!(writer.rest().map(|(_, keep)| keep), Some(PAGE));
        assert!(writer.rest().is_none(), "given back already");
        send(&mut writer, 4096, false);
        assert_eq!(writer.rest().map(|(_, keep)| keep), Some(PAGE));
    }

    /// Pages may be freed once no slot holds a message, published or not.
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
        let mut next = |at, len| {
            memory[PLACES].store(RingPlace { at, len }.word(), Ordering::Relaxed);
            reader.next(0).map(|message| message.is_some())
        };
        for len in [65, u32::MAX] {
            assert_eq!(next(0, len), Err(RingBreach::Length { len, slot_size: 64 }));
        }
        for (at, len) in [(8, 8), (320, 1), (u32::MAX, 64), (!63, 64)] {
            assert_eq!(next(at, len), Err(RingBreach::Place { at, len, room: 320 }));
        }
        assert_eq!(next(256, 64), Ok(true), "the last place");
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
