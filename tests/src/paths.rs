//! Which path each call took, recorded by a layer of every server.

use std::{
    sync::{Arc, Mutex},
    task::{Context, Poll},
};
use tower::{Layer, Service};

/// A call as the server saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// `/package.Service/Method`
    pub method: String,
    /// The fast path it came over, as the connect-info names it; `None` over TCP.
    pub fast: Option<String>,
}

/// Records every call that reaches a server, and the path it took.
#[derive(Clone, Debug, Default)]
pub struct PathLog {
    entries: Arc<Mutex<Vec<Seen>>>,
}

impl PathLog {
    /// The layer that records.
    pub fn layer(&self) -> PathLogLayer {
        PathLogLayer(self.clone())
    }

    /// What was recorded so far.
    pub fn entries(&self) -> Vec<Seen> {
        self.entries.lock().unwrap().clone()
    }
}

/// See [`PathLog::layer`].
#[derive(Clone, Debug)]
pub struct PathLogLayer(PathLog);

impl<S> Layer<S> for PathLogLayer {
    type Service = PathLogService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        PathLogService { log: self.0.clone(), inner }
    }
}

/// The layered service.
#[derive(Clone, Debug)]
pub struct PathLogService<S> {
    log: PathLog,
    inner: S,
}

impl<S, B> Service<http::Request<B>> for PathLogService<S>
where
    S: Service<http::Request<B>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<B>) -> S::Future {
        let seen = Seen { method: request.uri().path().to_owned(), fast: None };
        self.log.entries.lock().unwrap().push(seen);
        self.inner.call(request)
    }
}
