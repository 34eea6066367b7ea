//! Copies payload at memory speed, for all alignments of source and destination.
//!
//! If the processor has ERMS, glibc's memcpy copies with `rep movsb` from a threshold on, which is
//! 2 KiB or more. On AMD's Zen 3 and later, such a copy is at least four times slower if, modulo a
//! page, the destination is a few bytes after the source (glibc bugs 30994 and 30995). A payload
//! that follows a header is an example. glibc 2.40 avoids these slow copies, but Debian 12 and most
//! clouds have an older version.
//!
//! | processor | copies of |
//! |---|---|
//! | x86-64 with ERMS and AVX, AMD's | 2 KiB to 1 MiB: a loop of 32-byte loads and stores |
//! | the same, neither AMD's nor Intel's | 2 KiB and more: the loop |
//! | any other | memcpy |
//!
//! Shorter and longer copies use memcpy, which does not use `rep movsb` for them. On AMD's
//! processors glibc's upper limit is the size of the second-level cache, 512 KiB or 1 MiB
//! (sysdeps/x86/dl-cacheinfo.h, from 2.33). If `GLIBC_TUNABLES` sets another threshold
//! (`glibc.cpu.x86_rep_movsb_threshold`), the loop is used from that length on.
//!
//! `compare --rows phase` measures, for each alignment, the copy of this module and memcpy. On
//! Intel's processors both are memcpy.

/// Copies `len` bytes.
///
/// # Safety
/// `src` is valid for reads of `len` bytes, `dst` for writes, and they do not overlap. Another
/// process or a device may write to either range during the copy, but no other thread of this
/// process does.
#[inline]
pub unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= x86::MIN_LEN && x86::lengths().contains(&len) {
        // SAFETY: the caller's contract; the processor has AVX, and `len` is at least MIN_LEN.
        return unsafe { x86::by_loop(src, dst, len) };
    }
    // SAFETY: the caller's contract. The compiler cannot see concurrent writes by another process
    // or a device, and no code relies on the bytes (R4).
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) };
}

/// Copies all of `src` to the first bytes of `dst`.
///
/// # Panics
/// If `dst` is shorter than `src`.
pub fn copy_slice(src: &[u8], dst: &mut [u8]) {
    assert!(src.len() <= dst.len(), "{} bytes into {}", src.len(), dst.len());
    // SAFETY: the length has been checked; `dst` is borrowed exclusively, and so does not overlap.
    unsafe { copy(src.as_ptr(), dst.as_mut_ptr(), src.len()) };
}

