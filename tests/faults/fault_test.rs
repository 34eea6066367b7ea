//! The framework of a fault test: a server in another process, channels to it from this process,
//! and the checks before, during and after each fault.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::task::JoinHandle;
use tonic_rdma::{Channel, Context, Endpoint, FabricKind, Path, PathInfo, ReasonCode};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::fabric::fixed_port;
use tonic_rdma_tests::harness::client_of;
use tonic_rdma_tests::load::{
    LIMIT, Load, Tally, one_call, poll_until, wait_for_call, wait_for_path, with_timeout,
};
use tonic_rdma_tests::process::{Process, in_use};
use tonic_rdma_tests::process_resources::LeakCheck;
use tonic_rdma_tests::server_process::{self, fabric_of, wait_for_idle_pools};

use crate::log::Log;

/// A loss should be detected within this time. A test waits four times as long, because the machine
/// may be busy, and prints the time.
const DETECTION_LIMIT: Duration = Duration::from_secs(5);

/// The maximum number of channels that a test has open, including those from before a fault.
const CHANNELS: usize = 4;

/// The kind of the devices under test, `rxe` or `siw`.
pub fn kind() -> String {
    std::env::var("FAULTS_DEVICE").expect("FAULTS_DEVICE must say rxe or siw")
}

pub fn variable(name: &str) -> String {
    std::env::var(name)
        .unwrap_or_else(|_| panic!("{name} is not set: run this in the guest, see tests/README.md"))
}

/// The location of the two ends.
#[derive(Clone, Debug)]
pub struct Topology {
    pub server_device: String,
    pub client_device: String,
    /// The address at which the server listens for TCP. Faults of the devices do not affect
    /// loopback.
    pub tcp: IpAddr,
    /// HTTP/2 keep-alive on the channel, to detect a network that drops everything.
    pub keep_alive: bool,
}

impl Topology {
    /// Both ends on one device, TCP over loopback.
    pub fn one_device() -> Self {
        let device = variable(&format!("{}_DEVICE", kind().to_uppercase()));
        Self {
            server_device: device.clone(),
            client_device: device,
            tcp: Ipv4Addr::LOCALHOST.into(),
            keep_alive: false,
        }
    }

    /// The two ends of a veth pair, TCP over loopback.
    pub fn veth() -> Self {
        Self {
            server_device: variable("VETH_DEVICE_B"),
            client_device: variable("VETH_DEVICE_A"),
            tcp: Ipv4Addr::LOCALHOST.into(),
            keep_alive: false,
        }
    }

    /// One host whose processes share memory, TCP over loopback.
    pub fn shm() -> Self {
        Self {
            server_device: "shm".into(),
            client_device: "shm".into(),
            tcp: Ipv4Addr::LOCALHOST.into(),
            keep_alive: false,
        }
    }

    /// Another guest, at the other end of a cable.
    pub fn cable() -> Self {
        Self {
            server_device: String::new(),
            client_device: variable("CABLE_DEVICE"),
            tcp: variable("CABLE_SERVER").parse().unwrap(),
            keep_alive: true,
        }
    }

    /// The two ends of a veth pair, which TCP crosses as well.
    pub fn veth_alone() -> Self {
        Self { tcp: variable("VETH_B").parse().unwrap(), keep_alive: true, ..Self::veth() }
    }
}

/// Runs a command as root in the guest. Fails unless it succeeds.
pub fn run(command: &str) {
    let mut words = command.split(' ');
    let status = Command::new(words.next().unwrap()).args(words).status().unwrap();
    assert!(status.success(), "{command}: {status}");
}

/// Sends a signal to a process.
pub fn signal(process: &Process, name: &str) {
    run(&format!("kill -{name} {}", process.id()));
}

pub fn endpoint(
    server: SocketAddr,
    keep_alive: bool,
    (kind, context): (FabricKind, &Context),
) -> Endpoint {
    let endpoint =
        server_process::endpoint(server, (kind, context)).connect_timeout(Duration::from_secs(2));
    match keep_alive {
        false => endpoint,
        true => endpoint
            .http2_keep_alive_interval(Duration::from_secs(2))
            .keep_alive_timeout(Duration::from_secs(3))
            .keep_alive_while_idle(true),
    }
}

