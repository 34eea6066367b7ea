//! A server in its own process: stock tonic's, or tonic-rdma's.

use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tonic::codec::CompressionEncoding::Gzip;
use tonic::service::InterceptorLayer;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Status};
use tonic_rdma::{Context, Policy, PoolConfig};
use tonic_rdma_memory::test_util::process::{FSTATFS, MEMFD_CREATE, forbid, forbid_unix_sockets};
use tonic_rdma_tests::codec::CodecKind;
use tonic_rdma_tests::fabric::{Fabric, bind_ip, fixed_port};
use tonic_rdma_tests::probe::Probe;
use tonic_rdma_tests::process::{Process, runtime};
use tonic_rdma_tests::service::Scripted;

use crate::{HEAP, client, fork};

/// The metadata of a call whose handler acts on its process: see [`act`].
pub const ACT: &str = "x-act";
/// How long a process pauses. Earlier versions ended the connection to a silent peer sooner.
pub const PAUSE: Duration = Duration::from_secs(6);
/// The age at which a server with the option `ages` ends connections.
pub const AGE: Duration = Duration::from_millis(200);
/// Interval and timeout of the keep-alive of a server with the option `keep-alive`.
pub const KEEP_ALIVE: Duration = Duration::from_secs(1);
const MIB: usize = 1 << 20;

/// A server's process.
#[derive(Debug)]
pub struct Server {
    pub process: Process,
    pub at: SocketAddr,
    fabric: Fabric,
    options: String,
}

impl Server {
    /// Starts a server, through the command `wrapper` unless it is empty. See [`Process::start`].
    ///
    /// | option | |
    /// |---|---|
    /// | `one-thread` | all tasks run on one thread, which a handler can block |
    /// | `small-pool` | 64 MiB, of which connections have little before they need it |
    /// | `ages` | connections end once they are older than [`AGE`] |
    /// | `keep-alive` | connections end if the client answers no ping: see [`KEEP_ALIVE`] |
    /// | `default-limits` | tonic's limits on the lengths of messages |
    /// | `no-memfd`, `no-fstatfs`, `no-unix-sockets` | a filter forbids the system call |
    pub async fn start(fabric: Fabric, wrapper: &str, options: &str) -> Self {
        let ip = bind_ip().unwrap();
        let at = SocketAddr::new(ip, fixed_port(ip));
        let process = start(fabric, at, wrapper, options).await;
        Self { process, at, fabric, options: options.to_owned() }
    }

    /// Kills the server, and starts it again at the same address.
    pub async fn start_again(self) -> Self {
        let Server { process, at, fabric, options } = self;
        process.kill().await;
        let process = start(fabric, at, "", &options).await;
        Self { process, at, fabric, options }
    }

    pub fn signal(&self, name: &str) {
        signal(&self.process, name);
    }

    /// Begins a graceful shutdown. When it is complete, the server prints `ended`.
    pub async fn shut_down(&mut self) {
        assert_eq!(self.process.ask("shutdown").await, "shutting down");
    }
}

async fn start(fabric: Fabric, at: SocketAddr, wrapper: &str, options: &str) -> Process {
    let mut process = Process::start(wrapper, &format!("server {fabric} {at} {options}"));
    assert_eq!(process.read_line().await, "ready");
    process
}

pub fn signal(process: &Process, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &process.id()]).status().unwrap();
    assert!(status.success());
}

/// Applies the options that need a single-threaded process, and returns its context.
pub fn prepare(options: &[&str]) -> Context {
    let forbidden = [("no-memfd", MEMFD_CREATE), ("no-fstatfs", FSTATFS)];
    for (_, call) in forbidden.into_iter().filter(|(option, _)| options.contains(option)) {
        forbid(call).unwrap();
    }
    if options.contains(&"no-unix-sockets") {
        forbid_unix_sockets().unwrap();
    }
    // glibc allocates blocks of up to this length from the threads' reserved address space once a
    // block of this length has been freed. So the heap keeps its room when a limit is lowered.
    drop(std::hint::black_box(vec![1_u8; 31 * MIB]));
    let builder = Context::builder();
    match options.contains(&"small-pool") {
        true => builder.pool(PoolConfig::default().total(64 * MIB)),
        false => builder,
    }
    .build()
}

pub fn policy(fabric: Fabric) -> Policy {
    if fabric == Fabric::Tcp { Policy::Off } else { Policy::Auto }
}

