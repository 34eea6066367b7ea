//! Decides how the driver yields while more is left to copy.
//!
//! On a runtime with one thread, the driver yields to all other work, including sockets and timers,
//! because another connection's doorbell may have been rung. A task that yields by
//! [`tokio::task::yield_now`] runs again after tokio has polled sockets and timers. tokio polls
//! them when no other task can run, and otherwise once in `event_interval` (61) polls of tasks. If
//! some task can always run, the driver may wait too long, so the policy measures the wait:
//!
//! | state | event | next state |
//! |---|---|---|
//! | Several | any | Several |
//! | BehindAll | the driver runs again within [`MAX_WAIT`] | BehindAll |
//! | BehindAll | the driver runs again later | BehindTasks([`BUSY_TURNS`]) |
//! | BehindTasks(n) | the driver yields | BehindTasks(n - 1), BehindAll at 0 |
//!
//! On a runtime with several threads, the driver yields to the other tasks. Another thread may run
//! the driver next, and one of the threads polls the sockets.

use std::future::Future;
use std::pin::pin;
use std::task::Context;
use std::time::Duration;

use tokio::runtime::{Handle, RuntimeFlavor};
// Use tokio's clock, because tests can stop it.
use tokio::time::Instant;

/// The longest wait for other work after which the driver still yields to all other work. This wait
/// is several times as long as a copy, or as a round of short tasks.
const MAX_WAIT: Duration = Duration::from_micros(500);
/// Number of yields until the wait is measured again.
const BUSY_TURNS: u8 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum YieldTo {
    /// The state on a runtime with several threads.
    Several,
    BehindAll,
    BehindTasks(u8),
}

#[derive(Debug)]
pub(super) struct YieldPolicy {
    state: YieldTo,
    /// When the driver last yielded to all other work.
    since: Option<Instant>,
}

impl YieldPolicy {
    /// Creates the policy for the current tokio runtime.
    pub(super) fn new() -> Self {
        let flavor = Handle::try_current().map(|runtime| runtime.runtime_flavor());
        let state = match flavor {
            Ok(RuntimeFlavor::CurrentThread) => YieldTo::BehindAll,
            _ => YieldTo::Several,
        };
        YieldPolicy { state, since: None }
    }

    /// Records that the driver runs again.
    pub(super) fn runs(&mut self) {
        if let Some(since) = self.since.take()
            && since.elapsed() > MAX_WAIT
        {
            self.state = YieldTo::BehindTasks(BUSY_TURNS);
        }
    }

    /// Makes the driver's task run again after other tasks have run.
    pub(super) fn yield_now(&mut self, cx: &mut Context<'_>) {
        match self.state {
            YieldTo::BehindAll => {
                self.since = Some(Instant::now());
                let _ = pin!(tokio::task::yield_now()).poll(cx);
            }
            YieldTo::Several => cx.waker().wake_by_ref(),
            YieldTo::BehindTasks(left) => {
                self.state =
                    if left > 1 { YieldTo::BehindTasks(left - 1) } else { YieldTo::BehindAll };
                cx.waker().wake_by_ref();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;
    use std::sync::atomic::Ordering::Relaxed;
    use std::task::{Wake, Waker};

    use super::*;

    #[derive(Default)]
    struct Count(AtomicU32);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    /// Yields `times` times, each time for `wait`. Returns how often the task was woken
    /// immediately.
    async fn woken_at_once(policy: &mut YieldPolicy, times: u32, wait: Duration) -> u32 {
        let count = Arc::new(Count::default());
        let waker = Waker::from(count.clone());
        let mut at_once = 0;
        for _ in 0..times {
            let before = count.0.load(Relaxed);
            policy.yield_now(&mut Context::from_waker(&waker));
            at_once += count.0.load(Relaxed) - before;
            // tokio wakes deferred tasks when it is idle, as it is here.
            tokio::time::advance(wait).await;
            policy.runs();
        }
        at_once
    }

    #[tokio::test(start_paused = true)]
    async fn on_one_thread_it_yields_to_everything_unless_that_takes_long() {
        let mut policy = YieldPolicy::new();
        assert_eq!(woken_at_once(&mut policy, 10, MAX_WAIT).await, 0);
        let late = MAX_WAIT + Duration::from_micros(1);
        let measured = 20 / (u32::from(BUSY_TURNS) + 1);
        assert_eq!(
            woken_at_once(&mut policy, 20, late).await,
            20 - measured,
            "then measured again"
        );
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn on_several_threads_it_yields_to_tasks() {
        let woken = tokio::spawn(async {
            let (mut policy, count) = (YieldPolicy::new(), Arc::new(Count::default()));
            let waker = Waker::from(count.clone());
            for _ in 0..10 {
                policy.runs();
                policy.yield_now(&mut Context::from_waker(&waker));
            }
            count.0.load(Relaxed)
        });
        assert_eq!(woken.await.unwrap(), 10);
    }
}
