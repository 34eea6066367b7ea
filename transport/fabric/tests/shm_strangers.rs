//! Attacks by an admitted process: it speaks the protocol of the socket, and writes arbitrary data
//! into the ring.
#![cfg(all(target_os = "linux", feature = "shm"))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use common::lingering::Lingering;
use common::stranger::*;
use common::*;
use rustix::fs::{FallocateFlags, SealFlags, fallocate, fstat};
use tonic_rdma_fabric::{
    AnyLink, ConnectError, Fabric, Lending, Link, LinkError, Listener, ShmAccess, ShmAddr, Verb,
    Work, WriteSource,
};

fn side() -> Side {
    Side::new(Fabric::shm(ShmAccess::SameUser, Lending::Off).unwrap())
}

fn stranger_at(listener: &Listener) -> Stranger {
    Stranger::connect(listener.local_addr().shm().expect("no socket").name())
}

/// A listener of another version cannot read the greeting. Its refusal states the listener's
/// version.
#[tokio::test]
async fn a_listener_of_another_version_is_named_as_such() {
    let name = format!("tonic-rdma-test-version-{}", std::process::id());
    let listener = stranger_listener(&name);
    let server = std::thread::spawn(move || {
        let client = rustix::net::accept(&listener).unwrap();
        assert_eq!(rustix::io::read(&client, &mut [0; 256]).unwrap(), hello(0, 0).len() + 5);
        let mut refused = head(REFUSED);
        *refused.last_mut().unwrap() = 3;
        refused.extend(b"a greeting that makes no sense");
        rustix::io::write(&client, &refused).unwrap();
        client
    });
    let addr: ShmAddr = name.parse().unwrap();
    let error = side().connect(&addr.into()).await.unwrap_err();
    assert!(matches!(error, ConnectError::OtherVersion { version: 3, own: 12, .. }), "{error}");
    drop(server.join().unwrap());
}

/// A server that answers with a message for established connections.
#[tokio::test]
async fn an_answer_that_is_none_is_described() {
    let name = format!("tonic-rdma-test-answer-{}", std::process::id());
    let listener = stranger_listener(&name);
    let server = std::thread::spawn(move || {
        let stranger = Stranger::accept(&listener);
        assert_eq!(stranger.receive().unwrap().0[0], HELLO);
        stranger.send(&forget(7), &[]);
        stranger
    });
    let addr: ShmAddr = name.parse().unwrap();
    let error = side().connect(&addr.into()).await.unwrap_err();
    assert!(matches!(error, ConnectError::Failed { .. }), "{error}");
    let described = "expected Accept with descriptors, or Reject, Refused, OtherUser or NoRoom \
                     without, received Forget (kind 6) of 5 bytes; run one version of tonic-rdma \
                     at both ends";
    assert!(error.to_string().ends_with(described), "{error}");
    drop(server.join().unwrap());
}

/// A server that accepts a client with these files for the rings, and then sends `more`.
fn server_with(listener: &OwnedFd, rings: &[OwnedFd], more: Option<&[u8]>) -> Stranger {
    let stranger = Stranger::accept(listener);
    assert_eq!(stranger.receive().unwrap().0[0], HELLO);
    let mut accept = hello_taking(SLOTS, SLOT_SIZE, 0);
    accept[0] = ACCEPT;
    accept.extend([0; 8]);
    accept.extend(7_u64.to_le_bytes());
    stranger.send(&accept, &rings.iter().map(AsFd::as_fd).collect::<Vec<_>>());
    if let Some(more) = more {
        assert_eq!(stranger.receive().unwrap().0[0], READY);
        stranger.send(more, &[]);
    }
    stranger
}

