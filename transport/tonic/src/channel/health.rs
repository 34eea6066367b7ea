//! Keeps calls of a balanced channel away from endpoints that cannot be connected to.
//!
//! A balancer prefers the endpoint with fewer calls in flight. An endpoint that fails each call at
//! once has no calls in flight, so it would attract all calls. Therefore an endpoint **rests**
//! after it failed to connect: it is not ready, and calls go to other endpoints.
//!
//! | state | event | next |
//! |---|---|---|
//! | in use | a call fails because there is no connection | resting, for a pause that doubles |
//! | resting | the pause is over | in use |
//! | resting | every endpoint rests | ready for now: calls fail at once, as in tonic |
//! | in use | a call is answered | in use; the next pause is the first pause again |

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use pin_project_lite::pin_project;
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;
use tokio::time::Sleep;
use tonic::body::Body;
use tower::Service;

use crate::channel::balanced::Membership;
use crate::channel::{Channel, ResponseFuture};
use crate::path::reason::Reason;

/// The first pause of an endpoint. The pause doubles [`DOUBLINGS`] times, to 1.28 s.
const PAUSE: Duration = Duration::from_millis(10);
const DOUBLINGS: u32 = 7;

/// The endpoints of one balanced channel.
#[derive(Debug, Default)]
pub(super) struct Group {
    counts: Mutex<Counts>,
    /// Notified when the number of endpoints, or of resting endpoints, changes.
    changed: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Counts {
    all: usize,
    resting: usize,
}

impl Group {
    fn change(&self, f: impl FnOnce(&mut Counts)) {
        f(&mut self.counts.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_waiters();
    }

    fn all_rest(&self) -> bool {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.resting >= counts.all
    }
}

/// The health of an endpoint, derived from the results of its calls.
#[derive(Debug)]
struct Health {
    group: Arc<Group>,
    resting: AtomicBool,
    /// Failures to connect since the last answered call. Failures during a rest are not counted.
    failures: AtomicU32,
}

impl Health {
    fn failed(&self) {
        if !self.resting.swap(true, Ordering::Relaxed) {
            self.failures.fetch_add(1, Ordering::Relaxed);
            self.group.change(|counts| counts.resting += 1);
        }
    }

    fn answered(&self) {
        if self.failures.load(Ordering::Relaxed) != 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    fn rested(&self) {
        if self.resting.swap(false, Ordering::Relaxed) {
            self.group.change(|counts| counts.resting -= 1);
        }
    }

    fn pause(&self) -> Duration {
        let failures = self.failures.load(Ordering::Relaxed);
        PAUSE * 2_u32.pow(failures.saturating_sub(1).min(DOUBLINGS))
    }
}

/// An endpoint of a balanced channel, which rests after it failed to connect.
pub(super) struct Watched {
    channel: Channel,
    health: Arc<Health>,
    /// The events that end the rest. `None` until the balancer polls the resting endpoint.
    rest: Option<Rest>,
    _member: Option<Membership>,
}

/// The events that end a rest.
struct Rest {
    pause: Pin<Box<Sleep>>,
    changed: Pin<Box<OwnedNotified>>,
}

impl Watched {
    pub(super) fn new(channel: Channel, group: Arc<Group>, member: Option<Membership>) -> Self {
        group.change(|counts| counts.all += 1);
        let (resting, failures) = (AtomicBool::new(false), AtomicU32::new(0));
        let health = Arc::new(Health { group, resting, failures });
        Self { channel, health, rest: None, _member: member }
    }

    /// Returns ready when the endpoint may be used.
    fn poll_rested(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let group = &self.health.group;
        let changed = || Box::pin(group.changed.clone().notified_owned());
        let rest = self.rest.get_or_insert_with(|| Rest {
            pause: Box::pin(tokio::time::sleep(self.health.pause())),
            changed: changed(),
        });
        if rest.pause.as_mut().poll(cx).is_ready() {
            self.rest = None;
            self.health.rested();
            return Poll::Ready(());
        }
        // Subscribe before reading, so that no change is missed.
        while rest.changed.as_mut().poll(cx).is_ready() {
            rest.changed = changed();
        }
        match group.all_rest() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // `failed` now finds the endpoint resting, so calls in flight that fail later change no
        // count.
        let resting = self.health.resting.swap(true, Ordering::Relaxed);
        self.health.group.change(|counts| {
            counts.all -= 1;
            counts.resting -= usize::from(resting);
        });
    }
}

impl Service<Request<Body>> for Watched {
    type Response = Response<Body>;
    type Error = tonic::transport::Error;
    type Future = WatchedCall;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        if self.health.resting.load(Ordering::Relaxed) && self.poll_rested(cx).is_pending() {
            return Poll::Pending;
        }
        self.channel.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> WatchedCall {
        WatchedCall { call: self.channel.call(request), health: self.health.clone() }
    }
}

pin_project! {
    /// A call that reports whether the endpoint could be reached.
    pub(super) struct WatchedCall {
        #[pin]
        call: ResponseFuture,
        health: Arc<Health>,
    }
}

impl Future for WatchedCall {
    type Output = Result<Response<Body>, tonic::transport::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let result = this.call.poll(cx);
        match &result {
            Poll::Ready(Ok(_)) => this.health.answered(),
            Poll::Ready(Err(error)) if is_unreachable(error) => this.health.failed(),
            Poll::Ready(Err(_)) | Poll::Pending => {}
        }
        result
    }
}

/// Whether the call failed because it has no connection, or because the fast path that it requires
/// is not available.
fn is_unreachable(error: &tonic::transport::Error) -> bool {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        next = error.source();
    }
    Reason::of(error).is_some()
}
