//! The unix socket of a connection.
//!
//! | module | what |
//! |---|---|
//! | `wire` | the messages |
//! | `blocking` | threads for calls that a peer can make block |
//!
//! The socket keeps the boundaries of messages, and a message may carry descriptors.

pub(super) mod blocking;
pub(crate) mod wire;

use std::future::Future;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
    SocketType, accept_with, bind, connect, listen, recvmsg, sendmsg, shutdown, socket_with,
};
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};
use tokio::sync::oneshot;

use crate::addr::ShmAddr;
use crate::shm::socket::blocking::{PEERS, STRANGERS, ThreadPool};
use crate::turn;
use crate::wake_gate::WakeGate;

/// Maximum length of a message in bytes.
pub(crate) const MAX_MESSAGE: usize = 256;
/// Maximum number of descriptors with a message.
pub(crate) const MAX_FDS: usize = 4;
/// Number of connections that the kernel keeps until they are accepted.
const BACKLOG: i32 = 128;
/// Maximum number of messages that are dropped to find out whether the peer has ended.
const MAX_SKIPPED: usize = 64;

/// A message from the socket.
#[derive(Debug)]
pub(crate) struct SocketMessage {
    pub(crate) bytes: Vec<u8>,
    /// Whether descriptors came with the message. If so, the message stays in the queue until
    /// [`Socket::take_fds`] has taken the descriptors.
    pub(crate) has_fds: bool,
    /// The process that has sent the message, as verified by the kernel, if the socket reports
    /// senders.
    pub(crate) sender: Option<u32>,
}

/// Descriptors that came with a message.
#[derive(Debug, Default)]
pub(crate) struct TakenFds {
    pub(crate) fds: Vec<OwnedFd>,
    /// The process that has sent the descriptors, as verified by the kernel, if the socket reports
    /// senders.
    pub(crate) sender: Option<u32>,
}

/// The process at the other end, as the kernel reports it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Credentials {
    /// 0 if the process is outside of this process's PID namespace.
    pub(crate) pid: u32,
    pub(crate) uid: u32,
}

/// A connected socket.
#[derive(Debug)]
pub(crate) struct Socket {
    /// The socket, which is closed on a thread that may block.
    fd: ManuallyDrop<Arc<OwnedFd>>,
    /// `None` only while the socket is dropped.
    ready_fd: Option<ReadyFd<Arc<OwnedFd>>>,
    peer: Credentials,
    /// Whether messages come with their senders.
    tells_senders: bool,
    is_shut: bool,
    threads: &'static ThreadPool,
}

fn open() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

fn name(addr: &ShmAddr) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new_abstract_name(addr.name().as_bytes())?)
}

/// Takes the next message. A message with descriptors stays in the queue. Peeking takes references
/// to the message's files. Dropping these references closes no file, because the queue still holds
/// the files. If the socket reports senders, the control buffer has room only for the sender, which
/// comes first.
fn receive(socket: &OwnedFd, tells_senders: bool) -> io::Result<Option<SocketMessage>> {
    let (mut bytes, mut sender) = ([0; MAX_MESSAGE], None);
    let mut read = |flags| {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
        let space = if tells_senders { &mut space[..] } else { &mut [] };
        let mut control = RecvAncillaryBuffer::new(space);
        let received = read(socket, &mut bytes, flags, &mut control);
        sender = control.drain().find_map(|message| sender_of(&message));
        received
    };
    let (len, has_fds) = read(RecvFlags::PEEK)?;
    if !has_fds {
        // This call takes the same message, because no other thread reads from this socket.
        read(RecvFlags::empty())?;
    }
    let message = || SocketMessage { bytes: bytes[..len].to_vec(), has_fds, sender };
    Ok((len > 0 || has_fds).then(message))
}

fn sender_of(message: &RecvAncillaryMessage<'_>) -> Option<u32> {
    match message {
        RecvAncillaryMessage::ScmCredentials(who) => u32::try_from(who.pid.as_raw_pid()).ok(),
        _ => None,
    }
}

