//! The flag that tells a sender whether the receiver waits. No wake-up is lost, and few wake-ups
//! are sent.
//!
//! The receiver raises the flag, and then checks for messages once more. The sender publishes, and
//! then checks the flag. A fence between the two steps on either side ensures that at least one
//! side sees the other's first step. The code is checked with loom.

use crate::atomics::{AtomicU64, Ordering, fence};

/// Announces that the receiver is about to wait. `value`, which is not 0, says how to wake the
/// receiver. The receiver must check for messages once more before it waits.
#[inline]
pub(crate) fn raise(flag: &AtomicU64, value: u64) {
    // The flag is exchanged and not stored, so that this step is ordered after the sender's
    // exchange. The cost of an exchange does not matter here, because a sleep follows.
    flag.swap(value, Ordering::AcqRel);
    fence(Ordering::SeqCst);
}

/// Announces that the receiver no longer waits.
#[inline]
pub(crate) fn lower(flag: &AtomicU64) {
    flag.store(0, Ordering::Relaxed);
}

/// Call this function after publishing. If the sender has to wake the receiver, returns the value
/// with which the flag was raised, and otherwise 0. The value is returned only once for each time
/// that the flag was raised.
#[inline]
pub(crate) fn must_wake(flag: &AtomicU64) -> u64 {
    fence(Ordering::SeqCst);
    match flag.load(Ordering::Relaxed) {
        0 => 0,
        _ => flag.swap(0, Ordering::AcqRel),
    }
}
