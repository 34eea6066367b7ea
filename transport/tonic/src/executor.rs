//! The executor of background tasks.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use hyper::rt::Executor;

/// A background task of any type.
pub(crate) type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Boxes a task that is spawned rarely, because the compiler repeats tokio's code for each type of
/// task and each scheduler.
pub(crate) fn boxed(task: impl Future<Output = ()> + Send + 'static) -> Task {
    Box::pin(task)
}

/// A shared executor. If the user has set no executor, tasks run on tokio's current runtime.
#[derive(Clone, Default)]
pub(crate) struct SharedExec(Option<Arc<dyn Executor<Task> + Send + Sync>>);

impl SharedExec {
    pub(crate) fn new(executor: impl Executor<Task> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(executor)))
    }

    /// Spawns `task`. Panics outside a tokio runtime if no executor was set, as tonic does.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        match &self.0 {
            Some(executor) => executor.execute(Box::pin(task)),
            None => drop(tokio::spawn(task)),
        }
    }
}

impl Executor<Task> for SharedExec {
    fn execute(&self, task: Task) {
        self.spawn(task);
    }
}

impl fmt::Debug for SharedExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Some(_) => "SharedExec(custom)",
            None => "SharedExec(tokio)",
        })
    }
}
