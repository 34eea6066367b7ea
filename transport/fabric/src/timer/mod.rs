//! A timer for waits of many milliseconds, most of which end before it fires.
//!
//! While a tokio timer is set, the runtime reads the clock twice whenever it goes idle, even
//! between two messages of a call. A [`Timer`] uses a kernel timer (timerfd_create(2)) that all
//! timers of a runtime share (`deadlines`). A [`Timer`] costs nothing while it waits, and one
//! system call when it is set to expire before all others. The timer may fire late by up to 1/32 of
//! the wait.
//!
//! Without a vDSO, reading the clock is also a system call. So a timer reports the time when it
//! fires, and the connections of a runtime share a [`Clock`] whose time may be 20 ms old.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

#[cfg(all(target_os = "linux", any(feature = "shm", feature = "verbs")))]
mod deadlines;
mod time;

#[cfg(all(target_os = "linux", any(feature = "shm", feature = "verbs")))]
use deadlines::{Deadlines, KernelTimer};
use tokio::time::Sleep;
#[cfg(all(target_os = "linux", any(feature = "shm", feature = "verbs")))]
use tonic_rdma_memory::throttled;

use self::time::now;

/// A timer. The timer belongs to one task of the runtime in which it was created.
#[derive(Debug)]
pub struct Timer {
    kind: TimerSource,
    set: bool,
}

#[derive(Debug)]
enum TimerSource {
    #[cfg(all(target_os = "linux", any(feature = "shm", feature = "verbs")))]
    Kernel(KernelTimer),
    /// A timer of tokio, for a runtime without a kernel timer, and for the simulated fabric,
    /// because tests stop tokio's clock.
    Tokio(Pin<Box<Sleep>>),
}

impl Default for Timer {
    fn default() -> Self {
        Timer::new()
    }
}

impl Timer {
    /// Creates a timer that is not set. The timer uses this runtime's kernel timer, or a tokio
    /// timer if the kernel refuses a timer, for example because the process has no descriptor left.
    ///
    /// # Panics
    /// If the function is called outside of a tokio runtime with both drivers enabled.
    #[inline]
    pub fn new() -> Timer {
        #[cfg(all(target_os = "linux", any(feature = "shm", feature = "verbs")))]
        match KernelTimer::new() {
            Ok(timer) => return Timer { kind: TimerSource::Kernel(timer), set: false },
            Err(error) => tracing::debug!(%error, "timerfd_create; a tokio timer is used instead"),
        }
        Timer::with_tokio_clock()
    }

    /// Like [`new`](Timer::new), but on tokio's clock, which tests can stop.
    #[inline]
    pub fn with_tokio_clock() -> Timer {
        Timer { kind: TimerSource::Tokio(Box::pin(tokio::time::sleep(Duration::ZERO))), set: false }
    }

    /// Sets the timer to fire at `at`, or at once if `at` has passed. Replaces any earlier setting.
    #[inline]
    pub fn set(&mut self, at: Instant) {
        self.set = true;
        match &mut self.kind {
            #[cfg(all(target_os = "linux", any(feature = "shm", feature = "verbs")))]
            TimerSource::Kernel(timer) => {
                if let Err(error) = timer.set(at) {
                    // The call does not fail for these arguments. A timer that never fires would be
                    // worse than a tokio timer.
                    throttled!(warn, %error, "timerfd_settime; a tokio timer is used instead");
                    self.kind = TimerSource::Tokio(Box::pin(tokio::time::sleep_until(at.into())));
                }
            }
            TimerSource::Tokio(sleep) => sleep.as_mut().reset(at.into()),
        }
    }

    /// The clock of this runtime's timers.
    pub fn clock(&self) -> Clock {
        match &self.kind {
            #[cfg(all(target_os = "linux", any(feature = "shm", feature = "verbs")))]
            TimerSource::Kernel(timer) => Clock(Time::Shared(timer.deadlines())),
            TimerSource::Tokio(_) => Clock::default(),
        }
    }

