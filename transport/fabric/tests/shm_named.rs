//! Application buffers that a peer maps to write to them, over shared memory. The peers are in this
//! process, and some of them lie.
#![cfg(all(target_os = "linux", feature = "shm"))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use bytes::Bytes;
use common::stranger::{
    self, DECLINED, NAME, Stranger, TAKEN, UNNAME, arrival, chunk, file, whole, with_key,
};
use common::*;
use rustix::fs::SealFlags;
use tonic_rdma_fabric::{
    Fabric, Lending, Link, LinkError, Shared, ShmAccess, Verb, Work, WriteSource,
};
use tonic_rdma_memory::{LandableBuf, NamedBuffer, NamedGrant, NamedLease};

/// The length of a buffer.
const LEN: usize = 100_001;

fn side() -> Side {
    Side::new(Fabric::shm(ShmAccess::SameUser, Lending::Off).unwrap())
}

fn kept() -> NamedBuffer {
    let buffer = NamedBuffer::new(LandableBuf::zeroed(LEN).unwrap());
    buffer.keep_registered();
    buffer
}

/// A grant of the whole buffer to a peer of this side.
async fn granted(side: &Side, lease: NamedLease) -> NamedGrant {
    let landing = side.pool.landing();
    assert!(landing.can_name(&lease));
    let registration = landing.register_named(lease, 0..LEN);
    let made = async {
        loop {
            match registration.take_result() {
                Some(result) => return result.unwrap(),
                None => tokio::task::yield_now().await,
            }
        }
    };
    tokio::time::timeout(TIMEOUT, made).await.expect("it is never registered")
}

/// Returns the buffer once its registration has ended. A thread ends the registration.
async fn taken(buffer: &NamedBuffer) -> LandableBuf {
    buffer.close();
    let idle = std::future::poll_fn(|cx| buffer.poll_idle(cx));
    tokio::time::timeout(TIMEOUT, idle).await.expect("it stays registered");
    buffer.take().unwrap()
}

/// Offers a buffer to the peer of `s` until the peer has answered.
async fn offer(s: &mut End, c: &mut End, rkey: u32) -> Shared {
    let answered = async {
        loop {
            match s.link.share_named(rkey).unwrap() {
                Shared::Asked => {}
                answer => return answer,
            }
            // Messages make sure that both ends are polled, and their sockets with them.
            meet(s, c).await;
        }
    };
    tokio::time::timeout(TIMEOUT, answered).await.expect("NAME is never answered")
}

async fn meet(s: &mut End, c: &mut End) {
    s.send(0, b"named").await;
    c.receive().await.unwrap();
    c.send(0, b"named").await;
    s.receive().await.unwrap();
    tokio::task::yield_now().await;
}

fn write(end: &mut End, (remote_addr, rkey): (u64, u32), bytes: Bytes) -> Result<u64, LinkError> {
    let src = WriteSource::Any(bytes);
    end.queue(Work::Write { src, remote_addr, rkey }, false)
}

#[tokio::test]
async fn a_buffer_is_written_where_it_lies() {
    let (me, you) = (side(), side());
    let (mut s, mut c) = greeted_pair(&me, &you).await;
    let buffer = kept();
    let mut start = std::ptr::null();
    for round in 0..3 {
        let lease = buffer.claim().unwrap();
        let grant = granted(&me, lease.clone()).await;
        let key = (grant.addr(), grant.rkey());
        if round > 0 {
            assert_eq!(s.link.share_named(key.1).unwrap(), Shared::Yes, "it was mapped before");
        }
        assert_eq!(offer(&mut s, &mut c, key.1).await, Shared::Yes);
        let bytes = pattern(LEN, round).freeze();
        write(&mut c, key, bytes.slice(..70_000)).unwrap();
        write(&mut c, (key.0 + 70_000, key.1), bytes.slice(70_000..)).unwrap();
        meet(&mut s, &mut c).await;
        let view = grant.filled(LEN);
        assert!(view == bytes);
        assert!(round == 0 || view.as_ptr() == start, "at another place");
        start = view.as_ptr();
        drop((view, lease));
    }
    assert_eq!(me.pool.stats().application, LEN);
    let mut back = taken(&buffer).await;
    assert!(back.as_ptr() == start && back[..] == pattern(LEN, 2)[..]);
    assert_eq!(me.pool.stats().application, 0);
    back[0] = 0;
}

