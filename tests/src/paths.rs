//! The path that each call took, recorded by a layer of every server.

use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll};

use tonic_rdma::{Path, RdmaConnectInfo};
use tower::{Layer, Service};

use crate::probe::EventSink;

/// A call as recorded by the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedCall {
    /// `/package.Service/Method`
    pub method: String,
    /// The fast path as the connect-info names it, or `None` for TCP.
    pub fast: Option<Path>,
}

/// Records every call that reaches a server, with its path.
#[derive(Clone, Debug, Default)]
pub struct PathLog {
    entries: Arc<Mutex<Vec<RecordedCall>>>,
    sink: Arc<OnceLock<EventSink>>,
}

impl PathLog {
    /// The recording layer.
    pub fn layer(&self) -> PathLogLayer {
        PathLogLayer(self.clone())
    }

    /// A log that also passes each call to `write`, as one line.
    pub(crate) fn with_sink(write: fn(String)) -> Self {
        let log = Self::default();
        let _ = log.sink.set(EventSink(write));
        log
    }

    pub(crate) fn record(&self, call: RecordedCall) {
        if let Some(EventSink(write)) = self.sink.get() {
            write(format!("call {} {}", call.fast.map_or("tcp", Path::as_str), call.method));
        }
        self.entries.lock().unwrap().push(call);
    }

    /// The calls so far, without the transport's own Offer calls.
    pub fn entries(&self) -> Vec<RecordedCall> {
        let entries = self.entries.lock().unwrap();
        let calls = entries.iter().filter(|e| !e.method.starts_with("/tonic_rdma.v1.Bootstrap/"));
        calls.cloned().collect()
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
        let fast = request.extensions().get::<RdmaConnectInfo>().map(|info| info.path);
        let call = RecordedCall { method: request.uri().path().to_owned(), fast };
        self.log.record(call);
        self.inner.call(request)
    }
}
