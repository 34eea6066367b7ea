//! Counts payload bytes of bodies that travel over TCP.

use crate::stats::{Counter, Counters};
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tonic::{Status, body::Body};

/// Which counter a body adds to.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Direction {
    Sent,
    Received,
}

/// Wraps `body` so that its data frames are counted as TCP bytes.
pub(crate) fn count(body: Body, counters: &Arc<Counters>, direction: Direction) -> Body {
    if body.is_end_stream() {
        return body;
    }
    Body::new(Counting { inner: body, counters: counters.clone(), direction })
}

struct Counting {
    inner: Body,
    counters: Arc<Counters>,
    direction: Direction,
}

impl Counting {
    fn counter(&self) -> &Counter {
        match self.direction {
            Direction::Sent => &self.counters.bytes_sent_tcp,
            Direction::Received => &self.counters.bytes_received_tcp,
        }
    }
}

impl HttpBody for Counting {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            self.counter().add(data.len() as u64);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::{BodyExt, Full};

    #[tokio::test]
    async fn data_is_counted_and_passed_on() {
        let counters = Arc::new(Counters::default());
        let body = Body::new(Full::new(Bytes::from_static(b"12345")));
        let body = count(body, &counters, Direction::Sent);
        let got = body.collect().await.unwrap().to_bytes();
        assert_eq!(&got[..], b"12345");
        let stats = counters.snapshot();
        assert_eq!((stats.bytes_sent_tcp, stats.bytes_received_tcp), (5, 0));
    }
}
