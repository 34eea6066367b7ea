//! The control block of a connection: RECV ring, SEND slots and staging, with slots that are added
//! and removed with the load. The crate docs describe the block's layout.
//!
//! The SEND slots of a busy connection lie in separate memory, and replace the SEND slots next to
//! the RECV ring, so that all slots in use are one range.
//!
//! The RECVs of the ring may be shorter than the extra RECVs. If so, the RECVs of the ring are left
//! out while extra RECVs are posted. Messages fill RECVs in turn, so otherwise no message could be
//! longer than the shortest RECV.
//!
//! | a RECV slot that is | becomes | by |
//! |---|---|---|
//! | posted | held | its completion |
//! | held | posted | `mark_posted` |
//! | held, in a ring of short slots, while extra ones are posted | left out | `retire` |
//! | left out | held | `rejoin` |
//! | held, extra and to be removed | absent | `retire` |
//! | absent | held | `revive` |

// The shared-memory provider neither adds RECVs nor takes work from the block by address.
#![cfg_attr(not(any(feature = "test-util", feature = "verbs")), allow(dead_code))]

use std::ptr::NonNull;

use tonic_rdma_memory::{PinnedBuf, Pool};

use crate::error::ConnectError;
use crate::link_config::LinkConfig;

/// The state of a RECV slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    /// The device may write into the slot.
    Posted,
    /// Holds a message of this many bytes, for the driver to read.
    Held(u32),
    /// A slot of the ring that is not in use.
    LeftOut,
    /// An extra slot that is not in use.
    Absent,
}

/// The memory of the extra RECV slots.
#[derive(Debug)]
struct ExtraSlots {
    base: NonNull<u8>,
    lkey: u32,
    /// Number of slots in this memory.
    slots: u32,
    /// Whether the slots in this memory are being removed, so that they are not posted again.
    retiring: bool,
    /// Number of extra slots that are absent.
    absent: u32,
    /// Keeps the memory.
    _buf: PinnedBuf,
}

/// The memory of the SEND slots of a busy connection.
#[derive(Debug)]
struct BusySends {
    base: NonNull<u8>,
    lkey: u32,
    /// Keeps the memory.
    _buf: PinnedBuf,
}

/// Owns the block and knows which RECV slots may be read.
///
/// The whole block is reached through `base`, never through a reference to all of it: the device
/// writes into posted slots at any time, so no Rust reference may cover them.
#[derive(Debug)]
pub(crate) struct ControlBlock {
    base: NonNull<u8>,
    lkey: u32,
    recv_bytes: usize,
    block_bytes: usize,
    busy_sends: Option<BusySends>,
    /// Number of SEND slots at rest, and when busy.
    sends: (u32, u32),
    slot_size: u32,
    /// Number of slots in the RECV ring. Later slots are extra slots.
    ring: u32,
    ring_size: u32,
    slots: Vec<Slot>,
    extra: Option<ExtraSlots>,
    /// Keeps the memory. The block is addressed only through `base`.
    _buf: PinnedBuf,
}

// SAFETY: each `base` points into the `_buf` beside it, which is uniquely owned and Send; the
// pointer is used through &self and &mut self under the rules of the methods below, from whichever
// thread owns the block.
unsafe impl Send for ControlBlock {}
// SAFETY: through &self only slots that are Held can be read, and no method of &self makes anything
// writable.
unsafe impl Sync for ControlBlock {}

impl ControlBlock {
    /// Takes the block from the pool's control budget. RECV slots count as held until they are
    /// posted.
    #[inline]
    pub(crate) fn new(pool: &Pool, config: &LinkConfig) -> Result<ControlBlock, ConnectError> {
        let mut slots = vec![Slot::Held(0); config.recv_slots as usize];
        slots.resize(config.max_recvs() as usize, Slot::Absent);
        ControlBlock::with(pool, config, config.recv_bytes(), slots)
    }

    /// Like [`new`](Self::new), but with SEND slots and staging only, and no RECV slots.
    #[cfg(all(target_os = "linux", feature = "shm"))]
    pub(crate) fn without_recvs(
        pool: &Pool,
        config: &LinkConfig,
    ) -> Result<ControlBlock, ConnectError> {
        ControlBlock::with(pool, config, 0, Vec::new())
    }

    #[inline]
    fn with(
        pool: &Pool,
        config: &LinkConfig,
        recv_bytes: usize,
        slots: Vec<Slot>,
    ) -> Result<ControlBlock, ConnectError> {
        config.check().map_err(ConnectError::Config)?;
        let need = recv_bytes + config.block_bytes();
        let mut buf = pool.control(need).map_err(|e| ConnectError::Memory(e.into()))?;
        // Zeros the whole block, so that every byte that a slice below may show is initialized.
        buf.resize_zeroed(need);
        let base = NonNull::from(buf.as_mut_slice()).cast::<u8>();
        Ok(ControlBlock {
            base,
            lkey: buf.lkey(),
            recv_bytes,
            block_bytes: config.block_bytes(),
            busy_sends: None,
            sends: (config.send_slots, config.max_sends()),
            slot_size: config.slot_size,
            ring: config.recv_slots,
            ring_size: config.rest_recv(),
            slots,
            extra: None,
            _buf: buf,
        })
    }

