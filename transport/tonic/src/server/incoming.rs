//! What stands between a listener and tonic's server: an end without losses, and limits.
//!
//! - **The backlog is served.** When the server is told to end, connections that have been made
//!   already, and wait to be accepted, are accepted first. tonic alone closes the listener over
//!   them, which resets them, with calls on the way.
//! - **Sockets linger.** A socket that is closed while something of the peer's lies in it unread is
//!   reset by the system, and the peer then loses what it has not read itself: the last answers of
//!   a connection that ends in good order. So what the peer still says, updates of windows mostly,
//!   is read and dropped until it has closed as well.
//! - **Accepting that fails is not tried again at once.** A process that has no descriptor left
//!   would do nothing else.
//! - **Connections have a limit.** What comes beyond it is closed before it costs anything.
//! - **What an Offer has shown of a connection is known until the connection closes**
//!   (`bootstrap::gateways`).

use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use pin_project_lite::pin_project;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;
use tonic::transport::server::Connected;

use crate::bootstrap::capture::Connection;
use crate::bootstrap::gateways::{Gateways, Known};

/// A peer that has been told of the end may take this long to close.
const LINGER: Duration = Duration::from_secs(1);
/// Pause after accepting has failed.
const PAUSE: Duration = Duration::from_millis(50);
/// Connections refused in a row before other tasks get their turn.
const ROUNDS: usize = 32;

pin_project! {
    /// Connections of `inner`, until `signal` completes and those that wait by then are accepted.
    pub(super) struct Accepting<I, F, G> {
        #[pin]
        inner: I,
        #[pin]
        signal: Option<F>,
        on_signal: Option<G>,
        places: Arc<Semaphore>,
        most: usize,
        gateways: Arc<Gateways>,
        // Refused since the last that was not.
        refused: u64,
        pause: Option<Pin<Box<Sleep>>>,
        failing: bool,
    }
}

impl<I, F, G> Accepting<I, F, G> {
    /// `on_signal` is called when `signal` completes, before the backlog is accepted; at most
    /// `most` connections live at a time.
    pub(super) fn new(
        inner: I,
        signal: F,
        on_signal: G,
        most: usize,
        gateways: Arc<Gateways>,
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
            // That the task has done much already does not mean that nobody waits.
            let next = tokio::task::unconstrained(poll_fn(|cx| this.inner.as_mut().poll_next(cx)));
            match pin!(next).poll(cx) {
                Poll::Pending if ending => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Ready(Some(Ok(io))) => match this.places.clone().try_acquire_owned() {
                    Ok(place) => {
                        (*this.refused, *this.failing) = (0, false);
                        let known = this.gateways.accepted(&Connection::of(io.connect_info()));
                        return Poll::Ready(Some(Ok(Lingering::new(io, place, known))));
                    }
                    Err(_) => {
                        *this.refused += 1;
                        if this.refused.is_power_of_two() {
                            let (most, refused) = (*this.most, *this.refused);
                            tracing::warn!(
                                most,
                                refused,
                                "TCP connections refused: there are as many as allowed"
                            );
                        }
                    }
                },
                Poll::Ready(Some(Err(error))) => {
                    if !std::mem::replace(this.failing, true) {
                        let error = error.into();
                        tracing::warn!(%error, "no TCP connection can be accepted for now");
                    }
                    *this.pause = Some(Box::pin(tokio::time::sleep(PAUSE)));
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

/// A connection that is closed only when its peer has nothing more to say, or has had its time.
#[derive(Debug)]
pub(super) struct Lingering<IO> {
    io: IO,
    end: End,
    _place: OwnedSemaphorePermit,
    _known: Option<Known>,
}

/// How far the end has come.
#[derive(Debug)]
enum End {
    Open,
    /// This side has said all; the peer is listened to.
    Draining(Pin<Box<Sleep>>),
    Done,
}

impl<IO> Lingering<IO> {
    fn new(io: IO, place: OwnedSemaphorePermit, known: Option<Known>) -> Self {
        Self { io, end: End::Open, _place: place, _known: known }
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
                End::Open => {
                    ready!(Pin::new(&mut this.io).poll_shutdown(cx))?;
                    this.end = End::Draining(Box::pin(tokio::time::sleep(LINGER)));
                }
                End::Draining(limit) => {
                    let mut scratch = [0; 1024];
                    let mut buf = ReadBuf::new(&mut scratch);
                    let read = match limit.as_mut().poll(cx) {
                        Poll::Ready(()) => Ok(()),
                        Poll::Pending => ready!(Pin::new(&mut this.io).poll_read(cx, &mut buf)),
                    };
                    // The time is over, the peer has closed, or it is gone.
                    if read.is_err() || buf.filled().is_empty() {
                        this.end = End::Done;
                    }
                }
                End::Done => return Poll::Ready(Ok(())),
            }
        }
    }
}
