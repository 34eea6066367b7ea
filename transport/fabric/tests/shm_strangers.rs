//! What a process may try that has been let in: it speaks the socket's language, and writes what it likes into the ring.
#![cfg(all(target_os = "linux", feature = "shm"))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use common::*;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, sendmsg,
    socket_with, sockopt,
};
use tonic_rdma_fabric::{Addr, Fabric, Link, LinkError, Listener, ShmAccess, Verb, Work, WriteSource};

const HELLO: u8 = 1;
const ACCEPT: u8 = 2;
const REFUSED: u8 = 4;
const CHUNK: u8 = 5;
const FORGET: u8 = 6;
/// Offsets in a ring of at least 8 slots.
const TAIL: u64 = 0;
const HEAD: u64 = 64;
const LENGTHS: u64 = 256;
/// What a stranger's ring has: slots of so many bytes.
const SLOTS: u32 = 8;
const SLOT_SIZE: u32 = 1024;

fn side() -> Side {
    Side::new(Fabric::shm(ShmAccess::SameUser).unwrap())
}

fn head(kind: u8) -> Vec<u8> {
    [&[kind], b"trdshm\x01".as_slice()].concat()
}

fn hello(slots: u32, slot_size: u32) -> Vec<u8> {
    [head(HELLO), slots.to_le_bytes().to_vec(), slot_size.to_le_bytes().to_vec()].concat()
}

fn chunk(rkey: u32, addr: u64, len: u64) -> Vec<u8> {
    [&[CHUNK], rkey.to_le_bytes().as_slice(), &addr.to_le_bytes(), &len.to_le_bytes()].concat()
}

fn file(len: u64, seals: SealFlags) -> OwnedFd {
    let file = memfd_create("stranger", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    if !seals.is_empty() {
        fcntl_add_seals(&file, seals).unwrap();
    }
    file
}

fn sealed(len: u64) -> OwnedFd {
    file(len, SealFlags::SHRINK | SealFlags::GROW)
}

fn bell() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// A process that has connected and may say anything. Its socket blocks.
struct Stranger {
    socket: OwnedFd,
    ring: File,
    bell: OwnedFd,
}

impl Stranger {
    fn connect(listener: &Listener) -> Stranger {
        let Addr::Shm(addr) = listener.local_addr() else { panic!("no socket") };
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        connect(&socket, &SocketAddrUnix::new_abstract_name(addr.name().as_bytes()).unwrap()).unwrap();
        // A test that would hang fails.
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(PATIENCE)).unwrap();
        Stranger { socket, ring: sealed(1 << 20).into(), bell: bell() }
    }

    fn say(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || beside.push(SendAncillaryMessage::ScmRights(fds)));
        sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut beside, SendFlags::NOSIGNAL).unwrap();
    }

    /// The next message, or None when the connection was closed.
    fn hear(&self) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        let mut bytes = [0; 512];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got = loop {
            match recvmsg(&self.socket, &mut [IoSliceMut::new(&mut bytes)], &mut beside, flags) {
                // What was said before the end lies behind this.
                Err(rustix::io::Errno::CONNRESET) => {}
                got => break got.unwrap(),
            }
        };
        let mut fds = Vec::new();
        for message in beside.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        (got.bytes > 0).then(|| (bytes[..got.bytes].to_vec(), fds))
    }

    fn greet(&self) {
        self.say(&hello(SLOTS, SLOT_SIZE), &[self.ring.as_fd(), self.bell.as_fd()]);
    }

    /// Says how it was refused.
    fn refusal(&self) -> String {
        let (bytes, fds) = self.hear().expect("it was hung up on without a word");
        assert_eq!((bytes[0], fds.len()), (REFUSED, 0));
        String::from_utf8(bytes[8..].to_vec()).unwrap()
    }
}

/// A link to a stranger that has shaken hands, the stranger, and the ring that it may send through.
async fn acquainted(side: &Side) -> (End, Stranger, File) {
    let mut listener = side.listen();
    let stranger = Stranger::connect(&listener);
    stranger.greet();
    let incoming = listener.accept().await.unwrap();
    let end = End::new(incoming.accept(&config(), &side.pool, b"", PATIENCE).await.unwrap());
    let (accept, mut fds) = stranger.hear().unwrap();
    assert_eq!((accept[0], fds.len()), (ACCEPT, 2));
    (end, stranger, fds.swap_remove(0).into())
}

fn put(ring: &File, at: u64, value: u64) {
    ring.write_all_at(&value.to_ne_bytes(), at).unwrap();
}

