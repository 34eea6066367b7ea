//! Limits on the memory and the handlers that a peer with a ticket can claim through streams alone.
//! The tests run over shared memory. The server has its own process, whose memory is measured.

// A failed unwrap is a failed test.
#![allow(clippy::unwrap_used, clippy::panic)]

mod model;
mod peer;
mod victim;

use std::convert::Infallible;
use std::future::{Future, pending};
use std::net::SocketAddr;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context as Task, Poll};

use bytes::Bytes;
use http::{Request, Response};
use libtest_mimic::{Arguments, Trial};
use peak_alloc::PeakAlloc;
use peer::{Ended, Peer, data};
use tokio::io::{AsyncBufReadExt as _, BufReader, stdin};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::transport::server::TcpIncoming;
use tonic_rdma::{Context, FabricKind, Server};
use tonic_rdma_proto::frame::Frame;
use tonic_rdma_proto::{LentBody, LentPlace};
use tonic_rdma_tests::codec::CodecKind;
use tonic_rdma_tests::process::{Process, role, runtime};
use tonic_rdma_tests::wire::head;
use tower::Service;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Bytes by which an unread window, or [`UNREAD`] in landing memory, may increase the server's
/// memory.
const MAX_GROWTH: usize = 4 << 20;
/// Maximum bytes that land on the unread stream.
const UNREAD: usize = 2 << 20;
/// A stream whose body the server discards.
const DISCARDED: u32 = 3;
/// Bytes sent on the discarded stream before the first measurement.
const WARM_UP: usize = 100 * 4000;

fn main() -> ExitCode {
    if let Some(role) = role() {
        let at = || role[1].parse().unwrap();
        runtime(CodecKind::ZeroCopy).block_on(async {
            match role[0].as_str() {
                "victim" => victim::call(at()).await,
                "beside" => victim::run_beside(at(), &role[2]).await,
                _ => serve(role[1].parse().unwrap(), &role[2..]).await,
            }
        });
        return ExitCode::SUCCESS;
    }
    let mut arguments = Arguments::from_args();
    // Each test measures the memory of a process.
    arguments.test_threads = Some(1);
    let eager: [(&str, &[usize]); 6] = [
        ("1", &[1]),
        ("5", &[5]),
        ("7", &[7]),
        ("100", &[100]),
        ("4000", &[4000]),
        ("mixed", &[1, 4000, 5, 333, 2, 1700]),
    ];
    let landed: [(&str, &[usize], usize); 5] = [
        ("1", &[1], 2000),
        ("7", &[7], 2000),
        ("100", &[100], 2000),
        ("5000", &[5000], 2000),
        ("mixed", &[1, 6000, 3000, 2], 2000),
    ];
    let mut trials = Vec::new();
    for (name, sizes) in eager {
        let name = format!("a_full_window_of_data_frames_of_{name}_bytes");
        trials.push(trial(name, move || a_full_window_of_data_frames(sizes)));
    }
    for (name, sizes, pieces) in landed {
        let name = format!("a_window_of_{name}_bytes_landed_by_standing_grant");
        trials.push(trial(name, move || landed_by_standing_grant(sizes, pieces)));
    }
    for (name, settings, lends) in
        [("", "", false), ("_borrowed", "borrowing", true), ("_copied", "borrowing copying", false)]
    {
        for seed in 1..4 {
            trials.push(trial(format!("heap_is_within_the_windows{name}_{seed}"), move || {
                model::heap_is_within_the_windows(settings, lends, 0x9e37_79b9 * seed)
            }));
        }
    }
    trials.push(trial("one_byte_of_each_message".into(), one_byte_of_each_message));
    trials
        .push(trial("data_frames_between_landed_pieces".into(), data_frames_between_landed_pieces));
    trials.push(trial(
        "begins_out_of_bounds_end_the_connection".into(),
        begins_out_of_bounds_end_the_connection,
    ));
    trials.push(trial(
        "leases_that_nobody_gave_end_the_connection".into(),
        leases_that_nobody_gave_end_the_connection,
    ));
    trials.push(trial("rapid_resets_end_the_connection".into(), rapid_resets_end_the_connection));
    let figures = trial("victim".into(), victim::print_figures);
    trials.push(figures.with_ignored_flag(true));
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trial<F: Future<Output = ()>>(name: String, test: impl FnOnce() -> F + Send + 'static) -> Trial {
    Trial::test(name, move || {
        runtime(CodecKind::ZeroCopy).block_on(test());
        Ok(())
    })
}

/// Handlers that never answer: `Hold` keeps its request without reading it, `Discard` drops it.
#[derive(Clone, Default)]
struct Silent {
    begun: Arc<AtomicUsize>,
}

impl NamedService for Silent {
    const NAME: &'static str = "tonic_rdma.conformance.v1.Conformance";
}

impl Service<Request<Body>> for Silent {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Task<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.begun.fetch_add(1, Relaxed);
        Box::pin(async move {
            let method = request.uri().path().rsplit('/').next().unwrap().to_owned();
            let held = match method.as_str() {
                "Hold" => Some(request),
                "Discard" => {
                    drop(request);
                    None
                }
                _ => return Ok(Status::ok("").into_http()),
            };
            pending::<()>().await;
            drop(held);
            unreachable!("it waits for ever")
        })
    }
}