/// Takes the next message with its descriptors. May block, because the kernel closes each passed
/// file for which this process has no free descriptor.
fn receive_fds(socket: &OwnedFd, TakenFds { fds, sender }: &mut TakenFds) -> io::Result<()> {
    let mut bytes = [0; MAX_MESSAGE];
    // The buffer has room for one more descriptor than is allowed, so that a surplus is noticed.
    let mut space =
        [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS + 1), ScmCredentials(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = read(socket, &mut bytes, RecvFlags::CMSG_CLOEXEC, &mut control);
    for message in control.drain() {
        match message {
            RecvAncillaryMessage::ScmRights(rights) => fds.extend(rights),
            other => *sender = sender_of(&other).or(*sender),
        }
    }
    let (_, truncated) = received?;
    if fds.len() > MAX_FDS {
        let what = "a message with more descriptors than the protocol allows";
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    if truncated {
        // The buffer had room for all descriptors, so the kernel could not open one of them.
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    Ok(())
}

/// Reads a message. Returns the length of the message, and whether the kernel dropped descriptors,
/// because the buffer has too little room or a descriptor could not be opened.
fn read(
    socket: &OwnedFd,
    bytes: &mut [u8],
    flags: RecvFlags,
    control: &mut RecvAncillaryBuffer<'_>,
) -> io::Result<(usize, bool)> {
    let mut reset = false;
    let got = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(bytes)], control, flags | RecvFlags::DONTWAIT) {
            Err(rustix::io::Errno::INTR) => {}
            // The peer closed its end and left messages unread. The messages that the peer sent are
            // read next.
            Err(rustix::io::Errno::CONNRESET) if !reset => reset = true,
            got => break got?,
        }
    };
    if got.flags.contains(ReturnFlags::TRUNC) {
        let what = "a message that is longer than the protocol allows";
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok((got.bytes, got.flags.contains(ReturnFlags::CTRUNC)))
}

/// SO_PASSRIGHTS (Linux 6.16), on architectures that use the common number for this option.
const PASS_RIGHTS: Option<libc::c_int> = match cfg!(any(
    target_arch = "x86_64",
    target_arch = "aarch64",
    target_arch = "riscv64",
    target_arch = "loongarch64"
)) {
    true => Some(83),
    false => None,
};

/// Sets whether descriptors may be sent to this socket or, for a listening socket, to the sockets
/// that it accepts. Older kernels lack the option and always allow descriptors.
fn set_pass_rights(socket: &OwnedFd, pass: bool) {
    let (Some(option), pass) = (PASS_RIGHTS, libc::c_int::from(pass)) else { return };
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    let value = (&raw const pass).cast();
    // SAFETY: the descriptor is open; the call reads `len` bytes of `pass`.
    unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, value, len) };
}

