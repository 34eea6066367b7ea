//! Addresses of landing memory that peers cannot guess.
//!
//! All queue pairs of a device share one protection domain, so a device accepts the rkey of a chunk
//! from every connected peer. A peer that knows the key of another connection's chunk lacks only
//! the chunk's address. A WRITE to a wrong address ends the peer's connection, and a new connection
//! needs a new ticket. So a peer has one guess per ticket.
//!
//! | the device | peers use | which is random in | bits | a guess at a chunk of 2^k bytes succeeds once in |
//! |---|---|---|---|---|
//! | uses the iova of `ibv_reg_mr_iova` | the iova, by [`random_iova`] | all 64 bits | 52 | 2^(64-k) |
//! | ignores the iova (Soft-iWARP) | the virtual address, by [`map_at_random`] | the user address space, 2^47 bytes on x86-64 | 35 | 2^(47-k) |
//!
//! The bits are counted in the page number, with pages of 4 KiB. A chunk of [`HUGE_PAGE`] or more
//! keeps its offset within a huge page, for devices and kernels that use larger pages. Its address
//! has nine fewer random bits, but a guess has the same chance, because such a chunk is at least as
//! long as the distance between two possible addresses.
//!
//! A virtual address lies between 1/64 and 63/64 of the way from 0 to the main thread's stack.
//! Programs and their heaps lie below this range or use little of the range, and the stack has room
//! to grow. The address of the stack reveals the size of the address space: 47 bits on x86-64, 48
//! on most of arm64, 39 in User Mode Linux and 37 under valgrind. Sanitizers reserve parts of the
//! range. A mapping that is requested in such a part lies elsewhere, and another address is tried.

use std::io;
use std::ptr::NonNull;

use super::page::{HUGE_PAGE, page};

/// The maximum number of attempts to find a free address. One attempt nearly always suffices. About
/// fifteen are needed under the thread sanitizer, which leaves less than a tenth of the range to
/// the program.
const MAX_ATTEMPTS: usize = 512;

