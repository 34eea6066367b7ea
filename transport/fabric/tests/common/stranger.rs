//! A client that implements the protocol of shared-memory sockets without the library, and may send
//! anything.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect,
    listen, recvmsg, sendmsg, socket_with, sockopt,
};

use tonic_rdma_fabric::{Incoming, Listener};

use super::TIMEOUT;

pub const HELLO: u8 = 1;
pub const ACCEPT: u8 = 2;
/// The range of bytes in ACCEPT that hold the nonce.
pub const NONCE: std::ops::Range<usize> = 25..33;
pub const REFUSED: u8 = 4;
pub const CHUNK: u8 = 5;
pub const FORGET: u8 = 6;
pub const READY: u8 = 8;
pub const LEND: u8 = 10;
pub const TAKEN: u8 = 11;
pub const DECLINED: u8 = 12;
pub const UNLEND: u8 = 13;
pub const NAME: u8 = 14;
pub const UNNAME: u8 = 15;
/// The byte in HELLO and ACCEPT with which an end accepts LEND and NAME.
pub const TAKES_ALL: u8 = 3;
/// Offsets in a ring of at least 8 slots.
pub const TAIL: u64 = 0;
pub const CHUNKS: u64 = 8;
pub const HEAD: u64 = 64;
pub const WAITING: u64 = 128;
pub const PLACES: u64 = 256;
/// The number and size of the slots in a stranger's ring.
pub const SLOTS: u32 = 8;
pub const SLOT_SIZE: u32 = 1024;
/// The size of this ring.
pub const RING_BYTES: u64 = ring_bytes(SLOTS, SLOT_SIZE);

/// The number of bytes of a ring. First come 32 words and one word for each slot, rounded up to
/// lines of 8. Then comes room for one message more than there are slots.
pub const fn ring_bytes(slots: u32, slot_size: u32) -> u64 {
    ((32 + slots).next_multiple_of(8) * 8 + (slots + 1) * slot_size) as u64
}

/// Returns where the client's ring begins in the file of both rings, behind the server's ring.
pub const fn client_ring(server: u64) -> u64 {
    server.next_multiple_of(64 << 10)
}

/// The size of a channel's page, and offsets in it. If a stranger has made the channel, its peer
/// wakes it through the words from INBOUND on. The stranger wakes its peer through the words from
/// OUTBOUND on.
pub const PAGE_BYTES: u64 = 2048;
pub const INBOUND: u64 = 0;
pub const OUTBOUND: u64 = 1024;
pub const SLEEPS: u64 = 0;
pub const STAGE: u64 = 8;
pub const SUMMARY: u64 = 64;
pub const BITS: u64 = 128;

pub fn head(kind: u8) -> Vec<u8> {
    [&[kind], b"trdshm\x0c".as_slice()].concat()
}

pub fn hello(slots: u32, slot_size: u32) -> Vec<u8> {
    hello_taking(slots, slot_size, TAKES_ALL)
}

/// HELLO of a peer that takes memory of these kinds.
pub fn hello_taking(slots: u32, slot_size: u32, takes: u8) -> Vec<u8> {
    [head(HELLO), slots.to_le_bytes().to_vec(), slot_size.to_le_bytes().to_vec(), vec![takes]]
        .concat()
}

pub fn chunk(rkey: u32, addr: u64, len: u64) -> Vec<u8> {
    [&[CHUNK], rkey.to_le_bytes().as_slice(), &addr.to_le_bytes(), &len.to_le_bytes()].concat()
}

pub fn lend(key: u32, addr: u64, len: u64) -> Vec<u8> {
    let mut message = chunk(key, addr, len);
    message[0] = LEND;
    message.push(0);
    message
}

pub fn forget(rkey: u32) -> Vec<u8> {
    [&[FORGET], rkey.to_le_bytes().as_slice()].concat()
}

/// A message that contains only a key.
pub fn with_key(kind: u8, key: u32) -> Vec<u8> {
    let mut message = forget(key);
    message[0] = kind;
    message
}

