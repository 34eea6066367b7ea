//! Memory of a kind that an end did not turn on: an honest peer does not give it, and a peer that
//! gives it commits a breach.
#![cfg(all(target_os = "linux", feature = "shm"))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use common::stranger::{
    NAME, SLOT_SIZE, SLOTS, Stranger, TAKEN, TAKES_ALL, UNLEND, UNNAME, arrival, chunk,
    file_called, hello_taking, lend, sealed, with_key,
};
use common::*;
use rustix::fs::{FallocateFlags, SealFlags, fallocate, fcntl_add_seals};
use tonic_rdma_fabric::shm::ShmDevice;
use tonic_rdma_fabric::{Fabric, Lending, Link, LinkConfig, LinkError, Shared, ShmAccess, Takes};
use tonic_rdma_memory::{LandableBuf, NamedBuffer, Pool, PoolConfig};

const NOTHING: Takes = Takes { lent: false, named: false };
const LENT: Takes = Takes { lent: true, named: false };
const NAMED: Takes = Takes { lent: false, named: true };

/// A side that lends to any peer that takes lent memory.
fn lending() -> Side {
    let fabric = Fabric::Shm(ShmDevice::new(ShmAccess::SameUser, Lending::SameUser));
    let pool = Pool::new(PoolConfig::default(), fabric.registrar()).unwrap().for_peer();
    Side { fabric, pool }
}

fn taking(takes: Takes) -> LinkConfig {
    LinkConfig { takes, ..config() }
}

/// A file that may be lent, and the pipe that accompanies the first file.
fn lendable() -> Vec<OwnedFd> {
    let file = file_called("lent", 4096, SealFlags::empty());
    fallocate(&file, FallocateFlags::empty(), 0, 4096).unwrap();
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE;
    fcntl_add_seals(&file, seals).unwrap();
    vec![file, std::io::pipe().unwrap().1.into()]
}

/// A stranger that claims to take the kinds of memory in `its`, and the end of a connection that
/// the stranger has entered.
async fn entered(side: &Side, own: Takes, its: u8) -> (Arc<Stranger>, End) {
    let mut listener = side.listen();
    let stranger = Arc::new(Stranger::connect(listener.local_addr().shm().unwrap().name()));
    stranger.send(&hello_taking(SLOTS, SLOT_SIZE, its), &[]);
    let incoming = arrival(&mut listener).await;
    let config = taking(own);
    let entering = stranger.enters(stranger.own());
    let (link, _ring) = tokio::join!(incoming.accept(&config, &side.pool, b"", TIMEOUT), entering);
    (stranger, End::new(link.unwrap()))
}

fn name(key: u32) -> Vec<u8> {
    let mut message = chunk(key, 0, 4096);
    message[0] = NAME;
    message
}

#[tokio::test]
async fn a_peer_that_gives_what_is_not_taken_commits_a_breach() {
    let lends = "it lends memory, which this end does not borrow (a setting: \
                 ContextBuilder::borrowing)";
    let names = "it offers a buffer to write to, which this end does not map (a setting: \
                 ContextBuilder::map_peer_buffers)";
    let answers = "it answers an offer, and takes none";
    let side = lending();
    // The features that this end takes and those that the stranger claims to take, the message and
    // files that the stranger sends, and the text of the breach.
    type Case<'a> = (Takes, u8, Vec<u8>, Vec<OwnedFd>, &'a str);
    let cases: Vec<Case<'_>> = vec![
        (NOTHING, TAKES_ALL, lend(1, 0, 4096), lendable(), lends),
        (NAMED, TAKES_ALL, lend(1, 0, 4096), lendable(), lends),
        (NAMED, TAKES_ALL, with_key(UNLEND, 1), vec![], lends),
        (NOTHING, TAKES_ALL, name(1), vec![sealed(4096)], names),
        (LENT, TAKES_ALL, name(1), vec![sealed(4096)], names),
        (LENT, TAKES_ALL, with_key(UNNAME, 1), vec![], names),
        (Takes::ALL, 0, with_key(TAKEN, 1), vec![], answers),
    ];
    for (own, its, message, files, why) in cases {
        let (stranger, mut end) = entered(&side, own, its).await;
        stranger.send(&message, &files.iter().map(AsFd::as_fd).collect::<Vec<_>>());
        let error = end.death().await;
        assert!(matches!(error, LinkError::Breach { .. }), "{error}");
        assert!(error.to_string().contains(why), "{error}, not: {why}");
    }
}

/// Bytes are lent, and buffers are offered, only to the ends that take them.
#[tokio::test]
async fn an_end_gives_what_its_peer_takes() {
    let (me, you) = (lending(), lending());
    for takes in [NOTHING, LENT, NAMED, Takes::ALL] {
        let mut listener = me.listen();
        let addr = listener.local_addr();
        let config = taking(NOTHING);
        let accept = async {
            let incoming = listener.accept().await.unwrap();
            incoming.accept(&config, &me.pool, b"", TIMEOUT).await.unwrap()
        };
        let takes_some = taking(takes);
        let connect = you.connect_with(&addr, &takes_some, b"");
        let (s, c) = tokio::join!(accept, connect);
        let (mut s, mut c) = (End::new(s), End::new(c.unwrap().link));
        assert_eq!((s.link.may_lend(), c.link.may_lend()), (takes.lent, false));

        let bytes = me.payload(4096, 1);
        let lendable = me.pool.lend(&bytes).unwrap();
        let key = lendable.key();
        assert_eq!(s.link.lend(lendable).unwrap(), None);
        assert_eq!(s.link.is_mapping(key), takes.lent, "{takes:?}");

        let buffer = NamedBuffer::new(LandableBuf::zeroed(1 << 20).unwrap());
        buffer.keep_registered();
        let landing = me.pool.landing();
        let registration = landing.register_named(buffer.claim().unwrap(), 0..1 << 20);
        let registered = async {
            loop {
                match registration.take_result() {
                    Some(result) => return result.unwrap(),
                    None => tokio::task::yield_now().await,
                }
            }
        };
        let grant = tokio::time::timeout(TIMEOUT, registered).await.expect("never registered");
        let shared = s.link.share_named(grant.rkey()).unwrap();
        assert_eq!(shared, if takes.named { Shared::Asked } else { Shared::No }, "{takes:?}");
        // An offer is no breach at an end that takes what is offered.
        s.send(0, b"still there").await;
        assert_eq!(c.receive().await.unwrap(), b"still there");
    }
}
