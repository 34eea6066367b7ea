//! The timers of a runtime, which share one kernel timer.
//!
//! The kernel's timer is set for the first deadline. A task of the runtime waits for the kernel's
//! timer, and wakes the tasks whose deadlines have passed. A deadline that is not the first costs
//! no system call. After a deadline is cancelled, the kernel's timer stays set, and the task finds
//! nothing to do. Deadlines that are close together expire together, so a wait may be longer by up
//! to its length divided by [`SLACK`].
//!
//! | the timers of a runtime | event | next |
//! |---|---|---|
//! | none | a timer is made | Live: a timerfd, and the task that waits for it |
//! | Live | a timer is made, or dropped while there are others | Live |
//! | Live | the last timer is dropped | Ended: the task ends, the descriptor is closed |
//! | Live | the runtime ends, and the task with it | Ended: no timer expires any more |
//!
//! # The coarse clock
//!
//! [`CoarseClock`] gives all connections of a runtime the time without reading the clock for each
//! message.
//!
//! Without a vDSO, reading the clock is a system call. The protocol's time-outs are seconds long,
//! and an old time only makes the protocol send a PING sooner.
//!
//! | from | on | to |
//! |---|---|---|
//! | Read | a caller gets the current time | Read; Reused at the [`READS`]th call |
//! | Reused | a caller gets the time that was last read | Reused |
//! | Reused | the runtime's timer, [`MAX_AGE`] after that time | Read |

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::{Handle, Id};
use tonic_rdma_memory::{PerProcess, throttled};

use crate::timer::time::{self, MAX_AGE, now};
use crate::wake_gate::WakeGate;

/// The runtimes with timers. A list suffices, because a process has few runtimes.
type Runtimes = Vec<(Id, Weak<Deadlines>)>;

static RUNTIMES: PerProcess<Mutex<Runtimes>> = PerProcess::new(Mutex::default);

/// Maximum wait, 68 years. Longer waits are shortened to this length.
const MAX_WAIT: Duration = Duration::from_secs(1 << 31);

/// A wait may be longer than requested, by up to `1 / SLACK` of its length. So the waits of
/// thousands of connections end together. Otherwise each wait would cost three system calls.
const SLACK: u64 = 32;

/// A deadline, and the timer that it belongs to.
type Key = (Instant, u64);

/// The deadlines of a runtime's timers.
#[derive(Debug)]
pub(super) struct Deadlines {
    fd: AsyncFd<OwnedFd>,
    clock: CoarseClock,
    /// The time from which shared deadlines are counted.
    epoch: Instant,
    state: Mutex<DeadlinesState>,
}

#[derive(Debug, Default)]
struct DeadlinesState {
    /// Timers that are set, each with the task that waits for it.
    waiting: BTreeMap<Key, Option<Waker>>,
    /// The time for which the kernel's timer is set.
    armed: Option<Instant>,
    /// The time when the kernel's timer last expired. All deadlines up to this time have passed.
    passed: Option<Instant>,
    /// The time when the clock's reused time becomes too old.
    clock_expires: Option<Instant>,
    timers: usize,
    /// The number of the timer that was made last.
    last: u64,
    ended: bool,
    /// The task that waits for the kernel's timer.
    task: Option<Waker>,
}

