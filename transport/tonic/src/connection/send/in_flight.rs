//! SEND slots and WRITEs in flight. Work completes in order, so the slots form a ring.
//!
//! A slot is in flight until a completion covers its work, and is then free again. Memory that is
//! not pinned is copied into staging before it is written. Staging consists of blocks that the pool
//! [can spare](Pool::spare), or of a SEND slot if the pool can spare no block.
//!
//! A link may have few SEND slots at rest, and more SEND slots while streams are open. The memory
//! of the additional slots is returned only while nothing is in flight. In the states marked with a
//! star, every SEND reports its completion, because no later work would free the SEND's slot soon.
//!
//! | from | on | to |
//! |---|---|---|
//! | Few* | work with a stream open | Wanted |
//! | Wanted* | the link has leased memory for all slots | All |
//! | Few*, Wanted* | the connection has been at rest for a while | Few |
//! | All | the connection has been at rest for a while | Draining |
//! | Draining* | work with a stream open | All |
//! | Draining* | the link has returned the memory | Few |
//!
//! A link whose number of slots is fixed stays in Fixed.

use std::collections::VecDeque;

use tonic_rdma_fabric::LinkConfig;
use tonic_rdma_memory::{PinnedBuf, Pool};

#[derive(Debug)]
enum WorkKind {
    Slot,
    /// A WRITE from a staging block or from a SEND slot.
    Staged {
        len: usize,
        block: bool,
    },
    Pinned {
        len: usize,
    },
}

/// The SEND slots that the link has, and the SEND slots that it should have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slots {
    /// The number of slots never changes.
    Fixed,
    /// The slots of a connection at rest.
    Few,
    /// The slots of a connection at rest. The link should lease memory for all slots.
    Wanted,
    All,
    /// All slots. The link should return the memory of the slots that a connection at rest does not
    /// have.
    Draining,
}

#[derive(Debug)]
pub(crate) struct InFlight {
    /// Bytes of a slot: the current value, at rest, and on a busy connection.
    slot_size: usize,
    rest_size: usize,
    busy_size: usize,
    slots: usize,
    state: Slots,
    /// The next free slot.
    next: usize,
    /// Number of slots in flight.
    used: usize,
    staging: Staging,
    in_flight: VecDeque<(u64, WorkKind)>,
    next_id: u64,
    /// Bytes of WRITEs in flight.
    writing: usize,
}

#[derive(Debug)]
struct Staging {
    /// Bytes of a staging block.
    size: usize,
    /// Maximum number of staging blocks in flight.
    max: usize,
    used: usize,
    /// A block that was taken from the pool but not used yet.
    next: Option<PinnedBuf>,
}

/// The destination for a copy of memory that is not pinned.
#[derive(Debug)]
pub(crate) enum StagingSpot {
    /// A block from the pool.
    Block(PinnedBuf),
    /// A SEND slot, at this offset in the link's block.
    Slot(usize),
}

impl InFlight {
    /// Creates the state of a link without work, which uses at most `blocks` staging blocks of
    /// `block_size` bytes.
    pub(crate) fn new(link: &LinkConfig, blocks: usize, block_size: usize) -> Self {
        InFlight {
            slot_size: link.rest_send() as usize,
            rest_size: link.rest_send() as usize,
            busy_size: link.slot_size as usize,
            slots: link.send_slots as usize,
            state: if link.busy_send_slots > 0 { Slots::Few } else { Slots::Fixed },
            next: 0,
            used: 0,
            staging: Staging { size: block_size, max: blocks, used: 0, next: None },
            in_flight: VecDeque::new(),
            next_id: 0,
            writing: 0,
        }
    }

    /// Records that work is about to be queued. `streams` says whether streams are open. If this
    /// returns true, the caller should first lease memory for all SEND slots, and then call
    /// [`resized`](Self::resized).
    #[inline]
    pub(crate) fn wants_slots(&mut self, streams: bool) -> bool {
        match self.state {
            Slots::All | Slots::Fixed => return false,
            Slots::Few if streams => self.state = Slots::Wanted,
            Slots::Draining if streams => self.state = Slots::All,
            Slots::Few | Slots::Wanted | Slots::Draining => {}
        }
        self.state == Slots::Wanted
    }

    /// Whether the next SEND has to report its completion.
    #[inline]
    pub(crate) fn must_report(&self) -> bool {
        !matches!(self.state, Slots::All | Slots::Fixed)
    }

    /// Records that the connection has been at rest for a while. Returns true if the link is to
    /// return memory while work is still in flight. A message must then be sent, whose completion
    /// also covers this work.
    pub(crate) fn rest(&mut self) -> bool {
        self.state = match self.state {
            Slots::Few | Slots::Wanted => Slots::Few,
            Slots::All | Slots::Draining => Slots::Draining,
            Slots::Fixed => Slots::Fixed,
        };
        self.state == Slots::Draining && !self.is_idle()
    }

