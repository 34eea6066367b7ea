//! A server is replaced under load, repeatedly, by one that takes over its listening socket. No
//! call is lost on any path, and channels return to their fast path.

// A failed unwrap is a failed test.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::net::TcpListener;
use std::process::ExitCode;
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::server::TcpIncoming;
use tonic_rdma::sim::{SimConfig, SimNet};
use tonic_rdma::{Channel, Context, Endpoint, FabricKind, Path, Policy, ReasonCode, Server};
use tonic_rdma_tests::codec::CodecKind;
use tonic_rdma_tests::fabric::bind_ip;
use tonic_rdma_tests::load::{Load, Tally, poll_until, wait_for_path, with_timeout};
use tonic_rdma_tests::probe::Probe;
use tonic_rdma_tests::process::{in_use, runtime};
use tonic_rdma_tests::service::Scripted;

const REPLACEMENTS: u64 = 6;
const CHANNELS: u64 = 3;
/// Number of calls that end while two servers run, before the older one is stopped.
const CALLS: u64 = 200;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    // The device in the guest, and otherwise the paths that need no device.
    let paths = match std::env::var_os("GUEST_DEVICE") {
        Some(_) => vec![Path::Verbs],
        None => vec![Path::Tcp, Path::Sim, Path::Shm],
    };
    let trials = paths.into_iter().flat_map(|path| {
        let required = [Policy::Auto, Policy::Require].into_iter().filter(move |policy| {
            // TCP has no fast path to require.
            path != Path::Tcp || *policy == Policy::Auto
        });
        required.map(move |policy| {
            Trial::test(format!("{path}-{policy}"), move || {
                runtime(CodecKind::ZeroCopy).block_on(replaced(path, policy));
                Ok(())
            })
        })
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

/// A server on the listening socket that all servers share.
struct Serving {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), tonic_rdma::Error>>,
}

impl Serving {
    fn start(socket: &TcpListener, builder: &Server) -> Self {
        let listener = tokio::net::TcpListener::from_std(socket.try_clone().unwrap()).unwrap();
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let (stop, stopped) = oneshot::channel();
        let router = builder.clone().add_service(Scripted::server(&Probe::default()));
        let task = tokio::spawn(router.serve_with_incoming_shutdown(incoming, async {
            let _ = stopped.await;
        }));
        Self { stop, task }
    }

    async fn end(self) {
        self.stop.send(()).unwrap();
        with_timeout("the end of a server", self.task).await.unwrap().unwrap();
    }
}

/// The contexts of the servers and of the clients.
fn contexts(path: Path) -> [Context; 2] {
    let net = SimNet::new(SimConfig::default());
    [1, 2].map(|n| match path {
        Path::Sim => {
            Context::builder().sim(net.device(format!("sim{n}"), [10, 0, 0, n].into())).build()
        }
        _ => Context::builder().build(),
    })
}

async fn replaced(path: Path, policy: Policy) {
    let [servers, clients] = contexts(path);
    let kind = if path == Path::Verbs { FabricKind::Verbs } else { FabricKind::Shm };
    let policy = if path == Path::Tcp { Policy::Off } else { policy };
    let builder = Server::builder().fabrics([kind]).context(servers.clone()).policy(match policy {
        Policy::Off => Policy::Off,
        _ => Policy::Auto,
    });
    let socket = TcpListener::bind((bind_ip().unwrap(), 0)).unwrap();
    socket.set_nonblocking(true).unwrap();
    let uri = format!("http://{}", socket.local_addr().unwrap());
    let mut serving = Serving::start(&socket, &builder);
    let (tally, mut channels, mut loads) = (Tally::default(), Vec::<Channel>::new(), Vec::new());
    for n in 0..CHANNELS {
        let endpoint =
            Endpoint::from_shared(uri.clone()).unwrap().fabrics([kind]).context(clients.clone());
        let endpoint = endpoint.policy(policy).fast_path_timeout(Duration::from_secs(30));
        let channel = endpoint.connect().await.unwrap();
        loads.push(Load::start(&channel, n, &tally));
        channels.push(channel);
    }
    for _ in 0..REPLACEMENTS {
        let next = Serving::start(&socket, &builder);
        let seen = tally.calls() + CALLS;
        poll_until("calls go on", || async { tally.calls() }, |calls| *calls >= seen).await;
        std::mem::replace(&mut serving, next).end().await;
        for channel in &channels {
            wait_for_path(channel, path).await;
        }
        loads.iter_mut().for_each(Load::check);
        assert_eq!(tally.failed(), 0, "{tally:?}");
    }
    for load in loads {
        load.stop().await;
    }
    let (mut fast, mut tcp, mut moved) = (0, 0, 0);
    for channel in &channels {
        let stats = channel.stats();
        (fast, tcp, moved) =
            (fast + stats.calls_fast, tcp + stats.calls_tcp, moved + stats.calls_moved);
        match channel.path().reason.map(|reason| reason.code()) {
            None => assert_ne!(path, Path::Tcp),
            Some(code) => assert_eq!((path, code), (Path::Tcp, ReasonCode::Policy)),
        }
    }
    eprintln!(
        "{path}, {policy}: {REPLACEMENTS} servers replaced, {fast} calls over the fast path, {tcp} over TCP, \
         {moved} moved before the server saw them, none lost of {}",
        tally.calls()
    );
    assert_eq!((tally.failed(), fast + tcp), (0, tally.calls()), "{tally:?}");
    assert_eq!(fast > 0, path != Path::Tcp);
    assert_eq!(tcp > 0, policy != Policy::Require);
    drop(channels);
    serving.end().await;
    for context in [&servers, &clients] {
        poll_until("in use, with nobody left", || in_use(context), |bytes| *bytes == 0).await;
    }
}
