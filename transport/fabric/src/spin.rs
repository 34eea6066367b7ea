//! How long to look before waiting.
//!
//! To wait costs a system call at either end and a context switch; to look costs the processor. A message that comes
//! soon after the last one is worth looking for, and whether it comes is learnt:
//!
//! | what happened | budget |
//! |---|---|
//! | a message came while looking | doubled, up to the cap |
//! | none came until the budget was used up | halved, down to nothing |
//! | woken within the cap of having begun to wait | at least what that took, twice |
//! | the peer runs on this very processor | looking is no use: nothing, for now |
//!
//! An end that has had no traffic since it last waited does not look at all.

use std::time::{Duration, Instant};

/// Under this much it is not worth beginning.
const LEAST: Duration = Duration::from_micros(2);
/// Looks between two yields to other tasks: a microsecond or two, at 40 to 140 cycles a pause.
const LOOKS: u32 = 32;

/// One end's habit.
#[derive(Debug)]
pub(crate) struct Spin {
    /// The longest.
    cap: Duration,
    budget: Duration,
    state: State,
}

/// | state | on | next |
/// |---|---|---|
/// | Idle | message | Eager |
/// | Eager | nothing there | Looking, or Waiting when the budget is too small, or Idle when the peer runs on this processor |
/// | Looking | message, or something sent | Eager |
/// | Looking | budget used up | Waiting |
/// | Idle, Waiting | something sent | Eager, or Waiting from now when the budget is too small |
/// | Waiting | message | Eager |
#[derive(Debug, Clone, Copy)]
enum State {
    Idle,
    Eager,
    Looking { since: Instant },
    Waiting { since: Instant },
}

/// What to do when there is nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Look again, after other tasks have had a turn.
    Again,
    /// Wait for the bell.
    Wait,
}

impl Spin {
    pub(crate) fn new(cap: Duration) -> Spin {
        Spin { cap, budget: cap / 2, state: State::Idle }
    }

    /// Something was sent: an answer may come, and the time to look for it begins now.
    pub(crate) fn sent(&mut self) {
        self.state = match self.state {
            // What this wait teaches is learnt when something comes.
            State::Idle | State::Waiting { .. } if self.budget < LEAST => {
                State::Waiting { since: Instant::now() }
            }
            _ => State::Eager,
        };
    }

    /// Whether it is worth looking now.
    pub(crate) fn is_eager(&self) -> bool {
        matches!(self.state, State::Eager) && self.budget >= LEAST
    }

    /// Something came.
    pub(crate) fn came(&mut self) {
        match self.state {
            State::Looking { .. } => self.budget = (self.budget * 2).max(LEAST).min(self.cap),
            State::Waiting { since } => {
                let waited = since.elapsed();
                if waited < self.cap {
                    self.budget = self.budget.max(waited * 2).max(LEAST).min(self.cap);
                }
            }
            State::Idle | State::Eager => {}
        }
        self.state = State::Eager;
    }

    /// Nothing is there. `apart`: the peer runs on another processor. `look` is called until it says true, for about a
    /// microsecond.
    pub(crate) fn nothing(&mut self, apart: bool, look: impl Fn() -> bool) -> Next {
        let since = match self.state {
            State::Idle | State::Waiting { .. } => return Next::Wait,
            // Waiting for a peer on the same processor teaches nothing.
            State::Eager if !apart => {
                self.state = State::Idle;
                return Next::Wait;
            }
            State::Eager if self.budget < LEAST => {
                self.state = State::Waiting { since: Instant::now() };
                return Next::Wait;
            }
            State::Eager => {
                let since = Instant::now();
                self.state = State::Looking { since };
                since
            }
            State::Looking { since } => since,
        };
        for _ in 0..LOOKS {
            if look() {
                return Next::Again;
            }
            std::hint::spin_loop();
        }
        if since.elapsed() < self.budget && apart {
            return Next::Again;
        }
        self.budget /= 2;
        self.state = State::Waiting { since: Instant::now() };
        Next::Wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::LOOK as CAP;

    fn until_it_waits(spin: &mut Spin) {
        while spin.nothing(true, || false) == Next::Again {}
    }

    #[test]
    fn an_idle_end_and_one_beside_its_peer_wait_at_once() {
        let mut spin = Spin::new(CAP);
        assert_eq!(spin.nothing(true, || false), Next::Wait);
        spin.came();
        assert_eq!(spin.nothing(false, || false), Next::Wait, "on one processor");
        assert_eq!(spin.nothing(true, || false), Next::Wait, "it waits already");
    }

    #[test]
    fn looking_in_vain_is_unlearnt_and_short_waits_teach_it_again() {
        let mut spin = Spin::new(CAP);
        for _ in 0..10 {
            spin.sent();
            until_it_waits(&mut spin);
        }
        assert!(spin.budget < LEAST);
        spin.state = State::Waiting { since: Instant::now() - CAP / 5 };
        spin.came();
        assert!(spin.budget > LEAST && spin.budget <= CAP, "{:?}", spin.budget);
        let before = spin.budget;
        spin.state = State::Looking { since: Instant::now() };
        spin.came();
        assert!(spin.budget >= before);
    }

    /// One that sends and waits for answers, with pauses between, learns as well as one that answers.
    #[test]
    fn a_quick_answer_teaches_the_one_that_asked() {
        let mut spin = Spin::new(CAP);
        spin.budget = LEAST / 2;
        spin.state = State::Waiting { since: Instant::now() - 10 * CAP };
        spin.sent();
        assert!(!spin.is_eager(), "it does not pay, so far");
        spin.came();
        assert!(spin.budget >= LEAST);
        until_it_waits(&mut spin);
        spin.budget = CAP;
        spin.sent();
        assert!(spin.is_eager());
    }

    #[test]
    fn one_that_is_told_not_to_never_looks() {
        let mut spin = Spin::new(Duration::ZERO);
        for _ in 0..5 {
            spin.came();
            assert_eq!(spin.nothing(true, || true), Next::Wait);
            spin.sent();
            assert!(!spin.is_eager());
        }
    }

    #[test]
    fn news_ends_the_look() {
        let mut spin = Spin::new(CAP);
        spin.came();
        assert_eq!(spin.nothing(true, || true), Next::Again);
    }
}
