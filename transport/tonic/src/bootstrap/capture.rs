//! Records the identity of the Offer's TCP connection, and traces of a gateway, before any user
//! layer can add, change or remove them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use http::Request;
use tokio::time::Instant;
use tonic_rdma_memory::throttled;
use tower::Service;

use crate::bootstrap::OFFER_PATH;
use crate::bootstrap::connection::{Asker, OfferConnection, peer, trace};
use crate::bootstrap::stock_calls::StockCalls;

/// The outermost layer on the TCP side. Requests other than Offers pass unchanged.
///
/// tonic clones a server's service for each connection, and clones the connection's service for
/// each request. So a clone of the server's own copy represents a new connection, and all further
/// clones of this clone represent the same connection.
#[derive(Debug)]
pub(crate) struct Capture<S> {
    inner: S,
    stock_calls: Arc<StockCalls>,
    /// Number of connections so far.
    connections: Arc<AtomicU64>,
    /// The connection that this clone serves. `None` in the server's own copy.
    asker: Option<Asker>,
}

impl<S: Clone> Clone for Capture<S> {
    fn clone(&self) -> Self {
        let first = || Asker::new(self.connections.fetch_add(1, Ordering::Relaxed));
        Capture {
            inner: self.inner.clone(),
            stock_calls: self.stock_calls.clone(),
            connections: self.connections.clone(),
            asker: Some(self.asker.clone().unwrap_or_else(first)),
        }
    }
}

impl<S> Capture<S> {
    pub(crate) fn new(inner: S, stock_calls: Arc<StockCalls>) -> Self {
        Capture { inner, stock_calls, connections: Arc::default(), asker: None }
    }

    /// Reports a call that is not an Offer to [`StockCalls`], and logs a warning if one is due.
    #[cold]
    fn watched<B>(&self, req: &Request<B>) {
        let Some(peer) = peer(req.extensions()) else { return };
        if self.stock_calls.called(peer, req.headers(), Instant::now()) {
            throttled!(
                warn,
                host = %peer.ip(),
                cure = "make each channel with tonic_rdma::Endpoint, and generate stubs with \
                        tonic-rdma-build, whose `connect` does so",
                "a host that uses the fast path also calls over TCP connections that never asked for it"
            );
        }
    }
}

impl<S, B> Service<Request<B>> for Capture<S>
where
    S: Service<Request<B>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut req: Request<B>) -> Self::Future {
        if req.uri().path() == OFFER_PATH {
            let trace = trace(req.version(), req.headers());
            let (extensions, asker) = (req.extensions().clone(), self.asker.clone());
            let connection = OfferConnection { extensions, trace, asker };
            req.extensions_mut().insert(connection);
        } else if self.stock_calls.is_watching() {
            self.watched(&req);
        }
        self.inner.call(req)
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, Version};
    use tower::ServiceExt;

    use super::*;
    use crate::bootstrap::connection::{OFFERS_AT_ONCE, Trace};

    async fn captured(req: Request<()>) -> Option<OfferConnection> {
        let inner = tower::service_fn(|req: Request<()>| async move {
            Ok::<_, std::convert::Infallible>(req.extensions().get::<OfferConnection>().cloned())
        });
        let stock_calls = Arc::new(StockCalls::new(Arc::default()));
        Capture::new(inner, stock_calls).oneshot(req).await.unwrap()
    }

    fn request(path: &str) -> Request<()> {
        let mut req = Request::builder().uri(path).version(Version::HTTP_2).body(()).unwrap();
        req.extensions_mut().insert(7_u32);
        req
    }

    #[tokio::test]
    async fn only_an_offer_is_given_its_connection() {
        let connection = captured(request(OFFER_PATH)).await.unwrap();
        assert_eq!(connection.extensions.get::<u32>(), Some(&7));
        assert_eq!(connection.trace, None);
        assert!(captured(request("/some.Service/Method")).await.is_none());
    }

    #[tokio::test]
    async fn each_connection_counts_its_own_offers() {
        let inner = tower::service_fn(|req: Request<()>| async move {
            let connection = req.extensions().get::<OfferConnection>().cloned();
            Ok::<_, std::convert::Infallible>(connection.and_then(|c| c.asker).unwrap())
        });
        let server = Capture::new(inner, Arc::new(StockCalls::new(Arc::default())));
        // tonic clones the service for each connection, and clones the connection's service for
        // each request.
        let connections = [server.clone(), server.clone()];
        let asker = async |n: usize| {
            let req = request(OFFER_PATH);
            connections[n].clone().oneshot(req).await.unwrap()
        };
        let mut permits = Vec::new();
        for _ in 0..OFFERS_AT_ONCE {
            permits.push(asker(0).await.begin().unwrap());
        }
        assert!(asker(0).await.begin().is_none());
        assert!(asker(1).await.begin().is_some());
        assert_ne!(asker(0).await.number, asker(1).await.number);
        permits.pop();
        assert!(asker(0).await.begin().is_some());
    }

    #[tokio::test]
    async fn traces_of_gateways_are_seen() {
        for name in ["Forwarded", "Via", "X-Forwarded-For", "X-Real-IP", "x-envoy-external-address"]
        {
            let mut offer = request(OFFER_PATH);
            let name: HeaderName = name.parse().unwrap();
            offer.headers_mut().insert(name.clone(), "192.0.2.1".parse().unwrap());
            assert_eq!(captured(offer).await.unwrap().trace, Some(Trace::Header(name)));
        }
        // Headers that clients also send themselves prove nothing.
        let mut offer = request(OFFER_PATH);
        for name in
            ["authorization", "user-agent", "te", "traceparent", "x-request-id", "grpc-timeout"]
        {
            offer.headers_mut().insert(name, "x".parse().unwrap());
        }
        assert_eq!(captured(offer).await.unwrap().trace, None);
        let mut offer = request(OFFER_PATH);
        *offer.version_mut() = Version::HTTP_11;
        assert_eq!(captured(offer).await.unwrap().trace, Some(Trace::Version(Version::HTTP_11)));
    }
}
