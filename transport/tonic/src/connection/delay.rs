//! A time that is let pass before something is done, once.
//!
//! | from | on | to |
//! |---|---|---|
//! | Idle | [`begin`](Delay::begin) | Running |
//! | Running | its time has passed | Over |
//! | any | [`reset`](Delay::reset) | Idle |

use std::time::Duration;

use tokio::time::Instant;

#[derive(Debug, Default)]
pub(in crate::connection) enum Delay {
    #[default]
    Idle,
    Running {
        until: Instant,
        /// The driver's timer does not know yet.
        news: bool,
    },
    Over,
}

impl Delay {
    pub(in crate::connection) fn is_idle(&self) -> bool {
        matches!(self, Self::Idle)
    }

    pub(in crate::connection) fn is_over(&self) -> bool {
        matches!(self, Self::Over)
    }

    pub(in crate::connection) fn begin(&mut self, time: Duration) {
        *self = Self::Running { until: Instant::now() + time, news: true };
    }

    pub(in crate::connection) fn reset(&mut self) {
        *self = Self::Idle;
    }

    /// Until when is waited.
    pub(in crate::connection) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Running { until, .. } => Some(*until),
            Self::Idle | Self::Over => None,
        }
    }

    /// Whether there is a deadline that has not been asked for.
    pub(in crate::connection) fn is_news(&mut self) -> bool {
        match self {
            Self::Running { news, .. } => std::mem::take(news),
            Self::Idle | Self::Over => false,
        }
    }

    /// True when its time passes now, once.
    pub(in crate::connection) fn expire(&mut self, now: Instant) -> bool {
        let over = self.deadline().is_some_and(|until| until <= now);
        if over {
            *self = Self::Over;
        }
        over
    }
}