/// A server gives files for the rings that the protocol does not allow.
#[tokio::test]
async fn rings_that_cannot_be_used_are_named() {
    let (lingering, config) = (Lingering::new(), config());
    let both = client_ring(RING_BYTES) + ring_bytes(config.recv_slots, config.slot_size);
    let program = || File::open(std::env::current_exe().unwrap()).unwrap().into();
    let (given, elsewhere) = (sealed(both), client_ring(RING_BYTES) - 64);
    let again = || given.try_clone().unwrap();
    let cases: Vec<(Vec<OwnedFd>, &str)> = vec![
        (vec![again()], ""),
        (vec![again()], "given already"),
        (vec![file(both, SealFlags::SHRINK)], "not sealed"),
        (vec![file(both, SealFlags::GROW)], "not sealed"),
        (vec![program()], "not a file that can be sealed"),
        (vec![event_fd()], "not a file that can be sealed"),
        (vec![lingering.socket()], "not a file that can be sealed"),
        (vec![sealed(both - 1)], "are to be mapped"),
        (vec![sealed(elsewhere)], "are to be mapped"),
        (vec![sealed(1 << 20)], "1048576 bytes"),
        (vec![sealed(both), sealed(both)], "not exactly one file"),
        (vec![sealed(both), lingering.socket()], "not exactly one file"),
        ((0..5).map(|_| sealed(both)).collect(), "more descriptors"),
        (vec![sealed(both)], ""),
    ];
    let name = format!("tonic-rdma-test-rings-{}", std::process::id());
    let (listener, addr) = (stranger_listener(&name), name.parse::<ShmAddr>().unwrap().into());
    let (connecting, mut ends) = (side(), Vec::new());
    for (fds, why) in cases {
        let listener = listener.try_clone().unwrap();
        let (told, server) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || {
            let _ = told.send(server_with(&listener, &fds, None));
            // This thread may be the last to close the descriptors, and then the close may block.
            drop(fds);
        });
        let connected = tokio::time::timeout(TIMEOUT, connecting.connect(&addr)).await;
        let stranger = server.await.unwrap();
        match connected.expect("connect hangs") {
            Ok(end) => ends.push((end, stranger, why)),
            Err(error) => {
                let error = format!("{error} {error:?}");
                assert!(!why.is_empty() && error.contains(why), "{error}, expected {why:?}");
            }
        }
    }
    assert_eq!(ends.iter().map(|(.., why)| *why).collect::<Vec<_>>(), ["", ""]);
    lingering.end();
}

/// A client that has answered ACCEPT is connected. If the server then refuses the client, the
/// connection ends with the reason.
#[tokio::test]
async fn a_server_that_refuses_later_ends_the_connection() {
    let config = config();
    let both = client_ring(RING_BYTES) + ring_bytes(config.recv_slots, config.slot_size);
    let refused = [head(REFUSED), b"Too many open files (os error 24)".to_vec()].concat();
    for (more, why) in [(refused, "Too many open files"), (with_key(FORGET, 1), "was not given")] {
        let name = format!("tonic-rdma-test-later-{}-{}", std::process::id(), more[0]);
        let listener = stranger_listener(&name);
        let serve = move || server_with(&listener, &[sealed(both)], Some(&more));
        let server = tokio::task::spawn_blocking(serve);
        let (connecting, addr) = (side(), name.parse::<ShmAddr>().unwrap().into());
        let end = connecting.connect(&addr).await.unwrap();
        let _stranger = server.await.unwrap();
        let error = tokio::time::timeout(TIMEOUT, End::new(end.link).death()).await.unwrap();
        assert!(error.to_string().contains(why), "{error}, expected {why}");
    }
}

/// A link to a stranger after the handshake, the stranger, and the ring through which the stranger
/// sends.
async fn acquainted(side: &Side) -> (End, Arc<Stranger>, File) {
    let mut listener = side.listen();
    acquainted_at(&mut listener, side).await
}

async fn acquainted_at(listener: &mut Listener, side: &Side) -> (End, Arc<Stranger>, File) {
    let stranger = Arc::new(stranger_at(listener));
    let fds = stranger.own();
    let (link, ring) = let_in(listener, side, &stranger, fds).await;
    (End::new(link.unwrap()), stranger, ring)
}

/// A stranger sends HELLO, is admitted, and sends these descriptors.
async fn let_in(
    listener: &mut Listener,
    side: &Side,
    stranger: &Arc<Stranger>,
    fds: Vec<OwnedFd>,
) -> (Result<AnyLink, ConnectError>, File) {
    stranger.greet();
    let incoming = arrival(listener).await;
    let config = config();
    tokio::join!(incoming.accept(&config, &side.pool, b"", TIMEOUT), stranger.enters(fds))
}

