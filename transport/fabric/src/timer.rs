//! A timer for waits of many milliseconds, most of which end before it fires.
//!
//! While a timer of tokio's is set, the runtime reads the clock twice whenever it goes idle, also
//! between two messages of a call. A [`Timer`] is a timer of the kernel, timerfd_create(2): it
//! costs a descriptor, a system call each time that it is set, and nothing while it waits.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

#[cfg(all(target_os = "linux", any(feature = "shm", feature = "verbs")))]
use kernel::KernelTimer;
use tokio::time::Sleep;

/// A timer. It belongs to one task of the runtime that it was made in.
#[derive(Debug)]
pub struct Timer {
    clock: Clock,
    set: bool,
}

#[derive(Debug)]
enum Clock {
    #[cfg(all(target_os = "linux", any(feature = "shm", feature = "verbs")))]
    Kernel(KernelTimer),
    /// Where there is no other, and on the simulated fabric, whose time tests stop.
    Tokio(Pin<Box<Sleep>>),
}

impl Default for Timer {
    fn default() -> Self {
        Timer::new()
    }
}

impl Timer {
    /// A timer that is not set. It is one of the kernel, or one of tokio where the kernel gives
    /// none, because the process has no descriptor left for instance.
    ///
    /// # Panics
    /// Outside of a tokio runtime with both drivers enabled.
    #[inline]
    pub fn new() -> Timer {
        #[cfg(all(target_os = "linux", any(feature = "shm", feature = "verbs")))]
        match KernelTimer::new() {
            Ok(timer) => return Timer { clock: Clock::Kernel(timer), set: false },
            Err(error) => tracing::debug!(%error, "timerfd_create; a timer of tokio's has to do"),
        }
        Timer::with_tokio_clock()
    }

    /// As [`new`](Timer::new), on tokio's clock, which tests can stop.
    #[inline]
    pub fn with_tokio_clock() -> Timer {
        Timer { clock: Clock::Tokio(Box::pin(tokio::time::sleep(Duration::ZERO))), set: false }
    }

    /// Sets the timer to fire at `at`, instead of any earlier setting; at once if `at` has passed.
    #[inline]
    pub fn set(&mut self, at: Instant) {
        self.set = true;
        match &mut self.clock {
            #[cfg(all(target_os = "linux", any(feature = "shm", feature = "verbs")))]
            Clock::Kernel(timer) => {
                if let Err(error) = timer.set(at.saturating_duration_since(now())) {
                    // The call does not fail for these arguments. A timer that never fires would
                    // be worse.
                    tracing::warn!(%error, "timerfd_settime; a timer of tokio's has to do");
                    self.clock = Clock::Tokio(Box::pin(tokio::time::sleep_until(at.into())));
                }
            }
            Clock::Tokio(sleep) => sleep.as_mut().reset(at.into()),
        }
    }

    /// Ready once, when the timer fires; pending while it is not set. The task of the last call is
    /// woken.
    #[inline]
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.set {
            return Poll::Pending;
        }
        let over = match &mut self.clock {
            #[cfg(all(target_os = "linux", any(feature = "shm", feature = "verbs")))]
            Clock::Kernel(timer) => timer.poll(cx),
            Clock::Tokio(sleep) => sleep.as_mut().poll(cx),
        };
        self.set = over.is_pending();
        over
    }

    /// Waits for `time`, or for ever where the clock does not reach that far. An earlier setting is
    /// lost.
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

/// tokio's clock, also for the kernel's timers: where a test has stopped it, deadlines are told by
/// it.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

#[cfg(all(target_os = "linux", any(feature = "shm", feature = "verbs")))]
mod kernel {
    use std::io;
    use std::os::fd::{AsRawFd as _, OwnedFd};
    use std::task::{Context, Poll};
    use std::time::Duration;

    use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
    use tokio::io::Interest;
    use tokio::io::unix::AsyncFd;

    use crate::ready_fd::ReadyFd;

    #[derive(Debug)]
    pub(super) struct KernelTimer(ReadyFd<OwnedFd>);

    impl KernelTimer {
        pub(super) fn new() -> io::Result<KernelTimer> {
            let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
            let fd = timerfd_create(TimerfdClockId::Monotonic, flags)?;
            // SAFETY: an OwnedFd owns its descriptor and always gives the same one (R17).
            let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
            Ok(KernelTimer(ReadyFd::new(fd)))
        }

        pub(super) fn set(&self, time: Duration) -> io::Result<()> {
            // Zero would take the timer back.
            let time = time.max(Duration::from_nanos(1));
            let value = libc::timespec {
                tv_sec: libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX),
                tv_nsec: time.subsec_nanos().into(),
            };
            let never = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            let once = libc::itimerspec { it_interval: never, it_value: value };
            // By the C library, as the clock is read: who puts a clock in that place can put timers
            // there, too.
            // SAFETY: the descriptor is open, the call reads `once`, and writes nowhere; this rests
            // on no rule.
            match unsafe {
                libc::timerfd_settime(self.0.get_ref().as_raw_fd(), 0, &once, std::ptr::null_mut())
            } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        }

        pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
            loop {
                let mut guard = match self.0.poll(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(guard)) => guard,
                    // The runtime shuts down, and ends this task.
                    Poll::Ready(Err(_)) => return Poll::Pending,
                };
                let mut times = [0; 8];
                // What had gone off before it was set anew counts no more: then there is nothing to
                // read.
                match guard.try_io(|fd| Ok(rustix::io::read(fd.get_ref(), &mut times)?)) {
                    Ok(_) => return Poll::Ready(()),
                    Err(_would_block) => {}
                }
            }
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
                poll_fn(|cx| timer.poll(cx)).await;
                assert!(began.elapsed() >= 20 * SHORT);
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
            // It fires before it is polled, and is set again.
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
            assert!(matches!(Timer::new().clock, Clock::Kernel(_)));
        });
    }
}
