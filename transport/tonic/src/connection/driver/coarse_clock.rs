//! When messages came, without a look at the clock for each.
//!
//! A look can be a system call. The protocol judges by times of seconds, and a message that it
//! takes for an older one only makes it ask sooner whether the peer is there.
//!
//! | from | on | to |
//! |---|---|---|
//! | Read | a message, which gets the time that it is | Read, or Reused with the [`EACH`]th |
//! | Reused | a message, which gets the time of the last look | Reused |
//! | Read, Reused | the connection's timer, which goes off within an eighth of the dead-peer time of a reused look, and within [`MAX`] | Read |

use std::time::{Duration, Instant};

/// Looks between two times that the timer goes off. One at rest has fewer messages, and needs no
/// timer for this.
const EACH: u32 = 8;

/// As old as a time may be: others than the heartbeat go by it, too, whether landing memory is idle
/// for instance.
const MAX: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(in crate::connection) struct CoarseClock {
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

impl CoarseClock {
    pub(in crate::connection) fn new(dead_peer: Duration) -> Self {
        CoarseClock { most: (dead_peer / 8).min(MAX), state: State::Read { looks: 0 } }
    }

    /// For a message that has come.
    pub(in crate::connection) fn now(&mut self) -> Instant {
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
    pub(in crate::connection) fn is_news(&mut self) -> bool {
        match &mut self.state {
            State::Reused { news, .. } => std::mem::take(news),
            State::Read { .. } => false,
        }
    }

    /// When the connection's timer has to go off.
    pub(in crate::connection) fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Reused { at, .. } => Some(at + self.most),
            State::Read { .. } => None,
        }
    }

    /// The connection's timer has gone off.
    pub(in crate::connection) fn expire(&mut self) {
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
        let mut clock = CoarseClock::new(DEAD);
        let mut last = Instant::now();
        for _ in 0..EACH {
            assert!(!clock.is_news() && clock.deadline().is_none(), "a few need no timer");
            advance(DEAD / 100).await;
            last = tokio::time::Instant::now().into_std();
            assert_eq!(clock.now(), last);
        }
        advance(DEAD / 100).await;
        assert_eq!(clock.now(), last);
        assert!(clock.is_news() && !clock.is_news(), "once");
        assert_eq!(clock.deadline(), Some(last + DEAD / 8));
        advance(DEAD / 8).await;
        assert_eq!(clock.now(), last);
        assert!(!clock.is_news());
        clock.expire();
        assert_eq!(clock.deadline(), None);
        assert!(clock.now() > last + DEAD / 8);
    }
}
