//! What is mapped of each budget.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use crate::stats::Use;

/// What of each budget is mapped.
#[derive(Debug, Default)]
pub(crate) struct Budgets {
    send: AtomicUsize,
    landing: AtomicUsize,
    control: AtomicUsize,
    /// Raised after a part and lowered before it, so never more than the sum of the parts.
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

    /// Takes `len` bytes of a budget, all or nothing.
    pub(crate) fn take(&self, usage: Use, len: usize, budget: usize) -> bool {
        self.take_some(usage, len, len, 1, budget).is_some()
    }

    /// Takes as much as there is of `most` bytes, in multiples of `unit`, at least `least`; or
    /// nothing.
    pub(crate) fn take_some(
        &self,
        usage: Use,
        most: usize,
        least: usize,
        unit: usize,
        budget: usize,
    ) -> Option<usize> {
        let mut len = 0;
        self.of(usage)
            .fetch_update(AcqRel, Acquire, |used| {
                len = budget.saturating_sub(used).min(most);
                len -= len % unit;
                (len >= least && len > 0).then(|| used + len)
            })
            .ok()?;
        self.total.fetch_add(len, AcqRel);
        Some(len)
    }

    /// What was taken has been registered.
    pub(crate) fn registered(&self) {
        self.high_water.fetch_max(self.total(), Relaxed);
    }

    /// Gives bytes back; what they stood for is deregistered and unmapped by now.
    pub(crate) fn give(&self, usage: Use, len: usize) {
        self.total.fetch_sub(len, AcqRel);
        self.of(usage).fetch_sub(len, AcqRel);
    }

    pub(crate) fn used(&self, usage: Use) -> usize {
        self.of(usage).load(Acquire)
    }

    pub(crate) fn total(&self) -> usize {
        self.total.load(Relaxed)
    }

    pub(crate) fn high_water(&self) -> usize {
        self.high_water.load(Relaxed)
    }
}
