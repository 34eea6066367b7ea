//! One type for the channels of all fabrics.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tonic::Status;
use tonic::body::Body;
use tower::Service;

/// Any error.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A channel over any of the fabrics.
#[derive(Clone, Debug)]
pub enum AnyChannel {
    /// A channel of tonic as published.
    Stock(tonic::transport::Channel),
    /// A tonic-rdma channel.
    Rdma(tonic_rdma::Channel),
}

impl AnyChannel {
    /// The tonic-rdma channel.
    ///
    /// # Panics
    /// The channel is tonic's.
    pub fn rdma(&self) -> &tonic_rdma::Channel {
        match self {
            AnyChannel::Rdma(channel) => channel,
            AnyChannel::Stock(_) => unreachable!("the case is for tonic-rdma only"),
        }
    }
}

impl Service<http::Request<Body>> for AnyChannel {
    type Response = http::Response<Body>;
    // A stub converts the channel's error to this type anyway.
    type Error = Status;
    type Future = AnyCall;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        match self {
            AnyChannel::Stock(channel) => {
                channel.poll_ready(cx).map_err(|e| Status::from_error(e.into()))
            }
            AnyChannel::Rdma(channel) => {
                channel.poll_ready(cx).map_err(|e| Status::from_error(e.into()))
            }
        }
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match self {
            AnyChannel::Stock(channel) => {
                let call = channel.call(request);
                AnyCall(Box::pin(
                    async move { call.await.map_err(|e| Status::from_error(e.into())) },
                ))
            }
            AnyChannel::Rdma(channel) => {
                let call = channel.call(request);
                AnyCall(Box::pin(
                    async move { call.await.map_err(|e| Status::from_error(e.into())) },
                ))
            }
        }
    }
}

/// The future of a response, whichever channel the call uses.
#[allow(missing_debug_implementations)]
pub struct AnyCall(Pin<Box<dyn Future<Output = Result<http::Response<Body>, Status>> + Send>>);

impl Future for AnyCall {
    type Output = Result<http::Response<Body>, Status>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}
