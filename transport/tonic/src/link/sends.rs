//! SEND slots and staging blocks of the control block. Work completes in order, so both are rings.
//!
//! A slot or block is free, in flight, and free again when a completion covers its work.

use std::collections::VecDeque;

use tonic_rdma_fabric::LinkConfig;

#[derive(Debug)]
enum Kind {
    Slot,
    Staged { len: usize },
    Pinned { len: usize },
}

#[derive(Debug)]
pub(super) struct Sends {
    slot_size: usize,
    slots: Ring,
    /// Where staging begins in the block.
    staging_at: usize,
    block_size: usize,
    blocks: Ring,
    in_flight: VecDeque<(u64, Kind)>,
    next_id: u64,
    /// Bytes of WRITEs in flight.
    writing: usize,
}

#[derive(Debug)]
struct Ring {
    len: usize,
    next: usize,
    used: usize,
}

impl Ring {
    fn peek(&self) -> Option<usize> {
        (self.used < self.len).then_some(self.next)
    }

    fn take(&mut self) {
        self.next = (self.next + 1) % self.len;
        self.used += 1;
    }
}

impl Sends {
    pub(super) fn new(link: &LinkConfig, block_size: usize) -> Self {
        let ring = |len| Ring { len, next: 0, used: 0 };
        Sends {
            slot_size: link.slot_size as usize,
            slots: ring(link.send_slots as usize),
            staging_at: link.send_slots as usize * link.slot_size as usize,
            block_size,
            blocks: ring(link.staging / block_size),
            in_flight: VecDeque::new(),
            next_id: 0,
            writing: 0,
        }
    }

    /// Offset of the next free SEND slot.
    pub(super) fn slot(&self) -> Option<usize> {
        self.slots.peek().map(|n| n * self.slot_size)
    }

    pub(super) fn slot_size(&self) -> usize {
        self.slot_size
    }

    /// Offset of the next free staging block.
    pub(super) fn staging(&self) -> Option<usize> {
        self.blocks.peek().map(|n| self.staging_at + n * self.block_size)
    }

    /// Bytes that the next staging block takes.
    pub(super) fn staging_room(&self) -> usize {
        if self.blocks.peek().is_some() { self.block_size } else { 0 }
    }

    pub(super) fn writing(&self) -> usize {
        self.writing
    }

    /// Nothing is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    fn begin(&mut self, kind: Kind) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.in_flight.push_back((id, kind));
        id
    }

    /// The slot from [`Sends::slot`] goes into flight.
    pub(super) fn send(&mut self) -> u64 {
        self.slots.take();
        self.begin(Kind::Slot)
    }

    /// The block from [`Sends::staging`] goes into flight with `len` bytes.
    pub(super) fn write_staged(&mut self, len: usize) -> u64 {
        self.blocks.take();
        self.writing += len;
        self.begin(Kind::Staged { len })
    }

    /// `len` bytes of pinned memory go into flight; the link keeps them alive.
    pub(super) fn write_pinned(&mut self, len: usize) -> u64 {
        self.writing += len;
        self.begin(Kind::Pinned { len })
    }

    /// Work `id` and all before it is done.
    pub(super) fn done(&mut self, id: u64) {
        while self.in_flight.front().is_some_and(|(first, _)| *first <= id) {
            match self.in_flight.pop_front() {
                Some((_, Kind::Slot)) => self.slots.used -= 1,
                Some((_, Kind::Staged { len })) => {
                    self.blocks.used -= 1;
                    self.writing -= len;
                }
                Some((_, Kind::Pinned { len })) => self.writing -= len,
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_fill_and_empty_in_order() {
        let link = LinkConfig { send_slots: 2, slot_size: 512, staging: 2048, ..LinkConfig::default() };
        let mut s = Sends::new(&link, 1024);
        assert_eq!((s.slot(), s.staging()), (Some(0), Some(1024)));
        let a = s.send();
        let b = s.write_staged(10);
        assert_eq!((s.slot(), s.staging(), s.writing()), (Some(512), Some(2048), 10));
        s.write_pinned(7);
        let d = s.send();
        s.write_staged(1);
        assert_eq!((s.slot(), s.staging_room()), (None, 0));
        s.done(a);
        assert_eq!(s.slot(), Some(0));
        s.done(b);
        assert_eq!((s.staging(), s.writing()), (Some(1024), 8));
        s.done(d);
        assert_eq!(s.slot(), Some(0));
        assert!(!s.is_idle());
        s.done(u64::MAX);
        assert!(s.is_idle());
        assert_eq!(s.writing(), 0);
    }
}
