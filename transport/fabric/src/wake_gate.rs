//! What a task asks about with every turn, and what hardly ever has anything to say.
//!
//! To poll a future or a descriptor of tokio's that is pending goes through its state each time,
//! with the task's waker handed over. A driver has some five of them, and a turn or two for every
//! message.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// Who is woken in the task's place.
#[derive(Debug)]
struct Rung {
    /// Since the last poll.
    rung: AtomicBool,
    task: Mutex<Option<Waker>>,
}

impl Wake for Rung {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, Ordering::Release);
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(task) = task {
            task.wake();
        }
    }
}

/// Stands between a task and one thing that it polls: that is asked when it may have something to
/// say, and costs a load otherwise.
#[derive(Debug)]
pub struct WakeGate {
    rung: Arc<Rung>,
    /// Of `rung`.
    waker: Waker,
    /// As in `rung`.
    task: Option<Waker>,
}

impl Default for WakeGate {
    fn default() -> Self {
        WakeGate::new()
    }
}

impl WakeGate {
    /// Nothing has been asked so far.
    pub fn new() -> WakeGate {
        let rung = Arc::new(Rung { rung: AtomicBool::new(true), task: Mutex::new(None) });
        WakeGate { waker: Waker::from(rung.clone()), rung, task: None }
    }

    /// Asks `poll`, always the same thing, unless it was pending the last time and has not woken
    /// its task since. The task of the last call is woken.
    pub fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        if self.task.as_ref().is_none_or(|task| !task.will_wake(cx.waker())) {
            self.task = Some(cx.waker().clone());
            *self.rung.task.lock().unwrap_or_else(PoisonError::into_inner) = self.task.clone();
        }
        if !self.rung.rung.load(Ordering::Acquire) {
            return Poll::Pending;
        }
        // Before it is asked: what happens from now on rings again.
        self.rung.rung.store(false, Ordering::Relaxed);
        let polled = poll(&mut Context::from_waker(&self.waker));
        if polled.is_ready() {
            // It has no waker now.
            self.rung.rung.store(true, Ordering::Relaxed);
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
    fn it_is_asked_at_first_when_it_has_woken_and_after_it_was_ready() {
        let (mut news, mut asked, mut theirs) = (WakeGate::new(), 0, None);
        let [first, second] = [(); 2].map(|()| Arc::new(Count(AtomicUsize::new(0))));
        let mut poll = |task: &Arc<Count>, ready: bool| {
            let waker = Waker::from(task.clone());
            let polled = news.poll(&mut Context::from_waker(&waker), |cx| {
                asked += 1;
                theirs = Some(cx.waker().clone());
                if ready { Poll::Ready(()) } else { Poll::Pending }
            });
            (polled.is_ready(), asked, theirs.clone().unwrap())
        };
        let (ready, asked, waker) = poll(&first, false);
        assert_eq!((ready, asked), (false, 1));
        assert_eq!(poll(&first, true).1, 1, "it has not woken anybody");
        // The one that has asked last is woken.
        assert_eq!(poll(&second, true).1, 1);
        waker.wake_by_ref();
        assert_eq!([&first, &second].map(|task| task.0.load(Ordering::SeqCst)), [0, 1]);
        let (ready, asked, _) = poll(&second, true);
        assert_eq!((ready, asked), (true, 2));
        assert_eq!(poll(&second, false).1, 3, "there may be more");
        assert_eq!(poll(&second, false).1, 3);
    }
}