    /// The key of SEND slots and staging.
    #[inline]
    pub(crate) fn lkey(&self) -> u32 {
        self.busy_sends.as_ref().map_or(self.lkey, |sends| sends.lkey)
    }

    /// Leases the SEND slots of a busy connection, if the pool can spare the memory, and returns
    /// their number if it has changed. Work in flight may still use the SEND slots in the block, so
    /// the memory of those slots stays.
    pub(crate) fn lease_sends(&mut self, pool: &Pool) -> Option<u32> {
        let (few, many) = self.sends;
        if self.busy_sends.is_some() || few == many {
            return None;
        }
        let need = many as usize * self.slot_size as usize;
        let mut buf = pool.spare(need)?;
        // Initializes every byte that a slice below may show.
        buf.resize_zeroed(need);
        let base = NonNull::from(buf.as_mut_slice()).cast::<u8>();
        self.busy_sends = Some(BusySends { base, lkey: buf.lkey(), _buf: buf });
        Some(many)
    }

    /// Returns the memory of [`lease_sends`](Self::lease_sends) to the pool. Returns the number of
    /// SEND slots if it has changed. The caller must have no work in flight (R10).
    pub(crate) fn return_sends(&mut self) -> Option<u32> {
        self.busy_sends.take().map(|_| self.sends.0)
    }

    /// The address and length of SEND slots and staging.
    #[inline]
    fn block(&self) -> (NonNull<u8>, usize) {
        match &self.busy_sends {
            Some(sends) => (sends.base, self.sends.1 as usize * self.slot_size as usize),
            // SAFETY: the RECV ring lies within the buffer.
            None => (unsafe { self.base.add(self.recv_bytes) }, self.block_bytes),
        }
    }

    /// The size of a RECV slot in bytes.
    #[inline]
    pub(crate) fn recv_size(&self, slot: u32) -> u32 {
        if slot < self.ring { self.ring_size } else { self.slot_size }
    }

    /// Leases memory for the extra RECV slots. If they already have memory, stops removing them.
    /// Returns the slots with memory, so that the caller can revive the absent slots among them. If
    /// the pool cannot spare memory for all extra slots, leases memory for a quarter of them, or
    /// for as many as the ring has if that is more. If the pool has too little memory even for that
    /// number, leases nothing.
    #[inline]
    pub(crate) fn lease_extra(&mut self, pool: &Pool) -> std::ops::Range<u32> {
        let (ring, all) = (self.ring, self.slots.len() as u32 - self.ring);
        if self.extra.is_none() {
            let few = (all / 4).max(ring).min(all);
            self.extra = self.lease_slots(pool, all).or_else(|| self.lease_slots(pool, few));
        }
        match &mut self.extra {
            Some(extra) => {
                extra.retiring = false;
                ring..ring + extra.slots
            }
            None => 0..0,
        }
    }

    fn lease_slots(&self, pool: &Pool, slots: u32) -> Option<ExtraSlots> {
        let need = slots as usize * self.slot_size as usize;
        let mut buf = (need > 0).then(|| pool.spare(need)).flatten()?;
        // Initializes every byte that a slice below may show.
        buf.resize_zeroed(need);
        let base = NonNull::from(buf.as_mut_slice()).cast::<u8>();
        Some(ExtraSlots {
            base,
            lkey: buf.lkey(),
            slots,
            retiring: false,
            absent: slots,
            _buf: buf,
        })
    }

    /// Turns an absent slot into a held slot, so that the slot can be posted. Returns false if the
    /// slot is not absent, or has no memory.
    #[inline]
    pub(crate) fn revive(&mut self, slot: u32) -> bool {
        match (self.slots.get_mut(slot as usize), &mut self.extra) {
            (Some(state @ Slot::Absent), Some(extra)) if slot < self.ring + extra.slots => {
                *state = Slot::Held(0);
                extra.absent -= 1;
                true
            }
            _ => false,
        }
    }

    /// Begins to remove the extra RECV slots, each after it has received its next message.
    #[inline]
    pub(crate) fn retire_extra(&mut self) {
        if let Some(extra) = &mut self.extra {
            extra.retiring = true;
        }
    }

