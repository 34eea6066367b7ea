//! When the driver has its next turn while it has more to copy.
//!
//! On a runtime of one thread it goes behind everything, sockets and timers too: another connection
//! may have been rung. tokio does that for a task that yields ([`tokio::task::yield_now`]) when no
//! task is left to run, and else once in `event_interval` (61) polls of tasks. Where there always
//! is one to run that is too seldom, so it is measured:
//!
//! | state | on | next |
//! |---|---|---|
//! | Several | | Several |
//! | BehindAll | back within [`LATE`] | BehindAll |
//! | BehindAll | back later | BehindTasks([`BUSY`]) |
//! | BehindTasks(n) | | BehindTasks(n - 1), BehindAll after 1 |
//!
//! On a runtime of several threads it goes behind the other tasks, where another thread may take it
//! up; one of them looks at the sockets.

use std::future::Future;
use std::pin::pin;
use std::task::Context;
use std::time::{Duration, Instant};

use tokio::runtime::{Handle, RuntimeFlavor};

/// Many times what a copy takes, and a trip round a queue of short tasks.
const LATE: Duration = Duration::from_micros(500);
/// Turns until it is measured again.
const BUSY: u8 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The runtime has several threads.
    Several,
    BehindAll,
    BehindTasks(u8),
}

#[derive(Debug)]
pub(in crate::connection) struct Turns {
    state: State,
    /// It went behind all then.
    since: Option<Instant>,
}

impl Turns {
    /// Of a task of the runtime that this is called in.
    pub(in crate::connection) fn new() -> Self {
        let flavor = Handle::try_current().map(|runtime| runtime.runtime_flavor());
        let state = match flavor {
            Ok(RuntimeFlavor::CurrentThread) => State::BehindAll,
            _ => State::Several,
        };
        Turns { state, since: None }
    }

    /// The task has its turn.
    pub(in crate::connection) fn begin(&mut self) {
        if let Some(since) = self.since.take() {
            self.back_after(since.elapsed());
        }
    }

    fn back_after(&mut self, waited: Duration) {
        if waited > LATE {
            self.state = State::BehindTasks(BUSY);
        }
    }

    /// Has the task woken for another turn, after others had theirs.
    pub(in crate::connection) fn again(&mut self, cx: &mut Context<'_>) {
        match self.state {
            State::BehindAll => {
                self.since = Some(Instant::now());
                let _ = pin!(tokio::task::yield_now()).poll(cx);
            }
            State::Several => cx.waker().wake_by_ref(),
            State::BehindTasks(left) => {
                self.state = if left > 1 { State::BehindTasks(left - 1) } else { State::BehindAll };
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

    /// Wakes at once, of so many turns.
    fn at_once(turns: &mut Turns, times: u32) -> u32 {
        let count = Arc::new(Count::default());
        let waker = Waker::from(count.clone());
        for _ in 0..times {
            turns.again(&mut Context::from_waker(&waker));
        }
        count.0.load(Relaxed)
    }

    #[tokio::test]
    async fn on_one_thread_it_goes_behind_all_unless_that_takes_long() {
        let mut turns = Turns::new();
        turns.back_after(LATE);
        assert_eq!(at_once(&mut turns, 10), 0);
        turns.back_after(LATE * 2);
        assert_eq!(at_once(&mut turns, 100), u32::from(BUSY), "and then it tries again");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn on_several_it_can_be_taken_up_by_another() {
        let handle = tokio::spawn(async { at_once(&mut Turns::new(), 10) });
        assert_eq!(handle.await.unwrap(), 10);
    }
}
