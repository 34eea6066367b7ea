//! Peers and strangers that give more, or connect more often, than they may. They wait or are
//! refused, and no others are affected.
#![cfg(all(target_os = "linux", feature = "shm"))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::future::poll_fn;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Instant;

use common::stranger::{
    DECLINED, NAME, SLOT_SIZE, SLOTS, Stranger, TAKEN, TAKES_ALL, arrival, chunk, file_called,
    fill_pages, hello_taking, lend, sealed, whole,
};
use common::*;
use rustix::fs::{SealFlags, fcntl_add_seals};
use tonic_rdma_fabric::shm::ShmDevice;
use tonic_rdma_fabric::{
    AnyLink, Fabric, Lending, LinkConfig, LinkError, Listener, ShmAccess, Takes,
};

fn name(key: u32, len: u64) -> Vec<u8> {
    let mut message = chunk(key, 0, len);
    message[0] = NAME;
    message
}

fn side() -> Side {
    Side::new(Fabric::Shm(ShmDevice::new(ShmAccess::SameUser, Lending::Off)))
}

fn stranger_at(listener: &Listener) -> Stranger {
    Stranger::connect(listener.local_addr().shm().unwrap().name())
}

/// A stranger, and the end of a connection that it has entered. The end takes all kinds of memory.
async fn entered(side: &Side) -> (Arc<Stranger>, End) {
    let mut listener = side.listen();
    let stranger = Arc::new(stranger_at(&listener));
    stranger.send(&hello_taking(SLOTS, SLOT_SIZE, TAKES_ALL), &[]);
    let incoming = arrival(&mut listener).await;
    let config = LinkConfig { takes: Takes::ALL, ..config() };
    let entering = stranger.enters(stranger.own());
    let (link, _ring) = tokio::join!(incoming.accept(&config, &side.pool, b"", TIMEOUT), entering);
    (stranger, End::new(link.unwrap()))
}

/// The attack: a process gives a long file that cannot be used, and then another file. After the
/// first file the process has a debt, so this end looks at the second file later, although that
/// file can be used.
#[tokio::test]
async fn files_of_a_peer_that_owes_too_much_wait() {
    const LONG: u64 = 48 << 30;
    let (stranger, mut end) = entered(&side()).await;
    for (key, len, file) in [(1, LONG, sealed(LONG)), (2, 4096, whole(4096))] {
        stranger.send(&name(key, len), &[file.as_fd()]);
    }
    let asker = stranger.clone();
    let answers = tokio::task::spawn_blocking(move || {
        [(); 2].map(|()| asker.receive().expect("the connection goes on").0)
    });
    let answers = tokio::select! {
        answers = answers => answers.unwrap(),
        error = end.death() => panic!("{error}"),
    };
    let kinds = answers.map(|answer| answer[0]);
    assert_eq!(kinds, [DECLINED, TAKEN]);
    let AnyLink::Shm(link) = &end.link else { panic!("{:?}", end.link) };
    assert_eq!(link.stats().deferred_files, 1);
}

/// A file that may be lent.
fn lendable(name: &str) -> OwnedFd {
    let file = file_called(name, 4096, SealFlags::empty());
    fill_pages(&file, 4096);
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE;
    fcntl_add_seals(&file, seals).unwrap();
    file
}

fn pipe() -> OwnedFd {
    std::io::pipe().unwrap().1.into()
}

/// The attack: a peer lends file after file, and takes none back.
#[tokio::test]
async fn no_more_files_than_a_peer_may_lend() {
    const MAX_FILES: u32 = 512;
    let (stranger, mut end) = entered(&side()).await;
    let lends = tokio::task::spawn_blocking(move || {
        for key in 0..10_000 {
            let (file, pipe) = (lendable("lent"), pipe());
            let fds = [file.as_fd(), pipe.as_fd()];
            stranger.send(&lend(key, 0, 4096), if key == 0 { &fds } else { &fds[..1] });
            match stranger.receive() {
                Some((answer, _)) => assert_eq!(answer[0], TAKEN, "file {key}"),
                None => return key,
            }
        }
        panic!("there is no limit");
    });
    let error = end.death().await;
    assert!(matches!(error, LinkError::Breach { .. }), "{error}");
    let why = "more memory than a peer may lend: 513 files";
    assert!(error.to_string().contains(why), "{error}");
    drop(end);
    assert_eq!(lends.await.unwrap(), MAX_FILES);
}

