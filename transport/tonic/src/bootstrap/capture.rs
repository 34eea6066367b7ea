//! Records the identity of the Offer's TCP connection, and traces of a gateway, before any of the
//! user's layers can add, change or remove them.

use std::net::SocketAddr;
use std::task::{Context, Poll};

use http::{Extensions, HeaderMap, HeaderName, Request, Version};
use tonic::transport::server::TcpConnectInfo;
#[cfg(feature = "_tls-any")]
use tonic::transport::server::TlsConnectInfo;
use tower::Service;

use crate::bootstrap::OFFER_PATH;

/// Headers that gateways add to requests.
const FORWARDING: [&str; 13] = [
    "cdn-loop",
    "cf-connecting-ip",
    "client-ip",
    "fastly-client-ip",
    "forwarded",
    "forwarded-for",
    "proxy-connection",
    "true-client-ip",
    "via",
    "x-client-ip",
    "x-cluster-client-ip",
    "x-proxyuser-ip",
    "x-real-ip",
];
/// Prefixes of further such headers.
const FORWARDING_PREFIXES: [&str; 4] = ["l5d-", "x-envoy-", "x-forwarded", "x-original-"];

/// Evidence that a request passed an HTTP gateway.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Trace {
    /// Not HTTP/2, which all clients of this crate speak.
    #[error("it came by {0:?}")]
    Version(Version),
    #[error("it carries the header `{0}`")]
    Header(HeaderName),
}

/// What is known of an Offer's connection; kept in the Offer's extensions.
#[derive(Debug, Clone, Default)]
pub(crate) struct Connection {
    /// The connect info of the connection.
    pub(crate) extensions: Extensions,
    /// Evidence of a gateway, if the Offer carries any.
    pub(crate) trace: Option<Trace>,
}

impl Connection {
    /// The peer's end of the TCP connection; `None` for a transport without TCP addresses.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        let info = self.extensions.get::<TcpConnectInfo>();
        #[cfg(feature = "_tls-any")]
        let info = info.or_else(|| {
            self.extensions.get::<TlsConnectInfo<TcpConnectInfo>>().map(TlsConnectInfo::get_ref)
        });
        info?.remote_addr()
    }

    /// The connection of an accepted socket with this connect info.
    pub(crate) fn of<I: Clone + Send + Sync + 'static>(info: I) -> Self {
        let mut extensions = Extensions::new();
        extensions.insert(info);
        Self { extensions, trace: None }
    }
}

fn trace(version: Version, headers: &HeaderMap) -> Option<Trace> {
    if version != Version::HTTP_2 {
        return Some(Trace::Version(version));
    }
    let forwards = |name: &&HeaderName| {
        let name = name.as_str();
        FORWARDING.contains(&name)
            || FORWARDING_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
    };
    headers.keys().find(forwards).cloned().map(Trace::Header)
}

/// The outermost layer on the TCP side. Requests other than Offers pass unchanged.
#[derive(Debug, Clone)]
pub(crate) struct Capture<S>(pub(crate) S);

impl<S, B> Service<Request<B>> for Capture<S>
where
    S: Service<Request<B>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, mut req: Request<B>) -> Self::Future {
        if req.uri().path() == OFFER_PATH {
            let trace = trace(req.version(), req.headers());
            let connection = Connection { extensions: req.extensions().clone(), trace };
            req.extensions_mut().insert(connection);
        }
        self.0.call(req)
    }
}

#[cfg(test)]
mod tests {
    use tower::ServiceExt;

    use super::*;

    async fn captured(req: Request<()>) -> Option<Connection> {
        let inner = tower::service_fn(|req: Request<()>| async move {
            Ok::<_, std::convert::Infallible>(req.extensions().get::<Connection>().cloned())
        });
        Capture(inner).oneshot(req).await.unwrap()
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
    async fn traces_of_gateways_are_seen() {
        for name in ["Forwarded", "Via", "X-Forwarded-For", "X-Real-IP", "x-envoy-external-address"]
        {
            let mut offer = request(OFFER_PATH);
            let name: HeaderName = name.parse().unwrap();
            offer.headers_mut().insert(name.clone(), "192.0.2.1".parse().unwrap());
            assert_eq!(captured(offer).await.unwrap().trace, Some(Trace::Header(name)));
        }
        // Headers that clients send themselves are no evidence.
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