/// The peers of several connections get the buffer in turn, each with its own mapping. Each is told
/// when the buffer is taken back, and a WRITE then ends the connection.
#[tokio::test]
async fn sixty_connections_have_one_buffer_in_turn() {
    let (me, you) = (side(), side());
    let buffer = kept();
    let mut pairs = Vec::new();
    let mut key = (0, 0);
    for round in 0..60 {
        let (mut s, mut c) = greeted_pair(&me, &you).await;
        let grant = granted(&me, buffer.claim().unwrap()).await;
        key = (grant.addr(), grant.rkey());
        assert_eq!(offer(&mut s, &mut c, key.1).await, Shared::Yes);
        write(&mut c, key, pattern(LEN, round).freeze()).unwrap();
        meet(&mut s, &mut c).await;
        assert!(grant.filled(LEN) == pattern(LEN, round));
        pairs.push((s, c));
    }
    buffer.close();
    for (mut s, mut c) in pairs {
        meet(&mut s, &mut c).await;
        // The end of the key is reported over the socket, which the link reads while no messages
        // arrive through the ring.
        let gone = async {
            while write(&mut c, key, Bytes::from_static(b"late")).is_ok() {
                meet(&mut s, &mut c).await;
                c.is_quiet().await;
            }
        };
        tokio::time::timeout(TIMEOUT, gone).await.expect("the key works for ever");
        let error = c.death().await;
        assert!(matches!(error, LinkError::Completion { verb: Verb::Write, code: 10, .. }));
    }
    // Until a peer was told, it could write, because nothing takes a mapping away.
    assert!(taken(&buffer).await.starts_with(b"late"));
}

/// A mapping that cannot be revoked is made only where the application allows it.
#[tokio::test]
async fn only_what_is_kept_and_in_a_file_is_mapped() {
    let landing = side().pool.landing();
    let once = NamedBuffer::new(LandableBuf::zeroed(LEN).unwrap());
    let private = NamedBuffer::new(vec![0; LEN]);
    private.keep_registered();
    for buffer in [once, private] {
        assert!(!landing.can_name(&buffer.claim().unwrap()), "{buffer:?}");
    }
}

/// A link to a stranger that was let in, and the stranger.
async fn acquainted(side: &Side) -> (End, Arc<Stranger>) {
    let mut listener = side.listen();
    let stranger = Arc::new(Stranger::connect(listener.local_addr().shm().unwrap().name()));
    stranger.greet();
    let incoming = arrival(&mut listener).await;
    let (config, own) = (config(), stranger.own());
    let entering = stranger.enters(own);
    let (link, _ring) = tokio::join!(incoming.accept(&config, &side.pool, b"", TIMEOUT), entering);
    (End::new(link.unwrap()), stranger)
}

fn name(key: u32, addr: u64, len: u64) -> Vec<u8> {
    let mut message = chunk(key, addr, len);
    message[0] = NAME;
    message
}

