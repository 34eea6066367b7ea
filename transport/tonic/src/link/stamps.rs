//! When messages came, without a look at the clock for each.
//!
//! A look can be a system call. The protocol judges by times of seconds, and a message that it takes for an older one only
//! makes it ask sooner whether the peer is there.
//!
//! | from | on | to |
//! |---|---|---|
//! | Unknown | a message, which gets the time that it is | Read |
//! | Read | a message, which gets the same time | Reused |
//! | Read, Reused | the connection's timer, which goes off within an eighth of the dead-peer time of a reused look | Unknown |

use std::time::{Duration, Instant};

#[derive(Debug)]
pub(super) struct Stamps {
    /// So long after a look that was reused the next message gets a new one.
    most: Duration,
    state: State,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Unknown,
    Read(Instant),
    Reused {
        at: Instant,
        /// The driver's timer does not know yet.
        news: bool,
    },
}

impl Stamps {
    pub(super) fn new(dead_peer: Duration) -> Self {
        Stamps { most: dead_peer / 8, state: State::Unknown }
    }

    /// For a message that has come.
    pub(super) fn stamp(&mut self) -> Instant {
        let (at, next) = match self.state {
            State::Unknown => {
                // tokio's clock, which tests can stop.
                let now = tokio::time::Instant::now().into_std();
                (now, State::Read(now))
            }
            State::Read(at) => (at, State::Reused { at, news: true }),
            State::Reused { at, .. } => (at, self.state),
        };
        self.state = next;
        at
    }

    /// Whether there is a deadline that has not been asked for.
    pub(super) fn is_news(&mut self) -> bool {
        match &mut self.state {
            State::Reused { news, .. } => std::mem::take(news),
            State::Unknown | State::Read(_) => false,
        }
    }

    /// When the connection's timer has to go off.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Reused { at, .. } => Some(at + self.most),
            State::Unknown | State::Read(_) => None,
        }
    }

    /// The connection's timer has gone off.
    pub(super) fn expire(&mut self) {
        self.state = State::Unknown;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    const DEAD: Duration = Duration::from_secs(8);

    #[tokio::test(start_paused = true)]
    async fn one_look_serves_all_messages_until_the_timer() {
        let mut stamps = Stamps::new(DEAD);
        let begin = stamps.stamp();
        assert!(!stamps.is_news() && stamps.deadline().is_none(), "an idle connection needs no timer for it");
        advance(DEAD / 100).await;
        assert_eq!(stamps.stamp(), begin);
        assert!(stamps.is_news() && !stamps.is_news(), "once");
        assert_eq!(stamps.deadline(), Some(begin + DEAD / 8));
        advance(DEAD / 8).await;
        assert_eq!(stamps.stamp(), begin);
        assert!(!stamps.is_news());
        stamps.expire();
        assert_eq!(stamps.deadline(), None);
        assert!(stamps.stamp() > begin + DEAD / 8);
    }
}
