//! Whether a message that finds no landing memory in one piece lands in several.
//!
//! Several have to be joined, by a copy, into memory that may have to be had from the kernel page by page. So a whole piece is
//! waited for, while others' messages make room for it; but not for long where readers hold on to what they have.
//!
//! | from | on | to |
//! |---|---|---|
//! | Fresh | no whole piece | Waiting |
//! | Waiting | [`PATIENCE`] has passed | Spent |
//! | any | a whole piece for whoever has waited longest | Fresh |
//!
//! When it is spent, parts are taken at once.

use std::time::Duration;
use tokio::time::Instant;

/// At 3 Gb/s and more, a message of 16 MiB that is on its way has landed by then.
const PATIENCE: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub(super) enum Patience {
    #[default]
    Fresh,
    Waiting {
        until: Instant,
        /// The driver's timer does not know yet.
        news: bool,
    },
    Spent,
}

impl Patience {
    pub(super) fn takes_parts(&self) -> bool {
        matches!(self, Self::Spent)
    }

    /// There was no whole piece. True when the wait begins now.
    pub(super) fn short(&mut self) -> bool {
        let begins = matches!(self, Self::Fresh);
        if begins {
            *self = Self::Waiting { until: Instant::now() + PATIENCE, news: true };
        }
        begins
    }

    /// There was one for the first that wants memory.
    pub(super) fn whole(&mut self) {
        *self = Self::Fresh;
    }

    /// Until when is waited.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Waiting { until, .. } => Some(*until),
            Self::Fresh | Self::Spent => None,
        }
    }

    /// Whether there is a deadline that has not been asked for.
    pub(super) fn is_news(&mut self) -> bool {
        match self {
            Self::Waiting { news, .. } => std::mem::take(news),
            Self::Fresh | Self::Spent => false,
        }
    }

    pub(super) fn expire(&mut self, now: Instant) {
        if self.deadline().is_some_and(|until| until <= now) {
            *self = Self::Spent;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_ends_and_comes_back() {
        let mut patience = Patience::default();
        assert!(!patience.takes_parts() && patience.deadline().is_none());
        assert!(patience.short(), "begins");
        assert!(!patience.short(), "once");
        assert!(patience.is_news());
        assert!(!patience.is_news());
        tokio::time::advance(PATIENCE / 2).await;
        patience.expire(Instant::now());
        assert!(!patience.takes_parts());
        tokio::time::advance(PATIENCE / 2).await;
        patience.expire(Instant::now());
        assert!(patience.takes_parts() && patience.deadline().is_none());
        assert!(!patience.short());
        patience.whole();
        assert!(!patience.takes_parts());
        assert!(patience.short());
    }
}