/// Resident bytes, without shared memory: shared pages are the pool's landing memory, some of which
/// stays mapped after any traffic. Landing memory in use is counted separately.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let kib = |name| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse::<usize>().unwrap()
    };
    (kib("VmRSS:") - kib("RssShmem:")) * 1024
}

/// The server's process: prints its address, and answers each question with a number.
async fn serve(max_streams: u32, settings: &[String]) {
    let is_set = |setting: &str| settings.iter().any(|set| set == setting);
    let context = Context::builder().borrowing(is_set("borrowing")).build();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let silent = Silent::default();
    let begun = silent.begun.clone();
    let mut server = Server::builder()
        .fabrics([FabricKind::Shm])
        .context(context.clone())
        .copy_on_delivery(is_set("copying"))
        .measuring(is_set("measuring"))
        .max_concurrent_streams(max_streams);
    tokio::spawn(server.add_service(silent).serve_with_incoming(TcpIncoming::from(listener)));
    println!("{at}");
    let mut lines = BufReader::new(stdin()).lines();
    while let Ok(Some(question)) = lines.next_line().await {
        match question.as_str() {
            "resident" => println!("{}", resident()),
            "landing" => println!("{}", landing(&context).await),
            "heap" => println!("{}", HEAP.current_usage()),
            "peak" => println!("{}", HEAP.peak_usage()),
            "begun" => println!("{}", begun.load(Relaxed)),
            _ => panic!("no such question: {question}"),
        }
    }
}

async fn landing(context: &Context) -> usize {
    context.pool_stats().await.iter().map(|(_, stats)| stats.filled).sum()
}

/// A hostile peer, and the server that it is connected to.
struct Fixture {
    server: Process,
    peer: Peer,
    /// The server's resident bytes before the test.
    before: usize,
}

impl Fixture {
    /// Opens stream 1, which is never read, and the discarded stream.
    async fn new() -> Self {
        let mut server = Process::start("", "server 1024");
        let at: SocketAddr = server.read_line().await.parse().unwrap();
        let mut peer = Peer::connect(at).await;
        peer.send(&[head(1, "Hold"), head(DISCARDED, "Discard")]).await.unwrap();
        peer.sync().await.unwrap();
        // Send enough that the server allocates what every connection needs: buffers and the ring.
        for n in 1..=WARM_UP / 4000 {
            peer.wait_for_window(n * 4000).await;
            peer.send(&[data(DISCARDED, 4000)]).await.unwrap();
        }
        peer.sync().await.unwrap();
        let mut fixture = Fixture { server, peer, before: 0 };
        fixture.before = fixture.ask("resident").await;
        fixture
    }

    async fn ask(&mut self, what: &str) -> usize {
        self.server.ask(what).await.parse().unwrap()
    }

    /// Checks that the server holds little for unread data. Landing memory counts even if the
    /// server has not touched it.
    async fn check(mut self, sent: usize) {
        self.peer.sync().await.unwrap();
        let now = self.ask("resident").await;
        let landing = self.ask("landing").await;
        let more = now.saturating_sub(self.before);
        println!("{sent} bytes unread: {more} more are resident, {landing} of landing memory held");
        assert!(
            more + landing <= MAX_GROWTH,
            "{sent} bytes of payload keep {more} and {landing} of landing memory"
        );
        assert!(sent < 1 << 20 || more + landing >= sent / 2, "it is not held: {more} + {landing}");
        assert_eq!(self.ask("begun").await, 2);
    }
}

async fn a_full_window_of_data_frames(sizes: &[usize]) {
    let mut fixture = Fixture::new().await;
    let window = fixture.peer.window as usize;
    let (mut sent, mut frames) = (0, Vec::new());
    for len in sizes.iter().copied().cycle() {
        let len = len.min(window - sent);
        frames.push(data(1, len));
        sent += len;
        if frames.len() == 1000 || sent == window {
            fixture.peer.send(&frames).await.unwrap();
            frames.clear();
        }
        if sent == window {
            break;
        }
    }
    fixture.check(sent).await;
}

