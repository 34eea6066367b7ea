//! Wake-up channels: the cost of waking connections between two processes, several runtimes, and a
//! peer that writes arbitrary data into the page.
#![cfg(all(target_os = "linux", feature = "shm"))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::stranger::*;
use common::*;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_setfl};
use tonic_rdma_fabric::shm::ShmStats;
use tonic_rdma_fabric::{Addr, AnyLink, Fabric, Lending, LinkError, Listener, ShmAccess};

fn side() -> Side {
    Side::new(Fabric::shm(ShmAccess::SameUser, Lending::Off).unwrap())
}

fn stats(end: &End) -> ShmStats {
    match &end.link {
        AnyLink::Shm(link) => link.stats(),
        other => panic!("{other:?}"),
    }
}

async fn echo(mut end: End) -> End {
    while let Ok(data) = end.receive().await {
        end.send(0, &data).await;
        end.sent.clear();
    }
    end
}

async fn asks(end: &mut End, times: u32) {
    for i in 0..times {
        end.send(0, &i.to_be_bytes()).await;
        assert_eq!(end.receive().await.unwrap(), i.to_be_bytes());
        end.sent.clear();
    }
}

/// Messages on many connections at once, none of which polls. Nearly every message finds its
/// receiver waiting, and few messages need a system call.
#[tokio::test]
async fn messages_on_many_connections_take_few_system_calls() {
    few_system_calls().await;
}

/// The same on a runtime of several threads. Any of these threads may run the poller, and the
/// thread that does so wakes the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_on_many_connections_take_few_system_calls_of_several_threads() {
    few_system_calls().await;
}

/// Without a poller, about one message in 30 would need a system call.
async fn few_system_calls() {
    const CONNECTIONS: usize = 64;
    const ROUNDS: u32 = 200;
    BUSY_POLL_LIMIT.set(Duration::ZERO);
    let (server, client) = (side(), side());
    let mut listener = server.listen();
    let mut pairs = Vec::new();
    for _ in 0..CONNECTIONS {
        pairs.push(pair_over(&mut listener, &server, &client, &config()).await);
    }
    // All pairs start together. A handshake takes long on a busy machine, and a message that is
    // alone needs a system call.
    let mut tasks = Vec::new();
    for (s, mut c) in pairs {
        let asks = async move {
            asks(&mut c, ROUNDS).await;
            // The other end ends when this end is dropped.
            stats(&c)
        };
        tasks.push((tokio::spawn(echo(s)), tokio::spawn(asks)));
    }
    let (mut sends, mut wakes, mut waits) = (0, 0, 0);
    for (echo, asks) in tasks {
        for stats in [asks.await.unwrap(), stats(&echo.await.unwrap())] {
            sends += stats.sends;
            wakes += stats.wakes;
            waits += stats.waits;
        }
    }
    assert_eq!(sends, 2 * CONNECTIONS as u64 * u64::from(ROUNDS));
    assert!(waits > sends * 9 / 10, "{waits} waits, {sends} messages");
    assert!(wakes < sends / 64, "{wakes} system calls for {sends} messages");
}

