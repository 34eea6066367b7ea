//! The send queue, which tracks the work requests in flight, their signals, and the memory that
//! they own.
//!
//! A queue pair completes its work in order, and reports completions of signalled requests only.
//! Such a completion covers all earlier requests. A request's place and memory become free when its
//! own completion or a later completion is reported.

use std::collections::VecDeque;

use tonic_rdma_memory::{PinnedBuf, PinnedBytes};

use crate::error::Verb;

/// The memory that a work request keeps from being reused until the request is done (R10).
#[derive(Debug)]
pub(crate) enum HeldMemory {
    /// A SEND slot, which is part of the control block.
    Slot,
    /// Staging, which is also part of the control block, but scarce.
    Staging,
    /// Frozen pool memory.
    Bytes(#[allow(dead_code, reason = "held, not read")] PinnedBytes),
    /// A pool buffer.
    Buf(#[allow(dead_code, reason = "held, not read")] PinnedBuf),
}

#[derive(Debug)]
struct QueueEntry {
    id: u64,
    verb: Verb,
    signalled: bool,
    urgent: bool,
    _held: HeldMemory,
}

/// The work requests of one send queue.
#[derive(Debug)]
pub(crate) struct SendQueue {
    depth: usize,
    /// The number of consecutive requests of which one is signalled.
    signal_interval: u32,
    /// The number of requests since the last signalled request.
    unsignalled: u32,
    /// Whether one of the unsignalled requests holds pool memory or staging.
    holds_memory: bool,
    /// Sequence number of the first entry.
    first: u64,
    entries: VecDeque<QueueEntry>,
    /// Number of SEND slots of the block.
    send_slots: usize,
    /// Number of entries in flight that hold pool memory or staging, or whose completion was
    /// requested.
    urgent: usize,
    /// The kind of work of the probe in flight, if any. A probe completes independently of the
    /// entries: over iWARP it is a READ, which later SENDs may overtake.
    probe: Option<Verb>,
}

impl SendQueue {
    #[inline]
    pub(crate) fn new(depth: usize, send_slots: u32) -> SendQueue {
        let signal_interval = (depth / 4).min(send_slots as usize / 2).clamp(1, 16);
        // If the depth is a power of two, the interval divides it, so the last request of a full
        // queue is signalled.
        let signal_interval = 1 << signal_interval.ilog2();
        SendQueue {
            depth,
            signal_interval: signal_interval as u32,
            unsignalled: 0,
            holds_memory: false,
            first: 0,
            entries: VecDeque::with_capacity(depth),
            send_slots: send_slots as usize,
            urgent: 0,
            probe: None,
        }
    }

    /// Whether the next completion has to wake the link, because payload or a probe is in flight, a
    /// completion was requested, or slots or places run short. Otherwise completions stay in the
    /// queue until something else wakes the link, so a small call costs no wake-up for its own
    /// SEND.
    #[inline]
    pub(crate) fn is_waited_for(&self) -> bool {
        let used = self.entries.len();
        self.urgent > 0
            || self.probe.is_some()
            || used * 2 > self.send_slots
            || used * 2 > self.depth
    }

    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.depth - self.entries.len() - usize::from(self.probe.is_some())
    }

    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.entries.len()
    }

    /// Takes a place and returns the sequence number of the request. The caller has checked that
    /// there is [`room`](Self::room).
    #[inline]
    pub(crate) fn push(&mut self, id: u64, verb: Verb, held: HeldMemory, signal: bool) -> u64 {
        let seq = self.first + self.entries.len() as u64;
        self.holds_memory |= !matches!(held, HeldMemory::Slot);
        self.unsignalled += 1;
        let signalled = signal || self.unsignalled >= self.signal_interval;
        if signalled {
            self.unsignalled = 0;
            self.holds_memory = false;
        }
        let urgent = signal || !matches!(held, HeldMemory::Slot);
        self.urgent += usize::from(urgent);
        self.entries.push_back(QueueEntry { id, verb, signalled, urgent, _held: held });
        seq
    }

    /// Takes a place for a probe. Returns false if a probe is already in flight, or if there is no
    /// room.
    #[cfg(any(test, all(target_os = "linux", feature = "verbs")))]
    pub(crate) fn begin_probe(&mut self, verb: Verb) -> bool {
        let begins = self.probe.is_none() && self.room() > 0;
        if begins {
            self.probe = Some(verb);
        }
        begins
    }

    /// Frees the place of a completed probe, and returns the probe's kind of work.
    #[cfg(any(test, all(target_os = "linux", feature = "verbs")))]
    pub(crate) fn end_probe(&mut self) -> Option<Verb> {
        self.probe.take()
    }

    /// Ends a batch. If unsignalled work holds pool memory or staging, the last request becomes
    /// signalled.
    #[inline]
    pub(crate) fn end_batch(&mut self) {
        if self.holds_memory
            && let Some(last) = self.entries.back_mut()
        {
            last.signalled = true;
            self.unsignalled = 0;
            self.holds_memory = false;
        }
    }

    #[inline]
    pub(crate) fn is_signalled(&self, seq: u64) -> bool {
        self.entry(seq).is_some_and(|e| e.signalled)
    }

    /// The kind of work, for error messages.
    #[inline]
    pub(crate) fn verb(&self, seq: u64) -> Verb {
        self.entry(seq).map_or(Verb::SendOrWrite, |e| e.verb)
    }

    fn entry(&self, seq: u64) -> Option<&QueueEntry> {
        self.entries.get(usize::try_from(seq.checked_sub(self.first)?).ok()?)
    }