/// Waits until the server in another guest accepts TCP connections.
pub async fn wait_for_server(at: SocketAddr) {
    let up = || async { tokio::net::TcpStream::connect(at).await.is_ok() };
    poll_until("the server in the other guest does not come up", up, |up| *up).await;
}

/// Starts a server's process, and waits until it serves.
pub async fn serve(at: SocketAddr, device: &str) -> Process {
    server_process::start("", "zero-copy", at, device).await
}

/// A fault test. Before the first fault and after the last, no call is in flight. Each process then
/// holds no more resources than before the first fault.
pub struct FaultTest {
    pub topology: Topology,
    pub at: SocketAddr,
    pub context: Context,
    fabric: FabricKind,
    /// `None` if the server runs in another guest.
    server: Option<Process>,
    pub rng: SmallRng,
    log: Log,
    leak_checks: (LeakCheck, LeakCheck),
    /// Faults injected so far, and the outcomes of calls.
    faults: usize,
    totals: Tally,
    started: Instant,
}

impl FaultTest {
    pub async fn new(topology: Topology, log: Log) -> Self {
        Self::with_wrapper("", topology, log).await
    }

    /// Starts the server through another command, such as `prlimit`.
    pub async fn with_wrapper(wrapper: &str, topology: Topology, log: Log) -> Self {
        let seed = rand::rng().random();
        eprintln!("seed {seed}, {topology:?}");
        let rng = SmallRng::seed_from_u64(seed);
        let at = SocketAddr::new(topology.tcp, fixed_port(topology.tcp));
        let (fabric, context) = fabric_of(&topology.client_device);
        let server = server_process::start(wrapper, "zero-copy", at, &topology.server_device).await;
        Self::with(topology, at, (fabric, context), Some(server), rng, log).await
    }

    /// Uses the server of another guest.
    pub async fn with_remote_server(topology: Topology, log: Log) -> Self {
        let at = SocketAddr::new(topology.tcp, variable("CABLE_PORT").parse().unwrap());
        let (fabric, context) = fabric_of(&topology.client_device);
        wait_for_server(at).await;
        Self::with(topology, at, (fabric, context), None, SmallRng::from_os_rng(), log).await
    }

    async fn with(
        topology: Topology,
        at: SocketAddr,
        (fabric, context): (FabricKind, Context),
        server: Option<Process>,
        rng: SmallRng,
        log: Log,
    ) -> Self {
        let (leak_checks, totals) = Default::default();
        let mut test = Self {
            topology,
            at,
            context,
            fabric,
            server,
            rng,
            log,
            leak_checks,
            faults: 0,
            totals,
            started: Instant::now(),
        };
        // Warm up: make all one-time allocations, for the maximum number of channels.
        let mut others = Vec::new();
        for _ in 0..CHANNELS {
            others.push(test.connect().await);
        }
        test.under_load().await.end().await;
        drop(others);
        test.assert_at_rest().await;
        test
    }

    pub fn server(&mut self) -> &mut Process {
        self.server.as_mut().expect("the server runs elsewhere")
    }

    /// The number of lines with this text in the server's log.
    pub fn server_log_count(&self, text: &str) -> usize {
        self.server.as_ref().map_or(0, |server| server.stderr_lines_with(text))
    }

    pub fn count_fault(&mut self) {
        self.faults += 1;
    }

    /// Starts another server after the first one has ended.
    pub async fn replace_server(&mut self) {
        self.server = Some(serve(self.at, &self.topology.server_device).await);
        self.leak_checks.1 = LeakCheck::default();
    }

    /// An endpoint for a server, on the devices of this end.
    pub fn endpoint(&self, server: SocketAddr) -> Endpoint {
        endpoint(server, self.topology.keep_alive, (self.fabric, &self.context))
    }

    /// The fast path of this topology.
    pub fn fast_path(&self) -> Path {
        match self.fabric {
            FabricKind::Shm => Path::Shm,
            _ => Path::Verbs,
        }
    }

    /// A new channel on whichever path it takes.
    pub async fn connect_any_path(&self) -> Channel {
        let endpoint = self.endpoint(self.at);
        with_timeout("connecting", endpoint.connect()).await.unwrap()
    }