    /// The result is ready once, with the time at which the timer fired. Pending while the timer is
    /// not set. The timer wakes the task that made the last call.
    #[inline]
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Instant> {
        if !self.set {
            return Poll::Pending;
        }
        let over = match &mut self.kind {
            #[cfg(all(target_os = "linux", any(feature = "shm", feature = "verbs")))]
            TimerSource::Kernel(timer) => timer.poll(cx),
            TimerSource::Tokio(sleep) => sleep.as_mut().poll(cx).map(|()| now()),
        };
        self.set = over.is_pending();
        over
    }

    /// Waits for `time`, or for ever if the clock does not reach that far. Replaces any earlier
    /// setting.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn wait(&mut self, time: Duration) {
        match now().checked_add(time) {
            Some(at) => self.set(at),
            None => return std::future::pending().await,
        }
        std::future::poll_fn(|cx| self.poll(cx)).await;
    }
}

/// A clock whose time may be [`MAX_AGE`](Self::MAX_AGE) old, and older in a runtime whose tasks
/// delay its timers. Such a clock suffices, for example, for the arrival times of messages.
#[derive(Debug, Default, Clone)]
pub struct Clock(Time);

#[derive(Debug, Default, Clone)]
enum Time {
    /// Shared by the connections of a runtime.
    #[cfg(all(target_os = "linux", any(feature = "shm", feature = "verbs")))]
    Shared(std::sync::Arc<Deadlines>),
    /// Reads tokio's clock each time.
    #[default]
    Tokio,
}

impl Clock {
    /// Maximum age of the time in a runtime whose timers are not delayed.
    pub const MAX_AGE: Duration = time::MAX_AGE;

    /// The time of tokio's clock. This time may be earlier than a time that this clock or a timer
    /// has returned before.
    #[inline]
    pub fn now(&self) -> Instant {
        match &self.0 {
            #[cfg(all(target_os = "linux", any(feature = "shm", feature = "verbs")))]
            Time::Shared(deadlines) => deadlines.now(),
            Time::Tokio => now(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    const SHORT: Duration = Duration::from_millis(1);
    const LONG: Duration = Duration::from_secs(3600);

    fn clocks() -> [Timer; 2] {
        [Timer::new(), Timer::with_tokio_clock()]
    }

    async fn is_pending(timer: &mut Timer) -> bool {
        poll_fn(|cx| Poll::Ready(timer.poll(cx).is_pending())).await
    }

    #[tokio::test]
    async fn it_goes_off_once_and_not_before_its_time() {
        for mut timer in clocks() {
            assert!(is_pending(&mut timer).await, "it is not set");
            for _ in 0..3 {
                let began = Instant::now();
                timer.set(began + 20 * SHORT);
                assert!(is_pending(&mut timer).await);
                let fired = poll_fn(|cx| timer.poll(cx)).await;
                assert!(began.elapsed() >= 20 * SHORT);
                assert!(
                    fired >= began + 20 * SHORT && fired <= Instant::now(),
                    "it tells the time"
                );
                assert!(is_pending(&mut timer).await, "once");
            }
            timer.set(Instant::now());
            poll_fn(|cx| timer.poll(cx)).await;
            timer.wait(SHORT).await;
            timer.wait(Duration::ZERO).await;
            let ever = tokio::time::timeout(SHORT, timer.wait(Duration::MAX));
            assert!(ever.await.is_err(), "beyond the clock's end");
        }
    }

    #[tokio::test]
    async fn what_it_is_set_to_last_counts() {
        for mut timer in clocks() {
            timer.set(Instant::now() + LONG);
            assert!(is_pending(&mut timer).await);
            timer.set(Instant::now() + SHORT);
            poll_fn(|cx| timer.poll(cx)).await;
            // The timer fires before it is polled, and is then set again.
            timer.set(Instant::now());
            tokio::time::sleep(SHORT).await;
            timer.set(Instant::now() + LONG);
            assert!(is_pending(&mut timer).await, "the old time is forgotten");
            timer.set(Instant::now() + Duration::from_secs(1 << 40));
            assert!(is_pending(&mut timer).await, "a time beyond the clock's end");
        }
    }

    #[cfg(all(target_os = "linux", any(feature = "shm", feature = "verbs")))]
    #[test]
    fn it_is_the_kernels_where_there_is_one() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            assert!(matches!(Timer::new().kind, TimerSource::Kernel(_)));
        });
    }
}