fn put(ring: &File, at: u64, value: u64) {
    ring.write_all_at(&value.to_ne_bytes(), at).unwrap();
}

async fn breach(mut end: End) -> String {
    match end.death().await {
        error @ LinkError::Breach { .. } => {
            let text = error.to_string();
            assert!(text.contains(&format!("process {}", std::process::id())), "{text}");
            assert!(text.ends_with("; run one version of tonic-rdma at both ends"), "{text}");
            text
        }
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn greetings_that_are_wrong_are_refused_by_name_and_hurt_nobody() {
    let side = side();
    let mut listener = side.listen();
    let (ring, event) = (sealed(RING_BYTES), event_fd());
    let good = hello(SLOTS, SLOT_SIZE);
    let mut other_version = good.clone();
    other_version[7] = 1;
    let absurd = [(0, 64), (8, 100), (64, 4096), (65536, 1 << 20), (u32::MAX, u32::MAX)];
    let absurd = absurd.map(|(slots, slot_size)| hello(slots, slot_size));
    let mut cases: Vec<(&[u8], &[BorrowedFd<'_>], &str)> = vec![
        (
            b"GET / HTTP/1.1",
            &[],
            "expected Hello (kind 1), received 14 bytes of the unknown kind 71; \
             run one version of tonic-rdma at both ends",
        ),
        (&other_version, &[], "a greeting of version 1, this end has 12"),
        (&good[..12], &[], "received Hello (kind 1) of 12 bytes instead of 17 to 73"),
        (&[0; 300], &[], "longer"),
    ];
    let invalid = "received Hello (kind 1) of 17 bytes with an invalid field";
    cases.extend(absurd.iter().map(|hello| (hello.as_slice(), [].as_slice(), invalid)));
    let both = [ring.as_fd(), event.as_fd()];
    let forty = [event.as_fd(); 40];
    cases.extend([(good.as_slice(), both.as_slice(), "before they were asked for")]);
    cases.extend([(good.as_slice(), forty.as_slice(), "before they were asked for")]);
    let strangers: Vec<_> = cases
        .iter()
        .filter_map(|(bytes, fds, why)| {
            let stranger = stranger_at(&listener);
            let said = stranger.try_send(bytes, fds);
            // Kernels from 6.16 on refuse descriptors for receivers that have not asked for any.
            assert!(said.is_ok() || !fds.is_empty());
            said.ok().map(|()| (stranger, why))
        })
        .collect();
    // These strangers send nothing, and must not delay others.
    let silent: Vec<_> = (0..10).map(|_| stranger_at(&listener)).collect();
    let (mut s, mut c) = pair_over(&mut listener, &side, &side, &config()).await;
    c.send(0, b"x").await;
    assert_eq!(s.receive().await.unwrap(), b"x");
    // By the time that the listener has accepted the last one, it has handled all earlier ones.
    for (stranger, why) in &strangers {
        let refusal = stranger.refusal();
        assert!(refusal.contains(*why), "{refusal}, expected {why}");
        assert!(stranger.receive().is_none(), "and hung up");
    }
    drop(silent);
}

/// An admitted peer sends descriptors that are not those of a channel.
#[tokio::test]
async fn channels_that_cannot_be_used_are_refused_by_name() {
    let side = side();
    let mut listener = side.listen();
    let page = || sealed(PAGE_BYTES);
    let pipe = || std::io::pipe().unwrap().0.into();
    let cases: Vec<(Vec<OwnedFd>, &str)> = vec![
        (vec![pipe(), event_fd(), page()], "no eventfd"),
        (vec![event_fd(), pipe(), page()], "no eventfd"),
        (vec![event_fd(), page(), event_fd()], "no eventfd"),
        (vec![event_fd(), event_fd(), event_fd()], "not a file that can be sealed"),
        (vec![event_fd(), event_fd(), file(PAGE_BYTES, SealFlags::GROW)], "not sealed"),
        (vec![event_fd(), event_fd(), sealed(1024)], "1024 bytes"),
        (vec![event_fd(), page()], "not two eventfds and a page"),
        (vec![event_fd()], "not two eventfds and a page"),
        (vec![event_fd(), event_fd(), page(), page()], "not two eventfds and a page"),
        (vec![event_fd(), event_fd(), page(), page(), page()], "more descriptors"),
        ((0..40).map(|_| event_fd()).collect(), "more descriptors"),
    ];
    for (fds, why) in cases {
        let stranger = Arc::new(stranger_at(&listener));
        let (link, _ring) = let_in(&mut listener, &side, &stranger, fds).await;
        let error = link.map(drop).unwrap_err();
        assert!(format!("{error} {error:?}").contains(why), "{error:?}, expected {why}");
        let refusal = stranger.refusal();
        assert!(refusal.contains(why), "{refusal}, expected {why}");
        assert!(stranger.receive().is_none(), "and hung up");
    }
}

/// A peer that has not read this ACCEPT is not let in. The descriptors that it sends may belong to
/// another process, but the kernel would say that the peer sent them.
#[tokio::test]
async fn a_ready_that_answers_no_accept_is_refused() {
    let side = side();
    let mut listener = side.listen();
    let earlier = Arc::new(stranger_at(&listener));
    let (link, _ring) = let_in(&mut listener, &side, &earlier, earlier.own()).await;
    link.unwrap();
    let earlier = earlier.nonce.load(Ordering::Relaxed);
    for guess in [None, Some(0), Some(earlier), Some(earlier + 1)] {
        let stranger = Arc::new(stranger_at(&listener));
        stranger.greet();
        let incoming = arrival(&mut listener).await;
        let own = stranger.own();
        let fds: Vec<_> = own.iter().map(AsFd::as_fd).collect();
        let accept = async {
            let config = config();
            incoming.accept(&config, &side.pool, b"", TIMEOUT).await
        };
        let answer = async {
            // Without a guess, the peer answers with the nonce of ACCEPT in which one bit is
            // changed.
            let reader = stranger.clone();
            let read = move || drop(reader.accepted());
            tokio::task::spawn_blocking(read).await.unwrap();
            let nonce = stranger.nonce.load(Ordering::Relaxed);
            let answer = guess.unwrap_or(nonce ^ 1);
            assert_ne!(answer, nonce);
            stranger.send(&ready(answer, stranger.number), &fds);
        };
        let (link, ()) = tokio::join!(accept, answer);
        let (error, why) = (link.map(drop).unwrap_err(), "does not answer the nonce of ACCEPT");
        assert!(format!("{error} {error:?}").contains(why), "{error:?}");
        assert!(stranger.refusal().contains(why));
        assert!(stranger.receive().is_none(), "and hung up");
    }
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
    put(&ring, PLACES, 4);
    put(&ring, TAIL, 1);
    assert_eq!(end.receive().await.unwrap().len(), 4);
    put(&ring, TAIL, 0);
    let text = breach(end).await;
    assert!(text.contains("tail of its SENDs went from 1 to 0"), "{text}");

    let (end, _stranger, ring) = acquainted(&side).await;
    put(&ring, PLACES, 1025);
    put(&ring, TAIL, 1);
    let text = breach(end).await;
    assert!(text.contains("a SEND of 1025 bytes into a RECV of 1024"), "{text}");

    for (at, len) in [(4, 4), (17 * 1024, 1), (17 * 1024 - 64, 65), (u64::from(u32::MAX), 0)] {
        let (end, _stranger, ring) = acquainted(&side).await;
        put(&ring, PLACES, at << 32 | len);
        put(&ring, TAIL, 1);
        let text = breach(end).await;
        let wrong = format!("a SEND of {len} bytes that lies at {at} in {} bytes", 17 * 1024);
        assert!(text.contains(&wrong), "{text}");
    }

    // In the ring through which the stranger receives, it claims to have freed messages that were
    // never sent.
    let (mut end, stranger, _ring) = acquainted(&side).await;
    stranger.put_own(HEAD, 1 << 40);
    for i in 0..SLOTS as usize {
        end.queue_send(i, b"x", false).unwrap();
    }
    let error = end.queue_send(9, b"x", false).unwrap_err();
    assert!(
        matches!(error, LinkError::Breach { .. }) && error.to_string().contains("head"),
        "{error}"
    );
    assert!(stranger.receive().is_none(), "the stranger is hung up on");
}

#[tokio::test]
async fn memory_that_is_not_what_it_should_be_ends_the_connection() {
    let side = side();
    let (good, small, page) = (whole(1 << 20), whole(4096), 4096);
    let sparse = sealed(4096);
    let unsealed = file(1 << 20, SealFlags::GROW);
    type Words<'a> = (Vec<u8>, Vec<BorrowedFd<'a>>);
    let cases: Vec<(Vec<Words<'_>>, &str)> = vec![
        (vec![(chunk(1, 0, page), vec![unsealed.as_fd()])], "not sealed"),
        (vec![(chunk(1, 0, page), vec![sparse.as_fd()])], "a file of 4096 bytes with a hole at 0"),
        (vec![(chunk(1, 0, (1 << 20) + 1), vec![good.as_fd()])], "1048576 bytes"),
        (vec![(chunk(1, 0, page), vec![good.as_fd()])], "1048576 bytes"),
        (vec![(chunk(1, 0, 0), vec![good.as_fd()])], "0 are to be mapped"),
        (
            vec![(chunk(1, u64::MAX, 2), vec![good.as_fd()])],
            "received Chunk (kind 5) of 21 bytes with an invalid field, with descriptors",
        ),
        (
            vec![(chunk(1, 0, page), vec![])],
            "expected Chunk, Lend or Name with descriptors, or Forget, Wake, Taken, Declined, Unlend, \
             Unname or Refused without, received Chunk (kind 5) of 21 bytes",
        ),
        (vec![(chunk(1, 0, page), vec![small.as_fd(); 2])], "not exactly one file"),
        (vec![(chunk(1, 0, page), vec![good.as_fd(); 5])], "more descriptors"),
        (
            vec![(chunk(1, 0, 65 << 30), vec![good.as_fd()])],
            "more landing memory than a peer may give",
        ),
        (
            vec![(chunk(1, 0, page), vec![small.as_fd()]), (chunk(1, 0, page), vec![good.as_fd()])],
            "0x1 twice",
        ),
        (vec![(forget(7), vec![])], "was not given"),
        (
            vec![(forget(7), vec![small.as_fd()])],
            "received Forget (kind 6) of 5 bytes, with descriptors",
        ),
        (vec![(hello(8, 64), vec![])], "received Hello (kind 1) of 17 bytes"),
        (
            vec![(vec![READY], vec![small.as_fd(); 2])],
            "received Ready (kind 8) of 1 bytes instead of 9 to 26, with descriptors",
        ),
        (vec![(vec![99; 200], vec![])], "received 200 bytes of the unknown kind 99"),
        (vec![(vec![0; 300], vec![])], "longer"),
    ];
    for (words, why) in cases {
        let (end, stranger, _ring) = acquainted(&side).await;
        for (bytes, fds) in &words {
            stranger.send(bytes, fds);
        }
        let text = breach(end).await;
        assert!(text.contains(why), "{text}, expected {why}");
    }
}

/// Offers the stranger's first chunk, at address 0x10000, followed by a message.
async fn offer(end: &mut End, stranger: &Stranger, ring: &File, rkey: u32, landing: &OwnedFd) {
    let len = fstat(landing).unwrap().st_size as u64;
    stranger.send(&chunk(rkey, 0x10000, len), &[landing.as_fd()]);
    put(ring, CHUNKS, 1);
    put(ring, PLACES, 4);
    put(ring, TAIL, 1);
    assert_eq!(end.receive().await.unwrap().len(), 4);
}

/// A WRITE goes where a valid key leads, or nowhere.
#[tokio::test]
async fn grants_that_lie_end_the_connection() {
    let side = side();
    for (rkey, addr, why) in [(2, 0x10000, "0x2"), (1, 0xffff, "0xffff"), (1, 0x10fff, "0x10fff")] {
        let (mut end, stranger, ring) = acquainted(&side).await;
        let landing = whole(4096);
        offer(&mut end, &stranger, &ring, 1, &landing).await;
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

/// A peer that does not read its socket is disconnected rather than waited for.
#[tokio::test]
async fn a_peer_that_reads_nothing_is_given_up() {
    let side = side();
    let (mut end, _stranger, _ring) = acquainted(&side).await;
    let mut account = side.pool.landing();
    let mut held = Vec::new();
    // Share chunk after chunk, each with a message, until its socket is full.
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

/// The resident KiB of this process's mappings of memfds with this name.
fn resident(name: &str) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut ours, mut sum) = (false, 0);
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some(range) if range.contains('-') => ours = line.contains(&format!("/memfd:{name}")),
            Some("Rss:") if ours => sum += words.next().unwrap().parse::<u64>().unwrap(),
            _ => {}
        }
    }
    sum
}

/// Pages of a peer's file are neither allocated nor counted to this process before they are
/// written, even after the peer has removed pages.
#[tokio::test]
async fn a_peers_memory_is_its_own_until_it_is_written() {
    const LEN: u64 = 64 << 20;
    let side = side();
    let (mut end, stranger, ring) = acquainted(&side).await;
    let landing = file_called("hoard", LEN, SealFlags::SHRINK | SealFlags::GROW);
    fill_pages(&landing, LEN);
    let blocks = || fstat(&landing).unwrap().st_blocks;
    assert_eq!(blocks(), LEN as i64 / 512);
    offer(&mut end, &stranger, &ring, 1, &landing).await;
    assert_eq!(resident("hoard"), 0);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&landing, punch, 0, LEN).unwrap();
    assert_eq!(blocks(), 0);
    let mut write = |offset: u64, len: usize| {
        let src = WriteSource::Any(vec![7; len].into());
        end.queue(Work::Write { src, remote_addr: 0x10000 + offset, rkey: 1 }, false).unwrap();
    };
    // The numbers of blocks of 512 bytes and of resident KiB that this many pages have.
    // SAFETY: sysconf takes no pointer.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap();
    let of = |pages: usize| ((pages * page / 512) as i64, (pages * page / 1024) as u64);
    write(0, 1);
    assert_eq!((blocks(), resident("hoard")), of(1), "one page for one byte");
    write(LEN / 2, 40_960);
    assert_eq!((blocks(), resident("hoard")), of(1 + 40_960_usize.div_ceil(page)));
    // After another removal, again only the pages that are written are allocated.
    fallocate(&landing, punch, 0, LEN).unwrap();
    write(0, 4096);
    assert_eq!((blocks(), resident("hoard")), of(1));
}