    pub async fn connect(&self) -> Channel {
        let channel = self.connect_any_path().await;
        wait_for_path(&channel, self.fast_path()).await;
        channel
    }

    /// A new channel with load that runs over the fast path.
    pub async fn under_load(&mut self) -> UnderLoad<'_> {
        let channel = self.connect().await;
        let paths = PathHistory::record(&channel);
        let (tally, seed) = (Tally::default(), self.rng.random());
        let load = Load::start(&channel, seed, &tally);
        let read = || async { tally.of("OK") };
        poll_until("calls over RDMA", read, |calls| *calls >= 20).await;
        assert_eq!(channel.stats().calls_tcp, 0, "{:?}", channel.stats());
        self.log.clear();
        UnderLoad {
            test: self,
            channel,
            load,
            tally,
            paths,
            mark: 0,
            fallbacks: Vec::new(),
            fault_began: Instant::now(),
            notes: Vec::new(),
        }
    }

    /// Makes the next check at rest record a new baseline. Called after the processes have opened
    /// another device.
    pub fn forget_baseline(&mut self) {
        self.leak_checks = Default::default();
    }

    /// Checks that closed channels leave nothing behind, in pools or in the system.
    pub async fn assert_at_rest(&mut self) {
        let context = self.context.clone();
        poll_until("in use, with no channel left", || in_use(&context), |bytes| *bytes == 0).await;
        self.leak_checks.0.check("self", self.faults).await;
        if let Some(server) = &mut self.server {
            wait_for_idle_pools(server).await;
            self.leak_checks.1.check(&server.id(), self.faults).await;
        }
    }

    /// Makes the final check. Prints and returns the number of faults, and the outcomes of calls.
    pub async fn end(mut self, name: &str) -> (usize, Tally) {
        self.assert_at_rest().await;
        let Self { topology, faults, totals, started, .. } = self;
        println!(
            "{name} on {}: {faults} faults, calls {totals:?}, {} s",
            topology.client_device,
            started.elapsed().as_secs()
        );
        (faults, totals)
    }
}

/// All paths that a channel has taken.
struct PathHistory {
    history: Arc<Mutex<Vec<(Instant, PathInfo)>>>,
    task: JoinHandle<()>,
}

impl PathHistory {
    fn record(channel: &Channel) -> Self {
        let history = Arc::<Mutex<Vec<_>>>::default();
        let (mut channel, seen) = (channel.clone(), Arc::clone(&history));
        let task = tokio::spawn(async move {
            loop {
                let info = channel.path_changed().await;
                seen.lock().unwrap().push((Instant::now(), info));
            }
        });
        Self { history, task }
    }

    fn len(&self) -> usize {
        self.history.lock().unwrap().len()
    }

    fn on_tcp_since(&self, mark: usize) -> Option<(Instant, PathInfo)> {
        let history = self.history.lock().unwrap();
        history.iter().skip(mark).find(|(_, info)| info.path == Path::Tcp).cloned()
    }
}

impl Drop for PathHistory {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A channel with load, before, during and after a fault.
pub struct UnderLoad<'a> {
    pub test: &'a mut FaultTest,
    pub channel: Channel,
    load: Load,
    tally: Tally,
    paths: PathHistory,
    mark: usize,
    /// Fallbacks to TCP before the fault, from the metrics.
    fallbacks: Vec<(ReasonCode, u64)>,
    fault_began: Instant,
    notes: Vec<String>,
}

