//! The delay of a work request or a completion, in polls and in time.

use std::time::Duration;

use tokio::time::Instant;

use crate::sim::config::SimConfig;
use crate::sim::rng::Rng;

/// A delay that lasts a number of polls, and until an instant.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Delay {
    polls: u32,
    until: Option<Instant>,
}

impl Delay {
    pub(crate) fn draw(rng: &mut Rng, config: &SimConfig) -> Delay {
        let polls = rng.up_to(config.delay);
        let millis = rng.up_to(u32::try_from(config.latency.as_millis()).unwrap_or(u32::MAX));
        let until = (millis > 0).then(|| Instant::now() + Duration::from_millis(millis.into()));
        Delay { polls, until }
    }

    /// Counts a poll.
    pub(crate) fn tick(&mut self) {
        self.polls = self.polls.saturating_sub(1);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.polls == 0 && self.waits_until().is_none()
    }

    /// The instant, if it is in the future.
    pub(crate) fn waits_until(&self) -> Option<Instant> {
        self.until.filter(|until| *until > Instant::now())
    }
}
