//! How long a message waits for landing memory in one piece before it lands in parts.
//!
//! Parts have to be joined by a copy, into memory that the kernel may have to provide page by page.
//! So a message waits for a whole piece while other messages free memory. The wait is short,
//! because readers may keep their messages.
//!
//! | the delay | on | next |
//! |---|---|---|
//! | Idle | no whole piece is free | Running |
//! | Running | [`MAX_WAIT`] has passed | Over |
//! | Idle, Running | memory in one piece cannot be registered | Over |
//! | any | the longest-waiting stream gets a whole piece | Idle |
//!
//! In the state Over, messages land in parts without a wait.

use std::time::Duration;

use crate::connection::delay::Delay;

/// Maximum wait for a whole piece. At 3 Gb/s and more, a message of 16 MiB in flight lands within
/// this time.
const MAX_WAIT: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub(crate) struct LandingWait(pub(crate) Delay);

impl LandingWait {
    #[inline]
    pub(crate) fn takes_parts(&self) -> bool {
        self.0.is_over()
    }

    /// Begins to wait, because no whole piece is free. Returns true if the wait begins now.
    #[inline]
    pub(crate) fn short(&mut self) -> bool {
        let begins = self.0.is_idle();
        if begins {
            self.0.begin(MAX_WAIT);
        }
        begins
    }

    /// Ends the wait, because memory in one piece cannot be registered.
    pub(crate) fn impossible(&mut self) {
        self.0 = Delay::Over;
    }

    /// Resets the wait, because the longest-waiting stream has got a whole piece.
    #[inline]
    pub(crate) fn whole(&mut self) {
        self.0.reset();
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_wait_ends_and_begins_again() {
        let mut landing_wait = LandingWait::default();
        assert!(!landing_wait.takes_parts() && landing_wait.0.deadline().is_none());
        assert!(landing_wait.short(), "begins");
        assert!(!landing_wait.short(), "once");
        assert!(landing_wait.0.has_new_deadline());
        assert!(!landing_wait.0.has_new_deadline());
        tokio::time::advance(MAX_WAIT / 2).await;
        landing_wait.0.expire(Instant::now());
        assert!(!landing_wait.takes_parts());
        tokio::time::advance(MAX_WAIT / 2).await;
        landing_wait.0.expire(Instant::now());
        assert!(landing_wait.takes_parts() && landing_wait.0.deadline().is_none());
        assert!(!landing_wait.short());
        landing_wait.whole();
        assert!(!landing_wait.takes_parts());
        assert!(landing_wait.short());
        landing_wait.impossible();
        assert!(landing_wait.takes_parts() && landing_wait.0.deadline().is_none());
    }
}
