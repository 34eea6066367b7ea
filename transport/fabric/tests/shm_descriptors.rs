//! A process that is out of descriptors. These tests have their own binary, because the limit
//! applies to the whole process.
#![cfg(all(target_os = "linux", feature = "shm"))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use common::stranger::{Stranger, WAITING, arrival};
use common::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tonic_rdma_fabric::shm::ShmDevice;
use tonic_rdma_fabric::{Completion, Fabric, Lending, Link, Shared, ShmAccess, Work, WriteSource};

/// Runs a test that sets the limit while no other test needs descriptors.
fn alone(test: impl Future<Output = ()>) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap().block_on(test);
}

/// Sets the soft limit on descriptors.
fn limit(current: Option<u64>) {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current, maximum }).unwrap();
}

fn side() -> Side {
    Side::new(Fabric::Shm(ShmDevice::new(ShmAccess::SameUser, Lending::Off)))
}

/// Returns the link's next report that is not a message.
async fn report(end: &mut End) -> Completion {
    loop {
        if let Some(at) = end.got.iter().position(|got| !matches!(got, Completion::Received { .. }))
        {
            return end.got.remove(at).unwrap();
        }
        tokio::time::timeout(TIMEOUT, end.poll()).await.expect("nothing is reported").unwrap();
    }
}

/// An end declines landing memory that it cannot map. The connection continues, the giver is told,
/// and what it gives later is mapped.
#[test]
fn a_chunk_that_cannot_be_received_is_declined() {
    alone(chunk_is_declined());
}

async fn chunk_is_declined() {
    let (server, client) = (side(), side());
    let (mut s, mut c) = greeted_pair(&server, &client).await;
    let mut account = server.pool.landing();
    let landing = account.alloc(4096, 4096).unwrap().unwrap();
    let rkey = landing.rkey();
    let before = getrlimit(Resource::Nofile).current;
    // Descriptors that are already open remain open.
    limit(Some(3));
    assert_eq!(s.link.share(rkey).unwrap(), Shared::Yes, "it may be");
    s.send(31, b"granted").await;
    assert_eq!(report(&mut c).await, Completion::NotMapped { rkey });
    assert_eq!(c.receive().await.unwrap(), b"granted", "small messages go on");
    limit(before);
    c.send(1, b"there").await;
    assert_eq!(s.receive().await.unwrap(), b"there");
    // The answer arrived before the message, and is read when the link next looks at its socket.
    for round in 0.. {
        if s.link.share(rkey).unwrap() == Shared::No {
            break;
        }
        assert!(round < 10_000, "the giver is not told");
        assert!(s.is_quiet().await);
        tokio::task::yield_now().await;
    }
    // Chunks that the giver gives from now on are mapped.
    drop(landing);
    assert!(account.trim() > 0);
    let landing = account.alloc(4096, 4096).unwrap().unwrap();
    let (remote_addr, next) = (landing.addr(), landing.rkey());
    // A thread frees the memory, and the giver's next poll tells the peer.
    let told = async {
        loop {
            assert!(s.is_quiet().await);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        forgotten = report(&mut c) => assert_eq!(forgotten, Completion::Forgotten { rkey }),
        () = told => unreachable!(),
    }
    grant(&mut s, &mut c, next).await;
    let src = WriteSource::Any(vec![7; 100].into());
    c.queue(Work::Write { src, remote_addr, rkey: next }, false).unwrap();
    c.send(2, b"written").await;
    assert_eq!(s.receive().await.unwrap(), b"written");
}

/// A client that has sent READY is connected. If the server cannot receive the files of the
/// client's wake-up channel, it keeps the connection and is woken by messages.
#[test]
fn a_channel_that_cannot_be_received_is_done_without() {
    alone(channel_is_done_without());
}

async fn channel_is_done_without() {
    BUSY_POLL_LIMIT.set(Duration::ZERO);
    let server = side();
    let mut listener = server.listen();
    let stranger = Arc::new(Stranger::connect(listener.local_addr().shm().unwrap().name()));
    stranger.greet();
    let (incoming, own) = (arrival(&mut listener).await, stranger.own());
    let before = getrlimit(Resource::Nofile).current;
    let answer = async {
        let reader = stranger.clone();
        let ring = tokio::task::spawn_blocking(move || reader.accepted()).await.unwrap();
        limit(Some(3));
        let fds: Vec<_> = own.iter().map(|fd| fd.as_fd()).collect();
        stranger.send(&stranger.ready(stranger.number), &fds);
        ring
    };
    let config = config();
    let (link, ring) = tokio::join!(incoming.accept(&config, &server.pool, b"", TIMEOUT), answer);
    limit(before);
    let mut end = End::new(link.unwrap());
    assert!(end.is_quiet().await);
    let mut waiting = [0; 8];
    ring.read_exact_at(&mut waiting, WAITING).unwrap();
    assert_eq!(u64::from_ne_bytes(waiting), u64::MAX, "by messages");
}
