//! The time limit of a call until its response headers: the shorter of the `grpc-timeout` header
//! and the configured limit. A call that exceeds the limit fails with the error of tonic's
//! transport.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{HeaderMap, HeaderName, Request};
use pin_project_lite::pin_project;
use tokio::time::Sleep;
use tonic::TimeoutExpired;
use tower::Service;

use crate::error::BoxError;

/// Fails calls that exceed their time limit. A header that does not parse counts as absent, as in
/// tonic.
#[derive(Debug, Clone)]
pub(crate) struct GrpcTimeout<S> {
    inner: S,
    configured: Option<Duration>,
}

impl<S> GrpcTimeout<S> {
    pub(crate) fn new(inner: S, configured: Option<Duration>) -> Self {
        Self { inner, configured }
    }
}

impl<S, B> Service<Request<B>> for GrpcTimeout<S>
where
    S: Service<Request<B>>,
    S::Error: Into<BoxError>,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = TimeoutFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, req: Request<B>) -> Self::Future {
        let limit = match (parse(req.headers()), self.configured) {
            (Some(header), Some(configured)) => Some(header.min(configured)),
            (header, configured) => header.or(configured),
        };
        let sleep = limit.map(|limit| Box::pin(tokio::time::sleep(limit)));
        TimeoutFuture { inner: self.inner.call(req), sleep }
    }
}

pin_project! {
    /// A call that fails with [`TimeoutExpired`] when its time is over.
    #[derive(Debug)]
    pub(crate) struct TimeoutFuture<F> {
        #[pin]
        inner: F,
        // Boxed because most calls have no limit, and the future is moved.
        sleep: Option<Pin<Box<Sleep>>>,
    }
}

impl<F, T, E> Future for TimeoutFuture<F>
where
    F: Future<Output = Result<T, E>>,
    E: Into<BoxError>,
{
    type Output = Result<T, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if let Poll::Ready(done) = this.inner.poll(cx) {
            return Poll::Ready(done.map_err(Into::into));
        }
        match this.sleep {
            Some(sleep) => sleep.as_mut().poll(cx).map(|()| Err(TimeoutExpired(()).into())),
            None => Poll::Pending,
        }
    }
}

static GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// Parses `TimeoutValue TimeoutUnit` of the gRPC specification: at most eight digits and one
/// letter.
fn parse(headers: &HeaderMap) -> Option<Duration> {
    // A call has few headers, so a linear search costs less than a hash, and a name compares with
    // another name faster than with a string.
    let (_, value) = headers.iter().find(|(name, _)| **name == GRPC_TIMEOUT)?;
    let text = value.to_str().ok()?;
    let unit = text.chars().last()?;
    let digits = text.strip_suffix(unit)?;
    if digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let value: u64 = digits.parse().ok()?;
    Some(match unit {
        'H' => Duration::from_secs(value * 3600),
        'M' => Duration::from_secs(value * 60),
        'S' => Duration::from_secs(value),
        'm' => Duration::from_millis(value),
        'u' => Duration::from_micros(value),
        'n' => Duration::from_nanos(value),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use tower::ServiceExt;

    use super::*;

    fn parsed(value: &'static str) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", HeaderValue::from_static(value));
        parse(&headers)
    }

    #[test]
    fn units_and_limits_of_the_header() {
        assert_eq!(parsed("3H"), Some(Duration::from_secs(3 * 3600)));
        assert_eq!(parsed("1M"), Some(Duration::from_secs(60)));
        assert_eq!(parsed("42S"), Some(Duration::from_secs(42)));
        assert_eq!(parsed("13m"), Some(Duration::from_millis(13)));
        assert_eq!(parsed("2u"), Some(Duration::from_micros(2)));
        assert_eq!(parsed("82n"), Some(Duration::from_nanos(82)));
        assert_eq!(parsed("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for bad in ["", "H", "1", "82f", "123456789H", "+1S", "1 S", "oneH"] {
            assert_eq!(parsed(bad), None, "{bad:?}");
        }
        assert_eq!(parse(&HeaderMap::new()), None);
    }

    async fn outcome(header: Option<&str>, configured: Option<Duration>) -> Option<Duration> {
        let start = tokio::time::Instant::now();
        let never = tower::service_fn(|_: Request<()>| async {
            tokio::time::sleep(Duration::from_secs(1000)).await;
            Ok::<_, BoxError>(())
        });
        let mut req = Request::new(());
        if let Some(header) = header {
            req.headers_mut().insert("grpc-timeout", header.parse().unwrap());
        }
        match GrpcTimeout::new(never, configured).oneshot(req).await {
            Ok(()) => None,
            Err(e) => {
                assert!(e.is::<TimeoutExpired>());
                Some(start.elapsed())
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_shorter_of_the_two_wins() {
        let s = Duration::from_secs;
        assert_eq!(outcome(None, None).await, None);
        assert_eq!(outcome(Some("3S"), None).await, Some(s(3)));
        assert_eq!(outcome(None, Some(s(4))).await, Some(s(4)));
        assert_eq!(outcome(Some("3S"), Some(s(4))).await, Some(s(3)));
        assert_eq!(outcome(Some("5S"), Some(s(4))).await, Some(s(4)));
        assert_eq!(outcome(Some("junk"), Some(s(4))).await, Some(s(4)));
    }
}