    /// Whether the caller should return the memory of the extra SEND slots, and then call
    /// [`resized`](Self::resized).
    #[inline]
    pub(crate) fn spares_slots(&self) -> bool {
        self.state == Slots::Draining && self.is_idle()
    }

    /// Records that the link now has this many SEND slots, in other memory. SEND slots of the rest
    /// state that are still in flight stay counted until their work completes, so the new slots
    /// also form a ring.
    pub(crate) fn resized(&mut self, slots: u32) {
        self.state = match self.state {
            Slots::Wanted | Slots::All => Slots::All,
            Slots::Draining | Slots::Few => Slots::Few,
            Slots::Fixed => Slots::Fixed,
        };
        self.slot_size = match self.state {
            Slots::All => self.busy_size,
            _ => self.rest_size,
        };
        self.slots = slots as usize;
        self.next = 0;
    }

    /// Offset of the next free SEND slot.
    #[inline]
    pub(crate) fn slot(&self) -> Option<usize> {
        (self.used < self.slots).then_some(self.next * self.slot_size)
    }

    #[inline]
    pub(crate) fn slot_size(&self) -> usize {
        self.slot_size
    }

    /// Number of bytes that can be staged for one WRITE. Takes a block from the pool if no block is
    /// ready.
    pub(crate) fn staging_room(&mut self, pool: &Pool) -> usize {
        let slot = self.slot();
        let staging = &mut self.staging;
        if staging.next.is_none() && staging.used < staging.max {
            staging.next = pool.spare(staging.size);
        }
        match (&staging.next, staging.used, slot) {
            (Some(block), _, _) => block.capacity(),
            // Wait for a block or a slot that is in flight, because it will soon be free.
            (None, 1.., _) | (None, 0, None) => 0,
            (None, 0, Some(_)) => self.slot_size,
        }
    }

    /// Returns the memory in which the next bytes are to be staged, or `None` if no memory is free.
    /// Call [`staging_room`](Self::staging_room) first.
    pub(crate) fn stage(&mut self) -> Option<StagingSpot> {
        match self.staging.next.take() {
            Some(block) => Some(StagingSpot::Block(block)),
            None => self.slot().map(StagingSpot::Slot),
        }
    }

    /// Returns an unused block to the pool.
    #[inline]
    pub(crate) fn return_unused(&mut self) {
        self.staging.next = None;
    }

    #[inline]
    pub(crate) fn writing(&self) -> usize {
        self.writing
    }

