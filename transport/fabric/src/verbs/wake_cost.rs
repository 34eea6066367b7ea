//! Measures how long a wake-up takes on this machine, and checks whether there is only one
//! processor.
//!
//! A device does not say when it announced a completion. So two threads, each on a different
//! processor, wake each other in the way that a device's event wakes a task. The threads run when a
//! link is about to sleep and the last result is older than [`MAX_AGE`]. The threads take a few
//! milliseconds, and sleep most of that time. All links of the process share the result.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::{Errno, retry_on_intr};
use rustix::thread::CpuSet;
use tonic_rdma_memory::PerProcess;

/// The cost before the first measurement, and the minimum. Every wake-up includes an interrupt, a
/// completion channel and epoll.
const MIN_COST: Duration = Duration::from_micros(20);
/// The maximum cost. Longer wake-ups count as this time.
const MAX_COST: Duration = Duration::from_millis(4);
/// A result older than this time is measured again.
const MAX_AGE: Duration = Duration::from_secs(60);
/// The number of wake-ups in each direction.
const ROUNDS: usize = 32;
/// A round that takes longer than this time never ends, because the other thread is gone.
const ROUND_TIMEOUT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// The cost in nanoseconds.
static COST: AtomicU64 = AtomicU64::new(MIN_COST.as_nanos() as u64);
static MEASURED: LazyLock<Mutex<Option<Instant>>> = LazyLock::new(Mutex::default);

/// Returns how long a wake-up takes.
pub(super) fn get() -> Duration {
    Duration::from_nanos(COST.load(Ordering::Relaxed))
}

/// Measures the cost on separate threads, unless the last measurement is recent.
pub(super) fn measure_if_old(now: Instant) {
    // If another thread holds the lock, that thread is measuring.
    let Ok(mut measured) = MEASURED.try_lock() else { return };
    if measured.is_some_and(|last| now.saturating_duration_since(last) < MAX_AGE) {
        return;
    }
    *measured = Some(now);
    let work = || match measure() {
        Ok(Some(cost)) => {
            let cost = cost.clamp(MIN_COST, MAX_COST);
            COST.store(u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
        Ok(None) => tracing::debug!("with one processor, the cost of a wake-up cannot be measured"),
        Err(error) => tracing::debug!(%error, "the cost of a wake-up cannot be measured"),
    };
    if let Err(error) = thread::Builder::new().name("wake-cost".to_owned()).spawn(work) {
        tracing::debug!(%error, "the cost of a wake-up cannot be measured");
    }
}

/// One of the two threads. The thread sleeps until the other thread wakes it.
struct Sleeper {
    event: OwnedFd,
    epoll: OwnedFd,
}

impl Sleeper {
    fn new() -> rustix::io::Result<Sleeper> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &event, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(Sleeper { event, epoll })
    }

    fn wake(&self) -> rustix::io::Result<()> {
        rustix::io::write(&self.event, &1_u64.to_ne_bytes()).map(drop)
    }

    fn sleep(&self) -> rustix::io::Result<()> {
        let mut events = Vec::with_capacity(1);
        let woken = retry_on_intr(|| {
            let events = rustix::buffer::spare_capacity(&mut events);
            epoll::wait(&self.epoll, events, Some(&ROUND_TIMEOUT))
        })?;
        if woken == 0 {
            return Err(Errno::TIMEDOUT);
        }
        rustix::io::read(&self.event, &mut [0; 8]).map(drop)
    }
}

/// The lower quartile of the time from waking the other thread until it runs. Returns `None` if the
/// process may use only one processor.
fn measure() -> rustix::io::Result<Option<Duration>> {
    let mut processors = processors()?.into_iter();
    let (Some(here), Some(there)) = (processors.next(), processors.next()) else { return Ok(None) };
    let (one, other) = (Sleeper::new()?, Sleeper::new()?);
    pin_to(here)?;
    thread::scope(|scope| {
        let answer = || {
            pin_to(there)?;
            for _ in 0..ROUNDS {
                other.sleep()?;
                one.wake()?;
            }
            rustix::io::Result::Ok(())
        };
        thread::Builder::new()
            .name("wake-cost".to_owned())
            .spawn_scoped(scope, answer)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))?;
        let mut times = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            let begin = Instant::now();
            other.wake()?;
            one.sleep()?;
            times.push(begin.elapsed() / 2);
        }
        times.sort_unstable();
        Ok(times.get(ROUNDS / 4).copied())
    })
}

/// The processors that the first thread of this process may use. The calling thread may be pinned
/// to one of them.
fn processors() -> rustix::io::Result<Vec<usize>> {
    let allowed = rustix::thread::sched_getaffinity(Some(rustix::process::getpid()))?;
    Ok((0..CpuSet::MAX_CPU).filter(|processor| allowed.is_set(*processor)).collect())
}

/// Pins this thread to a processor.
fn pin_to(processor: usize) -> rustix::io::Result<()> {
    let mut only = CpuSet::new();
    only.set(processor);
    rustix::thread::sched_setaffinity(None, &only)
}

/// Whether this host has a single processor. The answer is determined once.
pub(crate) fn host_has_one() -> bool {
    static ONE: PerProcess<bool> = PerProcess::new(|| {
        // SAFETY: sysconf takes no pointer; this rests on no rule.
        unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) == 1 }
    });
    *ONE
}

/// Whether this process may use only one processor, because of its affinity or its control group.
/// The answer is determined once.
pub(crate) fn process_has_one() -> bool {
    static ONE: PerProcess<bool> = PerProcess::new(|| {
        std::thread::available_parallelism().is_ok_and(|processors| processors.get() == 1)
    });
    *ONE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_measured_where_there_are_two_processors() {
        let processors = processors().unwrap();
        let measured = thread::spawn(measure).join().unwrap().unwrap();
        assert_eq!(measured.is_some(), processors.len() > 1);
        assert!(measured.is_none_or(|cost| !cost.is_zero()));
    }

    /// Some runtimes pin their worker threads to processors.
    #[test]
    fn a_thread_that_is_kept_to_one_processor_measures_it_too() {
        let processors = processors().unwrap();
        let kept = || {
            pin_to(processors[0]).unwrap();
            thread::spawn(measure).join().unwrap().unwrap()
        };
        let measured = thread::scope(|scope| scope.spawn(kept).join().unwrap());
        assert_eq!(measured.is_some(), processors.len() > 1);
    }
}