    /// Takes a held slot out of use if it is to be removed or left out, and returns whether it did.
    /// When the last extra slot is removed, the memory of all extra slots returns to the pool,
    /// because the device no longer uses any of it (R9, R10).
    #[inline]
    pub(crate) fn retire(&mut self, slot: u32) -> bool {
        let Some(extra) = &mut self.extra else { return false };
        let Some(state @ Slot::Held(_)) = self.slots.get_mut(slot as usize) else { return false };
        if slot < self.ring {
            // A slot of the ring is left out only while the extra slots alone suffice for the
            // credits of a connection.
            let leave_out = !extra.retiring
                && extra.slots >= self.ring
                && extra.absent == 0
                && self.ring_size < self.slot_size;
            if leave_out {
                *state = Slot::LeftOut;
            }
            return leave_out;
        }
        if !extra.retiring {
            return false;
        }
        *state = Slot::Absent;
        extra.absent += 1;
        if extra.absent == extra.slots {
            self.extra = None;
        }
        true
    }

    /// Turns a left-out slot of the ring into a held slot, so that the slot can be posted. Returns
    /// false for any other slot.
    pub(crate) fn rejoin(&mut self, slot: u32) -> bool {
        match self.slots.get_mut(slot as usize) {
            Some(state @ Slot::LeftOut) => {
                *state = Slot::Held(0);
                true
            }
            _ => false,
        }
    }

    /// Slots of the RECV ring.
    pub(crate) fn ring(&self) -> std::ops::Range<u32> {
        0..self.ring
    }

    /// The SEND slots and the staging.
    #[inline]
    pub(crate) fn block_mut(&mut self) -> &mut [u8] {
        let (base, bytes) = self.block();
        // SAFETY: the range lies in a buffer of this block and is initialized. No device writes
        // there, because the RECV ring ends before the range or lies in another buffer. &mut self
        // makes the range unique on this side. A device may read the range at the same time, which
        // Rust does not see.
        unsafe { std::slice::from_raw_parts_mut(base.as_ptr(), bytes) }
    }

    /// The address of a range, if it lies within the block.
    #[inline]
    pub(crate) fn range(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let (base, bytes) = self.block();
        if offset.checked_add(len)? > bytes {
            return None;
        }
        // SAFETY: offset + len lies within the block, as checked.
        Some(unsafe { base.add(offset) })
    }

    /// The address of a RECV slot that is not absent, and the key of its memory.
    #[inline]
    pub(crate) fn slot_place(&self, slot: u32) -> Option<(NonNull<u8>, u32)> {
        if matches!(self.slots.get(slot as usize), None | Some(Slot::Absent)) {
            return None;
        }
        let (base, lkey, at) = match slot.checked_sub(self.ring) {
            None => (self.base, self.lkey, slot),
            Some(at) => {
                let extra = self.extra.as_ref().filter(|extra| at < extra.slots)?;
                (extra.base, extra.lkey, at)
            }
        };
        // SAFETY: the slot lies within the ring, or within the extra slots that there is memory
        // for, and so within the buffer behind `base`.
        Some((unsafe { base.add(at as usize * self.recv_size(slot) as usize) }, lkey))
    }

    /// Records that the device has filled a slot. Returns false if the slot was not posted or
    /// cannot hold `len` bytes.
    #[inline]
    pub(crate) fn mark_received(&mut self, slot: u32, len: u32) -> bool {
        let size = self.recv_size(slot);
        match self.slots.get_mut(slot as usize) {
            Some(state @ Slot::Posted) if len <= size => {
                *state = Slot::Held(len);
                true
            }
            _ => false,
        }
    }

    /// Records that a slot is given to the device. Returns false if the slot is not held, for
    /// example because the device already has the slot.
    #[inline]
    pub(crate) fn mark_posted(&mut self, slot: u32) -> bool {
        match self.slots.get_mut(slot as usize) {
            Some(state @ Slot::Held(_)) => {
                *state = Slot::Posted;
                true
            }
            _ => false,
        }
    }

    /// Whether the driver has the slot.
    #[inline]
    pub(crate) fn is_held(&self, slot: u32) -> bool {
        matches!(self.slots.get(slot as usize), Some(Slot::Held(_)))
    }

    /// The received bytes, or an empty slice if the slot is not held.
    #[inline]
    pub(crate) fn recv_slot(&self, slot: u32, len: u32) -> &[u8] {
        let (Some(Slot::Held(filled)), Some((ptr, _))) =
            (self.slots.get(slot as usize), self.slot_place(slot))
        else {
            return &[];
        };
        // SAFETY: the slot is held, so no device writes into it (its RECV is complete and not
        // posted again, which takes &mut self); the slot is initialized, and its first `filled`
        // bytes lie within the buffer.
        unsafe { std::slice::from_raw_parts(ptr.as_ptr(), (*filled).min(len) as usize) }
    }
}