/// Copies `src` to the heap.
pub(crate) fn to_vec(src: &[u8]) -> Vec<u8> {
    let mut copied = Vec::with_capacity(src.len());
    // SAFETY: the new allocation has room for `src.len()` bytes, which are initialized before the
    // length is set.
    unsafe {
        copy(src.as_ptr(), copied.as_mut_ptr(), src.len());
        copied.set_len(src.len());
    }
    copied
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __cpuid_count, __m256i, _mm256_loadu_si256, _mm256_storeu_si256, CpuidResult,
    };
    use std::ops::RangeInclusive;

    use crate::process::PerProcess;

    /// The shortest copy that the loop can make, in bytes.
    pub(super) const MIN_LEN: usize = 64;
    /// The lowest of glibc's default thresholds for `rep movsb`, which depend on the vector width.
    const DEFAULT_MIN: usize = 2048;
    /// The maximum length at which glibc uses `rep movsb` on AMD's processors.
    const AMD_MAX: usize = 1 << 20;

    /// The lengths at which memcpy would use a slow `rep movsb`.
    pub(super) fn lengths() -> &'static RangeInclusive<usize> {
        static LENGTHS: PerProcess<RangeInclusive<usize>> = PerProcess::new(|| {
            let avx = std::arch::is_x86_feature_detected!("avx");
            let end = if avx { end(vendor(), has_erms()) } else { 0 };
            let tunables = std::env::var("GLIBC_TUNABLES").unwrap_or_default();
            begin(&tunables)..=end
        });
        &LENGTHS
    }

    /// The longest length at which memcpy would use a slow `rep movsb`. 0 if memcpy never does.
    pub(super) fn end(vendor: [u8; 12], erms: bool) -> usize {
        match &vendor {
            b"GenuineIntel" => 0,
            _ if !erms => 0,
            b"AuthenticAMD" => AMD_MAX,
            _ => usize::MAX,
        }
    }

    /// Executes CPUID. The standard library's functions for CPUID are unsafe in Rust 1.88, and safe
    /// in later versions.
    #[allow(unused_unsafe)]
    fn cpuid(leaf: u32) -> CpuidResult {
        // SAFETY: every x86-64 processor has the instruction, and it accesses no memory (R17).
        unsafe { __cpuid_count(leaf, 0) }
    }

    /// The processor's vendor: CPUID, leaf 0.
    fn vendor() -> [u8; 12] {
        let leaf = cpuid(0);
        let mut vendor = [0; 12];
        for (bytes, register) in vendor.chunks_exact_mut(4).zip([leaf.ebx, leaf.edx, leaf.ecx]) {
            bytes.copy_from_slice(&register.to_le_bytes());
        }
        vendor
    }

    /// Whether the processor has ERMS: CPUID, leaf 7, EBX, bit 9.
    fn has_erms() -> bool {
        cpuid(0).eax >= 7 && cpuid(7).ebx & (1 << 9) != 0
    }

    /// The shortest length at which memcpy may use `rep movsb`: glibc's lowest default, or the
    /// value of its tunable.
    pub(super) fn begin(tunables: &str) -> usize {
        let mut thresholds = tunables.split(':').filter_map(|one| {
            let number = one.strip_prefix("glibc.cpu.x86_rep_movsb_threshold=")?;
            match number.strip_prefix("0x") {
                Some(digits) => usize::from_str_radix(digits, 16).ok(),
                None => number.parse().ok(),
            }
        });
        thresholds.next_back().unwrap_or(DEFAULT_MIN).max(MIN_LEN)
    }

    const WIDTH: usize = size_of::<__m256i>();
    /// The number of bytes that one iteration of the loop copies.
    const STEP: usize = 4 * WIDTH;

    /// Copies by a loop of vector loads and stores. Stores are aligned. They are also volatile, so
    /// that the compiler does not turn the stores into a call to memcpy.
    ///
    /// # Safety
    /// The contract of [`copy`](super::copy). In addition, `len` is at least [`MIN_LEN`], and the
    /// processor has AVX.
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn by_loop(src: *const u8, dst: *mut u8, len: usize) {
        // SAFETY: each load of WIDTH bytes lies within the `len` bytes of the source, and each
        // store within those of the destination: the first and the last because of `len`, those
        // between because of the bounds of the loops. Aligned stores begin at the first multiple of
        // WIDTH after the start of the destination.
        unsafe {
            let load = |at: usize| _mm256_loadu_si256(src.add(at).cast());
            let store =
                |at: usize, vector: __m256i| dst.add(at).cast::<__m256i>().write_volatile(vector);
            let (first, last) = (load(0), load(len - WIDTH));
            let mut at = WIDTH - dst.addr() % WIDTH;
            while at + STEP <= len {
                let vectors =
                    [load(at), load(at + WIDTH), load(at + 2 * WIDTH), load(at + 3 * WIDTH)];
                for (n, vector) in vectors.into_iter().enumerate() {
                    store(at + n * WIDTH, vector);
                }
                at += STEP;
            }
            while at + WIDTH <= len {
                store(at, load(at));
                at += WIDTH;
            }
            _mm256_storeu_si256(dst.cast(), first);
            _mm256_storeu_si256(dst.add(len - WIDTH).cast(), last);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Copies, and checks that the bytes around the destination do not change.
    fn check(by: unsafe fn(*const u8, *mut u8, usize), len: usize, from: usize, to: usize) {
        let src: Vec<u8> = (0..from + len).map(|n| (n * 7 % 251) as u8).collect();
        let mut dst = vec![0xee; to + len + 64];
        // SAFETY: both ranges have `len` bytes, and they do not overlap.
        unsafe { by(src[from..].as_ptr(), dst[to..].as_mut_ptr(), len) };
        assert!(dst[to..to + len] == src[from..], "{len} bytes from {from} to {to}");
        assert!(
            dst[..to].iter().chain(&dst[to + len..]).all(|byte| *byte == 0xee),
            "{len} bytes to {to}"
        );
    }

    proptest! {
        #[test]
        fn every_byte_arrives_and_no_other(len in 0..20_000usize, from in 0..130usize, to in 0..130usize) {
            check(copy, len, from, to);
        }

        #[cfg(target_arch = "x86_64")]
        #[test]
        fn the_loop_copies_every_byte_and_no_other(len in 64..20_000usize, from in 0..130usize, to in 0..130usize) {
            if std::arch::is_x86_feature_detected!("avx") {
                // SAFETY: the caller's promise, and there is AVX.
                check(|src, dst, len| unsafe { x86::by_loop(src, dst, len) }, len, from, to);
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_loop_copies_all_short_lengths_and_alignments() {
        if std::arch::is_x86_feature_detected!("avx") {
            for len in 64..400 {
                for to in 0..33 {
                    // SAFETY: as above.
                    check(|src, dst, len| unsafe { x86::by_loop(src, dst, len) }, len, 1, to);
                }
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_loop_replaces_rep_movsb_only() {
        assert_eq!(x86::end(*b"GenuineIntel", true), 0);
        assert_eq!(x86::end(*b"AuthenticAMD", true), 1 << 20);
        assert_eq!(x86::end(*b"AuthenticAMD", false), 0);
        assert_eq!(x86::end(*b"  Shanghai  ", true), usize::MAX);
        assert_eq!(x86::begin(""), 2048);
        let told = "glibc.malloc.trim_threshold=1:glibc.cpu.x86_rep_movsb_threshold=";
        assert_eq!(x86::begin(&format!("{told}100000000")), 100_000_000);
        assert_eq!(x86::begin(&format!("{told}0x1000")), 4096);
        assert_eq!(x86::begin(&format!("{told}1")), 64);
        assert_eq!(x86::begin(&format!("{told}much")), 2048);
        assert_eq!(x86::begin("glibc.cpu.x86_rep_stosb_threshold=1"), 2048);
    }
}