/// A timer that uses the kernel's timer of the runtime in which it was made.
#[derive(Debug)]
pub(super) struct KernelTimer {
    deadlines: Arc<Deadlines>,
    id: u64,
    /// The time for which the timer was last set. The timer is in `waiting` until it expires.
    at: Option<Instant>,
    gate: WakeGate,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Deadlines {
    /// Adds a timer to the current runtime's deadlines. Returns the deadlines and the timer's
    /// number.
    fn join() -> io::Result<(Arc<Deadlines>, u64)> {
        let runtime = Handle::current();
        let mut runtimes = lock(&RUNTIMES);
        let own = runtimes.iter().find(|(id, _)| *id == runtime.id());
        if let Some(deadlines) = own.and_then(|(_, deadlines)| deadlines.upgrade())
            && let Some(id) = deadlines.add_timer()
        {
            return Ok((deadlines, id));
        }
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let fd = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        // SAFETY: an OwnedFd owns its descriptor and always gives the same one (R17).
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
        let state = Mutex::new(DeadlinesState { timers: 1, last: 1, ..DeadlinesState::default() });
        let epoch = now();
        let deadlines = Arc::new(Deadlines { fd, clock: CoarseClock::new(epoch), epoch, state });
        runtimes.retain(|(id, deadlines)| *id != runtime.id() && deadlines.strong_count() > 0);
        runtimes.push((runtime.id(), Arc::downgrade(&deadlines)));
        runtime.spawn(TimerReactor(deadlines.clone()).run());
        Ok((deadlines, 1))
    }

    /// Adds a timer and returns its number. `None` if the deadlines have ended.
    fn add_timer(&self) -> Option<u64> {
        let mut state = lock(&self.state);
        if state.ended {
            return None;
        }
        state.timers += 1;
        state.last += 1;
        Some(state.last)
    }

    /// Delays a deadline by at most its wait divided by [`SLACK`], to a multiple of a power of two
    /// of milliseconds, so that timers share deadlines.
    fn shared(&self, at: Instant, wait: Duration) -> Instant {
        let slack = wait.as_millis() as u64 / SLACK;
        let Some(step) = slack.checked_ilog2().map(|log| Duration::from_millis(1 << log)) else {
            return at;
        };
        let past = at.saturating_duration_since(self.epoch).as_nanos() % step.as_nanos();
        match u64::try_from(past) {
            Ok(past @ 1..) => at + (step - Duration::from_nanos(past)),
            _ => at,
        }
    }

    /// The time, which may be up to [`MAX_AGE`] old.
    #[inline]
    pub(super) fn now(&self) -> Instant {
        let (now, expires) = self.clock.now();
        if let Some(at) = expires {
            let mut state = lock(&self.state);
            state.clock_expires = Some(at);
            let armed = self.arm_for(&mut state, now, at);
            if let Err(error) = &armed {
                // timerfd_settime should not fail with these arguments.
                throttled!(warn, %error, "timerfd_settime; the clock is read each time");
            }
            if armed.is_err() || state.ended {
                self.clock.expire();
            }
        }
        now
    }

    /// Sets the kernel's timer for `at`, unless that timer already expires earlier.
    fn arm_for(&self, state: &mut DeadlinesState, now: Instant, at: Instant) -> io::Result<()> {
        if state.armed.is_none_or(|armed| at < armed) {
            self.arm(at.saturating_duration_since(now))?;
            state.armed = Some(at);
        }
        Ok(())
    }

    /// Sets the kernel's timer to expire in `wait`.
    fn arm(&self, wait: Duration) -> io::Result<()> {
        // Zero would disarm the timer.
        let wait = wait.max(Duration::from_nanos(1));
        let value = libc::timespec {
            // Every `time_t` can represent this number.
            tv_sec: i32::try_from(wait.as_secs()).unwrap_or(i32::MAX).into(),
            tv_nsec: wait.subsec_nanos().into(),
        };
        let never = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let once = libc::itimerspec { it_interval: never, it_value: value };
        // Uses the C library's function, like the code that reads the clock, so that a program that
        // replaces the clock can also replace timers.
        // SAFETY: the descriptor is open, the call reads `once`, and writes nowhere; this rests on
        // no rule.
        match unsafe {
            libc::timerfd_settime(self.fd.get_ref().as_raw_fd(), 0, &once, std::ptr::null_mut())
        } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Handles the expiry of the kernel's timer: removes the deadlines that have passed, and sets
    /// the timer for the next deadline. Returns the tasks to wake.
    fn expire(&self) -> Vec<Waker> {
        let now = now();
        let mut state = lock(&self.state);
        // The time of expiry is never earlier than the time for which the timer was set. The
        // kernel's clock and tokio's clock may differ in resolution, and a test may have stopped
        // tokio's clock.
        let passed = state.armed.take().map_or(now, |armed| armed.max(now));
        state.passed = Some(passed);
        if state.clock_expires.is_some_and(|at| at <= passed) {
            state.clock_expires = None;
            self.clock.expire();
        }
        let mut wakers = Vec::new();
        let mut first = state.waiting.first_key_value().map(|(&(at, _), _)| at);
        while first.is_some_and(|at| at <= passed) {
            wakers.extend(state.waiting.pop_first().and_then(|(_, waker)| waker));
            first = state.waiting.first_key_value().map(|(&(at, _), _)| at);
        }
        if let Some(at) = first.into_iter().chain(state.clock_expires).min()
            && let Err(error) = self.arm_for(&mut state, passed, at)
        {
            // timerfd_settime should not fail with these arguments. If the call fails, all timers
            // expire now, because timers that never expire would be worse than timers that expire
            // early.
            throttled!(warn, %error, "timerfd_settime; all timers expire");
            wakers.extend(std::mem::take(&mut state.waiting).into_values().flatten());
            self.clock.expire();
        }
        wakers
    }
}

/// The task that waits for the kernel's timer.
struct TimerReactor(Arc<Deadlines>);

impl TimerReactor {
    async fn run(self) {
        let deadlines = &self.0;
        poll_fn(|cx| {
            loop {
                {
                    let mut state = lock(&deadlines.state);
                    if state.ended {
                        return Poll::Ready(());
                    }
                    if state.task.as_ref().is_none_or(|task| !task.will_wake(cx.waker())) {
                        state.task = Some(cx.waker().clone());
                    }
                }
                let mut guard = match deadlines.fd.poll_read_ready(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(guard)) => guard,
                    // The runtime shuts down, and ends this task.
                    Poll::Ready(Err(_)) => return Poll::Ready(()),
                };
                let mut times = [0; 8];
                // If the timer has been set again since it expired, there is nothing to read.
                if guard.try_io(|fd| Ok(rustix::io::read(fd.get_ref(), &mut times)?)).is_ok() {
                    deadlines.expire().into_iter().for_each(Waker::wake);
                }
            }
        })
        .await;
    }
}

impl Drop for TimerReactor {
    /// Ends the timers, because the runtime may end before the timers are dropped.
    fn drop(&mut self) {
        lock(&self.0.state).ended = true;
        // No other code makes the clock expire from now on.
        self.0.clock.expire();
    }
}

impl KernelTimer {
    /// # Panics
    /// If the function is called outside of a tokio runtime with both drivers enabled.
    pub(super) fn new() -> io::Result<KernelTimer> {
        let (deadlines, id) = Deadlines::join()?;
        Ok(KernelTimer { deadlines, id, at: None, gate: WakeGate::new() })
    }