/// The peer removes its pages as fast as it can, with both calls that can do so, while this side
/// WRITEs to them. This side's cost never exceeds what the peer has given, and the connection
/// continues.
#[tokio::test]
async fn a_peer_that_punches_holes_in_step_costs_no_more_than_it_gave() {
    const LEN: usize = 4 << 20;
    const PIECE: usize = 64 << 10;
    let side = side();
    let (mut end, stranger, ring) = acquainted(&side).await;
    let landing = file_called("step", LEN as u64, SealFlags::SHRINK | SealFlags::GROW);
    fill_pages(&landing, LEN as u64);
    offer(&mut end, &stranger, &ring, 1, &landing).await;
    // The attackers count what they have removed: the first punches holes in the file, the second
    // removes pages through a mapping.
    let (stop, punched) = (AtomicBool::new(false), [const { AtomicU64::new(0) }; 2]);
    let blocks = || fstat(&landing).unwrap().st_blocks;
    let mut most = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            for at in (0..LEN).step_by(PIECE).cycle() {
                if stop.load(Ordering::SeqCst) {
                    break;
                }
                fallocate(&landing, punch, at as u64, PIECE as u64).unwrap();
                punched[0].fetch_add(1, Ordering::SeqCst);
            }
        });
        scope.spawn(|| {
            use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a new mapping, which is advised, never read, and unmapped once.
            unsafe {
                let map = mmap(std::ptr::null_mut(), LEN, prot, MapFlags::SHARED, &landing, 0);
                let map = map.unwrap();
                while !stop.load(Ordering::SeqCst) {
                    madvise(map, LEN, Advice::LinuxRemove).unwrap();
                    punched[1].fetch_add(1, Ordering::SeqCst);
                }
                munmap(map, LEN).unwrap();
            }
        });
        let holes = || punched.iter().map(|count| count.load(Ordering::SeqCst)).min().unwrap();
        // At least ten laps, and as many more as needed until both have attacked within one lap.
        for lap in 0.. {
            let before = holes();
            for at in (0..LEN).step_by(PIECE) {
                let src = WriteSource::Any(vec![7; PIECE].into());
                let remote_addr = 0x10000 + at as u64;
                end.queue(Work::Write { src, remote_addr, rkey: 1 }, false).unwrap();
                most = most.max(blocks());
            }
            if lap >= 10 && holes() > before {
                break;
            }
        }
        stop.store(true, Ordering::SeqCst);
    });
    assert!(most <= (LEN / 512) as i64, "{most} blocks of a file of {LEN} bytes");
    assert_eq!(resident("step") * 2, blocks() as u64, "each page is there once");
    end.queue_send(0, b"alive", true).unwrap();
    end.link.ring_doorbell().unwrap();
}

