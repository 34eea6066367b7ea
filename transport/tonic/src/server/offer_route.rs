//! Adds the Offer to a service without routes, and recognises Offers.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use pin_project_lite::pin_project;
use tonic::body::Body;
use tower::Service;

use crate::bootstrap::OFFER_PATH;
use crate::bootstrap::limited::LimitedOffers;
use crate::error::BoxError;

/// Length of the Offer's path without the method. All methods of the Offer's service have this
/// prefix, and are routed in the same way.
const PREFIX: usize = OFFER_PATH.len() - "Offer".len();

/// The service `S`, together with the calls by which clients ask for the fast path.
///
/// When a server serves a service directly, for example by [`Server::serve`](crate::Server::serve),
/// its layers wrap an `OfferRoute`. The Offer passes through the same layers as every other call,
/// so a layer that requires credentials requires them of the Offer as well. Requests to `S` and
/// errors from `S` pass unchanged. The response body of `S` is converted to tonic's [`Body`].
#[derive(Debug, Clone)]
pub struct OfferRoute<S> {
    service: S,
    offer: LimitedOffers,
}

impl<S> OfferRoute<S> {
    pub(super) fn new(service: S, offer: LimitedOffers) -> Self {
        Self { service, offer }
    }
}

impl<S, B> Service<Request<Body>> for OfferRoute<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = OfferRouteFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let inner = match is_offer(&request) {
            true => Inner::Offer { future: self.offer.call(request) },
            false => Inner::Service { future: self.service.call(request) },
        };
        OfferRouteFuture { inner }
    }
}

/// Whether `request` is one of this crate's own requests: the Offer, by which a client asks for the
/// fast path, or a measurement by the doctor.
///
/// These requests pass through the server's layers like every call, so that a layer that excludes a
/// client also excludes the client from the fast path. A layer may skip these requests if the layer
/// counts, limits or sheds requests, or requires data that only the service's own clients send. A
/// layer that authenticates or admits clients must not skip these requests.
///
/// ```
/// use http::Request;
/// use tonic_rdma::server::is_offer;
/// use tower::util::Either;
///
/// // Calls go to the service with a limit. The Offer goes to the service without a limit.
/// fn of_call<B, L, S>(request: &Request<B>, limited: L, unlimited: S) -> Either<L, S> {
///     match is_offer(request) {
///         true => Either::Right(unlimited),
///         false => Either::Left(limited),
///     }
/// }
/// ```
pub fn is_offer<B>(request: &Request<B>) -> bool {
    is_offers(request.uri().path())
}

/// Whether `path` belongs to the Offer's service.
fn is_offers(path: &str) -> bool {
    path.starts_with(&OFFER_PATH[..PREFIX])
}

type OfferFuture = <LimitedOffers as Service<Request<Body>>>::Future;

pin_project! {
    /// The response of an [`OfferRoute`].
    #[must_use = "futures do nothing unless awaited"]
    pub struct OfferRouteFuture<F> {
        #[pin]
        inner: Inner<F>,
    }
}

pin_project! {
    #[project = InnerProj]
    enum Inner<F> {
        Service { #[pin] future: F },
        Offer { #[pin] future: OfferFuture },
    }
}

impl<F, B, E> Future for OfferRouteFuture<F>
where
    F: Future<Output = Result<Response<B>, E>>,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Output = Result<Response<Body>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().inner.project() {
            InnerProj::Service { future } => {
                future.poll(cx).map(|response| Ok(response?.map(Body::new)))
            }
            InnerProj::Offer { future } => {
                future.poll(cx).map(|response| response.map_err(|never| match never {}))
            }
        }
    }
}

impl<F> std::fmt::Debug for OfferRouteFuture<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OfferRouteFuture").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::pb::bootstrap_server::SERVICE_NAME;

    #[test]
    fn the_whole_service_is_routed_and_nothing_else() {
        assert!(is_offers(OFFER_PATH) && is_offers(&format!("/{SERVICE_NAME}/Probe")));
        for other in ["/", "", "/tonic_rdma.v1.Bootstrap", "/tonic_rdma.v1.BootstrapX/Offer"] {
            assert!(!is_offers(other), "{other}");
        }
    }
}