pub fn file_called(name: &str, len: u64, seals: SealFlags) -> OwnedFd {
    let file = memfd_create(name, MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    if !seals.is_empty() {
        fcntl_add_seals(&file, seals).unwrap();
    }
    file
}

pub fn file(len: u64, seals: SealFlags) -> OwnedFd {
    file_called("stranger", len, seals)
}

pub fn sealed(len: u64) -> OwnedFd {
    file(len, SealFlags::SHRINK | SealFlags::GROW)
}

/// Writes to all pages of a file.
pub fn fill_pages(file: &OwnedFd, len: u64) {
    let zeros = vec![0; usize::try_from(len).unwrap()];
    assert_eq!(rustix::io::pwrite(file, &zeros, 0).unwrap(), zeros.len());
}

/// Like [`sealed`], but all pages of the file are allocated.
pub fn whole(len: u64) -> OwnedFd {
    let file = sealed(len);
    fill_pages(&file, len);
    file
}

/// An eventfd whose counter no test uses up.
pub fn event_fd() -> OwnedFd {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
    let event_fd = eventfd(0, flags).unwrap();
    rustix::io::write(&event_fd, &(1_u64 << 62).to_ne_bytes()).unwrap();
    event_fd
}

/// The counter of an eventfd.
pub fn count(event_fd: &OwnedFd) -> u64 {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", event_fd.as_raw_fd()));
    let info = info.unwrap();
    let count = info.lines().find_map(|line| line.strip_prefix("eventfd-count:")).unwrap();
    u64::from_str_radix(count.trim(), 16).unwrap()
}

/// Fills the counter of an eventfd, so that no write can add to it.
pub fn fill(event_fd: &OwnedFd) {
    let room = u64::MAX - 1 - count(event_fd);
    rustix::io::write(event_fd, &room.to_ne_bytes()).unwrap();
}

/// Makes the kernel set the counter of an eventfd to u64::MAX, which no write can do.
pub fn overflow(event_fd: &OwnedFd) {
    // This is struct iocb of linux/aio_abi.h. The request is an IOCB_CMD_PREAD of no bytes, with
    // IOCB_FLAG_RESFD.
    #[repr(C)]
    #[derive(Default)]
    struct Iocb {
        data: u64,
        key: u32,
        rw_flags: u32,
        opcode: u16,
        priority: i16,
        fd: u32,
        buf: u64,
        bytes: u64,
        offset: i64,
        reserved: u64,
        flags: u32,
        event_fd: u32,
    }
    fill(event_fd);
    let (file, at) = (sealed(4096), event_fd.as_raw_fd() as u32);
    let request = Iocb { fd: file.as_raw_fd() as u32, flags: 1, event_fd: at, ..Iocb::default() };
    let (mut context, requests) = (0_u64, [&raw const request]);
    // SAFETY: the kernel writes the context, reads the request, and has answered it when the
    // context is destroyed.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_io_setup, 1, &raw mut context), 0, "needs CONFIG_AIO");
        assert_eq!(libc::syscall(libc::SYS_io_submit, context, 1, requests.as_ptr()), 1);
        assert_eq!(libc::syscall(libc::SYS_io_destroy, context), 0);
    }
    let again = rustix::io::write(event_fd, &1_u64.to_ne_bytes());
    assert_eq!(again, Err(rustix::io::Errno::AGAIN));
}

/// A READY that answers this nonce and names a channel of this number. The stranger has made the
/// channel.
pub fn ready(nonce: u64, number: u64) -> Vec<u8> {
    let [nonce, number, runtime] = [nonce, number, 1].map(u64::to_le_bytes);
    [&[READY], nonce.as_slice(), &number, &runtime, &[0]].concat()
}

