//! How long a message waits for landing memory in one piece before it lands in parts.
//!
//! Several have to be joined, by a copy, into memory that may have to be had from the kernel page
//! by page. So a whole piece is waited for, while others' messages make room for it; but not for
//! long where readers hold on to what they have.
//!
//! | the delay | on | next |
//! |---|---|---|
//! | Idle | no whole piece | Running |
//! | Running | [`MAX_WAIT`] has passed | Over |
//! | Idle, Running | memory in one piece cannot be registered | Over |
//! | any | a whole piece for whoever has waited longest | Idle |
//!
//! When it is over, parts are taken at once.

use std::time::Duration;

use crate::connection::delay::Delay;

/// A message of 16 MiB in flight has landed by then at 3 Gb/s and more.
const MAX_WAIT: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub(crate) struct LandingWait(pub(crate) Delay);

impl LandingWait {
    #[inline]
    pub(crate) fn takes_parts(&self) -> bool {
        self.0.is_over()
    }

    /// There was no memory in one piece. True when the wait begins now.
    #[inline]
    pub(crate) fn short(&mut self) -> bool {
        let begins = self.0.is_idle();
        if begins {
            self.0.begin(MAX_WAIT);
        }
        begins
    }

    /// Memory in one piece cannot be registered.
    pub(crate) fn impossible(&mut self) {
        self.0 = Delay::Over;
    }

    /// There was memory in one piece for the first that wants it.
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
