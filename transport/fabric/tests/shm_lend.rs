//! Memory that is lent over shared memory, within one process and by peers that lie.
#![cfg(all(target_os = "linux", feature = "shm"))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::task::Waker;

use bytes::Bytes;
use common::stranger::{
    DECLINED, LEND, Stranger, TAKEN, arrival, file, fill_pages, lend, sealed, with_key,
};
use common::*;
use rustix::fs::{MemfdFlags, SealFlags, memfd_create};
use tonic_rdma_fabric::shm::ShmDevice;
use tonic_rdma_fabric::{Fabric, HostProcess, Lending, Lent, Link, LinkError, ShmAccess};
use tonic_rdma_memory::{LendableBuf, LendableMemory, Pool, PoolConfig};

/// A side that lends as `lending` says.
fn lending(lending: Lending) -> Side {
    let fabric = Fabric::Shm(ShmDevice::new(ShmAccess::SameUser, lending));
    let pool = Pool::new(PoolConfig::default(), fabric.registrar()).unwrap().for_peer();
    Side { fabric, pool }
}

fn borrowing() -> Side {
    Side::new(Fabric::Shm(ShmDevice::new(ShmAccess::SameUser, Lending::Off)))
}

fn try_lend(side: &Side, end: &mut End, bytes: &Bytes) -> Option<Lent> {
    end.link.lend(side.pool.lend(bytes).expect("may be lent")).unwrap()
}