/// 64 bits from the kernel's generator (getrandom(2)).
fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    loop {
        // SAFETY: the buffer is writable and 8 bytes long (R17).
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        match usize::try_from(got) {
            Ok(got) if got == bytes.len() => return Ok(u64::from_ne_bytes(bytes)),
            // A signal has interrupted the call.
            Ok(_) => {}
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
}

/// The distance between two possible addresses of a range of `len` bytes.
fn step(len: usize) -> usize {
    if len < HUGE_PAGE { page() } else { HUGE_PAGE }
}

/// Returns a random start address (iova) for the registration of `len` bytes mapped at `addr`. The
/// range does not wrap around 2^64, and the result has the same offset within a page as `addr`, as
/// `ibv_reg_mr_iova` requires.
///
/// # Errors
/// getrandom(2) is missing or forbidden.
pub fn random_iova(addr: NonNull<u8>, len: usize) -> io::Result<u64> {
    let within = step(len) as u64 - 1;
    loop {
        let iova = (random()? & !within) | (addr.addr().get() as u64 & within);
        if iova.checked_add(len as u64).is_some() {
            return Ok(iova);
        }
    }
}

/// Returns a random address for a mapping of `len` bytes. Something may be mapped there already.
fn random_place(len: usize) -> io::Result<usize> {
    // SAFETY: getauxval takes no pointer (R17). The result points above the main thread's stack,
    // and is used as a number only.
    let stack = unsafe { libc::getauxval(libc::AT_RANDOM) } as usize;
    let (part, step) = (stack / 64, step(len));
    let places = (stack - 2 * part).saturating_sub(len) / step;
    // The upper half of the product is less than `places`.
    let at = ((u128::from(random()?) * places as u128) >> 64) as usize;
    match places {
        0 => Err(io::Error::new(
            io::ErrorKind::OutOfMemory,
            "no address space to place landing memory in",
        )),
        _ => Ok((part / step + 1 + at) * step),
    }
}

/// Maps `len` bytes at a random address. `map` gets an address as a hint, and maps there or
/// elsewhere. A mapping elsewhere is passed to `unmap`. MAP_FIXED_NOREPLACE is no alternative,
/// because the thread sanitizer ends the process for an address that it has reserved.
///
/// # Errors
/// The error of `map`, an error if all [`MAX_ATTEMPTS`] addresses are in use, or the error of
/// getrandom(2). The function never falls back to an address that peers can guess.
pub(crate) fn map_at_random(
    len: usize,
    map: impl Fn(usize) -> io::Result<NonNull<u8>>,
    unmap: impl Fn(NonNull<u8>),
) -> io::Result<NonNull<u8>> {
    for _ in 0..MAX_ATTEMPTS {
        let place = random_place(len)?;
        let ptr = map(place)?;
        if ptr.addr().get() == place {
            return Ok(ptr);
        }
        unmap(ptr);
    }
    Err(io::Error::new(
        io::ErrorKind::AddrInUse,
        format!(
            "no free place for {len} bytes of landing memory at {MAX_ATTEMPTS} random addresses"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const LEN: usize = 64 << 10;

    fn at(place: usize) -> NonNull<u8> {
        NonNull::new(std::ptr::without_provenance_mut(place)).unwrap()
    }

    #[test]
    fn an_iova_keeps_the_offset_within_a_page_and_does_not_wrap() {
        for len in [4096, LEN, HUGE_PAGE, HUGE_PAGE + LEN, 1 << 62] {
            let mapped = at(0x7f12_3456_7000);
            for _ in 0..100 {
                let iova = random_iova(mapped, len).unwrap();
                assert!(iova.checked_add(len as u64).is_some());
                assert_eq!((iova ^ 0x7f12_3456_7000) % step(len) as u64, 0);
            }
        }
    }

    #[test]
    fn random_places_are_aligned_and_below_the_stack() {
        for len in [4096, LEN, HUGE_PAGE, 1 << 30] {
            for _ in 0..100 {
                let place = random_place(len).unwrap();
                assert_eq!(place % step(len), 0);
                // SAFETY: takes no pointer.
                assert!(place + len < unsafe { libc::getauxval(libc::AT_RANDOM) } as usize);
            }
        }
        assert!(random_place(usize::MAX / 2).is_err());
    }

    #[test]
    fn occupied_places_are_skipped() {
        let (tried, unmapped) = (RefCell::new(Vec::new()), RefCell::new(Vec::new()));
        let map = |place| {
            tried.borrow_mut().push(place);
            Ok(at(if tried.borrow().len() < 3 { 0x1000 } else { place }))
        };
        let ptr = map_at_random(LEN, map, |ptr| unmapped.borrow_mut().push(ptr)).unwrap();
        assert_eq!(tried.borrow().len(), 3);
        assert_eq!(ptr.addr().get(), tried.borrow()[2]);
        assert_eq!(*unmapped.borrow(), [at(0x1000); 2], "mappings elsewhere are unmapped");
    }

    /// If no random address is free, there is no fallback to an address that the kernel chooses.
    #[test]
    fn without_a_random_place_there_is_an_error() {
        let tried = RefCell::new(0);
        let elsewhere = |_| {
            *tried.borrow_mut() += 1;
            Ok(at(0x1000))
        };
        let error = map_at_random(LEN, elsewhere, |_| {}).unwrap_err();
        assert_eq!((error.kind(), *tried.borrow()), (io::ErrorKind::AddrInUse, MAX_ATTEMPTS));
        let limit = map_at_random(LEN, |_| Err(io::Error::from_raw_os_error(libc::ENOMEM)), |_| {});
        assert_eq!(
            limit.unwrap_err().raw_os_error(),
            Some(libc::ENOMEM),
            "a limit is no matter of the address"
        );
    }
}
