//! Finds out whether this process can run on more than one processor.

use tonic_rdma_memory::PerProcess;

/// Whether this host has a single processor. The answer is determined once.
pub(crate) fn host_has_one() -> bool {
    static ONE: PerProcess<bool> = PerProcess::new(|| {
        // SAFETY: sysconf takes no pointer; this rests on no rule.
        unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) == 1 }
    });
    *ONE
}

/// Whether this process may use only one processor, because of its affinity or its control group.
/// The answer is determined once.
pub(crate) fn process_has_one() -> bool {
    static ONE: PerProcess<bool> = PerProcess::new(|| {
        std::thread::available_parallelism().is_ok_and(|processors| processors.get() == 1)
    });
    *ONE
}