    /// The deadlines that this timer belongs to.
    pub(super) fn deadlines(&self) -> Arc<Deadlines> {
        self.deadlines.clone()
    }

    /// Sets the timer. `at` is a time of tokio's clock.
    pub(super) fn set(&mut self, at: Instant) -> io::Result<()> {
        let mut now = self.deadlines.now();
        let about = at.saturating_duration_since(now);
        // The slack of a longer wait exceeds the clock's error.
        if about < MAX_AGE * SLACK as u32 {
            now = time::now();
        }
        let wait = at.saturating_duration_since(now).min(MAX_WAIT);
        let at = self.deadlines.shared(now + wait, wait);
        let mut state = lock(&self.deadlines.state);
        let waker = self.at.and_then(|at| state.waiting.remove(&(at, self.id))).flatten();
        state.waiting.insert((at, self.id), waker);
        self.at = Some(at);
        self.deadlines.arm_for(&mut state, now, at)
    }

    /// Returns the time of expiry once the timer has expired after it was last set.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Instant> {
        let KernelTimer { deadlines, id, at, gate } = self;
        let Some(at) = *at else { return Poll::Pending };
        gate.poll(cx, |cx| {
            let mut state = lock(&deadlines.state);
            match state.waiting.get_mut(&(at, *id)) {
                Some(waker) => {
                    *waker = Some(cx.waker().clone());
                    Poll::Pending
                }
                None => Poll::Ready(state.passed.map_or(at, |passed| passed.max(at))),
            }
        })
    }
}

impl Drop for KernelTimer {
    fn drop(&mut self) {
        let mut state = lock(&self.deadlines.state);
        if let Some(at) = self.at {
            state.waiting.remove(&(at, self.id));
        }
        state.timers -= 1;
        if state.timers > 0 {
            return;
        }
        state.ended = true;
        let task = state.task.take();
        drop(state);
        lock(&RUNTIMES)
            .retain(|(_, deadlines)| !std::ptr::eq(deadlines.as_ptr(), &*self.deadlines));
        if let Some(task) = task {
            task.wake();
        }
    }
}

/// Number of clock reads until a time is reused, counted from the expiry of the previous reused
/// time. So a nearly idle runtime seldom sets the timer for its clock.
const READS: u32 = 8;

/// The value of `reused` while no time is reused.
const NONE: u64 = u64::MAX;

#[derive(Debug)]
pub(super) struct CoarseClock {
    /// The origin of the reused time.
    epoch: Instant,
    /// The reused time in nanoseconds since `epoch`. No other data depends on this value.
    reused: AtomicU64,
    reads: AtomicU32,
}

impl CoarseClock {
    pub(super) fn new(epoch: Instant) -> Self {
        CoarseClock { epoch, reused: AtomicU64::new(NONE), reads: AtomicU32::new(0) }
    }