/// Each message has one byte for the unread stream, and is filled up with data for the discarded
/// one.
async fn one_byte_of_each_message() {
    let mut fixture = Fixture::new().await;
    let mut others = WARM_UP;
    for _ in 0..10_000 {
        fixture.peer.wait_for_window(others + 4000).await;
        fixture.peer.send(&[data(1, 1), data(DISCARDED, 4000)]).await.unwrap();
        others += 4000;
    }
    fixture.check(10_000).await;
}

/// All pieces arrive by WRITE without a request: `DONE` names a standing grant, which any stream
/// may use.
async fn landed_by_standing_grant(sizes: &[usize], pieces: usize) {
    let mut fixture = Fixture::new().await;
    let sent = land(&mut fixture, sizes, pieces, |_| None).await;
    fixture.check(sent).await;
}

async fn data_frames_between_landed_pieces() {
    let mut fixture = Fixture::new().await;
    let sent = land(&mut fixture, &[3000, 6000, 2900], 1200, |n| Some(data(1, 1 + n % 3))).await;
    fixture.check(sent).await;
}

/// Lands up to `pieces` pieces, and at most [`UNREAD`] bytes on stream 1. Each piece on stream 1 is
/// followed by the frame that `between` returns. Returns the bytes sent on stream 1.
async fn land(
    fixture: &mut Fixture,
    sizes: &[usize],
    pieces: usize,
    between: impl Fn(usize) -> Option<Frame>,
) -> usize {
    let peer = &mut fixture.peer;
    // After a long REQUEST on the discarded stream the server makes standing grants of this
    // length.
    peer.send(&[Frame::Request { stream: DISCARDED, len: 64 << 10, begin: 0, field: None }])
        .await
        .unwrap();
    let (mut sent, mut landed) = (0, 0);
    let mut sizes = sizes.iter().copied().cycle();
    while landed < pieces {
        let grant = peer.next_standing_grant().await;
        let (stream, len) = match landed % 5 {
            // Standing grants keep the length of the longest of the last eight transfers.
            4 => (DISCARDED, grant.len as usize),
            _ => (1, sizes.next().unwrap().min(grant.len as usize)),
        };
        landed += 1;
        if stream == 1 && sent + len + 3 > UNREAD {
            break;
        }
        // Touch every byte of the grant.
        peer.write(grant, Bytes::from(vec![0; grant.len as usize]));
        let mut frames =
            vec![Frame::Done { stream, end: false, id: grant.id, len: len as u32, begin: 0 }];
        if stream == 1 {
            sent += len;
            if let Some(Frame::Data { data, .. }) = between(landed) {
                sent += data.len();
                frames.push(Frame::Data { stream, end: false, data });
            }
        }
        peer.send(&frames).await.unwrap();
    }
    sent
}

/// A DONE on a standing grant must begin below the modulus and end within the grant. Otherwise the
/// connection ends.
async fn begins_out_of_bounds_end_the_connection() {
    let mut server = Process::start("", "server 100");
    let at: SocketAddr = server.read_line().await.parse().unwrap();
    let long = 64 << 10;
    /// Returns begin and length of a DONE for a grant of this length.
    type Done = fn(u32) -> (u32, u32);
    let cases: [(Done, &str); 5] = [
        (|_| (64, 1), "begins at 64, the limit is 63"),
        (|_| (u32::MAX, 1), "begins at 4294967295, the limit is 63"),
        (|len| (1, len), "bytes from 1 on for"),
        (|len| (63, len - 62), "bytes from 63 on for"),
        (|_| (63, u32::MAX), "bytes from 63 on for"),
    ];
    for (of, expected) in cases {
        let mut peer = Peer::connect(at).await;
        peer.send(&[
            head(1, "Hold"),
            Frame::Request { stream: 1, len: long, begin: 63, field: None },
        ])
        .await
        .unwrap();
        let grant = peer.next_standing_grant().await;
        let (begin, len) = of(grant.len);
        peer.send(&[Frame::Done { stream: 1, end: false, id: grant.id, len, begin }])
            .await
            .unwrap();
        let Err(Ended(why)) = peer.sync().await else { panic!("{begin} {len}: it goes on") };
        assert!(why.contains(expected), "{why}");
    }
    let mut peer = Peer::connect(at).await;
    peer.send(&[head(1, "Hold"), Frame::Request { stream: 1, len: long, begin: 64, field: None }])
        .await
        .unwrap();
    let Err(Ended(why)) = peer.sync().await else { panic!("it goes on") };
    assert!(why.contains("begins at 64 modulo 64"), "{why}");
    // The largest permitted begin and length are accepted.
    let mut peer = Peer::connect(at).await;
    peer.send(&[head(1, "Hold"), Frame::Request { stream: 1, len: long, begin: 63, field: None }])
        .await
        .unwrap();
    let grant = peer.next_standing_grant().await;
    peer.send(&[Frame::Done {
        stream: 1,
        end: false,
        id: grant.id,
        len: grant.len - 63,
        begin: 63,
    }])
    .await
    .unwrap();
    peer.sync().await.unwrap();
}

