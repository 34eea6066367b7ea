//! Whether short messages go the way of long ones.
//!
//! Who copies a long message without a pause is done sooner: what an encoder has just written is
//! still in the cache, and of several messages one is over before the next wants memory. Who pauses
//! leaves others their turns. So there are pauses while short messages go the same way, and none
//! otherwise.
//!
//! | state | on | next |
//! |---|---|---|
//! | Calm, RecentLengths | short bytes have gone since the last piece | RecentLengths([`PIECES`]) |
//! | RecentLengths(n) | none have | RecentLengths(n - 1), Calm after 1 |

/// Pieces of long messages after the last short one. A piece is 64 or 128 KiB, so this is about a
/// millisecond.
const PIECES: u8 = 64;

/// One direction of a connection.
#[derive(Debug, Default)]
pub(in crate::connection) struct RecentLengths {
    /// Bytes of short messages, since the start.
    short: u64,
    /// None: calm.
    left: u8,
}

impl RecentLengths {
    /// A piece of a long message is next, or was the last; so many bytes of short ones have gone
    /// since the start. True when others are to have their turns.
    pub(in crate::connection) fn piece(&mut self, short: u64) -> bool {
        self.left = match short == self.short {
            true => self.left.saturating_sub(1),
            false => PIECES,
        };
        self.short = short;
        self.left > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_messages_count_for_a_while() {
        let mut beside = RecentLengths::default();
        assert!(!beside.piece(0), "none yet");
        for short in [10, 20] {
            let pauses = (0..200).filter(|_| beside.piece(short)).count();
            assert_eq!(pauses, usize::from(PIECES));
        }
    }
}
