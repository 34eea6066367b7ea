//! WRITEs whose bytes arrive in any order, as with IBV_ACCESS_RELAXED_ORDERING. All bytes have
//! arrived when the RECV of a later message completes, but perhaps not earlier.

use std::ptr::NonNull;

use crate::sim::memory::table::RegionTable;
use crate::sim::rng::Rng;

/// Bytes in transit, with their address and key.
#[derive(Debug, Default)]
pub(super) struct Unordered(Vec<(Vec<u8>, u64, u32)>);

impl Unordered {
    /// Lets a part of a WRITE arrive, and keeps the rest. Returns false if the key does not allow
    /// the WRITE.
    ///
    /// # Safety
    /// The same as for [`RegionTable::write`].
    pub(super) unsafe fn write(
        &mut self,
        table: &RegionTable,
        (rkey, addr): (u32, u64),
        (src, len): (NonNull<u8>, usize),
        rng: &mut Rng,
    ) -> bool {
        if !table.is_writable(rkey, addr, len) {
            return false;
        }
        // SAFETY: the caller's promise.
        let bytes = unsafe { std::slice::from_raw_parts(src.as_ptr(), len) };
        let (head, tail) = bytes.split_at(rng.up_to(len as u32) as usize);
        let mut parts = [(head.to_vec(), addr), (tail.to_vec(), addr + head.len() as u64)];
        if rng.one_in(2) {
            parts.reverse();
        }
        let [(mut now, at), (later, later_at)] = parts;
        // Sometimes no part arrives yet.
        match rng.one_in(3) {
            true => self.0.push((now, at, rkey)),
            // SAFETY: the source is a copy of this link's own.
            false => unsafe {
                let src = NonNull::from(now.as_mut_slice()).cast();
                table.write(rkey, at, src, now.len());
            },
        }
        self.0.push((later, later_at, rkey));
        true
    }

    /// Lets all bytes in transit arrive, in any order.
    pub(super) fn arrive(&mut self, table: &RegionTable, rng: &mut Rng) {
        while !self.0.is_empty() {
            let (mut bytes, addr, rkey) =
                self.0.swap_remove(rng.up_to(self.0.len() as u32 - 1) as usize);
            let src = NonNull::from(bytes.as_mut_slice()).cast();
            // SAFETY: the source is a copy of this link's own.
            unsafe { table.write(rkey, addr, src, bytes.len()) };
        }
    }
}
