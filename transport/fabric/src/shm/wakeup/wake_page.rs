//! One direction of the page that two processes share to wake each other's connections.
//!
//! `docs/protocol.md` has the layout.
//!
//! The sender sets a connection's bit, and then checks whether the receiving process sleeps. The
//! receiver announces that it sleeps, and then checks the bits (`wait_flag`). The thread that takes
//! bits wakes their connections. The peer may write any value to any word at any time. Such writes
//! only wake connections needlessly, or wake the peer's own connections late. The code is checked
//! with loom.

use crate::atomics::{AtomicU64, Ordering};
use crate::shm::wakeup::wait_flag;

const SLEEPS: usize = 0;
const STAGE: usize = 1;
const SUMMARY: usize = 8;
const BITS: usize = 16;

/// The state of a channel at one end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The channel has not been joined.
    Offered = 0,
    InUse = 1,
    Ended = 2,
}

/// Maximum number of connections of a channel.
pub(crate) const CAPACITY: u16 = 64 * 64;
/// Number of words of a direction.
pub(crate) const WORDS: usize = 128;

/// The words of one direction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Direction<'a>(pub(crate) &'a [AtomicU64]);

impl<'a> Direction<'a> {
    /// Marks a waiting connection on which the sender has sent something. Returns true if the
    /// process sleeps and has to be woken. The result is true only once for each time that the
    /// process sleeps.
    pub(crate) fn set(self, connection: u16) -> bool {
        let (word, bit) = (usize::from(connection / 64), 1 << (connection % 64));
        // The bit is set first, so that a thread that takes a bit of the summary finds the bits of
        // that word.
        self.0[BITS + word].fetch_or(bit, Ordering::AcqRel);
        self.0[SUMMARY].fetch_or(1 << word, Ordering::AcqRel);
        wait_flag::must_wake(&self.0[SLEEPS]) != 0
    }

    /// Whether any bit is set. Costs one load.
    pub(crate) fn has_bits(self) -> bool {
        self.0[SUMMARY].load(Ordering::Relaxed) != 0
    }

    /// Takes all bits that are set.
    pub(crate) fn take(self) -> TakenBits<'a> {
        let summary = match self.has_bits() {
            true => self.0[SUMMARY].swap(0, Ordering::AcqRel),
            false => 0,
        };
        TakenBits { words: self.0, summary, word: 0, bits: 0 }
    }

    /// Announces that the receiving process is about to sleep with regard to these connections. The
    /// process must check for bits once more before it sleeps.
    pub(crate) fn raise(self) {
        wait_flag::raise(&self.0[SLEEPS], 1);
    }

    /// Announces that the receiving process takes bits without being woken.
    pub(crate) fn lower(self) {
        wait_flag::lower(&self.0[SLEEPS]);
    }

    /// Whether the receiving process may sleep. Costs one load.
    pub(crate) fn may_sleep(self) -> bool {
        self.0[SLEEPS].load(Ordering::Relaxed) != 0
    }

    /// Sets the receiving end's state of the channel.
    pub(crate) fn set_stage(self, stage: Stage) {
        self.0[STAGE].store(stage as u64, Ordering::Release);
    }

    /// The receiving end's state of the channel.
    pub(crate) fn stage(self) -> Stage {
        match self.0[STAGE].load(Ordering::Acquire) {
            0 => Stage::Offered,
            1 => Stage::InUse,
            _ => Stage::Ended,
        }
    }
}

/// The connections whose bits were taken.
#[derive(Debug)]
pub(crate) struct TakenBits<'a> {
    words: &'a [AtomicU64],
    summary: u64,
    /// The word to which `bits` belong.
    word: u16,
    bits: u64,
}

impl Iterator for TakenBits<'_> {
    type Item = u16;

    fn next(&mut self) -> Option<u16> {
        while self.bits == 0 {
            if self.summary == 0 {
                return None;
            }
            self.word = self.summary.trailing_zeros() as u16;
            self.summary &= self.summary - 1;
            self.bits = self.words[BITS + usize::from(self.word)].swap(0, Ordering::AcqRel);
        }
        let bit = self.bits.trailing_zeros() as u16;
        self.bits &= self.bits - 1;
        Some(self.word * 64 + bit)
    }
}