    /// Whether nothing is in flight.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    fn begin(&mut self, kind: WorkKind) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.in_flight.push_back((id, kind));
        id
    }

    fn take_slot(&mut self) {
        self.next = (self.next + 1) % self.slots;
        self.used += 1;
    }

    /// Puts the slot from [`InFlight::slot`] in flight.
    #[inline]
    pub(crate) fn send(&mut self) -> u64 {
        self.take_slot();
        self.begin(WorkKind::Slot)
    }

    /// Puts the place from [`InFlight::stage`] in flight, with `len` bytes.
    pub(crate) fn write_staged(&mut self, len: usize, stage: &StagingSpot) -> u64 {
        let block = matches!(stage, StagingSpot::Block(_));
        match block {
            true => self.staging.used += 1,
            false => self.take_slot(),
        }
        self.writing += len;
        self.begin(WorkKind::Staged { len, block })
    }

    /// Puts `len` bytes of pinned memory in flight. The link keeps the memory alive.
    pub(crate) fn write_pinned(&mut self, len: usize) -> u64 {
        self.writing += len;
        self.begin(WorkKind::Pinned { len })
    }

    /// Records that work `id` and all work before it have completed.
    #[inline]
    pub(crate) fn done(&mut self, id: u64) {
        while self.in_flight.front().is_some_and(|(first, _)| *first <= id) {
            match self.in_flight.pop_front() {
                Some((_, WorkKind::Slot)) => self.used -= 1,
                Some((_, WorkKind::Staged { len, block })) => {
                    match block {
                        true => self.staging.used -= 1,
                        false => self.used -= 1,
                    }
                    self.writing -= len;
                }
                Some((_, WorkKind::Pinned { len })) => self.writing -= len,
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tonic_rdma_memory::{HeapRegistrar, PoolConfig};

    use super::*;

    fn sends() -> InFlight {
        InFlight::new(
            &LinkConfig { send_slots: 2, slot_size: 512, ..LinkConfig::default() },
            2,
            1024,
        )
    }

    #[test]
    fn slots_are_added_for_streams_and_returned_at_rest() {
        let link = LinkConfig { send_slots: 1, busy_send_slots: 3, ..LinkConfig::default() };
        let link = LinkConfig { slot_size: 512, rest_send_size: 256, ..link };
        let mut s = InFlight::new(&link, 2, 1024);
        assert_eq!(s.slot_size(), 256);
        assert!(s.must_report() && !s.wants_slots(false), "a PING needs one slot");
        let ping = s.send();
        assert_eq!(s.slot(), None);
        assert!(s.wants_slots(true) && s.wants_slots(false), "until it has them");
        assert!(s.must_report(), "the pool may have no memory");
        s.resized(3);
        assert_eq!(s.slot_size(), 512);
        assert!(!s.must_report() && !s.wants_slots(true) && !s.spares_slots());
        let second = [(); 2].map(|()| s.send())[1];
        assert_eq!(s.slot(), None, "the PING is in flight");
        s.done(ping);
        assert_eq!(s.slot(), Some(1024));
        let third = s.send();
        assert_eq!(s.slot(), None);
        s.done(second);
        assert_eq!(s.slot(), Some(0));
        s.done(third);
        let last = [(); 3].map(|()| s.send())[2];
        assert_eq!(s.slot(), None);
        s.done(last - 1);
        assert!(s.rest() && s.must_report() && !s.spares_slots(), "one is in flight");
        // A stream that opens during the drain keeps the slots.
        assert!(!s.wants_slots(true) && !s.must_report());
        s.done(last);
        assert!(!s.spares_slots());
        assert!(!s.rest() && s.spares_slots());
        s.resized(1);
        assert_eq!((s.slot(), s.slot_size()), (Some(0), 256));
        assert!(!s.rest() && !s.spares_slots() && s.must_report());
        // At rest, the link no longer wants slots that the pool could not provide.
        assert!(s.wants_slots(true) && !s.rest() && !s.wants_slots(false));
    }

    #[test]
    fn a_fixed_number_of_slots_stays() {
        let mut s = sends();
        let first = s.send();
        assert!(!s.wants_slots(true) && !s.rest() && !s.must_report());
        s.done(first);
        assert!(!s.rest() && !s.spares_slots());
    }

    fn pool() -> Pool {
        Pool::new(PoolConfig::default(), Arc::new(HeapRegistrar::default())).unwrap()
    }

    #[test]
    fn slots_and_blocks_fill_and_empty_in_order() {
        let (mut s, pool) = (sends(), pool());
        assert_eq!(s.slot(), Some(0));
        let a = s.send();
        let stage = |s: &mut InFlight| {
            assert_eq!(s.staging_room(&pool), 1024);
            let stage = s.stage().unwrap();
            assert!(matches!(stage, StagingSpot::Block(_)));
            stage
        };
        let first = stage(&mut s);
        let b = s.write_staged(10, &first);
        assert_eq!((s.slot(), s.writing()), (Some(512), 10));
        s.write_pinned(7);
        let d = s.send();
        let second = stage(&mut s);
        s.write_staged(1, &second);
        assert_eq!((s.slot(), s.staging_room(&pool)), (None, 0));
        s.done(a);
        assert_eq!(s.slot(), Some(0));
        s.done(b);
        assert_eq!((s.staging_room(&pool), s.writing()), (1024, 8));
        s.done(d);
        assert_eq!(s.slot(), Some(0));
        assert!(!s.is_idle());
        s.done(u64::MAX);
        assert!(s.is_idle());
        assert_eq!(s.writing(), 0);
        drop((first, second));
        let used = pool.stats().control;
        s.return_unused();
        assert_eq!(
            (used, pool.stats().control),
            (4096, 0),
            "a block in a page of its own, given back"
        );
    }

    #[test]
    fn without_spare_memory_a_slot_is_staged_in() {
        let (mut s, pool) = (sends(), pool());
        let mut all = Vec::new();
        while let Some(buf) = pool.spare(1 << 20) {
            all.push(buf);
        }
        while let Some(buf) = pool.spare(4096) {
            all.push(buf);
        }
        let budget = pool.config().control;
        assert_eq!(
            pool.stats().control / 4096,
            (budget - budget / 4) / 4096,
            "a quarter is left alone"
        );
        assert_eq!(s.staging_room(&pool), 512);
        let Some(stage @ StagingSpot::Slot(0)) = s.stage() else { panic!("the first slot") };
        let a = s.write_staged(100, &stage);
        assert_eq!((s.slot(), s.writing()), (Some(512), 100));
        s.send();
        assert_eq!((s.slot(), s.staging_room(&pool)), (None, 0));
        s.done(a);
        assert_eq!((s.slot(), s.writing()), (Some(0), 0));
    }
}
