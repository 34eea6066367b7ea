//! The service that queues calls in front of a balancer, and the paths of the balancer's endpoints.

use std::future::{Future, pending, poll_fn};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};

use http::{Request, Response};
use tokio::sync::{Notify, watch};
use tonic::body::Body;
use tonic_rdma_memory::Pool;
use tower::Service;
use tower::buffer::Buffer;
use tower::buffer::future::ResponseFuture;

use crate::channel::rails::Rails;
use crate::channel::select::CallFuture;
use crate::channel::shared::{ChannelState, Fast, FastPathState};
use crate::error::BoxError;
use crate::path::PathInfo;
use crate::path::reason::{Reason, ReasonCode};
use crate::telemetry::stats::Counters;

/// Sends each call to the less loaded of two endpoints drawn at random.
#[derive(Clone)]
pub(super) struct Balanced {
    pub(super) queue: Buffer<Request<Body>, CallFuture>,
    pub(super) counters: Arc<Counters>,
    pub(super) members: Arc<Members>,
    seen: Arc<PathInfo>,
}

impl Balanced {
    pub(super) fn new(
        queue: Buffer<Request<Body>, CallFuture>,
        counters: Arc<Counters>,
        members: Arc<Members>,
    ) -> Self {
        let seen = Arc::new(members.info());
        Balanced { queue, counters, members, seen }
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.counters
    }

    pub(super) fn info(&self) -> PathInfo {
        self.members.info()
    }

    /// The pool of the first endpoint whose fast path is up.
    pub(super) fn pool(&self) -> Pool {
        let up = |member: &Arc<BalancedEndpoint>| match &*member.state.borrow() {
            FastPathState::Up(fast) => Some(fast.pool.clone()),
            _ => None,
        };
        let pool = self.members.list().iter().find_map(up);
        pool.unwrap_or_else(|| self.context().ordinary_pool())
    }

    /// The context of the first endpoint.
    pub(super) fn context(&self) -> crate::Context {
        let first = self.members.list().first().map(|member| member.context.clone());
        first.unwrap_or_else(crate::Context::global)
    }

    pub(super) async fn changed(&mut self) -> PathInfo {
        loop {
            // Subscribe before reading, so that no change is missed.
            let mut members = pin!(self.members.changed.notified());
            members.as_mut().enable();
            let mut states = self.members.states();
            let info = self.info();
            if info != *self.seen {
                self.seen = Arc::new(info.clone());
                return info;
            }
            let mut states: Vec<_> = states.iter_mut().map(|state| Box::pin(next(state))).collect();
            poll_fn(|cx| {
                let any = states.iter_mut().any(|state| state.as_mut().poll(cx).is_ready());
                match any || members.as_mut().poll(cx).is_ready() {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                }
            })
            .await;
        }
    }
}

/// Waits for the next state of an endpoint.
async fn next(state: &mut watch::Receiver<FastPathState>) {
    if state.changed().await.is_err() {
        // Wait forever, because the endpoint is gone, and `Members` reports its removal.
        pending().await
    }
}

impl Service<Request<Body>> for Balanced {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = ResponseFuture<CallFuture>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.queue.poll_ready(cx)
    }

    fn call(&mut self, req: Request<Body>) -> Self::Future {
        self.queue.call(req)
    }
}

/// The endpoints of a balanced channel, in the order in which they were added.
#[derive(Debug, Default)]
pub(super) struct Members {
    list: Mutex<Vec<Arc<BalancedEndpoint>>>,
    changed: Notify,
}

#[derive(Debug)]
struct BalancedEndpoint {
    shared: Weak<ChannelState>,
    rails: Arc<Rails>,
    state: watch::Receiver<FastPathState>,
    context: crate::Context,
}

/// Keeps an endpoint in the list of members until dropped.
#[derive(Debug)]
pub(super) struct Membership {
    members: Arc<Members>,
    member: Arc<BalancedEndpoint>,
}

impl Members {
    fn list(&self) -> MutexGuard<'_, Vec<Arc<BalancedEndpoint>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn join(
        self: &Arc<Self>,
        shared: &Arc<ChannelState>,
        rails: Arc<Rails>,
        context: crate::Context,
    ) -> Membership {
        let (state, shared) = (shared.state.subscribe(), Arc::downgrade(shared));
        let member = Arc::new(BalancedEndpoint { shared, rails, state, context });
        self.list().push(member.clone());
        self.changed.notify_waiters();
        Membership { members: self.clone(), member }
    }

    /// The established connections of all endpoints.
    pub(super) fn established(&self) -> Vec<Fast> {
        let of = |member: &Arc<BalancedEndpoint>| {
            let shared = member.shared.upgrade();
            shared.map(|shared| member.rails.established(&shared)).unwrap_or_default()
        };
        self.list().iter().flat_map(of).collect()
    }

    /// Returns TCP if a call to any endpoint would take TCP, and otherwise the first endpoint's
    /// path.
    pub(super) fn info(&self) -> PathInfo {
        let mut first = None;
        for member in self.list().iter() {
            let info = member.state.borrow().info();
            if !info.path.is_fast() {
                return info;
            }
            first.get_or_insert(info);
        }
        first.unwrap_or_else(|| {
            let none = "a balanced channel has no endpoint before its first call";
            PathInfo::tcp(Reason::new(ReasonCode::Pending, none))
        })
    }

    /// Subscribes to the states of all endpoints. Each receiver waits for a change of the current
    /// state.
    fn states(&self) -> Vec<watch::Receiver<FastPathState>> {
        let of = |member: &Arc<BalancedEndpoint>| {
            let mut state = member.state.clone();
            state.mark_unchanged();
            state
        };
        self.list().iter().map(of).collect()
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.members.list().retain(|member| !Arc::ptr_eq(member, &self.member));
        self.members.changed.notify_waiters();
    }
}