/// A peer offers files that are no buffers, or too many buffers, or takes memory back with the
/// message for another kind of memory.
#[tokio::test]
async fn offers_that_lie_end_the_connection() {
    let side = side();
    let (small, unsealed) = (whole(4096), file(4096, SealFlags::SHRINK));
    let many = |count: u32, len: u64| (0..count).map(|key| (name(key, 0, len), true)).collect();
    let one = |message, with: bool| vec![(message, with)];
    type Messages = Vec<(Vec<u8>, bool)>;
    let cases: Vec<(Messages, BorrowedFd<'_>, &str)> = vec![
        (one(name(1, 0, 4096), true), unsealed.as_fd(), "not sealed"),
        (one(name(1, 0, 1 << 20), true), small.as_fd(), "4096 bytes"),
        (one(name(1, 0, 0), true), small.as_fd(), "0 are to be mapped"),
        (
            one(name(1, u64::MAX, 2), true),
            small.as_fd(),
            "received Name (kind 14) of 21 bytes with an invalid field",
        ),
        (one(name(1, 0, 4096), false), small.as_fd(), "received Name"),
        (one(name(1, 0, 1 << 40), true), small.as_fd(), "than a peer may offer"),
        (many(513, 4096), small.as_fd(), "than a peer may offer: 513"),
        (vec![(name(1, 0, 4096), true), (name(1, 0, 4096), true)], small.as_fd(), "0x1 twice"),
        (vec![(name(1, 0, 4096), true), (chunk(1, 0, 4096), true)], small.as_fd(), "0x1 twice"),
        (
            vec![(chunk(1, 0, 4096), true), (with_key(UNNAME, 1), false)],
            small.as_fd(),
            "taken back as what it is not",
        ),
        (one(with_key(UNNAME, 1), true), small.as_fd(), "received Unname"),
    ];
    for (messages, file, why) in cases {
        let (mut end, stranger) = acquainted(&side).await;
        let from = stranger.clone();
        let file = file.try_clone_to_owned().unwrap();
        // A thread sends the messages, because the stranger's socket fills while files are mapped,
        // and it must read the answers.
        let sends = std::thread::spawn(move || {
            for (message, with) in messages {
                let files = if with { vec![file.as_fd()] } else { Vec::new() };
                if from.try_send(&message, &files).is_err() {
                    break;
                }
                if message[0] == NAME && from.receive().is_none() {
                    break;
                }
            }
        });
        let error = end.death().await;
        assert!(matches!(error, LinkError::Breach { .. }), "{error}");
        assert!(error.to_string().contains(why), "{error}, expected {why}");
        drop(end);
        sends.join().unwrap();
    }
}

/// A buffer with holes is no breach, because the application may have dropped the buffer before
/// this end looks at it. The attack: a long buffer without pages, for which this process would have
/// to allocate pages.
#[tokio::test]
async fn a_buffer_with_holes_is_declined_and_not_mapped() {
    let side = side();
    let (mut end, stranger) = acquainted(&side).await;
    let sparse = stranger::sealed(64 << 30);
    stranger.send(&name(1, 0, 64 << 30), &[sparse.as_fd()]);
    let from = stranger.clone();
    let answer = tokio::task::spawn_blocking(move || from.receive().unwrap().0);
    let answer = async {
        let mut answer = std::pin::pin!(answer);
        while !answer.is_finished() {
            assert!(end.is_quiet().await);
            tokio::task::yield_now().await;
        }
        (&mut answer).await.unwrap()
    };
    let answer = tokio::time::timeout(TIMEOUT, answer).await.expect("no answer");
    assert_eq!(answer[0], DECLINED);
    assert_eq!(rustix::fs::fstat(&sparse).unwrap().st_blocks, 0);
}

/// A peer may answer offers that were never made, take back keys that were never given, and decline
/// a buffer.
#[tokio::test]
async fn answers_may_be_late_or_no() {
    let me = side();
    let (mut end, stranger) = acquainted(&me).await;
    for message in [with_key(TAKEN, 7), with_key(DECLINED, 7), with_key(UNNAME, 7)] {
        stranger.send(&message, &[]);
    }
    assert!(end.is_quiet().await);
    let grant = granted(&me, kept().claim().unwrap()).await;
    assert_eq!(end.link.share_named(grant.rkey()).unwrap(), Shared::Asked);
    assert!(end.is_quiet().await);
    assert_eq!(end.link.share_named(grant.rkey()).unwrap(), Shared::Asked, "no answer yet");
    let from = stranger.clone();
    let (bytes, files) =
        tokio::task::spawn_blocking(move || from.receive().unwrap()).await.unwrap();
    assert_eq!((bytes[0], files.len()), (NAME, 1));
    stranger.send(&with_key(DECLINED, grant.rkey()), &[]);
    let declined = async {
        while end.link.share_named(grant.rkey()).unwrap() != Shared::No {
            assert!(end.is_quiet().await);
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TIMEOUT, declined).await.expect("DECLINED is not heard");
    let unknown = end.link.share_named(grant.rkey() + 1000);
    assert!(matches!(unknown, Err(LinkError::Misuse { .. })));
    // Landing memory of the pool is no such buffer, because only one peer may ever get it (R12).
    let landing = me.landing(4096);
    assert!(matches!(end.link.share_named(landing.rkey()), Err(LinkError::Misuse { .. })));
    assert!(matches!(end.link.share(grant.rkey()), Err(LinkError::Misuse { .. })));
}