/// A server on its own runtime, which ends when this value is dropped.
struct Server {
    addr: Addr,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    fn start(threads: usize) -> Server {
        let (told, addr) = std::sync::mpsc::channel();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let thread = std::thread::spawn(move || {
            let mut builder = match threads {
                0 => tokio::runtime::Builder::new_current_thread(),
                _ => tokio::runtime::Builder::new_multi_thread(),
            };
            let runtime = builder.worker_threads(threads.max(1)).enable_all().build().unwrap();
            runtime.spawn(async move {
                let side = side();
                let mut listener = side.listen();
                told.send(listener.local_addr()).unwrap();
                loop {
                    let incoming = listener.accept().await.unwrap();
                    let link = incoming.accept(&config(), &side.pool, b"", TIMEOUT).await.unwrap();
                    tokio::spawn(echo(End::new(link)));
                }
            });
            let _ = runtime.block_on(stopped);
        });
        Server { addr: addr.recv().unwrap(), stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Each of two client runtimes has connections to each of three server runtimes. First a server's
/// runtime ends, then a client's. The connections of the other runtimes continue.
#[test]
fn runtimes_come_and_go() {
    let mut servers: Vec<_> = [0, 1, 3].map(Server::start).into();
    let addrs: Vec<_> = servers.iter().map(|server| server.addr.clone()).collect();
    let client = |threads: usize| {
        let mut builder = match threads {
            0 => tokio::runtime::Builder::new_current_thread(),
            _ => tokio::runtime::Builder::new_multi_thread(),
        };
        let runtime = builder.worker_threads(threads.max(1)).enable_all().build().unwrap();
        let side = runtime.block_on(async { side() });
        (runtime, side)
    };
    let connect = |(runtime, side): &(tokio::runtime::Runtime, Side), addrs: &[Addr]| {
        let ends = addrs.iter().flat_map(|addr| {
            (0..3).map(|_| End::new(runtime.block_on(side.connect(addr)).unwrap().link))
        });
        ends.collect::<Vec<End>>()
    };
    let all_ask = |runtime: &tokio::runtime::Runtime, ends: Vec<End>| {
        runtime.block_on(async {
            let tasks: Vec<_> = ends
                .into_iter()
                .map(|mut end| {
                    tokio::spawn(async move {
                        asks(&mut end, 300).await;
                        end
                    })
                })
                .collect();
            let mut ends = Vec::new();
            for task in tasks {
                ends.push(task.await.unwrap());
            }
            ends
        })
    };
    let (one, other) = (client(0), client(2));
    let (mut ones, others) = (connect(&one, &addrs), connect(&other, &addrs));
    ones = all_ask(&one.0, ones);
    let mut others = all_ask(&other.0, others);
    drop(servers.remove(0));
    for (runtime, ends) in [(&one.0, &mut ones), (&other.0, &mut others)] {
        for mut end in ends.drain(..3) {
            runtime.block_on(end.death());
        }
    }
    ones = all_ask(&one.0, ones);
    drop(ones);
    drop(one);
    others = all_ask(&other.0, others);
    let more = connect(&other, &addrs[1..]);
    others.extend(more);
    drop(all_ask(&other.0, others));
}

async fn strangers(
    listener: &mut Listener,
    side: &Side,
    connections: usize,
) -> Vec<(End, Arc<Stranger>, File)> {
    let mut all: Vec<(End, Arc<Stranger>, File)> = Vec::new();
    for _ in 0..connections {
        let mut stranger = Stranger::connect(listener.local_addr().shm().unwrap().name());
        let fds = match all.first() {
            // Later connections send only the number of the channel.
            Some((_, first, _)) => {
                stranger.number = first.number;
                vec![]
            }
            None => stranger.own(),
        };
        let (end, stranger, ring) = enters(listener, side, stranger, fds).await;
        all.push((end, stranger, ring));
    }
    all
}

async fn enters(
    listener: &mut Listener,
    side: &Side,
    stranger: Stranger,
    fds: Vec<std::os::fd::OwnedFd>,
) -> (End, Arc<Stranger>, File) {
    let stranger = Arc::new(stranger);
    stranger.greet();
    let incoming = arrival(listener).await;
    let config = config();
    let (link, ring) =
        tokio::join!(incoming.accept(&config, &side.pool, b"", TIMEOUT), stranger.enters(fds));
    (End::new(link.unwrap()), stranger, ring)
}

fn get(file: &File, at: u64) -> u64 {
    let mut word = [0; 8];
    file.read_exact_at(&mut word, at).unwrap();
    u64::from_ne_bytes(word)
}

fn put(file: &File, at: u64, value: u64) {
    file.write_all_at(&value.to_ne_bytes(), at).unwrap();
}

/// The connections of one peer have numbers in its channel. A connection that names a channel which
/// does not exist is woken by messages.
#[tokio::test]
async fn connections_say_how_they_are_woken() {
    BUSY_POLL_LIMIT.set(Duration::ZERO);
    let side = side();
    let mut listener = side.listen();
    let mut all = strangers(&mut listener, &side, 3).await;
    assert_eq!(get(&all[0].1.page, OUTBOUND + STAGE), 1);
    for (at, (end, _, ring)) in all.iter_mut().enumerate() {
        assert!(end.is_quiet().await);
        assert_eq!(get(ring, WAITING), at as u64 + 1);
    }
    let unknown = Stranger::connect(listener.local_addr().shm().unwrap().name());
    let (mut end, stranger, ring) = enters(&mut listener, &side, unknown, vec![]).await;
    assert!(end.is_quiet().await);
    assert_eq!(get(&ring, WAITING), u64::MAX);
    let woken = tokio::spawn(async move { end.receive().await.unwrap() });
    tokio::task::yield_now().await;
    put(&ring, PLACES, 4);
    put(&ring, TAIL, 1);
    stranger.send(&[7], &[]);
    assert_eq!(woken.await.unwrap().len(), 4);
}

/// A peer may write anything into the page and punch holes into it. Its own connections still work
/// once it wakes them, and the connections of others are served.
#[tokio::test]
async fn a_page_that_lies_hurts_nobody() {
    BUSY_POLL_LIMIT.set(Duration::ZERO);
    let side = side();
    let mut listener = side.listen();
    let mut all = strangers(&mut listener, &side, 3).await;
    let (mut s, mut c) = pair_over(&mut listener, &side, &side, &config()).await;
    let page = all[0].1.page.try_clone().unwrap();
    let event_fds = [&all[0].1.own_event_fd, &all[0].1.peers_event_fd];
    let event_fds = event_fds.map(|event_fd| event_fd.try_clone().unwrap());
    let done = Arc::new(AtomicBool::new(false));
    let scribbles = std::thread::spawn({
        let done = done.clone();
        move || {
            let mut seed = 1_u64;
            while !done.load(Ordering::Relaxed) {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let at = (seed >> 20) as usize % 2;
                match seed >> 61 {
                    0 => {
                        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                        fallocate(&page, punch, 0, PAGE_BYTES).unwrap();
                    }
                    1 => page.write_all_at(&[0xff; PAGE_BYTES as usize], 0).unwrap(),
                    2 => drop(rustix::io::write(&event_fds[at], &1_u64.to_ne_bytes())),
                    3 => drop(rustix::io::read(&event_fds[at], &mut [0; 8])),
                    _ => put(&page, (seed >> 20) % (PAGE_BYTES / 8) * 8, seed),
                }
            }
        }
    });
    for round in 0..500_usize {
        c.send(0, b"ask").await;
        assert_eq!(s.receive().await.unwrap(), b"ask");
        s.sent.clear();
        c.sent.clear();
        // The stranger waits, and gives valid and invalid numbers for how to wake it.
        let (end, stranger, _) = &mut all[round % 3];
        stranger.put_own(WAITING, [1, 2, 4096, 4097, u64::MAX][round % 5]);
        stranger.put_own(HEAD, round as u64 / 3);
        end.post(0, b"x");
        end.sent.clear();
        assert!(end.is_quiet().await);
    }
    done.store(true, Ordering::Relaxed);
    scribbles.join().unwrap();
    let page = all[0].1.page.try_clone().unwrap();
    let event_fd = all[0].1.peers_event_fd.try_clone().unwrap();
    for (mut end, _stranger, ring) in all {
        let woken = tokio::spawn(async move { end.receive().await.unwrap() });
        let waits = async {
            while get(&ring, WAITING) == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, waits).await.unwrap();
        put(&ring, PLACES, 4);
        put(&ring, TAIL, 1);
        wake(&page, &event_fd, get(&ring, WAITING) - 1);
        assert_eq!(woken.await.unwrap().len(), 4);
    }
}

/// Wakes a connection through the channel, as the end that made the channel does.
fn wake(page: &File, event_fd: &OwnedFd, connection: u64) {
    let (word, bit) = (connection / 64, connection % 64);
    put(page, OUTBOUND + BITS + word * 8, 1 << bit);
    put(page, OUTBOUND + SUMMARY, 1 << word);
    rustix::io::read(event_fd, &mut [0; 8]).unwrap();
}

/// A task that blocks the thread may keep the poller from running. A connection that runs then
/// wakes the other connections of its channel.
#[tokio::test]
async fn a_connection_that_runs_wakes_the_others() {
    BUSY_POLL_LIMIT.set(Duration::ZERO);
    let side = side();
    let mut listener = side.listen();
    let mut all = strangers(&mut listener, &side, 2).await;
    let (mut end, _stranger, ring) = all.pop().unwrap();
    let woken = tokio::spawn(async move { end.receive().await.unwrap() });
    while get(&ring, WAITING) == 0 {
        tokio::task::yield_now().await;
    }
    put(&ring, PLACES, 4);
    put(&ring, TAIL, 1);
    let (first, stranger, _) = &mut all[0];
    // The state after a signal to the eventfd, when the poller has not run since.
    put(&stranger.page, OUTBOUND + SLEEPS, 0);
    put(&stranger.page, OUTBOUND + BITS, 2);
    put(&stranger.page, OUTBOUND + SUMMARY, 1);
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(!woken.is_finished());
    assert!(first.is_quiet().await);
    assert_eq!(tokio::time::timeout(TIMEOUT, woken).await.unwrap().unwrap().len(), 4);
}

/// An eventfd that reports an error ends the connections that use it, and delays no others.
#[tokio::test]
async fn a_full_eventfd_ends_its_channel() {
    BUSY_POLL_LIMIT.set(Duration::ZERO);
    let side = side();
    let mut listener = side.listen();
    let (mut s, mut c) = pair_over(&mut listener, &side, &side, &config()).await;
    let late = strangers(&mut listener, &side, 2).await;
    // The read makes the eventfd writable. The kernel records this before this thread asks for the
    // state of the eventfd.
    let event_fd = &late[0].1.peers_event_fd;
    rustix::io::read(event_fd, &mut [0; 8]).unwrap();
    overflow(event_fd);
    let early = Stranger::connect(listener.local_addr().shm().unwrap().name());
    overflow(&early.peers_event_fd);
    let fds = early.own();
    let early = enters(&mut listener, &side, early, fds).await;
    for (mut end, ..) in late.into_iter().chain([early]) {
        let error = tokio::time::timeout(TIMEOUT, end.death()).await.unwrap();
        assert!(matches!(error, LinkError::Breach { .. }), "{error}");
        assert!(error.to_string().contains("wake-up channel"), "{error}");
    }
    c.send(0, b"ask").await;
    assert_eq!(s.receive().await.unwrap(), b"ask");
}

/// If a page cannot be mapped, each wake-up costs a system call, but the connection continues.
#[tokio::test]
async fn a_page_that_is_mapped_already_is_done_without() {
    BUSY_POLL_LIMIT.set(Duration::ZERO);
    let side = side();
    let mut listener = side.listen();
    let all = strangers(&mut listener, &side, 1).await;
    let mut stranger = Stranger::connect(listener.local_addr().shm().unwrap().name());
    // This is the page of another channel.
    stranger.page = all[0].1.page.try_clone().unwrap();
    let fds = stranger.own();
    let (mut end, _stranger, ring) = enters(&mut listener, &side, stranger, fds).await;
    assert!(end.is_quiet().await);
    assert_eq!(get(&ring, WAITING), u64::MAX, "by messages");
}

/// After both eventfds were accepted, a peer makes them blocking. It empties the eventfd that is
/// read to wake the peer, and fills the other.
#[tokio::test]
async fn an_eventfd_that_blocks_later_holds_up_nobody() {
    BUSY_POLL_LIMIT.set(Duration::ZERO);
    let side = side();
    let mut listener = side.listen();
    let (mut s, mut c) = pair_over(&mut listener, &side, &side, &config()).await;
    let mut stranger = Stranger::connect(listener.local_addr().shm().unwrap().name());
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    stranger.own_event_fd = eventfd(1, flags).unwrap();
    let fds = stranger.own();
    let (mut end, stranger, _) = enters(&mut listener, &side, stranger, fds).await;
    rustix::io::read(&stranger.own_event_fd, &mut [0; 8]).unwrap();
    fill(&stranger.peers_event_fd);
    for event_fd in [&stranger.own_event_fd, &stranger.peers_event_fd] {
        fcntl_setfl(event_fd, OFlags::empty()).unwrap();
    }
    let wakes = |mut end: End| {
        put(&stranger.page, INBOUND + SLEEPS, 1);
        stranger.put_own(WAITING, 1);
        let (told, done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            end.post(0, b"wake up");
            told.send(end).unwrap();
        });
        let end = done.recv_timeout(TIMEOUT).expect("waking the peer waits for ever");
        assert_eq!(get(&stranger.page, INBOUND + SLEEPS), 0, "the peer was to be woken");
        end
    };
    end = wakes(end);
    rustix::io::write(&stranger.own_event_fd, &1_u64.to_ne_bytes()).unwrap();
    end = wakes(end);
    assert_eq!(count(&stranger.own_event_fd), 0, "woken by a read");
    assert!(end.is_quiet().await);
    c.send(0, b"ask").await;
    assert_eq!(s.receive().await.unwrap(), b"ask");
}
