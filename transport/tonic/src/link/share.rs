//! How a connection gives back the landing memory that it has beyond its share while another waits.
//!
//! Nothing is granted of the chunks that are to go back. Where the peer is fast, what is on its way lands within moments,
//! and the readers free it. What is still granted after that is asked back, and a peer that does not answer is ended by the
//! protocol ([`Connection::recall_grants`](tonic_rdma_proto::Connection::recall_grants)).
//!
//! | state | on | next |
//! |---|---|---|
//! | Within | chunks are chosen to go back | Draining |
//! | Draining | [`DRAIN`] has passed | Recalled: their grants are asked back |
//! | Recalled | more chunks are chosen | Draining |
//! | any | none is chosen | Within |
//!
//! [`DRAIN`] and the time that the protocol gives for the answer are no longer than the dead-peer time together.

use std::time::Duration;

use tokio::time::Instant;
use tonic_rdma_memory::{Excess, LandingBuf};

use super::shared::Inner;

/// At 3 Gb/s and more, 16 MiB that are on their way have landed by then.
const DRAIN: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub(super) enum GiveBack {
    #[default]
    Within,
    Draining {
        until: Instant,
        /// The driver's timer does not know yet.
        news: bool,
    },
    Recalled,
}

impl GiveBack {
    fn is_within(&self) -> bool {
        matches!(self, Self::Within)
    }

    /// What has been chosen to go back.
    fn chosen(&mut self, excess: Excess, dead_peer: Duration) {
        match (&self, excess) {
            (_, Excess::None) => *self = Self::Within,
            (Self::Draining { .. }, _) | (Self::Recalled, Excess::Same) => {}
            (Self::Within, _) | (Self::Recalled, Excess::More) => {
                *self = Self::Draining { until: Instant::now() + DRAIN.min(dead_peer / 8), news: true };
            }
        }
    }

    /// Until when is waited.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Draining { until, .. } => Some(*until),
            Self::Within | Self::Recalled => None,
        }
    }

    /// Whether there is a deadline that has not been asked for.
    pub(super) fn is_news(&mut self) -> bool {
        match self {
            Self::Draining { news, .. } => std::mem::take(news),
            Self::Within | Self::Recalled => false,
        }
    }

    /// True when the grants are to be asked back now.
    fn expire(&mut self, now: Instant) -> bool {
        let over = self.deadline().is_some_and(|until| until <= now);
        if over {
            *self = Self::Recalled;
        }
        over
    }
}

impl Inner {
    /// Another connection waits for landing memory: what is idle here goes back, and what is more than the share of this
    /// one.
    pub(super) fn make_room_elsewhere(&mut self) {
        let wanted = self.landing.wanted_elsewhere();
        if wanted {
            self.conn.recall_standing();
            self.landing.trim();
        }
        if wanted || !self.give_back.is_within() {
            let excess = self.landing.keep_share();
            self.give_back.chosen(excess, self.conn.dead_peer());
        }
    }

    /// Asks back what is in the way of those that wait, if it is time to.
    pub(super) fn recall_excess(&mut self, now: Instant) {
        if self.give_back.expire(now) {
            let granted = &self.granted;
            self.conn.recall_grants(|key| granted.get(key).is_some_and(LandingBuf::is_wanted_back));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEAD: Duration = Duration::from_secs(5);

    /// The table.
    #[tokio::test(start_paused = true)]
    async fn it_drains_then_asks() {
        let mut state = GiveBack::default();
        state.chosen(Excess::None, DEAD);
        assert!(state.is_within() && state.deadline().is_none() && !state.is_news());
        for excess in [Excess::More, Excess::Same] {
            state.chosen(excess, DEAD);
            let until = state.deadline().unwrap();
            assert_eq!(until, Instant::now() + DRAIN);
            assert!(state.is_news() && !state.is_news());
            tokio::time::advance(DRAIN / 2).await;
            for excess in [Excess::More, Excess::Same] {
                state.chosen(excess, DEAD);
                assert_eq!(state.deadline(), Some(until), "it is not put off");
            }
            assert!(!state.expire(Instant::now()));
            tokio::time::advance(DRAIN / 2).await;
            assert!(state.expire(Instant::now()) && !state.expire(Instant::now()), "once");
            state.chosen(Excess::Same, DEAD);
            assert!(!state.is_within() && state.deadline().is_none());
            state.chosen(Excess::More, DEAD);
            assert!(state.deadline().is_some());
            state.chosen(Excess::None, DEAD);
            assert!(state.is_within());
        }
        // No more than an eighth of what the peer has in all.
        state.chosen(Excess::More, DRAIN);
        assert_eq!(state.deadline(), Some(Instant::now() + DRAIN / 8));
    }
}
