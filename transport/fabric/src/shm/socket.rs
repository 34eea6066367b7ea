//! Unix sockets with message boundaries, and descriptors beside the messages.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::task::{Context, Poll};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind,
    connect, listen, recvmsg, sendmsg, shutdown, socket_with,
};
use tokio::io::unix::AsyncFd;

use crate::addr::ShmAddr;
use crate::watch::Watch;

/// The longest message, in bytes.
pub(super) const MAX_MESSAGE: usize = 256;
/// The most descriptors beside one.
pub(super) const MAX_FDS: usize = 2;
/// Connections that the kernel keeps until they are accepted.
const BACKLOG: i32 = 128;

/// A message and what came beside it.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) bytes: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

/// Who is at the other end, as the kernel says.
#[derive(Debug, Clone, Copy)]
pub(super) struct Credentials {
    /// 0 when it lies outside of this process's PID namespace.
    pub(super) pid: u32,
    pub(super) uid: u32,
}

/// A connected socket.
#[derive(Debug)]
pub(super) struct Socket(Watch);

fn open() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

fn name(addr: &ShmAddr) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new_abstract_name(addr.name().as_bytes())?)
}

fn receive(socket: &OwnedFd) -> io::Result<Option<Received>> {
    let mut bytes = [0; MAX_MESSAGE];
    // Room for one descriptor more than is allowed: a surplus is seen, and closed.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS + 1))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let mut reset = false;
    let got = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut beside, flags) {
            Err(rustix::io::Errno::INTR) => {}
            // The peer has closed and left something unread. What it said before lies behind this.
            Err(rustix::io::Errno::CONNRESET) if !reset => reset = true,
            got => break got?,
        }
    };
    let mut fds = Vec::new();
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
        let what = "a message that is longer, or brings more descriptors, than any of the protocol";
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    if got.bytes == 0 {
        return Ok(None);
    }
    Ok(Some(Received { bytes: bytes[..got.bytes].to_vec(), fds }))
}

impl Socket {
    /// Connects, or says at once why not: `WouldBlock` when the listener has more to do than it takes on.
    pub(super) fn connect(addr: &ShmAddr) -> io::Result<Socket> {
        let fd = open()?;
        connect(&fd, &name(addr)?)?;
        Socket::new(fd)
    }

    fn new(fd: OwnedFd) -> io::Result<Socket> {
        // SAFETY: an OwnedFd owns its descriptor and always gives the same one (R17).
        Ok(Socket(Watch::new(unsafe { AsyncFd::register(fd) }?)))
    }

    /// The process at the other end. Of a listener's side: the one that called connect; of a client's: listen.
    pub(super) fn peer(&self) -> io::Result<Credentials> {
        let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the descriptor is open; the call writes at most `len` bytes to `cred`, of which any are valid.
        let result = unsafe {
            libc::getsockopt(
                self.0.get_ref().as_raw_fd(),
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

    /// Sends a message now.
    ///
    /// # Errors
    /// `WouldBlock` when the peer does not read.
    pub(super) fn send(&self, message: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one message"));
        }
        sendmsg(self.0.get_ref(), &[IoSlice::new(message)], &mut beside, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Takes the next message that is there. `None`: the peer's end is closed.
    ///
    /// # Errors
    /// `WouldBlock` when there is none; `InvalidData` when it or its descriptors do not fit.
    pub(super) fn receive(&self) -> io::Result<Option<Received>> {
        receive(self.0.get_ref())
    }

    /// As [`receive`](Self::receive), waiting for one. Cancel safe.
    pub(super) async fn next(&self) -> io::Result<Option<Received>> {
        loop {
            let mut guard = self.0.fd().readable().await?;
            match guard.try_io(|_| self.receive()) {
                Ok(result) => return result,
                Err(_would_block) => {}
            }
        }
    }

    /// As [`receive`](Self::receive), in a task that is woken when there is one.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Received>>> {
        loop {
            let mut guard = match self.0.poll(cx) {
                Poll::Ready(Ok(guard)) => guard,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            };
            if let Ok(result) = guard.try_io(|socket| receive(socket.get_ref())) {
                return Poll::Ready(result);
            }
        }
    }

    /// The peer sees the end.
    pub(super) fn shut(&self) {
        let _ = shutdown(self.0.get_ref(), Shutdown::Both);
    }
}

/// A listening socket.
#[derive(Debug)]
pub(super) struct Listening(AsyncFd<OwnedFd>);

impl Listening {
    pub(super) fn bind(addr: &ShmAddr) -> io::Result<Listening> {
        let fd = open()?;
        bind(&fd, &name(addr)?)?;
        listen(&fd, BACKLOG)?;
        // SAFETY: as above.
        Ok(Listening(unsafe { AsyncFd::register(fd) }?))
    }

    /// The next connection. Cancel safe.
    pub(super) async fn accept(&self) -> io::Result<Socket> {
        loop {
            let mut guard = self.0.readable().await?;
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let accepted = guard.try_io(|fd| Ok(accept_with(fd.get_ref(), flags)?));
            match accepted {
                Ok(Ok(fd)) => return Socket::new(fd),
                // It was gone before it was accepted.
                Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Ok(Err(error)) => return Err(error),
                Err(_would_block) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    async fn pair() -> (Socket, Socket) {
        let addr = ShmAddr::unique();
        let listening = Listening::bind(&addr).unwrap();
        let one = Socket::connect(&addr).unwrap();
        (one, listening.accept().await.unwrap())
    }

    fn refused(socket: &Socket) -> String {
        let error = socket.receive().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        error.to_string()
    }

    #[tokio::test]
    async fn messages_keep_their_bounds_and_bring_their_descriptors() {
        let (one, other) = pair().await;
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(one.receive().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        other.send(b"first", &[file.as_fd(), file.as_fd()]).unwrap();
        other.send(b"second", &[]).unwrap();
        let Received { bytes, fds } = one.receive().unwrap().unwrap();
        assert_eq!((bytes.as_slice(), fds.len()), (b"first".as_slice(), 2));
        let Received { bytes, fds } = one.next().await.unwrap().unwrap();
        assert_eq!((bytes.as_slice(), fds.len()), (b"second".as_slice(), 0));
        let me = one.peer().unwrap();
        assert_eq!(me.pid, std::process::id());
        drop(other);
        assert!(one.next().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_surplus_is_refused() {
        let (one, other) = pair().await;
        let file = std::fs::File::open("/dev/null").unwrap();
        for count in [MAX_FDS + 1, 40] {
            let fds = vec![file.as_fd(); count];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
            let mut beside = SendAncillaryBuffer::new(&mut space);
            assert!(beside.push(SendAncillaryMessage::ScmRights(&fds)));
            sendmsg(other.0.get_ref(), &[IoSlice::new(b"x")], &mut beside, SendFlags::NOSIGNAL).unwrap();
            assert!(refused(&one).contains("more descriptors"), "{count}");
        }
        other.send(&[0; MAX_MESSAGE + 1], &[]).unwrap();
        assert!(refused(&one).contains("longer"));
    }

    /// One that closes without having read everything resets the connection; what it said is still heard.
    #[tokio::test]
    async fn last_words_are_heard() {
        let (one, other) = pair().await;
        one.send(b"unread", &[]).unwrap();
        other.send(b"last words", &[]).unwrap();
        drop(other);
        assert_eq!(one.receive().unwrap().unwrap().bytes, b"last words");
        assert!(one.receive().unwrap().is_none());
    }
}