/// A peer announces a lease that it has not given, or returns a lease that it was not given.
async fn leases_that_nobody_gave_end_the_connection() {
    let mut server = Process::start("", "server 100 borrowing");
    let at: SocketAddr = server.read_line().await.parse().unwrap();
    let mut plain = Process::start("", "server 100");
    let plain_at: SocketAddr = plain.read_line().await.parse().unwrap();
    let mut copying = Process::start("", "server 100 borrowing copying");
    let copying_at: SocketAddr = copying.read_line().await.parse().unwrap();
    let lent = |lease, len, addr| {
        let (head, place) =
            (Bytes::from_static(b"\0\0\0\0\x05"), LentPlace { lease, key: 0, addr });
        let lent = Box::new(LentBody { head, place, len, tail: Bytes::new() });
        Frame::Lent { stream: 1, end: false, lent }
    };
    for (at, frames, expected) in [
        (at, vec![lent(1, 4096, 0)], "nothing is lent"),
        (at, vec![lent(1, u32::MAX, 1 << 60)], "nothing is lent"),
        (at, vec![lent(1, 0, 0)], "no bytes"),
        (at, vec![lent(1, 4096, u64::MAX - 5)], "past the end of the address space"),
        (at, vec![lent(1, 1, 0), lent(1, 1, 0)], "its number is in use"),
        (at, vec![Frame::Return { lease: 7 }], "RETURN of lease 7, which is not out"),
        (plain_at, vec![lent(1, 4096, 0)], "this side does not borrow"),
        (copying_at, vec![lent(1, 4096, 0)], "this side does not borrow"),
    ] {
        let mut peer = Peer::connect(at).await;
        peer.send(&[head(1, "Hold")]).await.unwrap();
        peer.send(&frames).await.unwrap();
        let Err(Ended(why)) = peer.sync().await else { panic!("{frames:?}: it goes on") };
        assert!(why.contains(expected), "{why}, not: {expected}");
    }
    // The server continues.
    let mut peer = Peer::connect(at).await;
    peer.send(&[head(1, "Hold")]).await.unwrap();
    peer.sync().await.unwrap();
}

/// Streams are opened and reset within all limits: the number of open ones never exceeds the
/// server's limit.
async fn rapid_resets_end_the_connection() {
    const STREAMS: u32 = 25;
    let mut server = Process::start("", &format!("server {STREAMS}"));
    let at: SocketAddr = server.read_line().await.parse().unwrap();
    let mut peer = Peer::connect(at).await;
    let mut pairs = 0;
    let Ended(why) = loop {
        let ids = pairs + 1..pairs + 1 + STREAMS;
        let heads: Vec<_> = ids.clone().map(|id| head(id, "Hold")).collect();
        let resets: Vec<_> = ids.map(|stream| Frame::Reset { stream, code: 8 }).collect();
        let round = async {
            peer.send(&heads).await?;
            peer.sync().await?;
            peer.send(&resets).await?;
            peer.sync().await
        };
        if let Err(ended) = round.await {
            break ended;
        }
        pairs += STREAMS;
        assert!(pairs < 50_000, "nothing limits what is begun for a client that resets it all");
    };
    assert!(why.contains("enhance your calm"), "{why}");
    let begun: u32 = server.ask("begun").await.parse().unwrap();
    println!("{begun} handlers were begun, by {pairs} pairs");
    // The budget is 1,600 resets for so low a stream limit, and time restores some. A call that is
    // reset before its handler first runs does not count as begun.
    assert!(pairs + STREAMS >= 1600, "{pairs}");
    assert!((1..=pairs + STREAMS).contains(&begun), "{begun} of {pairs}");
    // The server still serves new connections, even from the same host.
    let mut peer = Peer::connect(at).await;
    peer.send(&[head(1, "Other")]).await.unwrap();
    peer.sync().await.unwrap();
    let answered = |frame: &Frame| matches!(frame, Frame::Headers { stream: 1, .. });
    while !peer.frames.iter().any(answered) {
        peer.sync().await.unwrap();
    }
}
