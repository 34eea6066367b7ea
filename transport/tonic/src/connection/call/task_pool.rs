//! The tasks that run a server's calls.
//!
//! Every running call has its own task. A task whose call has ended waits for the connection's next
//! call, because spawning a task costs more than waking a task. When the connection comes to rest,
//! waiting tasks end.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tonic::Status;
use tonic::body::Body;
use tower::Service;

use crate::codec::{Call, serve_first};
use crate::connection::call::StreamRef;
use crate::connection::call::response::{begin, is_over};
use crate::connection::call::send_body::SendBody;
use crate::telemetry::metrics::CallTimer;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Maximum number of a connection's idle tasks.
const MAX_IDLE: usize = 64;

/// A call to run, and the clone of the service for this call. When the clone is dropped, resources
/// that it reserved for the call, such as a permit, are freed.
struct Job<S> {
    service: S,
    stream: StreamRef,
    method: Call,
    request: Request<Body>,
}

/// Passes the next call to an idle task. Only this task takes the call, so a call in the slot will
/// run.
struct TaskSlot<S> {
    next: Mutex<NextJob<S>>,
}

/// The next step of an idle task that was woken.
#[allow(clippy::large_enum_variant, reason = "a box would be an allocation for each call")]
enum NextJob<S> {
    /// The task continues to wait, because only a waker of an earlier call has woken it.
    Wait,
    Run(Job<S>),
    End,
}

/// The idle tasks. Only the caller that takes a task off the list sets the task's next step.
struct IdleTasks<S> {
    /// `None` once the connection has ended.
    idle: Option<Vec<(Arc<TaskSlot<S>>, Waker)>>,
}

