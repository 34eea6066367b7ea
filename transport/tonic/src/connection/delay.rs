//! A one-time delay before an action.
//!
//! | from | on | to |
//! |---|---|---|
//! | Idle | [`begin`](Delay::begin) | Running |
//! | Running | the time has passed | Over |
//! | any | [`reset`](Delay::reset) | Idle |

use std::time::Duration;

use tokio::time::Instant;

#[derive(Debug, Default)]
pub(crate) enum Delay {
    #[default]
    Idle,
    Running {
        until: Instant,
        /// Whether the driver has not taken the deadline yet.
        is_new: bool,
    },
    Over,
}

impl Delay {
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        matches!(self, Self::Idle)
    }

    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        matches!(self, Self::Over)
    }

    #[inline]
    pub(crate) fn begin(&mut self, time: Duration) {
        *self = Self::Running { until: Instant::now() + time, is_new: true };
    }

    #[inline]
    pub(crate) fn reset(&mut self) {
        *self = Self::Idle;
    }

    /// When the delay ends.
    #[inline]
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Running { until, .. } => Some(*until),
            Self::Idle | Self::Over => None,
        }
    }

    /// Returns true if a deadline exists that the driver has not taken, and marks the deadline as
    /// taken.
    #[inline]
    pub(crate) fn has_new_deadline(&mut self) -> bool {
        match self {
            Self::Running { is_new, .. } => std::mem::take(is_new),
            Self::Idle | Self::Over => false,
        }
    }

    /// Returns true once, when the delay ends.
    #[inline]
    pub(crate) fn expire(&mut self, now: Instant) -> bool {
        let over = self.deadline().is_some_and(|until| until <= now);
        if over {
            *self = Self::Over;
        }
        over
    }
}
