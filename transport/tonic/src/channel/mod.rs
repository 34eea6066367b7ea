//! The client's channel.

mod select;
mod stack;

use crate::{
    counting,
    endpoint::Endpoint,
    error::Error,
    path::PathInfo,
    policy::{EnvError, EnvSettings},
    reason::{Reason, ReasonCode},
    stats::{Counters, TransportStats},
};
use bytes::Bytes;
use http::{Request, Response, Uri};
use select::Select;
use stack::Stack;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};
use tonic::body::Body;
use tower::Service;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A connection to a server, over the fast path where it is open and over TCP otherwise.
///
/// Cheap to clone; clones share the connection, the limits and the statistics.
#[derive(Clone)]
pub struct Channel {
    stack: Stack,
    counters: Arc<Counters>,
    path: tokio::sync::watch::Receiver<PathInfo>,
}

impl Channel {
    /// Create an [`Endpoint`] builder that can create [`Channel`]s.
    pub fn builder(uri: Uri) -> Endpoint {
        Endpoint::from(uri)
    }

    /// Create an [`Endpoint`] from a static string. Panics if it is an invalid URI.
    pub fn from_static(s: &'static str) -> Endpoint {
        Endpoint::from_static(s)
    }

    /// Create an [`Endpoint`] from shared bytes.
    pub fn from_shared(s: impl Into<Bytes>) -> Result<Endpoint, Error> {
        Endpoint::from_shared(s)
    }

    pub(crate) async fn establish(
        tcp: tonic::transport::Channel,
        endpoint: &Endpoint,
        env: EnvSettings,
    ) -> Result<Self, Error> {
        Ok(Self::lazy(tcp, endpoint, Ok(env)))
    }

    pub(crate) fn lazy(
        tcp: tonic::transport::Channel,
        endpoint: &Endpoint,
        _env: Result<EnvSettings, EnvError>,
    ) -> Self {
        let counters = Arc::new(Counters::default());
        let (_tx, path) = tokio::sync::watch::channel(PathInfo::tcp(Reason::new(
            ReasonCode::Policy,
            "the fast path is not part of this build",
        )));
        let select = Select::new(tcp, counters.clone());
        Self { stack: stack::build(select, &endpoint.shared), counters, path }
    }

    /// The path that a call started now takes, and why.
    pub fn path(&self) -> PathInfo {
        self.path.borrow().clone()
    }

    /// Waits until the path differs from what this clone last saw here (at first: from what it
    /// was when the channel was made), and returns it.
    ///
    /// Cancel safe. Never resolves when nothing can change the path any more.
    pub async fn path_changed(&mut self) -> PathInfo {
        match self.path.changed().await {
            Ok(()) => self.path.borrow_and_update().clone(),
            Err(_) => std::future::pending().await,
        }
    }

    /// What all clones of this channel have carried so far.
    pub fn stats(&self) -> TransportStats {
        self.counters.snapshot()
    }
}

impl Service<Request<Body>> for Channel {
    type Response = Response<Body>;
    type Error = Error;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.stack.poll_ready(cx).map_err(Error::call)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        ResponseFuture { inner: Box::pin(self.stack.call(request)) }
    }
}

/// The response to come. Dropping it cancels the call.
pub struct ResponseFuture {
    inner: Pin<Box<dyn Future<Output = Result<Response<Body>, BoxError>> + Send>>,
}

impl Future for ResponseFuture {
    type Output = Result<Response<Body>, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.inner.as_mut().poll(cx).map_err(Error::call)
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("path", &*self.path.borrow()).finish_non_exhaustive()
    }
}

impl fmt::Debug for ResponseFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

fn count_request(req: Request<Body>, counters: &Arc<Counters>) -> Request<Body> {
    req.map(|body| counting::count(body, counters, counting::Direction::Sent))
}

fn count_response(res: Response<Body>, counters: &Arc<Counters>) -> Response<Body> {
    res.map(|body| counting::count(body, counters, counting::Direction::Received))
}