/// For a peer that lends file after file, this process keeps a limited number of descriptors.
#[tokio::test]
async fn descriptors_kept_for_peers_are_limited() {
    const NAME: &str = "kept-for-a-stranger";
    let fabric = Fabric::Shm(ShmDevice::new(ShmAccess::SameUser, Lending::SameUserOnward));
    let (stranger, mut end) = entered(&Side::new(fabric)).await;
    let (first, owner) = (pipe(), pipe());
    let owner_is = rustix::fs::fstat(&owner).unwrap().st_ino;
    // `lend_on` is 1 if a file may be lent on, and 2 if it was lent on.
    let offers = |key: u32, lend_on: u8, pipes: &[&OwnedFd]| {
        let (mut message, file) = (lend(key, 0, 4096), lendable(NAME));
        *message.last_mut().unwrap() = lend_on;
        let fds: Vec<_> =
            [&file].into_iter().chain(pipes.iter().copied()).map(AsFd::as_fd).collect();
        stranger.send(&message, &fds);
    };
    for key in 0..500 {
        match key {
            0 => offers(key, 1, &[&first]),
            1..250 => offers(key, 1, &[]),
            _ => offers(key, 2, &[&owner]),
        }
        // The answer is TAKEN or DECLINED.
        let this = stranger.clone();
        let answer = tokio::task::spawn_blocking(move || this.receive().unwrap().0[0]);
        let answer = tokio::select! {
            answer = answer => answer.unwrap(),
            ended = end.poll() => panic!("{ended:?}"),
        };
        // Files that this end could not lend on are taken nevertheless.
        let kept = key.min(250) + key.saturating_sub(249);
        assert_eq!(answer == TAKEN, key < 250 || kept <= 256, "{key}");
    }
    let pipe = format!("pipe:[{owner_is}]");
    let kept = || {
        let names = std::fs::read_dir("/proc/self/fd").unwrap();
        let names = names.filter_map(|file| file.ok()?.path().read_link().ok());
        let ours = |name: &std::path::PathBuf| {
            let name = name.to_string_lossy();
            name.contains(NAME) || name == pipe
        };
        names.filter(ours).count()
    };
    // One of these descriptors is this test's own. A thread closes the descriptors that were
    // declined.
    let closed = async {
        while kept() != 256 + 1 {
            tokio::task::yield_now().await;
        }
    };
    let closed = tokio::time::timeout(TIMEOUT, closed).await;
    assert!(closed.is_ok(), "{} descriptors", kept());
}

/// The attack: strangers connect and send nothing. When as many are pending as allowed, the next
/// one waits in the kernel. It is let in when one of the others leaves.
#[tokio::test]
async fn strangers_that_say_nothing_are_few_at_a_time() {
    const MAX_PENDING: usize = 64;
    let side = side();
    let mut listener = side.listen();
    let mut silent: Vec<_> = (0..MAX_PENDING).map(|_| stranger_at(&listener)).collect();
    let next = stranger_at(&listener);
    next.greet();
    let mut accepted = pin!(listener.accept());
    // Accepting all waiting strangers takes far fewer turns than this.
    for turn in 0..2000 {
        let waits = poll_fn(|cx| Poll::Ready(accepted.as_mut().poll(cx).is_pending())).await;
        assert!(waits, "accepted at turn {turn}");
        tokio::task::yield_now().await;
    }
    silent.pop();
    let incoming = tokio::time::timeout(TIMEOUT, accepted).await;
    drop(incoming.expect("the next one waits for ever").unwrap());
}

/// A subscriber that counts lines.
struct Lines(Arc<AtomicU64>);

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::INFO
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// Any process that can reach the socket can cause refusals.
#[tokio::test]
async fn refusals_do_not_fill_the_log() {
    const REFUSALS: u64 = 500;
    let lines = Arc::new(AtomicU64::new(0));
    let _log = tracing::subscriber::set_default(Lines(lines.clone()));
    let (side, since) = (side(), Instant::now());
    let mut listener = side.listen();
    for _ in 0..REFUSALS / 10 {
        let strangers: Vec<_> = (0..10).map(|_| stranger_at(&listener)).collect();
        for stranger in &strangers {
            stranger.send(b"no greeting", &[]);
        }
        others_are_served(&mut listener, &side).await;
        let described = "received 11 bytes of the unknown kind 110";
        assert!(strangers.iter().all(|stranger| stranger.refusal().contains(described)));
    }
    // Twenty lines are allowed at once, and then one for each second that the test took.
    let (lines, most) = (lines.load(Ordering::Relaxed), 21 + since.elapsed().as_secs());
    assert!((1..=most.min(REFUSALS / 2)).contains(&lines), "{lines} lines, at most {most}");
}
