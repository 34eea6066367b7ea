//! Counts the mapped bytes of each budget.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use crate::stats::Use;

/// The mapped bytes of each budget.
#[derive(Debug, Default)]
pub(crate) struct Budgets {
    send: AtomicUsize,
    landing: AtomicUsize,
    control: AtomicUsize,
    /// The bytes of `landing` in chunks that wait for the landing thread to free them.
    pub(crate) freeing: AtomicUsize,
    /// The sum of `send`, `landing` and `control`. An increase is applied first to the part and
    /// then to the sum, and a decrease first to the sum, so that `total` never exceeds the sum of
    /// the parts.
    total: AtomicUsize,
    high_water: AtomicUsize,
}

impl Budgets {
    fn of(&self, usage: Use) -> &AtomicUsize {
        match usage {
            Use::Send => &self.send,
            Use::Landing => &self.landing,
            Use::Control => &self.control,
        }
    }

    /// Takes `len` bytes of a budget. Returns false and takes nothing if the budget has fewer than
    /// `len` bytes left.
    pub(crate) fn take(&self, usage: Use, len: usize, budget: usize) -> bool {
        self.take_some(usage, len, len, 1, budget).is_some()
    }

    /// Takes up to `max` bytes of a budget, in multiples of `unit`, and returns the number of
    /// bytes. Returns `None` if that would be fewer than `min` bytes, or 0.
    pub(crate) fn take_some(
        &self,
        usage: Use,
        max: usize,
        min: usize,
        unit: usize,
        budget: usize,
    ) -> Option<usize> {
        let mut len = 0;
        self.of(usage)
            .fetch_update(AcqRel, Acquire, |used| {
                len = budget.saturating_sub(used).min(max);
                len -= len % unit;
                (len >= min && len > 0).then(|| used + len)
            })
            .ok()?;
        self.total.fetch_add(len, AcqRel);
        Some(len)
    }

    /// Updates the high-water mark after bytes that were taken have been registered.
    pub(crate) fn registered(&self) {
        self.high_water.fetch_max(self.total(), Relaxed);
    }

    /// Returns bytes to a budget after their memory has been deregistered and unmapped.
    pub(crate) fn release(&self, usage: Use, len: usize) {
        self.total.fetch_sub(len, AcqRel);
        self.of(usage).fetch_sub(len, AcqRel);
    }

    pub(crate) fn used(&self, usage: Use) -> usize {
        self.of(usage).load(Acquire)
    }

    /// The mapped bytes that a pool returns sooner or later: all except control memory, because a
    /// connection may last as long as the process.
    pub(super) fn returnable(&self) -> usize {
        self.used(Use::Send) + self.used(Use::Landing)
    }

    pub(crate) fn total(&self) -> usize {
        self.total.load(Relaxed)
    }

    pub(crate) fn high_water(&self) -> usize {
        self.high_water.load(Relaxed)
    }
}