fn credentials(socket: &OwnedFd) -> io::Result<Credentials> {
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is open; the call writes at most `len` bytes to `cred`, of which any
    // are valid.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut len,
        )
    };
    match result {
        0 => Ok(Credentials { pid: u32::try_from(cred.pid).unwrap_or(0), uid: cred.uid }),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Socket {
    /// Connects without waiting. Fails with `WouldBlock` if the listener's backlog is full.
    pub(crate) fn connect(addr: &ShmAddr) -> io::Result<Socket> {
        let fd = open()?;
        connect(&fd, &name(addr)?)?;
        Socket::new(fd, &PEERS)
    }

    fn new(fd: OwnedFd, threads: &'static ThreadPool) -> io::Result<Socket> {
        let fd = Arc::new(fd);
        // The peer has the other end, so the socket must never be closed on this thread.
        let peer = credentials(&fd);
        let user = peer.as_ref().map_or(u32::MAX, |peer| peer.uid);
        // SAFETY: an OwnedFd owns its descriptor and always gives the same one (R17).
        let ready_fd = unsafe { AsyncFd::register(fd.clone()) }.map_err(io::Error::from);
        match (ready_fd, peer) {
            (Ok(ready_fd), Ok(peer)) => {
                let fd = ManuallyDrop::new(fd);
                let ready_fd = Some(ReadyFd::new(ready_fd));
                Ok(Socket { fd, ready_fd, peer, tells_senders: false, is_shut: false, threads })
            }
            (ready_fd, peer) => {
                let error = ready_fd.err().or(peer.err());
                threads.close(user, fd);
                Err(error.unwrap_or_else(|| io::ErrorKind::Other.into()))
            }
        }
    }

    /// The process at the other end. For the accepting side, this is the process that called
    /// connect(2). For a client, this is the process that called listen(2).
    pub(crate) fn peer(&self) -> Credentials {
        self.peer
    }

    /// Admits the peer, which has shown a ticket. From now on the peer may pass descriptors.
    pub(crate) fn admit(&mut self) {
        self.threads = &PEERS;
        set_pass_rights(self.fd(), true);
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Sets whether messages that are sent from now on come with their senders.
    pub(crate) fn tell_senders(&mut self, tell: bool) -> io::Result<()> {
        if self.tells_senders != tell {
            set_socket_passcred(self.fd(), tell)?;
            self.tells_senders = tell;
        }
        Ok(())
    }

    /// Sends a message without waiting.
    ///
    /// # Errors
    /// `WouldBlock` if the peer does not read.
    pub(crate) fn send(&self, message: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "too many descriptors for one message",
            ));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(self.fd(), &[IoSlice::new(message)], &mut control, flags)?;
        Ok(())
    }

    /// Returns the next message. Takes the message unless it carries descriptors. `None` if the
    /// peer's end is closed, or if the peer has sent an empty message, which counts as the end.
    ///
    /// # Errors
    /// `WouldBlock` if no message has arrived, and `InvalidData` if the message is too long.
    pub(crate) fn receive(&self) -> io::Result<Option<SocketMessage>> {
        receive(self.fd(), self.tells_senders)
    }

    /// Like [`receive`](Self::receive), but waits for a message. Cancel safe.
    pub(crate) async fn next(&self) -> io::Result<Option<SocketMessage>> {
        let Some(ready_fd) = &self.ready_fd else { return Ok(None) };
        loop {
            let mut guard = ready_fd.fd().readable().await?;
            match guard.try_io(|_| self.receive()) {
                Ok(result) => return result,
                Err(_would_block) => {}
            }
        }
    }

    /// Like [`receive`](Self::receive), but wakes the task when a message arrives.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<SocketMessage>>> {
        let tells_senders = self.tells_senders;
        let Some(ready_fd) = &mut self.ready_fd else { return Poll::Ready(Ok(None)) };
        loop {
            let mut guard = match ready_fd.poll(cx) {
                Poll::Ready(Ok(guard)) => guard,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            };
            if let Ok(result) = guard.try_io(|socket| receive(socket.get_ref(), tells_senders)) {
                return Poll::Ready(result);
            }
        }
    }

    /// Drops up to [`MAX_SKIPPED`] messages to find out whether the peer has ended, and returns the
    /// answer. Call this function when a connection fails.
    pub(crate) fn has_ended(&mut self, cx: &mut Context<'_>) -> bool {
        (0..MAX_SKIPPED)
            .map(|_| self.poll(cx))
            .find_map(|polled| match polled {
                Poll::Ready(Ok(Some(_))) => None,
                Poll::Ready(Ok(None)) => Some(true),
                Poll::Ready(Err(error)) => Some(is_end(&error)),
                Poll::Pending => Some(false),
            })
            .unwrap_or(false)
    }

    /// Takes the message that [`receive`](Self::receive) left in the queue, and passes its
    /// descriptors to `make`, on a thread that may block. That thread sends the result, and then
    /// closes the descriptors that `make` leaves. The caller must not receive messages until the
    /// result has arrived.
    pub(crate) fn take_fds<T: Send + 'static>(
        &self,
        make: impl FnOnce(&mut TakenFds) -> io::Result<T> + Send + 'static,
    ) -> TakeFds<T> {
        let (told, result) = oneshot::channel();
        let socket = Arc::clone(&self.fd);
        self.threads.run(self.peer.uid, move || {
            let mut taken = TakenFds::default();
            let received = receive_fds(&socket, &mut taken);
            let _ = told.send(received.and_then(|()| make(&mut taken)));
            drop((taken, socket));
        });
        TakeFds(result)
    }

    /// Shuts the socket down, so that the peer sees the end.
    pub(crate) fn shut(&mut self) {
        if !std::mem::replace(&mut self.is_shut, true) {
            let _ = shutdown(self.fd(), Shutdown::Both);
        }
    }
}