#[tokio::test]
async fn a_file_is_taken_once() {
    let side = side();
    let (mut first, stranger, ring) = acquainted(&side).await;
    let landing = whole(1 << 20);
    offer(&mut first, &stranger, &ring, 1, &landing).await;
    // The file is refused under another key of the same peer, and from another peer.
    let (other, another, _ring) = acquainted(&side).await;
    another.send(&chunk(1, 0, 1 << 20), &[landing.as_fd()]);
    let text = breach(other).await;
    assert!(text.contains("a file that was given already"), "{text}");
    stranger.send(&chunk(2, 0, 1 << 20), &[landing.as_fd()]);
    let text = breach(first).await;
    assert!(text.contains("a file that was given already"), "{text}");
}

#[tokio::test]
async fn no_more_chunks_than_a_peer_needs() {
    let side = side();
    // Either 512 short chunks are accepted, or three short chunks and then none of a length that
    // exceeds the limit together with them. The first chunk above a limit is refused before its
    // file is looked at.
    for (short, long, told) in [(512, 4096, 513), (3, 1 << 30, 4)] {
        let (end, stranger, _ring) = acquainted(&side).await;
        let offers = tokio::task::spawn_blocking(move || {
            let taken = (0..10_000).take_while(|rkey| {
                let len = if *rkey < short { 4096 } else { long };
                stranger.try_send(&chunk(*rkey, 0, len), &[whole(4096).as_fd()]).is_ok()
            });
            taken.count()
        });
        let text = breach(end).await;
        assert!(text.contains(&format!("may give: {told} chunks")), "{text}");
        assert!(offers.await.unwrap() > short as usize);
    }
}

