//! Skips polling a future until its waker has fired.
//!
//! Each poll of a pending tokio future or descriptor checks its state and registers the task's
//! waker. A driver has about five such futures, which are rarely ready, and polls once or twice for
//! every message.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// The waker that the future gets instead of the task's.
#[derive(Debug)]
struct GateWaker {
    /// Whether the waker has fired since the last poll.
    fired: AtomicBool,
    task: Mutex<Option<Waker>>,
}

impl Wake for GateWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.fired.store(true, Ordering::Release);
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(task) = task {
            task.wake();
        }
    }
}

/// Polls one future or descriptor only when it may be ready. Otherwise, a poll of the gate costs
/// one atomic load.
#[derive(Debug)]
pub struct WakeGate {
    gate: Arc<GateWaker>,
    /// The waker that wakes through `gate`.
    waker: Waker,
    /// The task that `gate` wakes.
    task: Option<Waker>,
}

impl Default for WakeGate {
    fn default() -> Self {
        WakeGate::new()
    }
}

impl WakeGate {
    /// Creates a gate whose first poll calls the future.
    #[inline]
    pub fn new() -> WakeGate {
        let gate = Arc::new(GateWaker { fired: AtomicBool::new(true), task: Mutex::new(None) });
        WakeGate { waker: Waker::from(gate.clone()), gate, task: None }
    }

    /// Calls `poll`, unless its last call was pending and its waker has not fired since. `poll`
    /// must poll the same future each time. The gate wakes the task that made the last call.
    #[inline]
    pub fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        if self.task.as_ref().is_none_or(|task| !task.will_wake(cx.waker())) {
            self.task = Some(cx.waker().clone());
            *self.gate.task.lock().unwrap_or_else(PoisonError::into_inner) = self.task.clone();
        }
        if !self.gate.fired.load(Ordering::Acquire) {
            return Poll::Pending;
        }
        // The flag is cleared before polling, so that any later event sets it again.
        self.gate.fired.store(false, Ordering::Relaxed);
        let polled = poll(&mut Context::from_waker(&self.waker));
        if polled.is_ready() {
            // A future that was ready holds no waker, so the next poll must not be skipped.
            self.gate.fired.store(true, Ordering::Relaxed);
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn it_polls_at_first_after_a_wake_and_after_ready() {
        let (mut gate, mut polls, mut inner) = (WakeGate::new(), 0, None);
        let [first, second] = [(); 2].map(|()| Arc::new(Count(AtomicUsize::new(0))));
        let mut poll = |task: &Arc<Count>, ready: bool| {
            let waker = Waker::from(task.clone());
            let polled = gate.poll(&mut Context::from_waker(&waker), |cx| {
                polls += 1;
                inner = Some(cx.waker().clone());
                if ready { Poll::Ready(()) } else { Poll::Pending }
            });
            (polled.is_ready(), polls, inner.clone().unwrap())
        };
        let (ready, polls, waker) = poll(&first, false);
        assert_eq!((ready, polls), (false, 1));
        assert_eq!(poll(&first, true).1, 1, "it has not woken anybody");
        // The task that polled last is woken.
        assert_eq!(poll(&second, true).1, 1);
        waker.wake_by_ref();
        assert_eq!([&first, &second].map(|task| task.0.load(Ordering::SeqCst)), [0, 1]);
        let (ready, polls, _) = poll(&second, true);
        assert_eq!((ready, polls), (true, 2));
        assert_eq!(poll(&second, false).1, 3, "there may be more");
        assert_eq!(poll(&second, false).1, 3);
    }
}