/// Lines of standard input, read by a detached thread.
pub fn questions() -> mpsc::UnboundedReceiver<String> {
    let (ask, questions) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if ask.send(line).is_err() {
                return;
            }
        }
    });
    questions
}

/// Serves until standard input ends, or until a shutdown is complete. Answers `refused` with the
/// number of refused connections, and `heap` with the maximum heap size in bytes so far.
pub fn play(words: &[&str]) {
    let fabric = Fabric::from_name(words[0]).unwrap();
    let at: SocketAddr = words[1].parse().unwrap();
    let options = words[2..].iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let words: Vec<_> = options.iter().map(String::as_str).collect();
    let context = prepare(&words);
    let runtime = match words.contains(&"one-thread") {
        true => client::one_thread(),
        false => runtime(CodecKind::ZeroCopy),
    };
    let has = move |option: &str| options.iter().any(|word| word == option);
    let serving = runtime.spawn(serve(fabric, at, context, has));
    runtime.block_on(serving).unwrap();
    runtime.shutdown_background();
}

async fn serve(fabric: Fabric, at: SocketAddr, context: Context, has: impl Fn(&str) -> bool) {
    let listener = tokio::net::TcpListener::bind(at).await.unwrap();
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let acting = InterceptorLayer::new(move |request: Request<()>| {
        if let Some(what) = request.metadata().get(ACT) {
            act(fabric, at, what.to_str().unwrap());
        }
        Ok::<_, Status>(request)
    });
    let service = match has("default-limits") {
        true => Scripted::server_with_default_limits(&Probe::default()),
        false => Scripted::server(&Probe::default()),
    };
    let service = service.accept_compressed(Gzip);
    let mut stats = None;
    let (stop, stopping) = oneshot::channel::<()>();
    // A sender that is dropped stops nothing.
    let stopping = async {
        if stopping.await.is_err() {
            std::future::pending().await
        }
    };
    let mut serving = if fabric == Fabric::Stock {
        let mut server = tonic::transport::Server::builder();
        if has("ages") {
            server = server.max_connection_age(AGE);
        }
        if has("keep-alive") {
            server = server
                .http2_keepalive_interval(Some(KEEP_ALIVE))
                .http2_keepalive_timeout(Some(KEEP_ALIVE));
        }
        let router = server.layer(acting).add_service(service);
        let serving = router.serve_with_incoming_shutdown(incoming, stopping);
        tokio::spawn(async { serving.await.map_err(drop) })
    } else {
        let mut server = tonic_rdma::Server::builder()
            .policy(policy(fabric))
            .fabrics(fabric.kinds().to_vec())
            .context(context);
        if has("ages") {
            server = server.max_connection_age(AGE);
        }
        if has("keep-alive") {
            server = server
                .http2_keepalive_interval(Some(KEEP_ALIVE))
                .http2_keepalive_timeout(Some(KEEP_ALIVE));
        }
        stats = Some(server.stats());
        let router = server.layer(acting).add_service(service);
        let serving = router.serve_with_incoming_shutdown(incoming, stopping);
        tokio::spawn(async { serving.await.map_err(drop) })
    };
    println!("ready");
    let mut questions = questions();
    let mut stop = Some(stop);
    loop {
        tokio::select! {
            question = questions.recv() => match question {
                Some(question) if question == "heap" => println!("{}", HEAP.peak_usage()),
                Some(question) if question == "shutdown" => {
                    println!("shutting down");
                    stop.take().unwrap().send(()).unwrap();
                }
                Some(_) => {
                    let refused = stats.as_ref().map(|stats| stats.get().connections_refused);
                    println!("{}", refused.unwrap_or(0));
                }
                None => return,
            },
            end = &mut serving => match stop {
                None => return println!("ended"),
                Some(_) => panic!("the server has ended: {end:?}"),
            },
        }
    }
}

/// Acts on the process as a call's metadata asks, before the call's handler continues.
fn act(fabric: Fabric, at: SocketAddr, what: &str) {
    match what {
        "block" => std::thread::sleep(PAUSE),
        "fork" => {
            let child = fork::of_a_handler(fabric, at);
            std::thread::spawn(move || println!("child: {}", child.wait().unwrap()));
        }
        _ => panic!("no act: {what}"),
    }
}
