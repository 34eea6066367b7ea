//! Passes TCP connections to tonic's server, with limits and a shutdown that loses no calls.
//!
//! - **The backlog is served.** On shutdown, established connections that wait to be accepted are
//!   accepted first. tonic alone would close the listener, which resets these connections and their
//!   calls.
//! - **Sockets linger.** If a socket is closed with unread data from the peer, the system resets
//!   the connection. The peer then loses everything that it has not read yet, which includes the
//!   last responses of a connection that closes gracefully. So the server reads and discards
//!   further data, mostly window updates, until the peer has closed as well.
//! - **A failed accept is not retried at once.** A process without free descriptors would otherwise
//!   spin.
//! - **The number of connections is limited.** A connection beyond the limit is closed at once.
//! - **Facts that an Offer reveals about a connection are kept until the connection closes**
//!   (`bootstrap::gateways`).

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use pin_project_lite::pin_project;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::Sleep;
use tonic::transport::server::Connected;
use tonic_rdma_memory::throttled;

use crate::bootstrap::connection::OfferConnection;
use crate::bootstrap::gateways::{Gateways, Known};

/// Time limit for the peer to close after this side has closed.
const LINGER: Duration = Duration::from_secs(1);
/// Pause after a failed accept.
const PAUSE: Duration = Duration::from_millis(50);
/// The task yields after it has refused this number of connections in a row.
const ROUNDS: usize = 32;

pin_project! {
    /// Yields the connections of `inner` until `signal` completes and the backlog at that time is
    /// accepted.
    pub(super) struct Accepting<I, F, G> {
        #[pin]
        inner: I,
        #[pin]
        signal: Option<F>,
        on_signal: Option<G>,
        places: Arc<Semaphore>,
        most: usize,
        gateways: Arc<Gateways>,
        open: mpsc::Sender<Infallible>,
        // Number of connections refused since the last accepted one.
        refused: u64,
        pause: Option<Pin<Box<Sleep>>>,
        failing: bool,
    }
}

impl<I, F, G> Accepting<I, F, G> {
    /// `on_signal` is called when `signal` completes, before the backlog is accepted, or when
    /// `inner` ends. At most `most` connections exist at the same time. Each connection keeps a
    /// clone of `open`.
    pub(super) fn new(
        inner: I,
        signal: F,
        on_signal: G,
        most: usize,
        gateways: Arc<Gateways>,
        open: mpsc::Sender<Infallible>,
    ) -> Self {
        let most = most.min(Semaphore::MAX_PERMITS);
        let places = Arc::new(Semaphore::new(most));
        let (signal, on_signal) = (Some(signal), Some(on_signal));
        Self {
            inner,
            signal,
            on_signal,
            places,
            most,
            gateways,
            open,
            refused: 0,
            pause: None,
            failing: false,
        }
    }
}

impl<I, IO, IE, F, G> Stream for Accepting<I, F, G>
where
    I: Stream<Item = Result<IO, IE>>,
    IO: Connected,
    IE: Into<Box<dyn std::error::Error + Send + Sync>>,
    F: Future<Output = ()>,
    G: FnOnce(),
{
    type Item = Result<Lingering<IO>, IE>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut this = self.project();
        if let Some(signal) = this.signal.as_mut().as_pin_mut()
            && signal.poll(cx).is_ready()
        {
            this.signal.set(None);
            if let Some(on_signal) = this.on_signal.take() {
                on_signal();
            }
        }
        let ending = this.on_signal.is_none();
        for _ in 0..ROUNDS {
            if let Some(pause) = this.pause.as_mut() {
                if ending {
                    return Poll::Ready(None);
                }
                ready!(pause.as_mut().poll(cx));
                *this.pause = None;
            }
            // Poll without a budget, because a task whose budget is spent would see an empty
            // backlog although connections wait.
            let next = tokio::task::unconstrained(poll_fn(|cx| this.inner.as_mut().poll_next(cx)));
            match pin!(next).poll(cx) {
                Poll::Pending if ending => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => {
                    if let Some(on_signal) = this.on_signal.take() {
                        on_signal();
                    }
                    return Poll::Ready(None);
                }
                Poll::Ready(Some(Ok(io))) => match this.places.clone().try_acquire_owned() {
                    Ok(place) => {
                        (*this.refused, *this.failing) = (0, false);
                        let known = this.gateways.accepted(&OfferConnection::of(io.connect_info()));
                        let holds = (place, this.open.clone());
                        return Poll::Ready(Some(Ok(Lingering::new(io, holds, known))));
                    }
                    Err(_) => {
                        *this.refused += 1;
                        if this.refused.is_power_of_two() {
                            let (most, refused) = (*this.most, *this.refused);
                            throttled!(
                                warn,
                                most,
                                refused,
                                "TCP connections refused: the limit is reached"
                            );
                        }
                    }
                },
                Poll::Ready(Some(Err(error))) => {
                    if !std::mem::replace(this.failing, true) {
                        let error = error.into();
                        throttled!(warn, %error, "no TCP connection can be accepted at the moment");
                    }
                    *this.pause = Some(Box::pin(tokio::time::sleep(PAUSE)));
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

/// A connection that closes only after its peer has closed, or after [`LINGER`].
#[derive(Debug)]
pub(super) struct Lingering<IO> {
    io: IO,
    end: CloseState,
    _holds: Holds,
    _known: Option<Known>,
}

/// Counts a connection until the connection is closed.
type Holds = (OwnedSemaphorePermit, mpsc::Sender<Infallible>);

/// The progress of an orderly close.
#[derive(Debug)]
enum CloseState {
    Open,
    /// This side has closed. Data from the peer is read and discarded.
    Draining(Pin<Box<Sleep>>),
    Done,
}

impl<IO> Lingering<IO> {
    fn new(io: IO, holds: Holds, known: Option<Known>) -> Self {
        Self { io, end: CloseState::Open, _holds: holds, _known: known }
    }
}

impl<IO: Connected> Connected for Lingering<IO> {
    type ConnectInfo = IO::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.io.connect_info()
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for Lingering<IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Lingering<IO> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            match &mut this.end {
                CloseState::Open => {
                    ready!(Pin::new(&mut this.io).poll_shutdown(cx))?;
                    this.end = CloseState::Draining(Box::pin(tokio::time::sleep(LINGER)));
                }
                CloseState::Draining(limit) => {
                    let mut scratch = [0; 1024];
                    let mut buf = ReadBuf::new(&mut scratch);
                    let read = match limit.as_mut().poll(cx) {
                        Poll::Ready(()) => Ok(()),
                        Poll::Pending => ready!(Pin::new(&mut this.io).poll_read(cx, &mut buf)),
                    };
                    // The time limit is over, or the peer has closed or failed.
                    if read.is_err() || buf.filled().is_empty() {
                        this.end = CloseState::Done;
                    }
                }
                CloseState::Done => return Poll::Ready(Ok(())),
            }
        }
    }
}