/// The tasks of one connection. When the pool is dropped, idle tasks end at once, and busy tasks
/// end with their calls.
pub(crate) struct TaskPool<S> {
    service: S,
    waiting: Arc<Mutex<IdleTasks<S>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S> TaskPool<S>
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send,
{
    /// Creates a pool whose calls run on clones of `service`.
    pub(crate) fn new(service: S) -> Self {
        TaskPool { service, waiting: Arc::new(Mutex::new(IdleTasks { idle: Some(Vec::new()) })) }
    }

    /// Runs a call. Must be called within a tokio runtime.
    pub(crate) fn run(&self, stream: StreamRef, method: Call, request: Request<Body>) {
        let job = Job { service: self.service.clone(), stream, method, request };
        let idle = lock(&self.waiting).idle.as_mut().and_then(Vec::pop);
        if let Some((slot, waker)) = idle {
            *lock(&slot.next) = NextJob::Run(job);
            return waker.wake();
        }
        let Job { service, stream, method, request } = job;
        tokio::spawn(PooledTask {
            waiting: self.waiting.clone(),
            slot: Arc::new(TaskSlot { next: Mutex::new(NextJob::Wait) }),
            stream: Some(stream),
            method: Some(method),
            is_new: true,
            timer: CallTimer::default(),
            stage: TaskStage::New { service, request: Some(request) },
        });
    }

    /// Ends the tasks that have no call.
    pub(crate) fn end_idle(&self) {
        let idle = lock(&self.waiting).idle.as_mut().map(std::mem::take);
        for (slot, waker) in idle.into_iter().flatten() {
            *lock(&slot.next) = NextJob::End;
            waker.wake();
        }
    }
}

impl<S> Drop for TaskPool<S> {
    fn drop(&mut self) {
        let idle = lock(&self.waiting).idle.take();
        for (_, waker) in idle.into_iter().flatten() {
            waker.wake();
        }
    }
}

pin_project! {
    /// A task of the pool. If the client resets the stream, or the connection ends, the handler is
    /// dropped.
    struct PooledTask<S, F> {
        waiting: Arc<Mutex<IdleTasks<S>>>,
        slot: Arc<TaskSlot<S>>,
        // The current call's stream.
        stream: Option<StreamRef>,
        // Present until the response's head is ready.
        method: Option<Call>,
        // Whether the handler has not been polled yet.
        is_new: bool,
        // Measures the time from the service's call to the response.
        timer: CallTimer,
        #[pin]
        stage: TaskStage<S, F>,
    }
}

pin_project! {
    #[project = TaskStageProj]
    enum TaskStage<S, F> {
        New { service: S, request: Option<Request<Body>> },
        // The service has failed and takes no calls.
        Failed { error: Option<BoxError> },
        Running { #[pin] handler: F },
        // Sends the part of a response that was not sent with the head.
        Sending { out: Box<SendBody> },
        // The task is on the list, or was just taken off the list.
        Idle,
    }
}

/// Starts to measure the call of a stream.
fn start(stream: &StreamRef) -> CallTimer {
    let mut timer = stream.shared.calls.durations.start();
    timer.took_fast(&stream.shared.peer);
    timer
}

impl<S> Future for PooledTask<S, S::Future>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Error: Into<BoxError>,
{
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if matches!(self.stage, TaskStage::Idle) {
            let this = self.as_mut().project();
            let next = std::mem::replace(&mut *lock(&this.slot.next), NextJob::Wait);
            let job = match next {
                NextJob::Run(job) => job,
                NextJob::End => return Poll::Ready(()),
                NextJob::Wait => {
                    return match lock(this.waiting).idle {
                        Some(_) => Poll::Pending,
                        None => Poll::Ready(()),
                    };
                }
            };
            let mut this = self.as_mut().project();
            let Job { mut service, stream, method, request } = job;
            // Poll the service here, because most services are always ready, and the call then
            // skips `New`.
            this.stage.set(match service.poll_ready(cx) {
                Poll::Ready(Ok(())) => {
                    *this.timer = start(&stream);
                    TaskStage::Running { handler: service.call(request) }
                }
                Poll::Ready(Err(error)) => TaskStage::Failed { error: Some(error.into()) },
                Poll::Pending => TaskStage::New { service, request: Some(request) },
            });
            (*this.stream, *this.method, *this.is_new) = (Some(stream), Some(method), true);
        }
        ready!(self.as_mut().poll_call(cx));
        let mut this = self.project();
        this.stage.set(TaskStage::Idle);
        *this.timer = CallTimer::default();
        (*this.stream, *this.method) = (None, None);
        match &mut lock(this.waiting).idle {
            Some(idle) if idle.len() < MAX_IDLE => {
                idle.push((this.slot.clone(), cx.waker().clone()));
                Poll::Pending
            }
            _ => Poll::Ready(()),
        }
    }
}

impl<S> PooledTask<S, S::Future>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Error: Into<BoxError>,
{
    /// Returns ready when the call has ended.
    fn poll_call(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut this = self.project();
        let Some(stream) = this.stream else { return Poll::Ready(()) };
        let result = loop {
            let result = match this.stage.as_mut().project() {
                TaskStageProj::New { service, request } => match service.poll_ready(cx) {
                    Poll::Ready(Ok(())) => {
                        let Some(request) = request.take() else { return Poll::Ready(()) };
                        *this.timer = start(stream);
                        let handler = service.call(request);
                        this.stage.set(TaskStage::Running { handler });
                        continue;
                    }
                    Poll::Ready(Err(error)) => Poll::Ready(Err(error.into())),
                    Poll::Pending => Poll::Pending,
                },
                TaskStageProj::Failed { error } => match error.take() {
                    Some(error) => Poll::Ready(Err(error)),
                    None => return Poll::Ready(()),
                },
                TaskStageProj::Running { handler } => {
                    let polled = match this.method {
                        Some(call) if std::mem::take(this.is_new) => {
                            serve_first(call, || handler.poll(cx))
                        }
                        _ => handler.poll(cx),
                    };
                    polled.map_err(Into::into)
                }
                TaskStageProj::Sending { out } => return out.pump(stream, cx).map(|_| ()),
                TaskStageProj::Idle => return Poll::Ready(()),
            };
            match result {
                Poll::Ready(result) => break result,
                Poll::Pending if is_over(stream, cx) => return Poll::Ready(()),
                Poll::Pending => return Poll::Pending,
            }
        };
        // Free the handler's permits before the client gets the response.
        this.stage.set(TaskStage::Idle);
        let response = result.unwrap_or_else(|error| Status::from_error(error).into_http());
        let Some(method) = this.method.take() else { return Poll::Ready(()) };
        let timer = std::mem::take(this.timer);
        let Some(mut out) = begin(stream, response, method, timer, cx) else {
            return Poll::Ready(());
        };
        if out.pump(stream, cx).is_ready() {
            return Poll::Ready(());
        }
        this.stage.set(TaskStage::Sending { out: Box::new(out) });
        Poll::Pending
    }
}