/// Makes one end lend bytes, and polls the other end until it has mapped the memory in which they
/// lie.
async fn lend_to(side: &Side, end: &mut End, other: &mut End, bytes: &Bytes) -> Lent {
    let lends = async {
        loop {
            if let Some(lent) = try_lend(side, end, bytes) {
                return lent;
            }
            // The answer to LEND comes over the socket. The messages make sure that both ends are
            // polled.
            end.send(0, b"lend").await;
            other.receive().await.unwrap();
            other.send(0, b"lend").await;
            end.receive().await.unwrap();
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TIMEOUT, lends).await.expect("the peer never maps what is lent")
}

fn returned(end: &mut End) -> Vec<u32> {
    let mut leases = Vec::new();
    end.link.take_returned(Waker::noop(), &mut leases);
    leases
}

fn lent_of(side: &Side) -> usize {
    side.pool.stats().lent
}

#[tokio::test]
async fn bytes_are_read_where_they_lie() {
    let (me, you) = (lending(Lending::SameUser), borrowing());
    let (mut s, mut c) = greeted_pair(&me, &you).await;
    assert!(s.link.may_lend() && !c.link.may_lend());
    let bytes = me.payload(100_000, 3);
    assert_eq!(try_lend(&me, &mut s, &bytes), None, "the peer has not mapped it");
    assert_eq!(lent_of(&me), 0);
    let lent = lend_to(&me, &mut s, &mut c, &bytes).await;
    assert_eq!(lent_of(&me), 100_000);
    let read = c.link.borrow(lent, 100_000).unwrap();
    assert!(read == pattern(100_000, 3) && read.as_ptr() != bytes.as_ptr());
    // The lease returns only when the last part of the borrowed bytes is dropped.
    let slice = read.slice(10..20);
    drop(read);
    assert_eq!(returned(&mut c), [], "a part of it is still read");
    drop(slice);
    assert_eq!(returned(&mut c), [lent.lease]);
    assert_eq!(returned(&mut c), []);
    let freed = me.pool.stats().send;
    drop(bytes);
    assert_eq!(me.pool.stats().send, freed, "the lease keeps the memory");
    s.link.end_lease(lent.lease);
    assert_eq!((me.pool.stats().send, lent_of(&me)), (0, 0));
}

/// The reader maps an arena only once for sixty connections to the same lender.
#[tokio::test]
async fn connections_share_what_is_mapped() {
    let (me, you) = (lending(Lending::SameUser), borrowing());
    let bytes = me.payload(4096, 1);
    let mut pairs = Vec::new();
    for _ in 0..60 {
        let (mut s, mut c) = greeted_pair(&me, &you).await;
        let lent = lend_to(&me, &mut s, &mut c, &bytes).await;
        let read = c.link.borrow(lent, 4096).unwrap();
        assert_eq!(read, pattern(4096, 1));
        pairs.push((s, c, read));
    }
    let first = pairs[0].2.as_ptr();
    assert!(pairs.iter().all(|(_, _, read)| read.as_ptr() == first));
}

/// The process that runs these tests, to which both ends belong.
fn this_process() -> Lending {
    Lending::OneProcess(HostProcess::by_pid(std::process::id()).unwrap())
}

#[tokio::test]
async fn only_those_who_may_are_lent_anything() {
    let you = borrowing();
    let off = lending(Lending::Off);
    let (s, _c) = greeted_pair(&off, &you).await;
    assert!(!s.link.may_lend());
    assert!(off.pool.lend(&off.payload(4096, 1)).is_none());
    // Memory that is registered for lending is not lent either.
    let mut buf = LendableBuf::zeroed(4096).unwrap();
    buf.fill(1);
    let memory = Arc::new(buf.freeze());
    let bytes = LendableMemory::bytes(memory.clone());
    let _registration = off.pool.register_lendable(memory).unwrap();
    assert!(off.pool.lend(&bytes).is_none());
    // Pool memory is not lent with registered memory.
    let registered = lending(Lending::SameUserRegistered);
    assert!(registered.pool.lend(&registered.payload(4096, 1)).is_none());
    // The first peer that connects is not the process that is named.
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let other = lending(Lending::OneProcess(HostProcess::by_pid(child.id()).unwrap()));
    let (mut s, _c) = greeted_pair(&other, &you).await;
    assert_eq!(try_lend(&other, &mut s, &other.payload(4096, 1)), None);
    assert!(!s.link.may_lend());
    child.kill().unwrap();
    child.wait().unwrap();
    // This process is the process that is named.
    let one = lending(this_process());
    let (mut s, mut c) = greeted_pair(&one, &you).await;
    let bytes = one.payload(4096, 1);
    lend_to(&one, &mut s, &mut c, &bytes).await;
}

/// Memory that is still read when the connection ends remains with its reader. The memory returns
/// when the reader drops the last slice.
#[tokio::test]
async fn leases_outlive_the_connection() {
    let (me, you) = (lending(Lending::SameUser), borrowing());
    for lender_first in [true, false] {
        let (mut s, mut c) = greeted_pair(&me, &you).await;
        let bytes = me.payload(50_000, 9);
        let lent = lend_to(&me, &mut s, &mut c, &bytes).await;
        let read = c.link.borrow(lent, 50_000).unwrap();
        drop(bytes);
        match lender_first {
            true => {
                drop(s);
                drop(c);
            }
            false => {
                drop(c);
                s.death().await;
                drop(s);
            }
        }
        assert_eq!(lent_of(&me), 50_000, "it is read");
        // The memory is not handed out again.
        let others: Vec<_> = std::iter::from_fn(|| me.pool.try_alloc(64 << 10).ok()).collect();
        others.into_iter().for_each(|mut buf| buf.resize_zeroed(64 << 10));
        assert!(read == pattern(50_000, 9));
        drop(read);
        let back = async {
            while lent_of(&me) > 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(TIMEOUT, back).await.expect("what was lent never comes back");
        assert_eq!(me.pool.stats().send, 0);
    }
}

/// The peer unmaps an arena that was freed.
#[tokio::test]
async fn freed_arenas_are_taken_back() {
    let fabric = Fabric::Shm(ShmDevice::new(ShmAccess::SameUser, Lending::SameUser));
    let config = PoolConfig::default().send(4 << 20);
    let me = Side { pool: Pool::new(config, fabric.registrar()).unwrap().for_peer(), fabric };
    let you = borrowing();
    let (mut s, mut c) = greeted_pair(&me, &you).await;
    // These are dedicated arenas. The budget has room for one of them.
    for round in 0..3 {
        let bytes = me.payload((5 << 19) + round * 4096, round as u8);
        let lent = lend_to(&me, &mut s, &mut c, &bytes).await;
        let read = c.link.borrow(lent, bytes.len() as u32).unwrap();
        assert!(read == pattern(bytes.len(), round as u8));
        drop(read);
        assert_eq!(returned(&mut c), [lent.lease]);
        s.link.end_lease(lent.lease);
        drop(bytes);
        // After the peer was told, the key of the freed arena has no meaning any more.
        if round > 0 {
            continue;
        }
        let next = me.payload((5 << 19) + 8192, 7);
        let second = lend_to(&me, &mut s, &mut c, &next).await;
        let gone = c.link.borrow(lent, 4096);
        assert!(matches!(gone.map(drop), Err(LinkError::Breach { .. })));
        s.link.end_lease(second.lease);
    }
}

/// A process between two others lends on what was lent to it, from the same file. Each reader
/// returns the memory in its turn. A process that received memory which was lent on does not lend
/// it on again.
#[tokio::test]
async fn what_was_lent_is_lent_on_once() {
    let [owner, between, reader] = [(); 3].map(|()| lending(Lending::SameUserOnward));
    let (mut s, mut c) = greeted_pair(&owner, &between).await;
    let (mut t, mut d) = greeted_pair(&between, &reader).await;
    let bytes = owner.payload(100_000, 3);
    let first = lend_to(&owner, &mut s, &mut c, &bytes).await;
    let received = c.link.borrow(first, 100_000).unwrap();
    let second = lend_to(&between, &mut t, &mut d, &received.slice(64..)).await;
    let read = d.link.borrow(second, 99_936).unwrap();
    assert!(read == pattern(100_000, 3)[64..] && read.as_ptr() != received[64..].as_ptr());
    let stats = between.pool.stats();
    assert_eq!((stats.lent, stats.lent_application, stats.application), (0, 99_936, 0));
    assert!(reader.pool.lend(&read).is_none(), "once");
    drop((bytes, received));
    assert_eq!(returned(&mut c), [], "it is lent on");
    assert_eq!(lent_of(&owner), 100_000);
    drop(read);
    assert_eq!(returned(&mut d), [second.lease]);
    t.link.end_lease(second.lease);
    assert_eq!(returned(&mut c), [first.lease]);
    s.link.end_lease(first.lease);
    assert_eq!((owner.pool.stats().send, lent_of(&owner)), (0, 0));
    assert_eq!(between.pool.stats().lent_application, 0);
}

/// Two connections lend the same buffer. Memory that is lent on returns to the connection over
/// which it came, because only that connection keeps it lent if the process between them ends.
#[tokio::test]
async fn what_is_lent_on_returns_where_it_came_from() {
    let [owner, between, reader] = [(); 3].map(|()| lending(Lending::SameUserOnward));
    let (mut s1, mut c1) = greeted_pair(&owner, &between).await;
    let (mut s2, mut c2) = greeted_pair(&owner, &between).await;
    let (mut t, mut d) = greeted_pair(&between, &reader).await;
    let bytes = owner.payload(50_000, 3);
    let first = lend_to(&owner, &mut s1, &mut c1, &bytes).await;
    let second = lend_to(&owner, &mut s2, &mut c2, &bytes).await;
    let (one, other) =
        (c1.link.borrow(first, 50_000).unwrap(), c2.link.borrow(second, 50_000).unwrap());
    drop(bytes);
    let on = lend_to(&between, &mut t, &mut d, &other).await;
    let read = d.link.borrow(on, 50_000).unwrap();
    drop((one, other));
    assert_eq!((returned(&mut c1), returned(&mut c2)), (vec![first.lease], vec![]));
    s1.link.end_lease(first.lease);
    // All connections of the process between are closed, and it has dropped what it had.
    drop((s1, c1, s2, c2, t));
    d.death().await;
    drop((d, between));
    assert_eq!(lent_of(&owner), 50_000);
    assert!(read == pattern(50_000, 3));
    drop(read);
    let back = async {
        while lent_of(&owner) > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TIMEOUT, back).await.expect("what was lent never comes back");
}

/// The attack: a process of the same user asks a proxy for something, and the proxy lends it the
/// files that contain everything that others have sent to the proxy. The proxy lends on none of the
/// owner's memory, unless the settings of both the owner and the proxy allow it.
#[tokio::test]
async fn what_is_lent_is_not_lent_on_unless_both_ask_for_it() {
    for (owner, between) in [
        (Lending::SameUser, Lending::SameUser),
        (Lending::SameUser, Lending::SameUserOnward),
        (Lending::SameUserOnward, Lending::SameUser),
        (this_process(), Lending::SameUserOnward),
        (Lending::SameUserOnward, this_process()),
        (Lending::SameUserOnward, Lending::Off),
    ] {
        let how = (owner, between);
        let (owner, between) = (lending(owner), lending(between));
        let (mut s, mut c) = greeted_pair(&owner, &between).await;
        let bytes = owner.payload(50_000, 3);
        let lent = lend_to(&owner, &mut s, &mut c, &bytes).await;
        let received = c.link.borrow(lent, 50_000).unwrap();
        assert!(between.pool.lend(&received).is_none(), "{how:?}");
    }
}

#[tokio::test]
async fn leases_that_lie_are_breaches() {
    let (me, you) = (lending(Lending::SameUser), borrowing());
    let (mut s, mut c) = greeted_pair(&me, &you).await;
    let bytes = me.payload(4096, 1);
    let Lent { lease, key, addr } = lend_to(&me, &mut s, &mut c, &bytes).await;
    let wrong = [
        (Lent { lease, key: key + 1, addr }, 1),
        (Lent { lease, key, addr: addr - (16 << 20) }, 1),
        (Lent { lease, key, addr: 0 }, 1),
        (Lent { lease, key, addr: u64::MAX }, 1),
        (Lent { lease, key, addr }, u32::MAX),
    ];
    for (lent, len) in wrong {
        let error = c.link.borrow(lent, len).unwrap_err();
        assert!(matches!(error, LinkError::Breach { .. }), "{error}");
        assert!(error.to_string().contains("lease"), "{error}");
    }
    assert_eq!(c.link.borrow(Lent { lease, key, addr }, 4096).unwrap(), bytes);
}

const LENDABLE: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

/// A file for which all pages are allocated.
fn allocated(len: u64, seals: SealFlags) -> OwnedFd {
    let made = file(len, SealFlags::empty());
    fill_pages(&made, len);
    rustix::fs::fcntl_add_seals(&made, seals).unwrap();
    made
}

/// A file of huge pages. After the peer gives such pages back, there may be no others.
fn of_huge_pages() -> OwnedFd {
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let made = memfd_create("huge", flags).expect("a kernel with huge pages (CONFIG_HUGETLBFS)");
    rustix::fs::ftruncate(&made, 2 << 20).unwrap();
    rustix::fs::fcntl_add_seals(&made, LENDABLE).unwrap();
    made
}

/// A file whose allocated pages lie behind its end.
fn behind_its_end() -> OwnedFd {
    let made = file(4096, SealFlags::empty());
    let keep = rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&made, keep, 4096, 4096).unwrap();
    rustix::fs::fcntl_add_seals(&made, LENDABLE).unwrap();
    made
}

/// A message on the socket, and the descriptors that are sent with it.
type Message = (Vec<u8>, Vec<OwnedFd>);

/// A LEND of 4096 bytes. `lend_on` says whether they may be lent on, or were lent on.
fn lend_saying(key: u32, lend_on: u8) -> Vec<u8> {
    let mut message = lend(key, 0, 4096);
    *message.last_mut().unwrap() = lend_on;
    message
}

/// A stranger, and the end of a connection that it has entered.
async fn entered(you: &Side) -> (Arc<Stranger>, End) {
    let mut listener = you.listen();
    let stranger = Arc::new(Stranger::connect(listener.local_addr().shm().unwrap().name()));
    stranger.greet();
    let incoming = arrival(&mut listener).await;
    let (config, own) = (config(), stranger.own());
    let entering = stranger.enters(own);
    let (link, _ring) = tokio::join!(incoming.accept(&config, &you.pool, b"", TIMEOUT), entering);
    (stranger, End::new(link.unwrap()))
}

/// A sender that waits for the answer stops waiting when the answer arrives, even if the peer
/// declines.
#[tokio::test]
async fn a_peer_that_declines_is_not_waited_for() {
    let me = lending(Lending::SameUser);
    let (stranger, mut end) = entered(&me).await;
    let bytes = me.payload(4096, 1);
    let key = me.pool.lend(&bytes).unwrap().key();
    assert!(!end.link.is_mapping(key), "it was not asked");
    for _ in 0..2 {
        assert_eq!(try_lend(&me, &mut end, &bytes), None);
        assert!(end.link.is_mapping(key) && end.is_quiet().await, "no answer yet");
    }
    stranger.send(&with_key(DECLINED, key), &[]);
    let answered = async {
        while end.link.is_mapping(key) {
            assert!(end.is_quiet().await);
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TIMEOUT, answered).await.expect("DECLINED is not heard");
    assert_eq!(try_lend(&me, &mut end, &bytes), None);
    assert!(!end.link.is_mapping(key), "it is not asked again");
}

/// Returns the error of an end to which a stranger lends these files with these messages.
async fn offered(messages: Vec<Message>) -> String {
    let you = borrowing();
    let (stranger, mut end) = entered(&you).await;
    for (message, fds) in &messages {
        stranger.send(message, &fds.iter().map(AsFd::as_fd).collect::<Vec<_>>());
    }
    end.death().await.to_string()
}

fn pipe() -> OwnedFd {
    std::io::pipe().unwrap().1.into()
}

/// Without these checks a lender could end this process by truncating a file, make it allocate
/// pages by punching holes, or block it with a descriptor.
#[tokio::test]
async fn memory_that_cannot_be_lent_ends_the_connection() {
    let whole = || allocated(4096, LENDABLE);
    let first = |file| vec![(lend(1, 0, 4096), vec![file, pipe()])];
    let cases: Vec<(Vec<Message>, &str)> = vec![
        (first(sealed(4096)), "not sealed"),
        (first(allocated(4096, SealFlags::SHRINK | SealFlags::FUTURE_WRITE)), "not sealed"),
        (first(file(4096, LENDABLE)), "a file of 4096 bytes with a hole at 0"),
        (first(behind_its_end()), "a file of 4096 bytes with a hole at 0"),
        (first(pipe()), "not a file that can be sealed"),
        (
            vec![(lend(1, 0, 2 << 20), vec![of_huge_pages(), pipe()])],
            "not a file of ordinary pages",
        ),
        (vec![(lend_saying(1, 2), vec![whole()])], "neither a file nor a file and a pipe"),
        (vec![(lend_saying(1, 2), vec![whole(), pipe(), whole()])], "neither a file nor a file"),
        (vec![(lend_saying(1, 2), vec![whole(), pipe()])], "a pipe comes with the first"),
        (vec![(lend_saying(1, 1), vec![whole(), pipe(), pipe()])], "neither a file nor a file"),
        (
            vec![(lend_saying(1, 3), vec![whole(), pipe()])],
            "received Lend (kind 10) of 22 bytes with an invalid field, with descriptors",
        ),
        (vec![(lend(1, 0, 8192), vec![whole(), pipe()])], "4096 bytes"),
        (vec![(lend(1, 0, 4096), vec![whole()])], "a pipe comes with the first"),
        (vec![(lend(1, 0, 4096), vec![whole(), whole()])], "neither a file nor a file and a pipe"),
        (vec![(lend(1, 0, 0), vec![whole(), pipe()])], "more memory than a peer may lend"),
        (vec![(lend(1, 0, 1 << 40), vec![whole(), pipe()])], "more memory than a peer may lend"),
        (
            vec![(lend(1, 0, 4096), vec![whole(), pipe()]), (lend(1, 0, 4096), vec![whole()])],
            "is lent twice",
        ),
        (
            vec![
                (lend(1, 0, 4096), vec![whole(), pipe()]),
                (lend(2, 0, 4096), vec![whole(), pipe()]),
            ],
            "a pipe comes with the first",
        ),
        (
            vec![(vec![LEND, 1], vec![whole(), pipe()])],
            "received Lend (kind 10) of 2 bytes instead of 22",
        ),
        (vec![(vec![TAKEN, 1], vec![])], "received Taken (kind 11) of 2 bytes instead of 5"),
    ];
    // Files that nobody can write to may be lent. This file is lent twice.
    let kept = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    let twice = [
        (lend(1, 0, 4096), vec![allocated(4096, kept), pipe()]),
        (lend(1, 0, 4096), vec![whole()]),
    ];
    let cases = cases.into_iter().chain([
        (Vec::from(twice), "is lent twice"),
        (first(allocated(4096, SealFlags::SHRINK | SealFlags::WRITE)), "not sealed"),
    ]);
    for (messages, why) in cases {
        let error = offered(messages).await;
        assert!(error.contains(why), "{error}, not: {why}");
    }
}
