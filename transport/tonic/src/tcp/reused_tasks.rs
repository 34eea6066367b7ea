//! The tasks of a channel's HTTP/2 connection.
//!
//! hyper spawns a future for each call, which waits for the response. Here, a task whose future has
//! ended waits for the next future, because spawning a task costs more than waking a task.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use hyper::rt::Executor;

type BoxFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Maximum number of a channel's idle tasks.
const MAX_IDLE: usize = 256;

/// Runs futures on tokio's current runtime. All futures must come from the same runtime. tonic
/// ensures this condition by using the runtime of its channel task. When this struct is dropped,
/// idle tasks end at once, and busy tasks end with their futures.
#[derive(Debug, Default)]
pub(crate) struct ReusedTasks(Arc<Mutex<Idle>>);

/// The idle tasks. A caller that takes a task off the list owns the task.
#[derive(Debug, Default)]
struct Idle {
    tasks: Vec<(Arc<FutureSlot>, Waker)>,
    closed: bool,
}

/// Passes the next future to an idle task. Only this task takes the future, so a future in the slot
/// will run.
#[derive(Default)]
struct FutureSlot(Mutex<Option<BoxFuture>>);

impl std::fmt::Debug for FutureSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FutureSlot")
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Executor<BoxFuture> for ReusedTasks {
    fn execute(&self, future: BoxFuture) {
        let idle = lock(&self.0).tasks.pop();
        if let Some((slot, waker)) = idle {
            *lock(&slot.0) = Some(future);
            return waker.wake();
        }
        let (idle, slot) = (self.0.clone(), Arc::default());
        tokio::spawn(ReusedTask { idle, slot, future: Some(future) });
    }
}

impl Drop for ReusedTasks {
    fn drop(&mut self) {
        let tasks = {
            let mut idle = lock(&self.0);
            idle.closed = true;
            std::mem::take(&mut idle.tasks)
        };
        for (_, waker) in tasks {
            waker.wake();
        }
    }
}

/// A task that runs futures one after another.
struct ReusedTask {
    idle: Arc<Mutex<Idle>>,
    slot: Arc<FutureSlot>,
    /// `None` while the task is on the list, or was just taken off it.
    future: Option<BoxFuture>,
}

impl Future for ReusedTask {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        if this.future.is_none() {
            this.future = lock(&this.slot.0).take();
        }
        let Some(future) = &mut this.future else {
            // The task was woken by an earlier future's waker, or because the list is closed.
            return if lock(&this.idle).closed { Poll::Ready(()) } else { Poll::Pending };
        };
        ready!(future.as_mut().poll(cx));
        this.future = None;
        let mut idle = lock(&this.idle);
        if idle.closed || idle.tasks.len() >= MAX_IDLE {
            return Poll::Ready(());
        }
        idle.tasks.push((this.slot.clone(), cx.waker().clone()));
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::{mpsc, oneshot};

    use super::*;

    #[tokio::test]
    async fn a_task_runs_one_future_after_another() {
        let tasks = ReusedTasks::default();
        let (ran, mut ids) = mpsc::unbounded_channel();
        let run = || {
            let ran = ran.clone();
            tasks.execute(Box::pin(async move { ran.send(tokio::task::id()).unwrap() }));
        };
        run();
        let first = ids.recv().await.unwrap();
        for _ in 0..3 {
            // The task is idle once its future has ended.
            tokio::task::yield_now().await;
            run();
            assert_eq!(ids.recv().await.unwrap(), first);
        }
    }

    #[tokio::test]
    async fn a_future_that_waits_holds_up_no_other() {
        let tasks = ReusedTasks::default();
        let (go, waits) = oneshot::channel::<()>();
        let (done, both) = mpsc::unbounded_channel();
        let first = done.clone();
        tasks.execute(Box::pin(async move {
            waits.await.unwrap();
            first.send(1).unwrap();
        }));
        tasks.execute(Box::pin(async move { done.send(2).unwrap() }));
        let mut both = both;
        assert_eq!(both.recv().await, Some(2));
        go.send(()).unwrap();
        assert_eq!(both.recv().await, Some(1));
    }

    #[tokio::test]
    async fn tasks_end_with_what_runs_them() {
        let alive = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
        let before = alive();
        let tasks = ReusedTasks::default();
        let (go, waits) = oneshot::channel::<()>();
        tasks.execute(Box::pin(async {}));
        tasks.execute(Box::pin(async move { waits.await.unwrap() }));
        tokio::task::yield_now().await;
        assert_eq!(alive(), before + 2);
        drop(tasks);
        tokio::task::yield_now().await;
        assert_eq!(alive(), before + 1, "the idle one has ended");
        go.send(()).unwrap();
        tokio::task::yield_now().await;
        assert_eq!(alive(), before);
    }
}
