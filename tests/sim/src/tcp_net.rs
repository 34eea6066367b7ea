//! TCP without sockets: byte pipes in memory, with latency by the virtual clock. Faults stall and
//! break the pipes.
//!
//! A pipe accepts any number of bytes, because HTTP/2's own windows limit them. So nothing depends
//! on the length of a header, and a run is repeatable although dates in headers differ.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep};
use tonic::transport::server::Connected;

/// A network of pipes, which is cheap to clone.
#[derive(Clone)]
pub(crate) struct TcpNet(Arc<Inner>);

struct Inner {
    latency: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    listeners: BTreeMap<SocketAddr, mpsc::UnboundedSender<io::Result<Socket>>>,
    pipes: Vec<Weak<Pipe>>,
    stalled: bool,
    refusing: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TcpNet {
    pub(crate) fn new(latency: Duration) -> Self {
        TcpNet(Arc::new(Inner { latency, state: Mutex::default() }))
    }

    /// Takes the address over from its previous listener.
    pub(crate) fn listen(&self, addr: SocketAddr) -> mpsc::UnboundedReceiver<io::Result<Socket>> {
        let (sender, receiver) = mpsc::unbounded_channel();
        lock(&self.0.state).listeners.insert(addr, sender);
        receiver
    }

    pub(crate) async fn connect(&self, addr: SocketAddr) -> io::Result<Socket> {
        tokio::time::sleep(self.0.latency).await;
        let mut state = lock(&self.0.state);
        let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
        if state.refusing {
            return Err(refused());
        }
        let listener = state.listeners.get(&addr).cloned().ok_or_else(refused)?;
        let (up, down) = (self.pipe(), self.pipe());
        state.pipes.retain(|pipe| pipe.strong_count() > 0);
        state.pipes.extend([Arc::downgrade(&up), Arc::downgrade(&down)]);
        drop(state);
        let near = Socket { read: down.clone(), write: up.clone(), timer: None };
        let far = Socket { read: up, write: down, timer: None };
        listener.send(Ok(far)).map_err(|_| refused())?;
        Ok(near)
    }

    fn pipe(&self) -> Arc<Pipe> {
        Arc::new(Pipe { tcp_net: self.0.clone(), state: Mutex::default() })
    }

    fn pipes(&self) -> Vec<Arc<Pipe>> {
        lock(&self.0.state).pipes.iter().filter_map(Weak::upgrade).collect()
    }

    /// Fault: all connections break.
    pub(crate) fn reset(&self) {
        for pipe in self.pipes() {
            pipe.change(|state| state.broken = true);
        }
    }

    /// Fault: nothing arrives.
    pub(crate) fn stall(&self, on: bool) {
        lock(&self.0.state).stalled = on;
        for pipe in self.pipes() {
            pipe.change(|_| ());
        }
    }

    /// Fault: new connections are refused.
    pub(crate) fn refuse(&self, on: bool) {
        lock(&self.0.state).refusing = on;
    }
}

/// One direction of a connection.
struct Pipe {
    tcp_net: Arc<Inner>,
    state: Mutex<PipeState>,
}

#[derive(Default)]
struct PipeState {
    /// The written bytes, each with its time of arrival.
    queue: VecDeque<(Instant, Bytes)>,
    /// Whether the writer is done.
    ended: bool,
    /// Whether the reader was dropped.
    abandoned: bool,
    broken: bool,
    reader: Option<Waker>,
}

impl Pipe {
    fn change(&self, f: impl FnOnce(&mut PipeState)) {
        let mut state = lock(&self.state);
        f(&mut state);
        let reader = state.reader.take();
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

/// One end of a connection.
pub(crate) struct Socket {
    read: Arc<Pipe>,
    write: Arc<Pipe>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let stalled = lock(&this.read.tcp_net.state).stalled;
        let mut state = lock(&this.read.state);
        if state.broken {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        state.reader = Some(cx.waker().clone());
        if stalled {
            return Poll::Pending;
        }
        let now = Instant::now();
        let ended = state.ended;
        let due = match state.queue.front_mut() {
            None if ended => return Poll::Ready(Ok(())),
            None => return Poll::Pending,
            Some((due, bytes)) if *due <= now => {
                let len = bytes.len().min(buf.remaining());
                buf.put_slice(&bytes[..len]);
                bytes.advance(len);
                if bytes.is_empty() {
                    state.queue.pop_front();
                }
                return Poll::Ready(Ok(()));
            }
            Some((due, _)) => *due,
        };
        drop(state);
        let timer = this.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due)));
        if timer.deadline() != due {
            timer.as_mut().reset(due);
        }
        if timer.as_mut().poll(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let state = lock(&self.write.state);
        if state.broken {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        let abandoned = state.abandoned;
        drop(state);
        if abandoned {
            // As with a kernel's socket, the write succeeds, and what arrived before can still be
            // read.
            return Poll::Ready(Ok(buf.len()));
        }
        let due = Instant::now() + self.write.tcp_net.latency;
        self.write.change(|state| state.queue.push_back((due, Bytes::copy_from_slice(buf))));
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.write.change(|state| state.ended = true);
        Poll::Ready(Ok(()))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.write.change(|state| state.ended = true);
        self.read.change(|state| state.abandoned = true);
    }
}

impl Connected for Socket {
    type ConnectInfo = ();
    fn connect_info(&self) {}
}
