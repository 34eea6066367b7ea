//! Decides how long a connection at rest continues to wake in order to return memory.
//!
//! Landing memory is returned once nothing has landed for ten seconds. The pool's arenas are
//! returned once two checks have found them unused. Both returns happen long after the connection
//! has come to rest. So if the connection has used landing or pool memory since its last rest, it
//! wakes [`TURNS`] more times, and then stops.
//!
//! | turns left | the timer expires | to |
//! |---|---|---|
//! | 0 | not at rest | 0 |
//! | n | not at rest | 0, and memory counts as used at the next rest |
//! | any | at rest, memory has been used | [`TURNS`] |
//! | n | at rest, no memory has been used | n - 1 |

use std::time::{Duration, Instant};

/// Time between two turns.
const PAUSE: Duration = Duration::from_millis(2500);
/// Number of turns, which together take 20 s: 10 s until landing memory is returned, and 10 s for
/// the pool's checks.
const TURNS: u32 = 8;

#[derive(Debug, Default)]
pub(super) struct Tidy {
    /// The count of uses of memory when the connection came to rest.
    used: u64,
    left: u32,
    next: Option<Instant>,
}

impl Tidy {
    /// Counts a turn of the timer. All memory that may be returned by now has been returned. `used`
    /// is the number of uses of memory so far.
    pub(super) fn expired(&mut self, now: Instant, at_rest: bool, used: u64) {
        if !at_rest && self.left > 0 {
            // A message that used no memory has ended the rest, so the remaining turns are still
            // necessary.
            self.used = u64::MAX;
        }
        self.left = match (at_rest, used == self.used) {
            (false, _) => 0,
            (true, false) => TURNS,
            (true, true) => self.left.saturating_sub(1),
        };
        if at_rest {
            self.used = used;
        }
        self.next = (self.left > 0).then(|| now + PAUSE);
    }

    /// Whether the connection was already at rest at the last turn and has used no memory since.
    /// `used` is the number of uses of memory so far.
    pub(super) fn is_unused(&self, at_rest: bool, used: u64) -> bool {
        at_rest && self.left > 0 && used == self.used
    }

    /// When the timer must expire.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_has_used_memory_wakes_a_few_times_more() {
        let (mut tidy, mut now, mut wakes) = (Tidy::default(), Instant::now(), 0);
        for used in [0, 3, 3, 4] {
            let before = tidy.used;
            tidy.expired(now, false, used);
            assert_eq!(tidy.deadline(), None, "not before it rests");
            tidy.expired(now, true, used);
            while let Some(at) = tidy.deadline() {
                (now, wakes) = (at, wakes + 1);
                tidy.expired(now, true, used);
            }
            assert_eq!(std::mem::take(&mut wakes), if used == before { 0 } else { TURNS });
        }
        tidy.expired(now, true, 5);
        tidy.expired(now, false, 5);
        assert_eq!(tidy.deadline(), None, "a call has begun");
        tidy.expired(now, true, 5);
        assert!(tidy.deadline().is_some(), "the turns before it were not enough");
    }
}
