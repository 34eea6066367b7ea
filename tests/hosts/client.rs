//! A client in its own process, which follows the commands on its standard input.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::sync::mpsc::unbounded_channel;
use tokio::task::JoinSet;
use tonic::{Request, Status};
use tonic_rdma::{Channel, Context, Endpoint, Path, Policy};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::codec::{CodecKind, set_thread_codec};
use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::harness::{Client as Stub, client_of};
use tonic_rdma_tests::load::{assert_connection_lost, wait_for_path, with_timeout};
use tonic_rdma_tests::process::{Process, codec_from_name, runtime};
use tonic_rdma_tests::service::script::{echo, hang, steps};

use crate::server::{Server, policy, prepare, questions};
use crate::{crowd, fork, unread};

/// How long `connect` waits for a fast path: long enough that a slow machine does not count as one
/// without a fast path.
const PATIENCE: Duration = Duration::from_secs(100);
/// The [`PATIENCE`] of a client that requires the fast path.
const PATIENCE_OF_A_CALL: Duration = Duration::from_secs(5);
/// Interval at which a busy client says that it is busy.
const BUSY: Duration = Duration::from_secs(10);
/// Number of lines from a busy client after which it counts as hung.
const MOST_BUSY: usize = 24;

/// A client's process.
#[derive(Debug)]
pub struct Client {
    pub process: Process,
    fabric: Fabric,
}

impl Client {
    /// Starts a client of `server`. For the arguments, see [`Server::start`].
    ///
    /// | option | |
    /// |---|---|
    /// | `plain` | tonic's codec |
    /// | `require` | the fast path is required |
    /// | `small-pool`, `no-memfd`, `no-fstatfs`, `no-unix-sockets` | as for a server |
    pub async fn start(server: &Server, fabric: Fabric, wrapper: &str, options: &str) -> Self {
        let mut client = Self::begin(server, fabric, wrapper, options);
        assert_eq!(client.answer().await, "up");
        client
    }

    /// Starts a client that may have to wait for its connection.
    pub fn begin(server: &Server, fabric: Fabric, wrapper: &str, options: &str) -> Self {
        let role = format!("client {fabric} {} {options}", server.at);
        Self { process: Process::start(wrapper, &role), fabric }
    }

    /// Returns the client's next line, except lines that say that the client is busy.
    pub async fn answer(&mut self) -> String {
        for _ in 0..MOST_BUSY {
            let line = self.process.read_line().await;
            if line != "..." {
                return line;
            }
        }
        panic!("the client hangs");
    }

    pub async fn ask(&mut self, question: &str) -> String {
        let first = self.process.ask(question).await;
        if first == "..." { self.answer().await } else { first }
    }

    /// Sends a command that must succeed.
    pub async fn does(&mut self, what: &str) {
        assert_eq!(self.ask(what).await, "ok", "{what}");
    }

    /// Makes the client echo messages of these sizes, one after the other.
    pub async fn echo(&mut self, sizes: &[usize]) {
        for size in sizes {
            self.does(&format!("echo {size}")).await;
        }
    }

    /// Checks that calls take the fabric's path, now or once the channel has returned to it.
    pub async fn returns(&mut self) {
        self.does("returns").await;
    }

    /// The path that calls take: its name, and the reason if there is one.
    pub async fn path(&mut self) -> String {
        self.ask("path").await
    }

    /// Checks that calls take the fabric's path.
    pub async fn is_on_its_path(&mut self) {
        let (path, own) = (self.path().await, own_path(self.fabric));
        assert!(path.starts_with(own), "{path}");
    }

    /// Numbers of calls over the fast path, of calls over TCP, and of lost connections. Zeros with
    /// stock tonic.
    pub async fn counts(&mut self) -> [u64; 3] {
        let counts = self.ask("counts").await;
        let counts: Vec<_> = counts.split(' ').map(|count| count.parse().unwrap()).collect();
        counts.try_into().unwrap()
    }
}

/// The beginning of the path's text when calls take the fabric's path.
pub const fn own_path(fabric: Fabric) -> &'static str {
    match fabric {
        Fabric::Stock => "stock",
        Fabric::Tcp => "tcp (policy",
        Fabric::Shm => "shm",
        _ => "verbs",
    }
}

