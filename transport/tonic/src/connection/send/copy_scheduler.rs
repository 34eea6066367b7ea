//! What one flush copies, where the link copies while work is queued.
//!
//! | state | on | next |
//! |---|---|---|
//! | Messages | nothing short is left to post | Copying, or Over where nothing is to be copied |
//! | Copying | [`COPY`] bytes, or a message that has come | Over |
//!
//! Over is not the end of what waits to be copied: the driver goes on.

/// One flush copies no more than about this many bytes: it holds the connection's lock, and small
/// calls wait for that (R13).
const COPY: usize = 128 * 1024;
/// Bytes between two looks whether a message has come.
const LOOK: usize = 32 * 1024;
/// The protocol cuts no WRITE shorter than this.
const SHORTEST: usize = 16 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Messages,
    Copying,
    Over,
}

#[derive(Debug)]
pub(in crate::connection) struct CopyScheduler {
    state: State,
    most: usize,
    copied: usize,
}

impl CopyScheduler {
    pub(in crate::connection) fn some() -> Self {
        CopyScheduler { state: State::Messages, most: COPY, copied: 0 }
    }

    pub(in crate::connection) fn none() -> Self {
        CopyScheduler { state: State::Messages, most: 0, copied: 0 }
    }

    /// Bytes of the next WRITE, at most.
    pub(in crate::connection) fn room(&self) -> usize {
        match self.state {
            State::Copying => (self.most - self.copied).clamp(SHORTEST, LOOK),
            State::Messages | State::Over => 0,
        }
    }

    /// The protocol has nothing for that room. True when there is more room now.
    pub(in crate::connection) fn go_on(&mut self) -> bool {
        let more = self.state == State::Messages && self.most > 0;
        match (self.state, more) {
            (State::Messages, true) => self.state = State::Copying,
            (State::Messages, false) => self.state = State::Over,
            (State::Copying | State::Over, _) => {}
        }
        more
    }

    /// So much has been copied; `news`: a message has come.
    pub(in crate::connection) fn copied(&mut self, len: usize, news: bool) {
        self.copied += len;
        if news || self.copied >= self.most {
            self.state = State::Over;
        }
    }

    pub(in crate::connection) fn has_copied(&self) -> bool {
        self.copied > 0
    }

    /// What is left to copy waits for another flush.
    pub(in crate::connection) fn is_over(&self) -> bool {
        self.state == State::Over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_first_and_what_is_copied_has_an_end() {
        let mut copies = CopyScheduler::some();
        assert_eq!(copies.room(), 0);
        assert!(copies.go_on());
        assert!(!copies.go_on(), "nothing to copy is no reason to ask for ever");
        let mut pieces = 0;
        while copies.room() > 0 {
            assert!((SHORTEST..=LOOK).contains(&copies.room()));
            copies.copied(copies.room() - 1000, false);
            pieces += 1;
        }
        assert_eq!((pieces, copies.is_over(), copies.has_copied()), (5, true, true));
    }

    #[test]
    fn a_message_that_has_come_ends_it() {
        let mut copies = CopyScheduler::some();
        copies.go_on();
        copies.copied(1, true);
        assert_eq!((copies.room(), copies.is_over()), (0, true));
    }

    #[test]
    fn none_is_over_when_the_messages_are_out() {
        let mut copies = CopyScheduler::none();
        assert!(!copies.is_over());
        assert!(!copies.go_on());
        assert_eq!((copies.room(), copies.is_over(), copies.has_copied()), (0, true, false));
    }
}
