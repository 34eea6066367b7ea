//! One type for the channels of every fabric.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};
use tonic::body::Body;
use tower::Service;

/// Any error.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A channel over any fabric.
#[derive(Clone, Debug)]
pub enum AnyChannel {
    /// tonic's own.
    Stock(tonic::transport::Channel),
}

impl Service<http::Request<Body>> for AnyChannel {
    type Response = http::Response<Body>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        match self {
            AnyChannel::Stock(channel) => channel.poll_ready(cx).map_err(Into::into),
        }
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match self {
            AnyChannel::Stock(channel) => {
                let call = channel.call(request);
                Box::pin(async move { call.await.map_err(Into::into) })
            }
        }
    }
}
