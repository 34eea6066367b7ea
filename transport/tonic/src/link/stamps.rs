//! When messages came, without a look at the clock for each.
//!
//! A look can be a system call. The protocol judges by times of seconds, and a message that it
//! takes for an older one only makes it ask sooner whether the peer is there.
//!
//! | from | on | to |
//! |---|---|---|
//! | Read | a message, which gets the time that it is | Read, or Reused with the [`EACH`]th |
//! | Reused | a message, which gets the time of the last look | Reused |
//! | Read, Reused | the connection's timer, which goes off within an eighth of the dead-peer time of a reused look, and within [`MOST`] | Read |

use std::time::{Duration, Instant};

/// Looks between two times that the timer goes off. One at rest has fewer messages, and needs no
/// timer for this.
const EACH: u32 = 8;

/// As old as a time may be: others than the heartbeat go by it, too, whether landing memory is idle
/// for instance.
const MOST: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Stamps {
    /// So long after a look that was reused the next message gets a new one.
    most: Duration,
    state: State,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Read {
        looks: u32,
    },
    Reused {
        at: Instant,
        /// The driver's timer does not know yet.
        news: bool,
    },
}

impl Stamps {
    pub(super) fn new(dead_peer: Duration) -> Self {
        Stamps { most: (dead_peer / 8).min(MOST), state: State::Read { looks: 0 } }
    }

    /// For a message that has come.
    pub(super) fn stamp(&mut self) -> Instant {
        match self.state {
            State::Read { looks } => {
                // tokio's clock, which tests can stop.
                let at = tokio::time::Instant::now().into_std();
                self.state = match looks + 1 {
                    EACH => State::Reused { at, news: true },
                    looks => State::Read { looks },
                };
                at
            }
            State::Reused { at, .. } => at,
        }
    }

    /// Whether there is a deadline that has not been asked for.
    pub(super) fn is_news(&mut self) -> bool {
        match &mut self.state {
            State::Reused { news, .. } => std::mem::take(news),
            State::Read { .. } => false,
        }
    }

    /// When the connection's timer has to go off.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Reused { at, .. } => Some(at + self.most),
            State::Read { .. } => None,
        }
    }

    /// The connection's timer has gone off.
    pub(super) fn expire(&mut self) {
        self.state = State::Read { looks: 0 };
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const DEAD: Duration = Duration::from_secs(8);

    #[tokio::test(start_paused = true)]
    async fn one_look_serves_all_messages_until_the_timer() {
        let mut stamps = Stamps::new(DEAD);
        let mut last = Instant::now();
        for _ in 0..EACH {
            assert!(!stamps.is_news() && stamps.deadline().is_none(), "a few need no timer");
            advance(DEAD / 100).await;
            last = tokio::time::Instant::now().into_std();
            assert_eq!(stamps.stamp(), last);
        }
        advance(DEAD / 100).await;
        assert_eq!(stamps.stamp(), last);
        assert!(stamps.is_news() && !stamps.is_news(), "once");
        assert_eq!(stamps.deadline(), Some(last + DEAD / 8));
        advance(DEAD / 8).await;
        assert_eq!(stamps.stamp(), last);
        assert!(!stamps.is_news());
        stamps.expire();
        assert_eq!(stamps.deadline(), None);
        assert!(stamps.stamp() > last + DEAD / 8);
    }
}