    /// Frees the places and the memory of a completed request and of all earlier requests. Returns
    /// the request's id, or `None` if the request is not in flight.
    #[inline]
    pub(crate) fn complete(&mut self, seq: u64) -> Option<u64> {
        let count = usize::try_from(seq.checked_sub(self.first)?).ok()?.checked_add(1)?;
        let id = self.entries.get(count - 1)?.id;
        self.urgent -= self.entries.drain(..count).filter(|e| e.urgent).count();
        self.first = seq + 1;
        Some(id)
    }

    /// Forgets all work. Call this function only when the device can no longer access the memory of
    /// that work.
    #[cfg(feature = "test-util")]
    #[inline]
    pub(crate) fn clear(&mut self) {
        self.first += self.entries.len() as u64;
        self.entries.clear();
        self.urgent = 0;
        self.unsignalled = 0;
        self.holds_memory = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(q: &mut SendQueue, id: u64, held: HeldMemory) -> u64 {
        q.push(id, Verb::Send, held, false)
    }

    #[test]
    fn a_quarter_of_the_queue_and_half_of_the_slots_are_the_most_that_go_unsignalled() {
        for (depth, slots, signal_interval) in [
            (4, 64, 1),
            (16, 64, 4),
            (128, 64, 16),
            (128, 8, 4),
            (128, 11, 4),
            (1024, 1024, 16),
            (8, 1, 1),
        ] {
            let mut q = SendQueue::new(depth, slots);
            let seqs: Vec<u64> =
                (0..depth as u64).map(|id| push(&mut q, id, HeldMemory::Slot)).collect();
            let signalled: Vec<u64> = seqs.into_iter().filter(|seq| q.is_signalled(*seq)).collect();
            assert_eq!(q.room(), 0);
            assert_eq!(signalled.len(), depth / signal_interval, "depth {depth}, slots {slots}");
            assert_eq!(
                signalled.last(),
                Some(&(depth as u64 - 1)),
                "a full queue frees itself whole"
            );
        }
    }

    #[test]
    fn a_completion_frees_all_before_it() {
        let mut q = SendQueue::new(16, 64);
        for id in 100..110 {
            push(&mut q, id, HeldMemory::Slot);
        }
        assert_eq!(q.complete(3), Some(103));
        assert_eq!(q.room(), 10);
        assert_eq!(q.complete(3), None, "not twice");
        assert_eq!(q.complete(42), None, "never posted");
        assert_eq!(q.complete(9), Some(109));
        assert_eq!(q.room(), 16);
        assert_eq!(push(&mut q, 7, HeldMemory::Slot), 10);
        assert_eq!(q.complete(10), Some(7));
    }

    #[test]
    fn a_batch_that_holds_memory_ends_signalled() {
        let mut q = SendQueue::new(128, 64);
        push(&mut q, 1, HeldMemory::Staging);
        let last = push(&mut q, 2, HeldMemory::Slot);
        assert!(!q.is_signalled(last));
        q.end_batch();
        assert!(q.is_signalled(last));
        let slot = push(&mut q, 3, HeldMemory::Slot);
        q.end_batch();
        assert!(!q.is_signalled(slot), "SEND slots alone do not cost a completion");
    }

    #[test]
    fn a_request_for_a_completion_is_signalled_and_counts() {
        let mut q = SendQueue::new(16, 64);
        push(&mut q, 1, HeldMemory::Slot);
        let seq = q.push(2, Verb::Send, HeldMemory::Slot, true);
        assert!(q.is_signalled(seq));
        let next = (0..4).map(|id| push(&mut q, id, HeldMemory::Slot)).collect::<Vec<_>>();
        assert_eq!(
            next.iter().map(|s| q.is_signalled(*s)).collect::<Vec<_>>(),
            [false, false, false, true]
        );
    }

    #[test]
    fn payload_requested_completions_and_a_half_full_queue_are_waited_for() {
        let mut q = SendQueue::new(128, 8);
        for id in 0..4 {
            push(&mut q, id, HeldMemory::Slot);
            assert!(!q.is_waited_for());
        }
        push(&mut q, 4, HeldMemory::Slot);
        assert!(q.is_waited_for(), "more than half of the SEND slots");
        q.complete(4);
        assert!(!q.is_waited_for());
        push(&mut q, 5, HeldMemory::Staging);
        assert!(q.is_waited_for());
        q.complete(5);
        q.push(6, Verb::Send, HeldMemory::Slot, true);
        assert!(q.is_waited_for());
        q.complete(6);
        assert!(!q.is_waited_for());
    }

    #[test]
    fn a_probe_takes_a_place_and_is_waited_for() {
        let mut q = SendQueue::new(4, 64);
        assert!(q.begin_probe(Verb::Read) && !q.begin_probe(Verb::Read), "one at a time");
        assert!(q.is_waited_for());
        let last = (0..3).map(|id| push(&mut q, id, HeldMemory::Slot)).last().unwrap();
        assert_eq!(q.room(), 0);
        // The completion of a SEND that overtakes the probe does not cover the probe.
        assert_eq!(q.complete(last), Some(2));
        assert!(q.is_waited_for());
        assert_eq!((q.end_probe(), q.end_probe()), (Some(Verb::Read), None));
        assert!(!q.is_waited_for());
        for id in 0..4 {
            push(&mut q, id, HeldMemory::Slot);
        }
        assert!(!q.begin_probe(Verb::Write), "the queue is full");
    }

    #[test]
    fn clear_keeps_the_numbering() {
        let mut q = SendQueue::new(16, 64);
        push(&mut q, 1, HeldMemory::Slot);
        q.clear();
        assert_eq!(q.in_flight(), 0);
        assert_eq!(q.complete(0), None);
        assert_eq!(push(&mut q, 2, HeldMemory::Slot), 1);
    }
}