impl UnderLoad<'_> {
    /// Records the state just before the fault.
    pub fn begin_fault(&mut self) {
        self.test.faults += 1;
        self.mark = self.paths.len();
        let by_code = |code: ReasonCode| (code, self.test.log.fallbacks(code));
        self.fallbacks = ReasonCode::ALL.map(by_code).into();
        self.fault_began = Instant::now();
    }

    pub fn note(&mut self, what: &str) {
        self.notes.push(format!("{what} after {} ms", self.fault_began.elapsed().as_millis()));
    }

    /// Waits until the fault has ended the fast path. Channel, log and metrics must give the
    /// reason.
    pub async fn assert_fallback(&mut self, codes: &[ReasonCode]) {
        let begin = Instant::now();
        let (at, info) = loop {
            if let Some(found) = self.paths.on_tcp_since(self.mark) {
                break found;
            }
            self.load.check();
            assert!(
                begin.elapsed() < DETECTION_LIMIT * 4,
                "the fault goes unnoticed: {}",
                self.channel.path()
            );
            tokio::time::sleep(Duration::from_millis(1)).await;
        };
        self.notes
            .push(format!("noticed after {} ms ({info})", (at - self.fault_began).as_millis()));
        // On a busy machine, the reason in `info` may already be that of the first attempt to
        // reconnect. Metrics and log still have the first reason.
        let seen = info.reason.as_ref().map(|reason| reason.code()).unwrap();
        let more = |code: &ReasonCode| {
            self.fallbacks
                .iter()
                .any(|(c, before)| c == code && self.test.log.fallbacks(*code) > *before)
        };
        let code = *codes.iter().find(|code| **code == seen || more(code)).unwrap_or(&seen);
        assert!(codes.contains(&code), "{info}");
        let line = format!("code=\"{}\"", code.as_str());
        let read = || async { self.test.log.contains(&["calls go over TCP", &line]) };
        poll_until(&format!("no log line with {line}"), read, |there| *there).await;
        assert!(more(&code), "not in the metrics: {code}");
    }

    /// Waits until calls succeed over TCP.
    pub async fn assert_calls_over_tcp(&mut self) {
        let calls = self.channel.stats().calls_tcp;
        with_timeout("a call that goes on", wait_for_call(&self.channel, &mut self.test.rng)).await;
        let ok = self.tally.of("OK");
        let (channel, tally) = (&self.channel, &self.tally);
        let read = || async { (channel.stats().calls_tcp, tally.of("OK"), channel.path().path) };
        // The fast path may be back already.
        poll_until("no calls over TCP", read, |(now, end, path)| {
            (*now > calls && *end > ok + 4) || (*path != Path::Tcp && *end > ok)
        })
        .await;
        self.load.check();
        self.note("calls go on");
    }

    /// Waits until a further call has failed.
    pub async fn wait_for_failed_calls(&mut self) {
        let failed = self.tally.failed();
        let read = || async { self.tally.failed() };
        poll_until("calls neither fail nor end", read, |now| *now > failed).await;
        self.load.check();
        self.note("calls fail");
    }

    /// Waits until `count` more calls have ended, with any status.
    pub async fn wait_for_calls(&mut self, count: u64) {
        let calls = self.tally.calls();
        let read = || async { self.tally.calls() };
        poll_until("no calls end", read, |now| *now >= calls + count).await;
        self.load.check();
    }

    /// Waits until the channel is back on its fast path by itself, and calls use it.
    pub async fn wait_for_recovery(&mut self) {
        self.fault_began = Instant::now();
        let begin = Instant::now();
        loop {
            wait_for_path(&self.channel, self.test.fast_path()).await;
            self.load.check();
            let (fast_path, ok) = (self.channel.stats().calls_fast, self.tally.of("OK"));
            let mut client = client_of(AnyChannel::Rdma(self.channel.clone()));
            let call =
                with_timeout("a call after the return", one_call(&mut client, &mut self.test.rng))
                    .await;
            if call.is_ok()
                && self.channel.stats().calls_fast > fast_path
                && self.channel.path().path == self.test.fast_path()
            {
                // Calls in flight on the lost path may end only now, and fail.
                let tally = &self.tally;
                let read = || async { tally.of("OK") };
                poll_until("no calls succeed after the return", read, |now| *now >= ok + 4).await;
                self.load.check();
                break;
            }
            assert!(begin.elapsed() < LIMIT, "on the fast path, but no calls: {call:?}");
        }
        self.note("back on RDMA");
    }

    /// Stops the load. Fails if a call had wrong data or a wrong status.
    pub async fn end(self) -> Tally {
        let Self { test, channel, load, tally, notes, paths, .. } = self;
        load.stop().await;
        if !notes.is_empty() {
            println!(
                "  {}; calls {tally:?}, {} over TCP",
                notes.join(", "),
                channel.stats().calls_tcp
            );
        }
        drop(paths);
        test.totals.include(&tally);
        tally
    }
}
