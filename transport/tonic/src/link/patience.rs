//! Whether a message that finds no landing memory in one piece lands in several.
//!
//! Several have to be joined, by a copy, into memory that may have to be had from the kernel page
//! by page. So a whole piece is waited for, while others' messages make room for it; but not for
//! long where readers hold on to what they have.
//!
//! | the delay | on | next |
//! |---|---|---|
//! | Idle | no whole piece | Running |
//! | Running | [`PATIENCE`] has passed | Over |
//! | any | a whole piece for whoever has waited longest | Idle |
//!
//! When it is over, parts are taken at once.

use std::time::Duration;

use super::delay::Delay;

/// At 3 Gb/s and more, a message of 16 MiB that is on its way has landed by then.
const PATIENCE: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub(super) struct Patience(pub(super) Delay);

impl Patience {
    pub(super) fn takes_parts(&self) -> bool {
        self.0.is_over()
    }

    /// There was no whole piece. True when the wait begins now.
    pub(super) fn short(&mut self) -> bool {
        let begins = self.0.is_idle();
        if begins {
            self.0.begin(PATIENCE);
        }
        begins
    }

    /// There was one for the first that wants memory.
    pub(super) fn whole(&mut self) {
        self.0.reset();
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_ends_and_comes_back() {
        let mut patience = Patience::default();
        assert!(!patience.takes_parts() && patience.0.deadline().is_none());
        assert!(patience.short(), "begins");
        assert!(!patience.short(), "once");
        assert!(patience.0.is_news());
        assert!(!patience.0.is_news());
        tokio::time::advance(PATIENCE / 2).await;
        patience.0.expire(Instant::now());
        assert!(!patience.takes_parts());
        tokio::time::advance(PATIENCE / 2).await;
        patience.0.expire(Instant::now());
        assert!(patience.takes_parts() && patience.0.deadline().is_none());
        assert!(!patience.short());
        patience.whole();
        assert!(!patience.takes_parts());
        assert!(patience.short());
    }
}
