//! The queue in front of a balancer, as a service.

use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tonic::body::Body;
use tower::Service;
use tower::buffer::Buffer;
use tower::buffer::future::ResponseFuture;

use crate::channel::select::CallFuture;
use crate::error::BoxError;
use crate::path::PathInfo;
use crate::path::reason::{Reason, ReasonCode};
use crate::telemetry::stats::Counters;

/// A change in the set of endpoints, with the names of [`tonic::transport::channel::Change`].
#[derive(Debug, Clone)]
pub enum Change<K, V> {
    /// A new service identified by key `K` was identified.
    Insert(K, V),
    /// The service identified by key `K` disappeared.
    Remove(K),
}

/// Sends each call to the less loaded of two endpoints drawn at random.
#[derive(Clone)]
pub(super) struct Balanced {
    pub(super) queue: Buffer<Request<Body>, CallFuture>,
    pub(super) counters: Arc<Counters>,
}

impl Balanced {
    pub(super) fn counters(&self) -> &Counters {
        &self.counters
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

/// The path of a balanced channel: its endpoints have paths, it has none.
pub(super) fn path() -> PathInfo {
    PathInfo::tcp(Reason::new(
        ReasonCode::Pending,
        "a balanced channel: each endpoint has a path of its own",
    ))
}