impl Drop for Socket {
    /// Lets the peer see the end at once. The socket is closed on a thread that may block, because
    /// its queue may hold descriptors.
    fn drop(&mut self) {
        self.shut();
        // `ready_fd` is dropped first, so that this thread does not hold the last reference.
        self.ready_fd = None;
        // SAFETY: taken once, and not used any more (R17).
        let fd = unsafe { ManuallyDrop::take(&mut self.fd) };
        self.threads.close(self.peer.uid, fd);
    }
}

/// A future for descriptors that are being taken. Cancel safe.
#[derive(Debug)]
pub(crate) struct TakeFds<T>(oneshot::Receiver<io::Result<T>>);

impl<T> Future for TakeFds<T> {
    type Output = io::Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let lost = |_| io::Error::other("the thread that takes descriptors has failed");
        Pin::new(&mut self.0).poll(cx).map(|told| told.map_err(lost).and_then(|made| made))
    }
}

/// A listening socket.
#[derive(Debug)]
pub(crate) struct ListenSocket(Option<AsyncFd<OwnedFd>>);

impl ListenSocket {
    pub(crate) fn bind(addr: &ShmAddr) -> io::Result<ListenSocket> {
        let fd = open()?;
        bind(&fd, &name(addr)?)?;
        // The option is set before the first client can connect, because accepted sockets inherit
        // it.
        set_pass_rights(&fd, false);
        listen(&fd, BACKLOG)?;
        // SAFETY: as in `Socket::new` (R17).
        Ok(ListenSocket(Some(unsafe { AsyncFd::register(fd) }?)))
    }

    /// Waits for the next connection. Cancel safe.
    pub(crate) async fn accept(&self) -> io::Result<Socket> {
        let Some(listening) = &self.0 else { return Err(io::ErrorKind::NotConnected.into()) };
        loop {
            // Connections that end before they are accepted may follow each other as fast as peers
            // connect (R20).
            turn::spend(1).await;
            let mut guard = listening.readable().await?;
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let accepted = guard.try_io(|fd| Ok(accept_with(fd.get_ref(), flags)?));
            match accepted {
                Ok(Ok(fd)) => return Socket::new(fd, &STRANGERS),
                // The connection ended before it was accepted.
                Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Ok(Err(error)) => return Err(error),
                Err(_would_block) => {}
            }
        }
    }
}

impl Drop for ListenSocket {
    /// From now on nobody can connect. The socket is closed on a thread that may block, because
    /// connections that were not accepted are closed with it, and may have sent descriptors.
    fn drop(&mut self) {
        let Some(fd) = self.0.take().map(AsyncFd::into_inner) else { return };
        let _ = shutdown(&fd, Shutdown::Both);
        STRANGERS.close(rustix::process::geteuid().as_raw(), fd);
    }
}

/// Whether a socket error means that the peer is gone.
pub(crate) fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

/// Whether an error means that this process or its host is short of descriptors or memory.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

/// A descriptor that is registered with tokio.
#[derive(Debug)]
pub(crate) struct ReadyFd<T: AsRawFd = OwnedFd> {
    fd: AsyncFd<T>,
    gate: WakeGate,
}

impl<T: AsRawFd> ReadyFd<T> {
    #[inline]
    pub(crate) fn new(fd: AsyncFd<T>) -> Self {
        ReadyFd { fd, gate: WakeGate::new() }
    }

