//! Addresses of registered memory on systems other than Linux, which have only simulated devices.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ptr::NonNull;

use super::page::page;

/// Returns an address for `len` bytes that peers cannot guess, with the offset of `addr` within a
/// page.
///
/// # Errors
/// None on these systems.
pub fn random_iova(addr: NonNull<u8>, len: usize) -> io::Result<u64> {
    let within = page() as u64 - 1;
    loop {
        // The hash has random keys.
        let random = RandomState::new().hash_one(addr.addr());
        let iova = (random & !within) | (addr.addr().get() as u64 & within);
        if iova.checked_add(len as u64).is_some() {
            return Ok(iova);
        }
    }
}
