//! SIGKILL under load, over shared memory: a server a hundred times, then a hundred clients of another. The survivor goes
//! on, and nothing of the dead stays with it. The processes are this program again. `TONIC_RDMA_TEST_SEED` repeats the
//! draws of a run; moments still depend on the machine.

// A failed unwrap is a failed test.
#![allow(clippy::unwrap_used, clippy::panic)]

use libtest_mimic::Trial;
use rand::{Rng, SeedableRng, rngs::SmallRng};
use std::{
    collections::BTreeMap,
    fmt::Debug,
    future::Future,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    process::{ExitCode, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines, stdin},
    process::{Child, ChildStdin, ChildStdout, Command},
    runtime::Runtime,
    task::JoinSet,
};
use tokio_stream::{StreamExt as _, iter, once};
use tonic::{Code, Status};
use tonic_rdma::{Channel, Context, Endpoint, FabricKind, Path};
use tonic_rdma_tests::{
    channel::AnyChannel,
    codec::{self, Which},
    harness::{Client, client_of},
    probe::Probe,
    script::{echo, echo_all, payload, receive_all, send_many, steps, summary},
    service::Scripted,
};

const KILLS: usize = 100;
/// What comes after so many kills is the measure.
const FIRST: usize = 10;
/// Then it is compared after every so many.
const EVERY: usize = 15;
/// Calls that a channel keeps in flight.
const WORKERS: u64 = 8;
/// No wait takes this long when all is well.
const LIMIT: Duration = Duration::from_secs(60);
/// `server CODEC PORT`, `client CODEC PORT SEED`: what a process of this program is to be.
const ROLE: &str = "TONIC_RDMA_TEST_ROLE";

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(ROLE) {
        let words: Vec<_> = role.split(' ').collect();
        let runtime = runtime(codec_of(words[1]));
        match words[..] {
            ["server", _, port] => runtime.block_on(serve(port.parse().unwrap())),
            ["client", _, port, seed] => runtime.block_on(load(port.parse().unwrap(), seed.parse().unwrap())),
            _ => panic!("{ROLE}={role}"),
        }
        runtime.shutdown_background();
        return ExitCode::SUCCESS;
    }
    let seed = match std::env::var("TONIC_RDMA_TEST_SEED") {
        Ok(seed) => seed.parse().unwrap_or_else(|e| panic!("TONIC_RDMA_TEST_SEED={seed}: {e}")),
        Err(_) => rand::rng().random(),
    };
    eprintln!("TONIC_RDMA_TEST_SEED={seed}");
    let mut arguments = libtest_mimic::Arguments::from_args();
    // Each counts what this process holds.
    arguments.test_threads = Some(1);
    let trials = vec![
        Trial::test("killed_servers", move || {
            runtime(Which::ZeroCopy).block_on(killed_servers(seed));
            Ok(())
        }),
        Trial::test("killed_clients", move || {
            runtime(Which::Plain).block_on(killed_clients(seed));
            Ok(())
        }),
    ];
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// A process has one codec: a method is known by it.
fn runtime(codec: Which) -> Runtime {
    codec::use_here(codec);
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_keep_alive(Duration::from_millis(20))
        .on_thread_start(move || codec::use_here(codec))
        .enable_all()
        .build()
        .unwrap()
}

/// Each in turn.
fn codec_name(n: usize) -> &'static str {
    if n.is_multiple_of(2) { "zero-copy" } else { "plain" }
}

fn codec_of(name: &str) -> Which {
    match name {
        "zero-copy" => Which::ZeroCopy,
        "plain" => Which::Plain,
        _ => panic!("{ROLE}: no codec {name:?}"),
    }
}

/// What a server's process does: serves, and tells of its pools when a line asks for it.
async fn serve(port: u16) {
    let context = Context::builder().build();
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    let incoming = tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
    let mut server = tonic_rdma::Server::builder().fabrics([FabricKind::Shm]).context(context.clone());
    let router = server.add_service(Scripted::server(&Probe::default()));
    let mut serving = tokio::spawn(router.serve_with_incoming(incoming));
    println!("ready");
    let mut lines = BufReader::new(stdin()).lines();
    loop {
        tokio::select! {
            line = lines.next_line() => {
                let Ok(Some(_)) = line else { return };
                println!("{}", in_use(&context).await);
            }
            end = &mut serving => panic!("the server ended: {end:?}"),
        }
    }
}

/// What a client's process does: calls until it is killed.
async fn load(port: u16, seed: u64) {
    let channel = endpoint(port, &Context::builder().build()).connect().await.unwrap();
    let load = Load::start(&channel, seed, &Tally::default());
    while channel.stats().calls_fast < 2 * WORKERS {
        tokio::task::yield_now().await;
    }
    println!("up");
    // Unless it is killed before, it ends with the test.
    let mut lines = BufReader::new(stdin()).lines();
    while let Ok(Some(_)) = lines.next_line().await {}
    drop(load);
}