    #[inline]
    pub(crate) fn fd(&self) -> &AsyncFd<T> {
        &self.fd
    }

    /// The result is ready when the descriptor can be read, as far as tokio knows. Otherwise the
    /// task is woken when the descriptor can be read. A caller that finds nothing to read clears
    /// the guard and polls again.
    #[inline]
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<AsyncFdReadyGuard<'_, T>>> {
        let ReadyFd { fd, gate } = self;
        gate.poll(cx, |cx| fd.poll_read_ready(cx))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::io::Write as _;
    use std::os::fd::AsFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};

    use super::*;

    async fn pair() -> (Socket, Socket) {
        let addr = ShmAddr::unique();
        let listening = ListenSocket::bind(&addr).unwrap();
        let one = Socket::connect(&addr).unwrap();
        (one, listening.accept().await.unwrap())
    }

    async fn take(socket: &Socket) -> io::Result<usize> {
        socket.take_fds(|taken| Ok(taken.fds.len())).await
    }

    #[tokio::test]
    async fn messages_keep_their_bounds_and_bring_their_descriptors() {
        let (one, mut other) = pair().await;
        other.admit();
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(other.receive().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        one.send(b"first", &[file.as_fd(), file.as_fd()]).unwrap();
        one.send(b"second", &[]).unwrap();
        for _ in 0..2 {
            let SocketMessage { bytes, has_fds, .. } = other.receive().unwrap().unwrap();
            assert_eq!(
                (bytes.as_slice(), has_fds),
                (b"first".as_slice(), true),
                "it stays until they are taken"
            );
        }
        assert_eq!(take(&other).await.unwrap(), 2);
        let SocketMessage { bytes, has_fds, .. } = other.next().await.unwrap().unwrap();
        assert_eq!((bytes.as_slice(), has_fds), (b"second".as_slice(), false));
        assert_eq!(other.receive().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(one.peer().pid, std::process::id());
        drop(one);
        assert!(other.next().await.unwrap().is_none());
    }

    /// The kernel reports the sender, and descriptors are still noticed.
    #[tokio::test]
    async fn senders_are_told_while_they_are_asked_for() {
        let (one, mut other) = pair().await;
        other.admit();
        other.tell_senders(true).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let fds = [file.as_fd(); MAX_FDS];
        for count in [0, 1, 3, 2] {
            one.send(b"x", &fds[..count]).unwrap();
            assert_eq!(other.receive().unwrap().unwrap().has_fds, count > 0, "{count}");
            if count > 0 {
                let taken = other.take_fds(|taken| Ok((taken.sender, taken.fds.len()))).await;
                assert_eq!(taken.unwrap(), (Some(std::process::id()), count));
            }
        }
        other.tell_senders(false).unwrap();
        one.send(b"x", &fds[..1]).unwrap();
        assert!(other.receive().unwrap().unwrap().has_fds);
        assert_eq!(other.take_fds(|taken| Ok(taken.sender)).await.unwrap(), None);
        let surplus = [file.as_fd(); MAX_FDS + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS + 1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&surplus)));
        other.tell_senders(true).unwrap();
        sendmsg(one.fd(), &[IoSlice::new(b"x")], &mut control, SendFlags::NOSIGNAL).unwrap();
        assert!(other.next().await.unwrap().unwrap().has_fds);
        assert!(take(&other).await.is_err());
    }

    #[tokio::test]
    async fn a_surplus_is_refused() {
        let file = std::fs::File::open("/dev/null").unwrap();
        for count in [MAX_FDS + 1, 40] {
            let (one, mut other) = pair().await;
            other.admit();
            let fds = vec![file.as_fd(); count];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            sendmsg(one.fd(), &[IoSlice::new(b"x")], &mut control, SendFlags::NOSIGNAL).unwrap();
            assert!(other.next().await.unwrap().unwrap().has_fds);
            let error = take(&other).await.unwrap_err();
            assert!(error.to_string().contains("more descriptors"), "{count}: {error}");
        }
        let (one, other) = pair().await;
        other.send(&[0; MAX_MESSAGE + 1], &[]).unwrap();
        let error = one.receive().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(error.to_string().contains("longer"), "{error}");
    }

    /// If the kernel can forbid it (Linux 6.16), descriptors cannot even be sent before the peer is
    /// admitted.
    #[tokio::test]
    async fn strangers_pass_no_descriptors() {
        let (one, mut other) = pair().await;
        let file = std::fs::File::open("/dev/null").unwrap();
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut version = release.split('.').map(|n| n.parse::<u32>().unwrap_or(0));
        let passes_all = (version.next().unwrap_or(0), version.next().unwrap_or(0)) < (6, 16);
        let sent = one.send(b"x", &[file.as_fd()]).is_ok();
        assert_eq!(sent, passes_all || PASS_RIGHTS.is_none(), "{release}");
        other.admit();
        one.send(b"x", &[file.as_fd()]).unwrap();
    }

    /// A peer that closes with unread messages resets the connection, but its own messages are
    /// still received.
    #[tokio::test]
    async fn the_last_message_is_received() {
        let (one, other) = pair().await;
        one.send(b"unread", &[]).unwrap();
        other.send(b"last words", &[]).unwrap();
        drop(other);
        assert_eq!(one.receive().unwrap().unwrap().bytes, b"last words");
        assert!(one.receive().unwrap().is_none());
    }

    fn pipe() -> (ReadyFd, std::io::PipeWriter) {
        let (end, writer) = std::io::pipe().unwrap();
        rustix::fs::fcntl_setfl(&end, rustix::fs::OFlags::NONBLOCK).unwrap();
        // SAFETY: an OwnedFd owns its descriptor and always gives the same one (R17).
        let fd = unsafe { AsyncFd::register(OwnedFd::from(end)) }.unwrap();
        (ReadyFd::new(fd), writer)
    }

    /// Reads up to 16 available bytes. If no bytes are available, the task is woken when some
    /// arrive.
    fn read(watch: &mut ReadyFd, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = match watch.poll(cx) {
                Poll::Ready(guard) => guard?,
                Poll::Pending => return Poll::Pending,
            };
            let mut bytes = [0; 16];
            if let Ok(read) =
                guard.try_io(|fd| Ok(rustix::io::read(fd.get_ref().as_fd(), &mut bytes)?))
            {
                return Poll::Ready(read);
            }
        }
    }

    #[tokio::test]
    async fn every_write_wakes_whichever_task_waits() {
        let (mut watch, mut writer) = pipe();
        for round in 1..=8 {
            let (done, pending) = tokio::sync::oneshot::channel();
            // Each round has its own task.
            let reader = tokio::spawn(async move {
                let mut done = Some(done);
                let read = poll_fn(|cx| {
                    let read = read(&mut watch, cx);
                    done.take().map(|done| done.send(read.is_pending()));
                    read
                });
                (read.await.unwrap(), watch)
            });
            assert!(pending.await.unwrap(), "nothing is there yet");
            writer.write_all(&[7; 16][..round]).unwrap();
            let (got, back) = reader.await.unwrap();
            assert_eq!(got, round);
            watch = back;
        }
    }

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[tokio::test]
    async fn what_is_left_is_found_and_a_wake_is_never_taken_for_an_old_one() {
        let (mut watch, mut writer) = pipe();
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(count.clone());
        let cx = &mut Context::from_waker(&waker);
        assert!(read(&mut watch, cx).is_pending());
        writer.write_all(&[7; 40]).unwrap();
        while count.0.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        for left in [16, 16, 8] {
            assert!(matches!(read(&mut watch, cx), Poll::Ready(Ok(got)) if got == left));
        }
        assert!(read(&mut watch, cx).is_pending());
        assert!(read(&mut watch, cx).is_pending(), "again");
        drop(writer);
        while count.0.load(Ordering::SeqCst) < 2 {
            tokio::task::yield_now().await;
        }
        assert!(matches!(read(&mut watch, cx), Poll::Ready(Ok(0))));
    }
}
