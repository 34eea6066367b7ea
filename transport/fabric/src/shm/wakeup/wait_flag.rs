//! The flag that tells a sender whether the receiver waits, so that no wake-up is lost and few are
//! sent.
//!
//! The receiver raises the flag, and then checks for messages once more. The sender publishes, and
//! then checks the flag. A fence between the two steps on either side makes at least one of them
//! see what the other did. Checked with loom.

use crate::atomics::{AtomicU64, Ordering, fence};

/// The receiver is about to wait, and says by `value`, which is not 0, how it is to be woken. It
/// must check for messages once more before it waits.
#[inline]
pub(crate) fn raise(flag: &AtomicU64, value: u64) {
    // Exchanged, not stored, so that it comes after whatever the sender took down: this happens
    // before a sleep only.
    flag.swap(value, Ordering::AcqRel);
    fence(Ordering::SeqCst);
}

/// The receiver does not wait any more.
#[inline]
pub(crate) fn lower(flag: &AtomicU64) {
    flag.store(0, Ordering::Relaxed);
}

/// The sender has published something. Not 0 when it has to wake the receiver: the value with which
/// the flag was raised, once for each time that it was.
#[inline]
pub(crate) fn must_wake(flag: &AtomicU64) -> u64 {
    fence(Ordering::SeqCst);
    match flag.load(Ordering::Relaxed) {
        0 => 0,
        _ => flag.swap(0, Ordering::AcqRel),
    }
}
