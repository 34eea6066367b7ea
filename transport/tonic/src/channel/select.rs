//! The choice of the path, call by call.

use super::{
    BoxError,
    attempt::Fast,
    shared::{Route, Shared},
};
use crate::{
    codec,
    error::Error,
    link::CallError,
    path::Path,
    spans::{self, Spanned},
};
use http::{HeaderMap, HeaderValue, Request, Response, Uri, header::USER_AGENT};
use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tonic::body::Body;
use tonic_rdma_proto::Side;
use tower::{Service, ServiceExt};

pub(crate) type CallFuture = Pin<Box<dyn Future<Output = Result<Response<Body>, BoxError>> + Send>>;

/// Sends each call over the fast path where it is open, and over TCP otherwise.
///
/// `poll_ready` decides: where TCP is the way, it holds a place in the TCP connection's queue until
/// `call`. A call that was to go over the fast path and could not be sent goes over TCP.
#[derive(Debug)]
pub(crate) struct Select {
    shared: Arc<Shared>,
    /// This clone's handle to the TCP connection's queue.
    tcp: tonic::transport::Channel,
    /// It holds a place.
    placed: bool,
}

impl Select {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { tcp: shared.tcp.clone(), shared, placed: false }
    }
}

impl Clone for Select {
    fn clone(&self) -> Self {
        Self::new(self.shared.clone())
    }
}

impl Service<Request<Body>> for Select {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = CallFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        if self.shared.broken.is_some() || self.placed {
            return Poll::Ready(Ok(()));
        }
        self.shared.begin();
        if self.shared.needs_tcp() {
            ready!(self.tcp.poll_ready(cx))?;
            self.placed = true;
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<Body>) -> CallFuture {
        let span = spans::call(Side::Client, req.uri());
        if span.is_disabled() {
            return self.dispatch(req);
        }
        let call = span.in_scope(|| self.dispatch(req));
        Box::pin(Spanned::new(call, span))
    }
}

impl Select {
    fn dispatch(&mut self, req: Request<Body>) -> CallFuture {
        if let Some(env) = &self.shared.broken {
            let error = Error::from(env.clone());
            return Box::pin(async { Err(error.into()) });
        }
        let shared = self.shared.clone();
        if std::mem::take(&mut self.placed) {
            shared.counters.calls_tcp.add(1);
            spans::took(Path::Tcp);
            let call = self.tcp.call(outgoing(req, &shared));
            return Box::pin(async move { Ok(incoming(call.await?, &shared)) });
        }
        match shared.route() {
            Route::Fast(fast) => Box::pin(over_fast(shared, fast, req)),
            Route::Tcp => Box::pin(over_tcp(shared, req)),
            Route::Wait => Box::pin(async move {
                match shared.decided(shared.patience).await {
                    Ok(fast) => over_fast(shared, fast, req).await,
                    Err(reason) => Err(Error::required(reason).into()),
                }
            }),
        }
    }
}

async fn over_tcp(shared: Arc<Shared>, req: Request<Body>) -> Result<Response<Body>, BoxError> {
    shared.counters.calls_tcp.add(1);
    spans::took(Path::Tcp);
    let response = shared.tcp.clone().oneshot(outgoing(req, &shared)).await?;
    Ok(incoming(response, &shared))
}

fn outgoing(req: Request<Body>, shared: &Shared) -> Request<Body> {
    let (parts, body) = req.into_parts();
    let apart = codec::is_plain_grpc(&parts.headers);
    let body = codec::tcp_outgoing(body, shared.methods.call(&parts.uri), apart, &shared.counters);
    Request::from_parts(parts, body)
}

fn incoming(res: Response<Body>, shared: &Shared) -> Response<Body> {
    res.map(|body| codec::TcpIncoming::body(body, &shared.counters))
}

async fn over_fast(
    shared: Arc<Shared>,
    fast: Fast,
    mut req: Request<Body>,
) -> Result<Response<Body>, BoxError> {
    let own_agent = req.headers().get(USER_AGENT).cloned();
    set_user_agent(req.headers_mut(), &shared.user_agent);
    set_origin(req.uri_mut(), &shared.origin)?;
    shared.counters.calls_fast.add(1);
    spans::took(Path::of(fast.client.peer()));
    match fast.client.call(req).await {
        Ok(response) => Ok(response),
        Err(CallError::Status(status)) => Err(Box::new(status)),
        Err(CallError::NotSent(_, reason)) if shared.required => Err(Error::required(reason).into()),
        Err(CallError::NotSent(mut req, reason)) => {
            tracing::debug!(%reason, "a call moves to TCP before it was sent");
            shared.counters.calls_fast.take_back(1);
            // tonic adds its own on TCP.
            match own_agent {
                Some(own) => req.headers_mut().insert(USER_AGENT, own),
                None => req.headers_mut().remove(USER_AGENT),
            };
            over_tcp(shared, *req).await
        }
    }
}

/// Appends `agent` to what the request says already, as tonic does.
fn set_user_agent(headers: &mut HeaderMap, agent: &HeaderValue) {
    let value = match headers.get(USER_AGENT) {
        Some(own) => HeaderValue::from_bytes(&[own.as_bytes(), b" ", agent.as_bytes()].concat())
            .unwrap_or_else(|_| agent.clone()),
        None => agent.clone(),
    };
    headers.insert(USER_AGENT, value);
}

/// Gives the request's URI the scheme and authority of `origin`.
fn set_origin(uri: &mut Uri, origin: &Uri) -> Result<(), http::uri::InvalidUriParts> {
    let mut parts = std::mem::take(uri).into_parts();
    parts.scheme = origin.scheme().cloned();
    parts.authority = origin.authority().cloned();
    *uri = Uri::from_parts(parts)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_agents_are_appended() {
        let ours = HeaderValue::from_static("tonic-rdma/1");
        let mut headers = HeaderMap::new();
        set_user_agent(&mut headers, &ours);
        assert_eq!(headers[USER_AGENT], "tonic-rdma/1");
        headers.insert(USER_AGENT, HeaderValue::from_static("mine"));
        set_user_agent(&mut headers, &ours);
        assert_eq!(headers[USER_AGENT], "mine tonic-rdma/1");
    }

    #[test]
    fn origin_replaces_scheme_and_authority_only() {
        let mut uri: Uri = "/pkg.Service/Method".parse().unwrap();
        set_origin(&mut uri, &"https://example.com:1".parse().unwrap()).unwrap();
        assert_eq!(uri, "https://example.com:1/pkg.Service/Method");
    }
}