async fn in_use(context: &Context) -> usize {
    let stats = context.pool_stats().await;
    stats.iter().map(|(_, stats)| stats.in_use_bytes() + stats.leased).sum()
}

fn endpoint(port: u16, context: &Context) -> Endpoint {
    Endpoint::from_shared(format!("http://127.0.0.1:{port}"))
        .unwrap()
        .fabrics([FabricKind::Shm])
        .context(context.clone())
        .fast_path_timeout(Duration::from_secs(10))
}

/// A port that no outgoing connection takes while nobody listens: it could even connect to itself.
fn fixed_port(rng: &mut SmallRng) -> u16 {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
    let lowest: u16 = range.split_whitespace().next().unwrap().parse().unwrap();
    for _ in 0..1000 {
        let port = rng.random_range(1024..lowest);
        if TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).is_ok() {
            return port;
        }
    }
    panic!("no free port below {lowest}")
}

async fn bounded<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, future).await.unwrap_or_else(|_| panic!("hangs: {what}"))
}

/// A process of this program. It is killed when it is dropped.
struct Process {
    child: Child,
    stdin: ChildStdin,
    stdout: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(role: String) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, stdin, stdout: BufReader::new(stdout).lines() }
    }

    async fn server(port: u16, n: usize) -> Self {
        let mut server = Self::start(format!("server {} {port}", codec_name(n)));
        assert_eq!(server.line().await, "ready");
        server
    }

    async fn line(&mut self) -> String {
        bounded("a line of another process", self.stdout.next_line())
            .await
            .unwrap()
            .expect("the process has ended")
    }

    async fn in_use(&mut self) -> usize {
        self.stdin.write_all(b"pools\n").await.unwrap();
        self.line().await.parse().unwrap()
    }

    fn id(&self) -> String {
        self.child.id().expect("the process has ended").to_string()
    }

    /// SIGKILL.
    async fn kill(mut self) {
        assert_eq!(self.child.try_wait().unwrap(), None, "it ended before it was killed");
        self.child.kill().await.unwrap();
    }
}

/// What a process holds of the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    fds: usize,
    memfd_maps: usize,
    threads: usize,
}

impl Held {
    fn by(process: &str) -> Self {
        let list = |what| std::fs::read_dir(format!("/proc/{process}/{what}")).unwrap();
        let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
        let files = list("fd").filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
        let files: Vec<_> = files.map(|file| file.display().to_string()).collect();
        for line in maps.lines().chain(files.iter().map(String::as_str)) {
            assert!(!line.contains("/dev/shm"), "{process}: {line}");
        }
        Self {
            fds: list("fd").count(),
            memfd_maps: maps.lines().filter(|line| line.contains("/memfd:")).count(),
            threads: list("task").count(),
        }
    }

    fn within(self, limit: Self) -> bool {
        self.fds <= limit.fds && self.memfd_maps <= limit.memfd_maps && self.threads <= limit.threads
    }
}

