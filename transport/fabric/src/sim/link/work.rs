//! Work requests of a simulated link, and the memory that they read.

use std::ptr::NonNull;

use tonic_rdma_memory::{PinnedBuf, PinnedBytes};

use crate::control_block::ControlBlock;
use crate::link::WriteSource;
use crate::queue::HeldMemory;
use crate::sim::faults::delay::Delay;

/// One work request.
#[derive(Debug)]
pub(super) struct SimWorkRequest {
    pub(super) seq: u64,
    pub(super) addr: NonNull<u8>,
    /// The device's address of the same bytes.
    pub(super) iova: u64,
    pub(super) len: usize,
    pub(super) lkey: u32,
    /// Address and key of a WRITE.
    pub(super) remote: Option<(u64, u32)>,
    /// The delay until the request is delivered.
    pub(super) delay: Delay,
}

// SAFETY: `addr` points into memory that the link owns (its block) or holds in its send queue; it
// is used by the link's owner only.
unsafe impl Send for SimWorkRequest {}
// SAFETY: &Request gives no access to the memory.
unsafe impl Sync for SimWorkRequest {}

/// Memory that work reads: its address in this process, its address and key for the device, and its
/// length.
pub(super) struct Source {
    pub(super) addr: NonNull<u8>,
    pub(super) iova: u64,
    pub(super) lkey: u32,
    pub(super) len: usize,
}

impl Source {
    /// A part of the block, whose address for the device is the virtual address.
    pub(super) fn in_block(block: &ControlBlock, offset: usize, len: usize) -> Option<Source> {
        let addr = block.range(offset, len)?;
        Some(Source { addr, iova: addr.as_ptr() as u64, lkey: block.lkey(), len })
    }
}

/// Splits a WRITE's source into the owner of its memory and the place of its bytes.
pub(super) fn write_source(src: WriteSource, block: &ControlBlock) -> Option<(HeldMemory, Source)> {
    fn at(addr: u64) -> NonNull<u8> {
        // Pool memory has an address, so the fallback is never used. Length 0 makes it harmless.
        NonNull::new(std::ptr::with_exposed_provenance_mut(addr as usize))
            .unwrap_or(NonNull::dangling())
    }
    fn bytes(b: PinnedBytes) -> (HeldMemory, Source) {
        let source = Source { addr: at(b.addr()), iova: b.iova(), lkey: b.lkey(), len: b.len() };
        (HeldMemory::Bytes(b), source)
    }
    fn buf(b: PinnedBuf) -> (HeldMemory, Source) {
        let source = Source { addr: at(b.addr()), iova: b.addr(), lkey: b.lkey(), len: b.len() };
        (HeldMemory::Buf(b), source)
    }
    Some(match src {
        WriteSource::Bytes(b) => bytes(b),
        WriteSource::Buf(b) => buf(b),
        WriteSource::Staged { offset, len } => {
            (HeldMemory::Staging, Source::in_block(block, offset, len)?)
        }
        WriteSource::Any(_) => return None,
    })
}