/// A peer keeps this end busy by giving chunks and taking them back. Other connections are still
/// served.
#[tokio::test]
async fn a_flood_of_chunks_ends_the_connection() {
    let side = side();
    let mut listener = side.listen();
    let (end, stranger, _ring) = acquainted_at(&mut listener, &side).await;
    let (mut s, mut c) = pair_over(&mut listener, &side, &side, &config()).await;
    let flood = tokio::task::spawn_blocking(move || {
        let mut rounds = (0..20_000).take_while(|rkey| {
            let given = stranger.try_send(&chunk(*rkey, 0, 4096), &[whole(4096).as_fd()]);
            given.and_then(|()| stranger.try_send(&forget(*rkey), &[])).is_ok()
        });
        rounds.by_ref().count()
    });
    let serve = async {
        let mut calls = 0;
        while !flood.is_finished() {
            c.send(0, b"ask").await;
            assert_eq!(s.receive().await.unwrap(), b"ask");
            calls += 1;
            // Leaves processor time for the flood, because only a high rate counts as a flood.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        calls
    };
    // A slow machine takes longer to reach that rate.
    let dies = async {
        let mut end = end;
        while !matches!(tokio::time::timeout(TIMEOUT, end.poll()).await, Ok(Err(_))) {
            assert!(!flood.is_finished(), "the link does not die");
        }
        breach(end).await
    };
    let (text, calls) = tokio::join!(dies, serve);
    assert!(text.contains("a flood of chunks"), "{text}");
    assert!(calls > 0);
    assert!(flood.await.unwrap() >= 1024);
}

/// Strangers without a ticket pass descriptors with a greeting that is refused, with a greeting
/// that waits to be accepted, and on sockets that are never accepted.
#[tokio::test]
async fn what_strangers_pass_holds_up_nobody() {
    let side = side();
    let mut listener = side.listen();
    let lingering = Lingering::new();
    let say = |stranger: &Stranger, bytes: &[u8]| {
        let socket = lingering.socket();
        if stranger.try_send(bytes, &[socket.as_fd()]).is_err() {
            // The kernel refuses it (Linux 6.16), so it is left open: its close would block.
            std::mem::forget(socket);
            stranger.send(bytes, &[]);
        }
    };
    let pass = |listener: &Listener, bytes: &[u8]| {
        let stranger = stranger_at(listener);
        say(&stranger, bytes);
        stranger
    };
    for bytes in [hello(SLOTS, SLOT_SIZE), vec![99; 20], hello(0, 0)] {
        drop(pass(&listener, &bytes));
    }
    let mut refused = Vec::new();
    for _ in 0..8 {
        refused.push(pass(&listener, b"no greeting"));
    }
    let rejected = stranger_at(&listener);
    rejected.greet();
    say(&rejected, b"more");
    for _ in 0..2 {
        // Either greeting may come first: one stranger has hung up, and both are rejected.
        let incoming = tokio::time::timeout(Duration::from_millis(500), listener.accept()).await;
        if let Ok(incoming) = incoming {
            drop(incoming.unwrap());
        }
    }
    others_are_served(&mut listener, &side).await;
    let waiting = pass(&listener, b"never accepted");
    drop(listener);
    others_are_served(&mut side.listen(), &side).await;
    drop((refused, rejected, waiting));
    lingering.end();
}

/// Admitted peers pass descriptors in place of an eventfd, a page or a chunk. They also pass more
/// than the protocol allows, unrequested ones, and descriptors that are still unread when the
/// connection ends.
#[tokio::test]
async fn what_peers_pass_holds_up_nobody() {
    let side = side();
    let mut listener = side.listen();
    let lingering = Lingering::new();
    let socket = || lingering.socket();
    let channels: [Vec<OwnedFd>; 5] = [
        vec![socket(), event_fd(), sealed(PAGE_BYTES)],
        vec![event_fd(), socket(), sealed(PAGE_BYTES)],
        vec![event_fd(), event_fd(), socket()],
        vec![event_fd(), event_fd(), sealed(PAGE_BYTES), socket()],
        (0..12).map(|_| socket()).collect(),
    ];
    for fds in channels {
        let stranger = Arc::new(stranger_at(&listener));
        stranger.greet();
        let (incoming, config) = (arrival(&mut listener).await, config());
        let accept = async {
            // Fails at once, or waits until all descriptors that cannot be opened are closed.
            incoming.accept(&config, &side.pool, b"", TIMEOUT * 10).await.map(drop).unwrap_err();
            std::future::pending::<()>().await;
        };
        let serve = async {
            stranger.enters(fds).await;
            drop(stranger);
            others_are_served(&mut listener, &side).await;
        };
        tokio::select! {
            () = serve => {}
            () = accept => {}
        }
    }
    for bytes in [chunk(1, 0, 4096), vec![99; 8], vec![]] {
        let (end, stranger, _ring) = acquainted_at(&mut listener, &side).await;
        stranger.send(&bytes, &[socket().as_fd()]);
        breach(end).await;
        others_are_served(&mut listener, &side).await;
    }
    let (end, stranger, _ring) = acquainted_at(&mut listener, &side).await;
    // The descriptors come after other messages, so that they have not been read.
    stranger.send(&[7], &[]);
    stranger.send(&[], &[]);
    stranger.send(&[7], &[socket().as_fd(), socket().as_fd()]);
    drop(end);
    drop(stranger);
    others_are_served(&mut listener, &side).await;
    lingering.end();
}
