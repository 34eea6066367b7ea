//! The faults that a test injects: the faults of one device, and the delay of a work request or a
//! completion in polls and in time.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::sim::config::{Rng, SimConfig};

/// A registration that is held for longer than this time fails.
const MAX_HOLD: Duration = Duration::from_secs(20);

/// The switches of one device, all of which are off at first.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// Number of registrations that succeed before the next failure.
    registrations_before: AtomicU64,
    /// Number of registrations that fail after the successful registrations.
    registrations_failing: AtomicU64,
    /// New links carry one work request less than this number, and then die. 0 means off.
    kill_after: AtomicU64,
    /// Whether no traffic arrives or leaves.
    frozen: AtomicBool,
    /// Whether the process pauses while its device continues.
    paused: AtomicBool,
    /// Number of connect requests that get no answer.
    lose_connects: AtomicU32,
    /// Number of peers that do not learn that their connect request was accepted.
    lose_accepts: AtomicU32,
    /// Whether peers are not told that a link has ended.
    lose_disconnects: AtomicBool,
    removed: AtomicBool,
    /// Whether the destruction of links is held.
    holds_destroy: AtomicBool,
    /// The number of links whose destruction has begun while it was held.
    destroying: AtomicU64,
    /// Whether registrations have ever been held. From then on the registrar is slow.
    slow: AtomicBool,
    /// Whether registrations of landing memory are held.
    held: Mutex<bool>,
    /// The number of registrations that wait.
    waiting: AtomicU64,
    released: Condvar,
}

fn is_next_lost(left: &AtomicU32) -> bool {
    let one_less = |left: u32| match left {
        u32::MAX => Some(left),
        _ => left.checked_sub(1),
    };
    left.fetch_update(SeqCst, SeqCst, one_less).is_ok()
}

impl Faults {
    pub(crate) fn hold_registrations(&self, on: bool) {
        self.slow.store(true, SeqCst);
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = on;
        self.released.notify_all();
    }

    pub(crate) fn held_registrations(&self) -> u64 {
        self.waiting.load(SeqCst)
    }

    pub(crate) fn is_slow(&self) -> bool {
        self.slow.load(SeqCst)
    }

    /// Waits while registrations are held. Returns false if the wait exceeds [`MAX_HOLD`].
    pub(crate) fn registration_passes(&self) -> bool {
        if !self.is_slow() {
            return true;
        }
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_add(1, SeqCst);
        let waited = self.released.wait_timeout_while(held, MAX_HOLD, |held| *held);
        self.waiting.fetch_sub(1, SeqCst);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    pub(crate) fn fail_registrations(&self, after: u64, count: u64) {
        self.registrations_before.store(after, SeqCst);
        self.registrations_failing.store(count, SeqCst);
    }

    pub(crate) fn registration_fails(&self) -> bool {
        let take = |counter: &AtomicU64| {
            counter.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1)).is_ok()
        };
        !take(&self.registrations_before) && take(&self.registrations_failing)
    }

    pub(crate) fn set_kill_after(&self, work: Option<u64>) {
        self.kill_after.store(work.map_or(0, |n| n.saturating_add(1)), SeqCst);
    }

    pub(crate) fn kill_after(&self) -> Option<u64> {
        self.kill_after.load(SeqCst).checked_sub(1)
    }

    pub(crate) fn set_frozen(&self, on: bool) {
        self.frozen.store(on, SeqCst);
    }

    pub(crate) fn hold_destroy(&self, on: bool) {
        self.holds_destroy.store(on, SeqCst);
    }

    pub(crate) fn holds_destroy(&self) -> bool {
        self.holds_destroy.load(SeqCst)
    }

    /// Blocks while the destruction of links is held.
    pub(crate) fn wait_to_destroy(&self) {
        if self.holds_destroy() {
            self.destroying.fetch_add(1, SeqCst);
        }
        while self.holds_destroy() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    pub(crate) fn destroying(&self) -> u64 {
        self.destroying.load(SeqCst)
    }

    pub(crate) fn frozen(&self) -> bool {
        self.frozen.load(SeqCst)
    }

    pub(crate) fn set_paused(&self, on: bool) {
        self.paused.store(on, SeqCst);
    }

    pub(crate) fn paused(&self) -> bool {
        self.paused.load(SeqCst)
    }

    /// Loses the next `count` connect requests, or all of them for `u32::MAX`.
    pub(crate) fn set_lose_connects(&self, count: u32) {
        self.lose_connects.store(count, SeqCst);
    }

    pub(crate) fn lose_connects(&self) -> bool {
        is_next_lost(&self.lose_connects)
    }

    /// Loses the next `count` answers to connect requests, or all of them for `u32::MAX`.
    pub(crate) fn set_lose_accepts(&self, count: u32) {
        self.lose_accepts.store(count, SeqCst);
    }

    pub(crate) fn lose_accepts(&self) -> bool {
        is_next_lost(&self.lose_accepts)
    }

    pub(crate) fn set_lose_disconnects(&self, on: bool) {
        self.lose_disconnects.store(on, SeqCst);
    }

    pub(crate) fn lose_disconnects(&self) -> bool {
        self.lose_disconnects.load(SeqCst)
    }

    pub(crate) fn remove(&self) {
        self.removed.store(true, SeqCst);
    }

    pub(crate) fn removed(&self) -> bool {
        self.removed.load(SeqCst)
    }
}

/// A delay that ends when a number of polls has been made and an instant has passed.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Delay {
    polls: u32,
    until: Option<Instant>,
}

impl Delay {
    pub(crate) fn draw(rng: &mut Rng, config: &SimConfig) -> Delay {
        let polls = rng.up_to(config.delay);
        let millis = rng.up_to(u32::try_from(config.latency.as_millis()).unwrap_or(u32::MAX));
        let until = (millis > 0).then(|| Instant::now() + Duration::from_millis(millis.into()));
        Delay { polls, until }
    }

    /// Counts a poll.
    pub(crate) fn tick(&mut self) {
        self.polls = self.polls.saturating_sub(1);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.polls == 0 && self.waits_until().is_none()
    }

    /// The instant, if it is in the future.
    pub(crate) fn waits_until(&self) -> Option<Instant> {
        self.until.filter(|until| *until > Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registrations_fail_when_told() {
        let faults = Faults::default();
        assert!(!faults.registration_fails());
        faults.fail_registrations(2, 1);
        assert_eq!([0; 5].map(|_| faults.registration_fails()), [false, false, true, false, false]);
    }
}
