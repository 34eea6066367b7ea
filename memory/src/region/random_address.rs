//! Addresses of landing memory that peers cannot guess.
//!
//! All queue pairs of a device share one protection domain, so a device accepts the rkey of a chunk
//! from every peer that is connected. A peer that knows the key of another connection's chunk lacks
//! only the address. A WRITE to a wrong address ends the connection that it comes by, and with it a
//! ticket is spent: a peer has one guess for each ticket.
//!
//! | the device | peers name | which is random in | bits | a guess at a chunk of 2^k bytes hits once in |
//! |---|---|---|---|---|
//! | uses the iova of `ibv_reg_mr_iova` | the iova, by [`random_iova`] | all 64 bits | 52 | 2^(64-k) |
//! | ignores it (Soft-iWARP) | the virtual address, by [`map_at_random`] | the user address space, 2^47 bytes on x86-64 | 35 | 2^(47-k) |
//!
//! Bits are those of the page number, with pages of 4 KiB. A chunk of [`HUGE_PAGE`] or more keeps
//! its place within a huge page, for devices and kernels that use larger pages: nine bits less, and
//! the same chance of a guess, since such a chunk is as long as the step between two places.
//!
//! A virtual address lies between 1/64 and 63/64 of the way from 0 to the main thread's stack:
//! programs and their heaps lie below or rarely in the way, and the stack can grow. The stack's
//! address tells how large the address space is (47 bits on x86-64, 48 on most of arm64, 39 in User
//! Mode Linux, 37 under valgrind). Sanitizers reserve parts of it, which are passed over.

use std::io;
use std::ptr::NonNull;

use super::page::{HUGE_PAGE, page};

/// Attempts to find a free place. One nearly always suffices; under the thread sanitizer, which
/// leaves the program less than a tenth of the range, about fifteen do.
const ATTEMPTS: usize = 512;

/// 64 bits from the kernel's generator (getrandom(2)).
fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    loop {
        // SAFETY: the buffer is writable and 8 bytes long (R17).
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        match usize::try_from(got) {
            Ok(got) if got == bytes.len() => return Ok(u64::from_ne_bytes(bytes)),
            // Cut short by a signal.
            Ok(_) => {}
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
}

/// The step between two places of a range of `len` bytes.
fn step(len: usize) -> usize {
    if len < HUGE_PAGE { page() } else { HUGE_PAGE }
}

/// A random start address (iova) for the registration of `len` bytes that are mapped at `addr`. The
/// range from there does not pass the end of 64 bits, and `addr` and the result have the same place
/// within a page, as `ibv_reg_mr_iova` demands.
///
/// # Errors
/// The kernel gives no random numbers: getrandom(2) is missing or forbidden.
pub fn random_iova(addr: NonNull<u8>, len: usize) -> io::Result<u64> {
    let within = step(len) as u64 - 1;
    loop {
        let iova = (random()? & !within) | (addr.addr().get() as u64 & within);
        if iova.checked_add(len as u64).is_some() {
            return Ok(iova);
        }
    }
}

/// A random place for a mapping of `len` bytes. Something may be there already.
fn random_place(len: usize) -> io::Result<usize> {
    // SAFETY: getauxval takes no pointer (R17). The bytes that it points to lie above the main
    // thread's stack; only the address is used.
    let stack = unsafe { libc::getauxval(libc::AT_RANDOM) } as usize;
    let (part, step) = (stack / 64, step(len));
    let places = (stack - 2 * part).saturating_sub(len) / step;
    // The product's upper half is below `places`.
    let at = ((u128::from(random()?) * places as u128) >> 64) as usize;
    match places {
        0 => Err(io::Error::new(
            io::ErrorKind::OutOfMemory,
            "no address space to place landing memory in",
        )),
        _ => Ok((part / step + 1 + at) * step),
    }
}

/// Maps `len` bytes at a random place. `map` gets an address as a hint, and maps there or
/// elsewhere; what lies elsewhere is given to `unmap`. (With MAP_FIXED_NOREPLACE instead the thread
/// sanitizer would end the process at an address that it does not leave to the program.)
///
/// # Errors
/// Those of `map`; none of [`ATTEMPTS`] places was free; the kernel gives no random numbers. There
/// is no other place to fall back to.
pub(crate) fn map_at_random(
    len: usize,
    map: impl Fn(usize) -> io::Result<NonNull<u8>>,
    unmap: impl Fn(NonNull<u8>),
) -> io::Result<NonNull<u8>> {
    for _ in 0..ATTEMPTS {
        let place = random_place(len)?;
        let ptr = map(place)?;
        if ptr.addr().get() == place {
            return Ok(ptr);
        }
        unmap(ptr);
    }
    Err(io::Error::new(
        io::ErrorKind::AddrInUse,
        format!("no free place for {len} bytes of landing memory at {ATTEMPTS} random addresses"),
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
    fn an_iova_keeps_the_place_within_its_page_and_does_not_wrap() {
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
    fn a_place_is_below_the_stack_and_aligned() {
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
    fn places_that_are_taken_are_passed_over() {
        let (tried, unmapped) = (RefCell::new(Vec::new()), RefCell::new(Vec::new()));
        let map = |place| {
            tried.borrow_mut().push(place);
            Ok(at(if tried.borrow().len() < 3 { 0x1000 } else { place }))
        };
        let ptr = map_at_random(LEN, map, |ptr| unmapped.borrow_mut().push(ptr)).unwrap();
        assert_eq!(tried.borrow().len(), 3);
        assert_eq!(ptr.addr().get(), tried.borrow()[2]);
        assert_eq!(*unmapped.borrow(), [at(0x1000); 2], "what lies elsewhere does not stay");
    }

    /// Where no random place can be had, memory is not taken from another.
    #[test]
    fn without_a_random_place_there_is_an_error() {
        let tried = RefCell::new(0);
        let elsewhere = |_| {
            *tried.borrow_mut() += 1;
            Ok(at(0x1000))
        };
        let error = map_at_random(LEN, elsewhere, |_| {}).unwrap_err();
        assert_eq!((error.kind(), *tried.borrow()), (io::ErrorKind::AddrInUse, ATTEMPTS));
        let limit = map_at_random(LEN, |_| Err(io::Error::from_raw_os_error(libc::ENOMEM)), |_| {});
        assert_eq!(
            limit.unwrap_err().raw_os_error(),
            Some(libc::ENOMEM),
            "a limit is no matter of the place"
        );
    }
}