/// Reads until `done`. What a link leaves is let go behind its calls, and nobody tells when.
async fn until<T: Debug, F: Future<Output = T>>(
    what: &str,
    mut read: impl FnMut() -> F,
    mut done: impl FnMut(&T) -> bool,
) {
    let begin = Instant::now();
    loop {
        let now = read().await;
        if done(&now) {
            return;
        }
        assert!(begin.elapsed() < LIMIT, "{what}: {now:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The checkpoints of one process.
#[derive(Default)]
struct Watch(Option<Held>);

impl Watch {
    async fn check(&mut self, process: &str, kills: usize) {
        let read = || async { Held::by(process) };
        match self.0 {
            Some(measure) => {
                let what = format!("more is held after {kills} kills than the {measure:?} after {FIRST}");
                until(&what, read, |now| now.within(measure)).await;
            }
            None => {
                // That of a moment could be too much, for good.
                let (mut last, mut same) = (None, 0);
                until("what is held does not settle", read, |now| {
                    same = if last == Some(*now) { same + 1 } else { 0 };
                    last = Some(*now);
                    same == 40
                })
                .await;
                self.0 = last;
            }
        }
        eprintln!("after {kills} kills: {:?} held at rest", Held::by(process));
    }
}

fn is_checkpoint(kills: usize) -> bool {
    kills >= FIRST && (kills - FIRST).is_multiple_of(EVERY)
}

/// How calls ended.
#[derive(Clone, Default)]
struct Tally(Arc<Mutex<BTreeMap<String, u64>>>);

impl Tally {
    fn add(&self, end: &str) {
        *self.0.lock().unwrap().entry(end.to_owned()).or_default() += 1;
    }

    fn of(&self, end: &str) -> u64 {
        self.0.lock().unwrap().get(end).copied().unwrap_or(0)
    }
}

/// A channel with calls in flight.
struct Load {
    on: Arc<AtomicBool>,
    workers: JoinSet<()>,
}

impl Load {
    fn start(channel: &Channel, seed: u64, tally: &Tally) -> Self {
        let on = Arc::new(AtomicBool::new(true));
        let mut workers = JoinSet::new();
        for worker in 0..WORKERS {
            let (on, tally) = (Arc::clone(&on), tally.clone());
            let mut client = client_of(AnyChannel::Rdma(channel.clone()));
            let mut rng = SmallRng::seed_from_u64(seed.wrapping_mul(WORKERS).wrapping_add(worker));
            workers.spawn(async move {
                while on.load(Ordering::Relaxed) {
                    match bounded("a call", one_call(&mut client, &mut rng)).await {
                        Ok(()) => tally.add("OK"),
                        Err(status) => {
                            check_lost(&status);
                            tally.add(&format!("{:?}", status.code()));
                            // A server that is gone refuses at once, and a start takes the CPU.
                            tokio::time::sleep(Duration::from_millis(2)).await;
                        }
                    }
                }
            });
        }
        Self { on, workers }
    }

    /// Waits for the calls in flight. Fails if one went wrong.
    async fn stop(mut self) {
        self.on.store(false, Ordering::Relaxed);
        while let Some(worker) = self.workers.join_next().await {
            worker.unwrap();
        }
    }
}

/// One call of any kind, with messages of 64 bytes to 1 MiB. Wrong data, and an end that only looks good, panic.
async fn one_call(client: &mut Client, rng: &mut SmallRng) -> Result<(), Status> {
    let seed = rng.random_range(0..1000);
    let bits = rng.random_range(6..=20);
    let size = rng.random_range(64..=1usize << bits);
    let three = move || (0..3).map(move |n: u64| payload(seed + n, size));
    match rng.random_range(0..6) {
        0..=2 => {
            let request = steps("", [echo(1)]).with_payload(seed, size);
            client.unary(request).await?.into_inner().expect(seed, size);
        }
        3 => {
            let mut replies = client.download(steps("", [send_many(seed, size, 3)])).await?.into_inner();
            for seed in seed..seed + 3 {
                replies.message().await?.expect("a reply is missing").expect(seed, size);
            }
            assert_eq!(replies.message().await?, None);
        }
        4 => {
            let stream = once(steps("", [receive_all(), summary()])).chain(iter(three()));
            let reply = client.upload(stream).await?.into_inner();
            assert_eq!((reply.count, reply.total), (4, 3 * size as u64));
        }
        _ => {
            let stream = once(steps("", [echo_all()])).chain(iter(three()));
            let mut replies = client.chat(stream).await?.into_inner();
            replies.message().await?.expect("a reply is missing").expect(0, 0);
            for seed in seed..seed + 3 {
                replies.message().await?.expect("a reply is missing").expect(seed, size);
            }
            assert_eq!(replies.message().await?, None);
        }
    }
    Ok(())
}

/// UNAVAILABLE, or one of the other words that hyper has for a TCP connection that broke.
fn check_lost(status: &Status) {
    let by_hyper = || {
        let text = format!("{status:?}");
        ["h2 protocol error", "transport error", "Canceled", "operation was canceled", "connection"]
            .iter()
            .any(|word| text.contains(word))
    };
    let right = match status.code() {
        Code::Unavailable => true,
        Code::Unknown | Code::Internal | Code::Cancelled => by_hyper(),
        _ => false,
    };
    assert!(right, "no lost connection: {status:?}");
}

async fn back_on_shm(channel: &mut Channel) {
    let last = channel.clone();
    let back = async {
        while channel.path().path != Path::Shm {
            channel.path_changed().await;
        }
    };
    tokio::time::timeout(LIMIT, back).await.unwrap_or_else(|_| panic!("not back on shm: {}", last.path()));
}

/// Waits for a call that went well. Whether that was while the fast path was still away.
async fn goes_on(channel: &Channel, rng: &mut SmallRng) -> bool {
    let mut client = client_of(AnyChannel::Rdma(channel.clone()));
    loop {
        match one_call(&mut client, rng).await {
            Ok(()) => return channel.path().path == Path::Tcp,
            Err(status) => check_lost(&status),
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn killed_servers(seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let port = fixed_port(&mut rng);
    let context = Context::builder().build();
    let (tally, mut watch) = (Tally::default(), Watch::default());
    let (mut fast, mut tcp, mut answered, mut returns) = (0, 0, 0, 0);
    let mut server = Process::server(port, 0).await;
    // One channel lives through all of it. With each loss it waits longer before it tries for the fast path again, so
    // others take turns: each sees its path go twice at least, once it was up.
    let mut veteran = endpoint(port, &context).connect().await.unwrap();
    let mut beside = Load::start(&veteran, seed, &tally);
    let mut turn = None;
    for kill in 1..=KILLS {
        match &mut turn {
            None => {
                let channel = endpoint(port, &context).connect().await.unwrap();
                assert_eq!(channel.path().path, Path::Shm, "{}", channel.path());
                assert!(Held::by("self").memfd_maps > 0, "what is shared is not seen");
                let load = Load::start(&channel, rng.random(), &tally);
                turn = Some((channel, load, 0));
            }
            // Mostly over TCP, or while the path is set up.
            Some((_, _, losses)) if *losses == 1 => {}
            Some((channel, ..)) => {
                answered += usize::from(bounded("a call over TCP", goes_on(channel, &mut rng)).await);
                back_on_shm(channel).await;
                returns += 1;
            }
        }
        tokio::time::sleep(Duration::from_micros(rng.random_range(0..60_000))).await;
        server.kill().await;
        if let Some((.., losses)) = &mut turn {
            *losses += 1;
        }
        if let Some((channel, load, _)) = turn.take_if(|(.., losses)| *losses == 3 || is_checkpoint(kill)) {
            load.stop().await;
            fast += channel.stats().calls_fast;
            tcp += channel.stats().calls_tcp;
        }
        if is_checkpoint(kill) {
            beside.stop().await;
            until("in use, with no server left", || in_use(&context), |bytes| *bytes == 0).await;
            watch.check("self", kill).await;
            beside = Load::start(&veteran, rng.random(), &tally);
        }
        server = Process::server(port, kill).await;
    }
    back_on_shm(&mut veteran).await;
    beside.stop().await;
    let carried = veteran.stats().calls_fast;
    one_call(&mut client_of(AnyChannel::Rdma(veteran.clone())), &mut rng).await.unwrap();
    assert_eq!(veteran.stats().calls_fast, carried + 1, "{}", veteran.path());
    server.kill().await;
    eprintln!(
        "servers: {KILLS} kills, {answered} times first answered over TCP, {returns} returns to shm, calls: {:?}",
        tally.0.lock().unwrap()
    );
    eprintln!("begun by the channels that took turns: {fast} over shm, {tcp} over TCP");
    assert!(fast > 0 && tcp > 0 && answered > 0 && returns > 0);
    assert!(tally.of("OK") > 0 && tally.of("Unavailable") > 0);
}

async fn killed_clients(seed: u64) {
    /// So many live at once.
    const AT_ONCE: usize = 5;
    let mut rng = SmallRng::seed_from_u64(seed);
    let port = fixed_port(&mut rng);
    let context = Context::builder().build();
    let (tally, mut watch) = (Tally::default(), Watch::default());
    let mut server = Process::server(port, 0).await;
    let process = server.id();
    let mut healthy = None;
    let mut under_way = 0;
    for kills in (AT_ONCE..=KILLS).step_by(AT_ONCE) {
        if healthy.is_none() {
            let channel = endpoint(port, &context).connect().await.unwrap();
            let load = Load::start(&channel, rng.random(), &tally);
            healthy = Some((channel, load));
        }
        let mut doomed = JoinSet::new();
        for n in 0..AT_ONCE {
            let mut client =
                Process::start(format!("client {} {port} {}", codec_name(kills + n), rng.random::<u64>()));
            let (early, pause) = (rng.random_ratio(1, 4), Duration::from_micros(rng.random_range(0..60_000)));
            doomed.spawn(async move {
                if !early {
                    assert_eq!(client.line().await, "up");
                }
                tokio::time::sleep(pause).await;
                client.kill().await;
                usize::from(!early)
            });
        }
        under_way += doomed.join_all().await.into_iter().sum::<usize>();
        if is_checkpoint(kills)
            && let Some((channel, load)) = healthy.take()
        {
            load.stop().await;
            assert_eq!(channel.path().path, Path::Shm, "{}", channel.path());
            assert_eq!(channel.stats().calls_tcp, 0, "{:?}", channel.stats());
            drop(channel);
            let begin = Instant::now();
            while server.in_use().await != 0 {
                assert!(begin.elapsed() < LIMIT, "in use, with no client left: {}", server.in_use().await);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            watch.check(&process, kills).await;
        }
    }
    eprintln!(
        "clients: {KILLS} kills, {under_way} with calls over shm under way, healthy: {:?}",
        tally.0.lock().unwrap()
    );
    let ends = tally.0.lock().unwrap();
    assert!(ends.len() == 1 && ends.contains_key("OK"), "calls of the healthy client: {ends:?}");
}