/// A runtime with a single thread, which a task can block.
pub fn one_thread() -> Runtime {
    set_thread_codec(CodecKind::ZeroCopy);
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// An endpoint of tonic-rdma.
pub fn endpoint(fabric: Fabric, at: SocketAddr, context: &Context) -> Endpoint {
    Endpoint::from_shared(format!("http://{at}"))
        .unwrap()
        .policy(policy(fabric))
        .fabrics(fabric.kinds().to_vec())
        .context(context.clone())
        .fast_path_timeout(PATIENCE)
}

pub async fn connect(endpoint: &Endpoint, fabric: Fabric, at: SocketAddr) -> AnyChannel {
    if fabric == Fabric::Stock {
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{at}")).unwrap();
        return AnyChannel::Stock(endpoint.connect().await.unwrap());
    }
    AnyChannel::Rdma(endpoint.connect().await.unwrap())
}

/// Connects to a server from this process.
pub async fn connect_here(fabric: Fabric, at: SocketAddr) -> (AnyChannel, Stub) {
    let endpoint = endpoint(fabric, at, &Context::builder().build());
    let channel = with_timeout("connecting", connect(&endpoint, fabric, at)).await;
    let path = path_of(&channel);
    assert!(path.starts_with(own_path(fabric)), "{path}");
    (channel.clone(), client_of(channel))
}

pub fn path_of(channel: &AnyChannel) -> String {
    match channel {
        AnyChannel::Stock(_) => "stock".to_owned(),
        AnyChannel::Rdma(channel) => {
            let path = channel.path();
            match path.reason {
                Some(reason) => format!("{} ({reason}); do: {}", path.path, reason.cure()),
                None => path.path.to_string(),
            }
        }
    }
}

pub async fn echo_one(mut client: Stub, size: usize) -> Result<(), Status> {
    let request = steps("", [echo(1)]).with_payload(1, size);
    client.unary(request).await.map(|reply| reply.into_inner().expect(1, size))
}

/// Sizes of messages: small ones, some that land, and one that lands in parts.
pub const SIZES: [usize; 4] = [10, 4000, 300_000, 20 << 20];

/// Begins calls of all sizes at the same time.
pub fn echoes(client: &Stub) -> JoinSet<Result<(), Status>> {
    SIZES.into_iter().map(|size| echo_one(client.clone(), size)).collect()
}

pub async fn assert_all_succeed(mut calls: JoinSet<Result<(), Status>>) {
    while let Some(call) = with_timeout("a call", calls.join_next()).await {
        call.unwrap().unwrap();
    }
}

/// The client, as the functions that answer commands see it.
#[derive(Clone, Debug)]
pub struct Here {
    pub fabric: Fabric,
    pub at: SocketAddr,
    pub endpoint: Endpoint,
    pub channel: AnyChannel,
}

impl Here {
    pub fn stub(&self) -> Stub {
        client_of(self.channel.clone())
    }

    /// The channel, if it is tonic-rdma's.
    pub fn ours(&self) -> Option<&Channel> {
        match &self.channel {
            AnyChannel::Rdma(channel) => Some(channel),
            AnyChannel::Stock(_) => None,
        }
    }

    async fn answer(self, question: String) -> String {
        let words: Vec<_> = question.split(' ').collect();
        match words[..] {
            ["echo", size] => match echo_one(self.stub(), size.parse().unwrap()).await {
                Ok(()) => "ok".to_owned(),
                Err(status) => format!("{:?}: {}", status.code(), status.message()),
            },
            ["hang"] => {
                let call = self.stub().unary(steps("", [hang()])).await;
                format!("{:?}", call.map(drop).map_err(|status| status.code()))
            }
            ["path"] => path_of(&self.channel),
            ["counts"] => {
                let stats = self.ours().map(Channel::stats).unwrap_or_default();
                let counts = [stats.calls_fast, stats.calls_tcp, stats.connections_lost];
                counts.map(|count| count.to_string()).join(" ")
            }
            ["returns"] => {
                let path = self.fabric.fast().unwrap_or(Path::Tcp);
                if let Some(channel) = self.ours() {
                    wait_for_path(channel, path).await;
                }
                "ok".to_owned()
            }
            ["lost", size] => match echo_one(self.stub(), size.parse().unwrap()).await {
                Ok(()) => "ok".to_owned(),
                Err(status) => {
                    assert_connection_lost(&status);
                    "lost".to_owned()
                }
            },
            ["act", key, what] => {
                let mut request = Request::new(steps("", [echo(1)]).with_payload(1, 10));
                let key: &'static str = key.to_owned().leak();
                request.metadata_mut().insert(key, what.parse().unwrap());
                self.stub().unary(request).await.unwrap().into_inner().expect(1, 10);
                "ok".to_owned()
            }
            ["fork", what] => fork::answer(self.clone(), what).await,
            ["unread", size] => unread::answer(&self, size.parse().unwrap()).await,
            ["crowd", count] => crowd::answer(&self, count.parse().unwrap()).await,
            _ => panic!("not understood: {question}"),
        }
    }
}

pub fn play(words: &[&str]) {
    let fabric = Fabric::from_name(words[0]).unwrap();
    let at: SocketAddr = words[1].parse().unwrap();
    let context = prepare(words);
    let codec = if words.contains(&"plain") { "plain" } else { "zero-copy" };
    let runtime = runtime(codec_from_name(codec));
    let mut endpoint = endpoint(fabric, at, &context);
    if words.contains(&"require") {
        // Calls wait for their path as long as `connect` does.
        endpoint = endpoint.policy(Policy::Require).fast_path_timeout(PATIENCE_OF_A_CALL);
    }
    let playing = runtime.spawn(async move {
        let channel = connect(&endpoint, fabric, at).await;
        println!("up");
        let here = Here { fabric, at, endpoint, channel };
        let mut questions = questions();
        while let Some(question) = questions.recv().await {
            let (done, mut answer) = unbounded_channel();
            let here = here.clone();
            tokio::spawn(async move { done.send(here.answer(question).await) });
            loop {
                match tokio::time::timeout(BUSY, answer.recv()).await {
                    Ok(Some(answer)) => break println!("{}", answer.replace('\n', " ")),
                    Ok(None) => panic!("no answer"),
                    Err(_) => println!("..."),
                }
            }
        }
    });
    runtime.block_on(playing).unwrap();
    runtime.shutdown_background();
}