async fn breach(mut end: End) -> String {
    match end.death().await {
        error @ LinkError::Breach { .. } => {
            let text = error.to_string();
            assert!(text.contains(&format!("process {}", std::process::id())), "{text}");
            text
        }
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn greetings_that_are_wrong_are_refused_by_name_and_hurt_nobody() {
    let side = side();
    let mut listener = side.listen();
    let (ring, event) = (sealed(1 << 20), bell());
    let (pipe, _end) = std::io::pipe().unwrap();
    let whole = [ring.as_fd(), event.as_fd()];
    let (unsealed, short) = (file(1 << 20, SealFlags::SHRINK), sealed(8192));
    let disk: OwnedFd = tempfile::tempfile().unwrap().into();
    let good = hello(SLOTS, SLOT_SIZE);
    let mut other_version = good.clone();
    other_version[7] = 2;
    let cases: Vec<(&[u8], Vec<BorrowedFd<'_>>, &str)> = vec![
        (b"GET / HTTP/1.1", whole.to_vec(), "makes no sense"),
        (&other_version, whole.to_vec(), "another version"),
        (&good[..12], whole.to_vec(), "makes no sense"),
        (&good, vec![unsealed.as_fd(), event.as_fd()], "not sealed"),
        (&good, vec![disk.as_fd(), event.as_fd()], "not a file that can be sealed"),
        (&good, vec![short.as_fd(), event.as_fd()], "8192 bytes"),
        (&good, vec![event.as_fd(), ring.as_fd()], "not a file that can be sealed"),
        (&good, vec![ring.as_fd(), pipe.as_fd()], "no eventfd"),
        (&good, vec![ring.as_fd()], "exactly a ring and a bell"),
        (&good, vec![], "exactly a ring and a bell"),
        (&good, vec![ring.as_fd(), event.as_fd(), event.as_fd()], "more descriptors"),
        (&good, vec![event.as_fd(); 40], "more descriptors"),
    ];
    let strangers: Vec<_> = cases
        .iter()
        .map(|(bytes, fds, _)| {
            let stranger = Stranger::connect(&listener);
            stranger.say(bytes, fds);
            stranger
        })
        .collect();
    let absurd: Vec<_> = [(0, 64), (8, 100), (65536, 1 << 20), (u32::MAX, u32::MAX)]
        .iter()
        .map(|(slots, slot_size)| {
            let stranger = Stranger::connect(&listener);
            stranger.say(&hello(*slots, *slot_size), &whole);
            stranger
        })
        .collect();
    // Some that say nothing at all, and keep nobody waiting.
    let silent: Vec<_> = (0..10).map(|_| Stranger::connect(&listener)).collect();
    let (mut s, mut c) = pair_over(&mut listener, &side, &side, &config()).await;
    c.send(0, b"x").await;
    assert_eq!(s.receive().await.unwrap(), b"x");
    // The listener has turned to each of them by the time that it has accepted one that came last.
    for ((_, _, why), stranger) in cases.iter().zip(&strangers) {
        let refusal = stranger.refusal();
        assert!(refusal.contains(why), "{refusal}, expected {why}");
        assert!(stranger.hear().is_none(), "and hung up");
    }
    for stranger in &absurd {
        assert!(stranger.refusal().contains("makes no sense"));
    }
    drop(silent);
}

#[tokio::test]
async fn rings_that_lie_end_the_connection() {
    let side = side();
    let slots = u64::from(config().recv_slots);

    let (end, _stranger, ring) = acquainted(&side).await;
    put(&ring, TAIL, slots + 1);
    let text = breach(end).await;
    assert!(text.contains("tail of its SENDs went from 0 to 17, with 16 RECVs posted"), "{text}");

    let (mut end, _stranger, ring) = acquainted(&side).await;
    put(&ring, LENGTHS, 4);
    put(&ring, TAIL, 1);
    assert_eq!(end.receive().await.unwrap().len(), 4);
    put(&ring, TAIL, 0);
    let text = breach(end).await;
    assert!(text.contains("tail of its SENDs went from 1 to 0"), "{text}");

    let (end, _stranger, ring) = acquainted(&side).await;
    put(&ring, LENGTHS, 1025);
    put(&ring, TAIL, 1);
    let text = breach(end).await;
    assert!(text.contains("a SEND of 1025 bytes into a RECV of 1024"), "{text}");

    // The ring that the stranger receives through: it says that it has freed what was never sent.
    let (mut end, stranger, _ring) = acquainted(&side).await;
    put(&stranger.ring, HEAD, 1 << 40);
    for i in 0..SLOTS as usize {
        end.queue_send(i, b"x", false).unwrap();
    }
    let error = end.queue_send(9, b"x", false).unwrap_err();
    assert!(matches!(error, LinkError::Breach { .. }) && error.to_string().contains("head"), "{error}");
    assert!(stranger.hear().is_none(), "the stranger is hung up on");
}

#[tokio::test]
async fn memory_that_is_not_what_it_should_be_ends_the_connection() {
    let side = side();
    let (good, page) = (sealed(1 << 20), 4096);
    let unsealed = file(1 << 20, SealFlags::GROW);
    type Words<'a> = (Vec<u8>, Vec<BorrowedFd<'a>>);
    let cases: Vec<(Vec<Words<'_>>, &str)> = vec![
        (vec![(chunk(1, 0, page), vec![unsealed.as_fd()])], "not sealed"),
        (vec![(chunk(1, 0, (1 << 20) + 1), vec![good.as_fd()])], "1048576 bytes"),
        (vec![(chunk(1, 0, 0), vec![good.as_fd()])], "0 are to be mapped"),
        (vec![(chunk(1, u64::MAX, 2), vec![good.as_fd()])], "makes no sense"),
        (vec![(chunk(1, 0, page), vec![])], "makes no sense"),
        (vec![(chunk(1, 0, page), vec![good.as_fd(); 2])], "makes no sense"),
        (vec![(chunk(1, 0, page), vec![good.as_fd(); 3])], "more descriptors"),
        (vec![(chunk(1, 0, 65 << 30), vec![good.as_fd()])], "more landing memory than a peer may give"),
        (vec![(chunk(1, 0, page), vec![good.as_fd()]), (chunk(1, 0, page), vec![good.as_fd()])], "0x1 twice"),
        (vec![([&[FORGET], 7_u32.to_le_bytes().as_slice()].concat(), vec![])], "was not given"),
        (vec![(hello(8, 64), vec![])], "makes no sense"),
        (vec![(vec![99; 200], vec![])], "makes no sense"),
        (vec![(vec![0; 300], vec![])], "longer"),
    ];
    for (words, why) in cases {
        let (end, stranger, _ring) = acquainted(&side).await;
        for (bytes, fds) in &words {
            stranger.say(bytes, fds);
        }
        let text = breach(end).await;
        assert!(text.contains(why), "{text}, expected {why}");
    }
}

/// A WRITE goes where a key leads, or nowhere.
#[tokio::test]
async fn grants_that_lie_end_the_connection() {
    let side = side();
    for (rkey, addr, why) in [(2, 0x10000, "0x2"), (1, 0xffff, "0xffff"), (1, 0x10fff, "0x10fff")] {
        let (mut end, stranger, _ring) = acquainted(&side).await;
        let landing = sealed(4096);
        stranger.say(&chunk(1, 0x10000, 4096), &[landing.as_fd()]);
        let write = |remote_addr, rkey| Work::Write {
            src: WriteSource::Any(b"data".as_slice().into()),
            remote_addr,
            rkey,
        };
        end.queue(write(0x10ffc, 1), false).unwrap();
        let mut landed = [0; 4096];
        File::from(landing).read_exact_at(&mut landed, 0).unwrap();
        assert_eq!((&landed[4092..], &landed[..8]), (b"data".as_slice(), [0; 8].as_slice()));
        let error = end.queue(write(addr, rkey), false).unwrap_err();
        let LinkError::Completion { verb: Verb::Write, code: 10, status, .. } = &error else {
            panic!("{error}")
        };
        assert!(status.contains(why), "{error}");
    }
}

/// Shared memory is not something to wait for a peer with: one that reads nothing is given up.
#[tokio::test]
async fn a_peer_that_reads_nothing_is_given_up() {
    let side = side();
    let (mut end, _stranger, _ring) = acquainted(&side).await;
    let mut account = side.pool.landing();
    let mut held = Vec::new();
    // Chunk after chunk, each a message, until its socket is full.
    let error = (0..100_000).find_map(|_| {
        held.clear();
        account.trim();
        held.push(account.alloc(4096, 4096).unwrap().unwrap());
        end.link.share(held[0].rkey()).err()
    });
    let error = error.expect("the socket takes everything");
    assert!(error.to_string().contains("does not read its socket"), "{error}");
    assert!(matches!(end.death().await, LinkError::Breach { .. }));
}
