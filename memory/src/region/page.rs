//! Page sizes.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

/// The size of a huge page in bytes on x86-64, and on arm64 by default.
pub(crate) const HUGE_PAGE: usize = 2 << 20;
/// The size in bytes of the smallest page on any architecture.
const MIN_PAGE: usize = 4096;

/// The kind of pages that a pool uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum HugePages {
    /// Ordinary pages.
    Off,
    /// Transparent huge pages if the kernel has them (madvise(2), MADV_HUGEPAGE).
    #[default]
    Transparent,
    /// Reserved huge pages (mmap(2), MAP_HUGETLB), for arenas whose size is a multiple of 2 MiB. If
    /// no reserved page is left, the pool logs a warning and uses ordinary pages.
    Explicit,
}

/// The size of a page in bytes: 4 KiB, or 16 KiB or 64 KiB on some arm64 and ppc64 kernels.
/// Mappings, and therefore budgets, consist of whole pages.
pub(crate) fn page() -> usize {
    static PAGE: AtomicUsize = AtomicUsize::new(0);
    match PAGE.load(Relaxed) {
        0 => {
            let page = usize::try_from(of_system()).ok().filter(|b| b.is_power_of_two());
            let page = page.unwrap_or(0).max(MIN_PAGE);
            PAGE.store(page, Relaxed);
            page
        }
        page => page,
    }
}

#[cfg(unix)]
fn of_system() -> libc::c_long {
    // SAFETY: sysconf takes no pointer.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) }
}

/// Returns the granularity of mapping addresses on Windows.
#[cfg(not(unix))]
fn of_system() -> libc::c_long {
    64 << 10
}
