//! Page sizes.

use std::sync::OnceLock;

/// Bytes of a huge page on x86-64 and, by default, on arm64.
pub(crate) const HUGE_PAGE: usize = 2 << 20;
/// Bytes of the smallest page there is.
const SMALLEST_PAGE: usize = 4096;

/// Which pages a pool is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum HugePages {
    /// Ordinary ones.
    Off,
    /// Huge ones where the kernel has them (madvise(2), MADV_HUGEPAGE).
    #[default]
    Transparent,
    /// From the reserved pool (mmap(2), MAP_HUGETLB), for arenas whose size is a multiple of 2 MiB;
    /// where there are none, a warning and ordinary ones.
    Explicit,
}

/// Bytes of a page: 4 KiB, on some arm64 and ppc64 kernels 64 KiB. Mappings, and so budgets, are
/// whole pages.
pub(crate) fn page() -> usize {
    static PAGE: OnceLock<usize> = OnceLock::new();
    *PAGE.get_or_init(|| {
        // SAFETY: sysconf takes no pointer.
        let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(bytes).ok().filter(|b| b.is_power_of_two()).unwrap_or(0).max(SMALLEST_PAGE)
    })
}
