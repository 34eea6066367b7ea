//! Keeps what the Offer's TCP connection is known by: its connect info, as it was before any layer
//! of the user's added what belongs to the one request.

use super::OFFER_PATH;
use http::{Extensions, Request};
use std::task::{Context, Poll};
use tower::Service;

/// In the extensions of an Offer: those of its connection.
#[derive(Debug, Clone, Default)]
pub(crate) struct Connection(pub(crate) Extensions);

/// Outermost on the TCP side. Other requests pass untouched.
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
            let connection = Connection(req.extensions().clone());
            req.extensions_mut().insert(connection);
        }
        self.0.call(req)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tower::ServiceExt;

    async fn captured(path: &str) -> Option<Connection> {
        let inner = tower::service_fn(|req: Request<()>| async move {
            Ok::<_, std::convert::Infallible>(req.extensions().get::<Connection>().cloned())
        });
        let mut req = Request::builder().uri(path).body(()).unwrap();
        req.extensions_mut().insert(7_u32);
        Capture(inner).oneshot(req).await.unwrap()
    }

    #[tokio::test]
    async fn only_an_offer_is_given_its_connection() {
        let connection = captured(OFFER_PATH).await.unwrap();
        assert_eq!(connection.0.get::<u32>(), Some(&7));
        assert!(captured("/some.Service/Method").await.is_none());
    }
}
