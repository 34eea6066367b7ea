//! The choice of the path, call by call.

use super::{BoxError, count_request, count_response};
use crate::stats::Counters;
use http::{Request, Response};
use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};
use tonic::body::Body;
use tower::Service;

pub(crate) type CallFuture = Pin<Box<dyn Future<Output = Result<Response<Body>, BoxError>> + Send>>;

/// Sends each call over the fast path where it is open, and over TCP otherwise.
#[derive(Clone)]
pub(crate) struct Select {
    tcp: tonic::transport::Channel,
    counters: Arc<Counters>,
}

impl Select {
    pub(crate) fn new(tcp: tonic::transport::Channel, counters: Arc<Counters>) -> Self {
        Self { tcp, counters }
    }
}

impl Service<Request<Body>> for Select {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = CallFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.tcp.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, req: Request<Body>) -> CallFuture {
        self.counters.calls_tcp.add(1);
        let counters = self.counters.clone();
        let call = self.tcp.call(count_request(req, &counters));
        Box::pin(async move { Ok(count_response(call.await?, &counters)) })
    }
}