/// A socket that listens under this name, and blocks.
pub fn stranger_listener(name: &str) -> OwnedFd {
    let listener =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .unwrap();
    bind(&listener, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
    listen(&listener, 1).unwrap();
    listener
}

/// Waits for the request of a stranger that has sent its greeting. If the greeting was refused, the
/// request never arrives, and the test fails.
pub async fn arrival(listener: &mut Listener) -> Incoming {
    let incoming = tokio::time::timeout(TIMEOUT, listener.accept()).await;
    incoming.expect("the greeting was not refused").unwrap()
}

/// A connected process that may send anything. Its socket blocks.
pub struct Stranger {
    pub socket: OwnedFd,
    /// The file of both rings, and the offset of the ring through which the stranger receives.
    pub rings: OnceLock<(File, u64)>,
    /// The eventfd for which the stranger waits, and the eventfd with which it wakes its peer.
    pub own_event_fd: OwnedFd,
    pub peers_event_fd: OwnedFd,
    /// The page of the stranger's wake-up channel.
    pub page: File,
    pub number: u64,
    /// The nonce of the last ACCEPT.
    pub nonce: AtomicU64,
}

impl Stranger {
    pub fn connect(name: &str) -> Stranger {
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
        Self::with(socket)
    }

    /// Accepts the next connection of this listener, as a server.
    pub fn accept(listener: &OwnedFd) -> Stranger {
        Self::with(rustix::net::accept(listener).unwrap())
    }

    fn with(socket: OwnedFd) -> Stranger {
        // The timeouts make a test fail that would otherwise hang.
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(TIMEOUT)).unwrap();
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(TIMEOUT)).unwrap();
        static NUMBERS: AtomicU64 = AtomicU64::new(1 << 32);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let (page, rings, nonce) = (sealed(PAGE_BYTES).into(), OnceLock::new(), AtomicU64::new(0));
        let (own_event_fd, peers_event_fd) = (event_fd(), event_fd());
        Stranger { socket, rings, own_event_fd, peers_event_fd, page, number, nonce }
    }

    pub fn try_send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
        sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        self.try_send(bytes, fds).unwrap();
    }

    /// Receives the next message. Returns `None` if the connection has been closed.
    pub fn receive(&self) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        let mut bytes = [0; 512];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got = loop {
            match recvmsg(&self.socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
                // Messages sent before the end are read first.
                Err(rustix::io::Errno::CONNRESET) => {}
                got => break got.unwrap(),
            }
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        (got.bytes > 0).then(|| (bytes[..got.bytes].to_vec(), fds))
    }

    pub fn greet(&self) {
        self.send(&hello(SLOTS, SLOT_SIZE), &[]);
    }

    /// Receives ACCEPT, and returns the file that comes with it. The file begins with the server's
    /// ring.
    pub fn accepted(&self) -> File {
        let (accept, mut fds) = self.receive().unwrap();
        assert_eq!((accept[0], fds.len()), (ACCEPT, 1));
        let nonce = u64::from_le_bytes(accept[NONCE].try_into().unwrap());
        self.nonce.store(nonce, Ordering::Relaxed);
        let [slots, slot_size] =
            [8, 12].map(|at| u32::from_le_bytes(accept[at..at + 4].try_into().unwrap()));
        let file = File::from(fds.swap_remove(0));
        let rings = (file.try_clone().unwrap(), client_ring(ring_bytes(slots, slot_size)));
        self.rings.set(rings).unwrap();
        file
    }

    /// A READY that answers the last ACCEPT.
    pub fn ready(&self, number: u64) -> Vec<u8> {
        ready(self.nonce.load(Ordering::Relaxed), number)
    }

    /// Writes a word of the ring that the stranger receives through.
    pub fn put_own(&self, at: u64, value: u64) {
        let (file, ring) = self.rings.get().unwrap();
        file.write_all_at(&value.to_ne_bytes(), ring + at).unwrap();
    }

    /// Reads a word of the ring that the stranger receives through.
    pub fn get_own(&self, at: u64) -> u64 {
        let ((file, ring), mut word) = (self.rings.get().unwrap(), [0; 8]);
        file.read_exact_at(&mut word, ring + at).unwrap();
        u64::from_ne_bytes(word)
    }

    /// Like [`accepted`](Self::accepted), but does not block the test's runtime. Then sends READY,
    /// with `fds` as the eventfds and the page of the stranger's channel.
    pub async fn enters(self: &Arc<Self>, fds: Vec<OwnedFd>) -> File {
        let (this, (told, entered)) = (self.clone(), tokio::sync::oneshot::channel());
        std::thread::spawn(move || {
            let ring = this.accepted();
            let message = this.ready(this.number);
            this.send(&message, &fds.iter().map(AsFd::as_fd).collect::<Vec<_>>());
            let _ = told.send(ring);
            // This thread may be the last to close the descriptors, and then the close may block.
            drop(fds);
        });
        entered.await.unwrap()
    }

    /// The eventfds and the page that the stranger has made.
    pub fn own(&self) -> Vec<OwnedFd> {
        let Stranger { own_event_fd, peers_event_fd, page, .. } = self;
        [own_event_fd.as_fd(), peers_event_fd.as_fd(), page.as_fd()]
            .map(|fd| fd.try_clone_to_owned().unwrap())
            .into()
    }

    /// Receives REFUSED, and returns its text.
    pub fn refusal(&self) -> String {
        let (bytes, fds) = self.receive().expect("the connection was closed without REFUSED");
        assert_eq!((bytes[0], fds.len()), (REFUSED, 0));
        String::from_utf8(bytes[8..].to_vec()).unwrap()
    }
}