    /// Returns the time. If later calls reuse this time, also returns the time at which
    /// [`expire`](Self::expire) has to be called.
    #[inline]
    pub(super) fn now(&self) -> (Instant, Option<Instant>) {
        match self.reused.load(Ordering::Relaxed) {
            NONE => self.read(),
            nanos => (self.epoch + Duration::from_nanos(nanos), None),
        }
    }

    #[cold]
    fn read(&self) -> (Instant, Option<Instant>) {
        let now = now();
        // Only one thread makes the read whose number is `READS`.
        if self.reads.fetch_add(1, Ordering::Relaxed) + 1 != READS {
            return (now, None);
        }
        match u64::try_from(now.saturating_duration_since(self.epoch).as_nanos()) {
            Ok(NONE) | Err(_) => (now, None), // After 584 years.
            Ok(nanos) => {
                self.reused.store(nanos, Ordering::Relaxed);
                (now, Some(now + MAX_AGE))
            }
        }
    }

    /// Stops reusing the time, which is too old.
    pub(super) fn expire(&self) {
        self.reads.store(0, Ordering::Relaxed);
        self.reused.store(NONE, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::runtime::{Builder, Runtime};
    use tokio::time::advance;

    use super::*;

    const SHORT: Duration = Duration::from_millis(1);
    const LONG: Duration = Duration::from_secs(3600);

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }

    fn set(timer: &mut KernelTimer, wait: Duration) {
        timer.set(now() + wait).unwrap();
    }

    async fn expires(timer: &mut KernelTimer) {
        poll_fn(|cx| timer.poll(cx)).await;
    }

    fn waiting(timer: &KernelTimer) -> usize {
        lock(&timer.deadlines.state).waiting.len()
    }

    #[test]
    fn all_timers_of_a_runtime_share_one() {
        runtime().block_on(async {
            let mut timers: Vec<_> = (0..100).map(|_| KernelTimer::new().unwrap()).collect();
            let fd = |timer: &KernelTimer| timer.deadlines.fd.get_ref().as_raw_fd();
            assert!(timers.iter().all(|timer| fd(timer) == fd(&timers[0])));
            for (n, timer) in timers.iter_mut().enumerate() {
                set(timer, SHORT * (n as u32 % 7));
            }
            for timer in &mut timers {
                expires(timer).await;
            }
            assert_eq!(waiting(&timers[0]), 0);
            // The kernel's timer also ends the clock's reused time.
            let armed = || lock(&timers[0].deadlines.state).armed;
            while armed().is_some() {
                tokio::time::sleep(SHORT).await;
            }
            assert_eq!(lock(&timers[0].deadlines.state).clock_expires, None);
        });
    }

    /// Shared deadlines are never early, late by at most 1/32 of the wait, and few even for many
    /// timers.
    #[test]
    fn deadlines_that_are_close_expire_together() {
        runtime().block_on(async {
            let timer = KernelTimer::new().unwrap();
            let deadlines = &timer.deadlines;
            for ms in [1, 32, 63, 64, 1_250, 5_000, 3_600_000] {
                let wait = Duration::from_millis(ms);
                let mut shared = std::collections::BTreeSet::new();
                for n in 0..1_000 {
                    let at = deadlines.epoch + wait + Duration::from_micros(n * 97);
                    let moved = deadlines.shared(at, wait);
                    assert!(at <= moved && moved <= at + wait / 32, "{wait:?}");
                    shared.insert(moved);
                }
                // All of them lie within 97 ms.
                let most = if ms < 32 { 1_000 } else { 2 * 97 * 32 / ms as usize + 2 };
                assert!(shared.len() <= most, "{wait:?}: {} deadlines", shared.len());
            }
        });
    }

    /// The clock stands still for a limited time, and is the same for all.
    #[test]
    fn the_clock_is_read_again_when_the_timer_says_so() {
        runtime().block_on(async {
            let timers = [(); 2].map(|()| KernelTimer::new().unwrap());
            let [first, second] = timers.each_ref().map(KernelTimer::deadlines);
            let last = loop {
                let at = first.now();
                if at == first.now() {
                    break at;
                }
            };
            assert_eq!(second.now(), last);
            while second.now() == last {
                tokio::time::sleep(SHORT).await;
            }
            assert!(first.now() >= last + MAX_AGE, "not before it is too old");
        });
    }

    /// A connection may ask for the time after its runtime's timers have ended.
    #[test]
    fn without_timers_the_clock_is_read_each_time() {
        let runtime = runtime();
        let clock = runtime.block_on(async {
            let timer = KernelTimer::new().unwrap();
            let clock = timer.deadlines();
            while clock.now() != clock.now() {}
            clock
        });
        drop(runtime);
        for _ in 0..20 {
            let last = clock.now();
            std::thread::sleep(SHORT);
            assert!(clock.now() > last);
        }
    }

    /// In a test that stops tokio's clock, timers wait for the right time, and report that clock's
    /// time.
    #[test]
    fn a_stopped_clock_stops_no_timer() {
        runtime().block_on(async {
            tokio::time::pause();
            let [mut first, mut later] = [(); 2].map(|()| KernelTimer::new().unwrap());
            let (began, now) = (Instant::now(), now());
            set(&mut later, SHORT * 20);
            set(&mut first, SHORT);
            let fired = poll_fn(|cx| first.poll(cx)).await;
            assert!(fired >= now + SHORT);
            let fired = poll_fn(|cx| later.poll(cx)).await;
            assert!(fired >= now + SHORT * 20 && began.elapsed() >= SHORT * 20);
        });
    }

    /// Setting a deadline that is not the first makes no system call.
    #[test]
    fn the_kernel_knows_of_the_first_deadline_only() {
        runtime().block_on(async {
            let [mut first, mut later] = [(); 2].map(|()| KernelTimer::new().unwrap());
            let armed = |timer: &KernelTimer| lock(&timer.deadlines.state).armed.unwrap();
            set(&mut first, LONG);
            let at = armed(&first);
            set(&mut later, LONG * 2);
            assert_eq!(armed(&first), at);
            set(&mut first, LONG * 3);
            assert_eq!(armed(&first), at, "it then finds nothing to do");
            set(&mut later, SHORT);
            assert!(armed(&first) < at);
            expires(&mut later).await;
            assert!(armed(&first) > at + LONG, "and is set for the next");
            assert_eq!(waiting(&first), 1);
            drop(first);
            assert_eq!(waiting(&later), 0, "a timer that is gone waits for nothing");
        });
    }

    #[test]
    fn the_last_timer_takes_the_descriptor_along() {
        let runtime = runtime();
        let tasks = || runtime.metrics().num_alive_tasks();
        runtime.block_on(async {
            let timers = [(); 2].map(|()| KernelTimer::new().unwrap());
            assert_eq!(tasks(), 1);
            let deadlines = Arc::downgrade(&timers[0].deadlines);
            drop(timers);
            while deadlines.strong_count() > 0 {
                tokio::task::yield_now().await;
            }
            assert_eq!(tasks(), 0);
            let mut timer = KernelTimer::new().unwrap();
            set(&mut timer, SHORT);
            expires(&mut timer).await;
        });
    }

    /// Timers of a runtime that has ended never expire, and those of others go on.
    #[test]
    fn runtimes_end_on_their_own() {
        let (old, new) = (runtime(), runtime());
        let mut kept = old.block_on(async { KernelTimer::new().unwrap() });
        let mut timer = new.block_on(async { KernelTimer::new().unwrap() });
        set(&mut kept, SHORT);
        set(&mut timer, SHORT * 20);
        drop(old);
        new.block_on(async {
            expires(&mut timer).await;
            assert!(poll_fn(|cx| Poll::Ready(kept.poll(cx))).await.is_pending());
            set(&mut timer, SHORT);
            drop(kept);
            expires(&mut timer).await;
        });
    }

    #[test]
    fn a_timer_wakes_the_task_that_polled_it_last() {
        runtime().block_on(async {
            let mut timer = KernelTimer::new().unwrap();
            set(&mut timer, SHORT * 5);
            assert!(poll_fn(|cx| Poll::Ready(timer.poll(cx))).await.is_pending());
            tokio::spawn(async move { expires(&mut timer).await }).await.unwrap();
        });
    }

    #[tokio::test(start_paused = true)]
    async fn one_read_serves_all_until_it_is_too_old() {
        let clock = CoarseClock::new(now());
        for round in 0..3 {
            for n in 1..=READS {
                advance(MAX_AGE / 10).await;
                let reused = (n == READS).then(|| now() + MAX_AGE);
                assert_eq!(clock.now(), (now(), reused), "{round}: a few need no timer");
            }
            let last = now();
            for _ in 0..10 {
                advance(MAX_AGE / 10).await;
                assert_eq!(clock.now(), (last, None));
            }
            clock.expire();
        }
    }

    #[test]
    fn of_several_threads_one_sets_the_timer() {
        for _ in 0..100 {
            let clock = CoarseClock::new(now());
            let set: usize = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4)
                    .map(|_| scope.spawn(|| (0..READS).filter(|_| clock.now().1.is_some()).count()))
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).sum()
            });
            assert_eq!(set, 1);
        }
    }
}
