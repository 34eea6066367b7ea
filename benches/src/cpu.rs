//! Processor affinity of processes.

use anyhow::Context as _;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The processors that this process may use, in order.
///
/// # Errors
/// sched_getaffinity(2) fails.
pub fn allowed() -> anyhow::Result<Vec<usize>> {
    let set = sched_getaffinity(None).context("cannot read which processors are allowed")?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// Pins the calling thread, and threads that it starts afterwards, to one processor.
///
/// # Errors
/// The processor does not exist, or is not allowed.
pub fn pin(cpu: usize) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("cannot run on processor {cpu}"))
}
