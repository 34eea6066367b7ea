//! A server in a process of its own, channels to it from this one, and what is checked around each
//! fault.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::task::JoinHandle;
use tonic_rdma::{Channel, Context, Endpoint, FabricKind, Path, PathInfo, ReasonCode};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::harness::client_of;
use tonic_rdma_tests::load::{LIMIT, Load, Tally, bounded, goes_on, one_call, takes, until};
use tonic_rdma_tests::process::{Process, in_use};
use tonic_rdma_tests::process_resources::Watch;
use tonic_rdma_tests::server_process::{self, fabric_of, fixed_port, unused};

use crate::log::Log;

/// What a connection waits for a silent peer by default. A loss is to be noticed by then; a test
/// waits four times as long, because the machine may be busy, and prints what it was.
const DEAD_PEER: Duration = Duration::from_secs(5);

/// Channels of a test, and those of before a fault, that are open at a time at most.
const CHANNELS: usize = 4;

/// The kind of the devices under test, `rxe` or `siw`.
pub fn kind() -> String {
    std::env::var("FAULTS_DEVICE").expect("FAULTS_DEVICE must say rxe or siw")
}

fn variable(name: &str) -> String {
    std::env::var(name)
        .unwrap_or_else(|_| panic!("{name} is not set: run this in the guest, see tests/README.md"))
}

/// Where the two ends are.
#[derive(Clone, Debug)]
pub struct Place {
    pub server_device: String,
    pub client_device: String,
    /// The server's TCP port is bound here: on loopback it lives through whatever happens to the
    /// devices.
    pub tcp: IpAddr,
    /// HTTP/2 keep-alive on the channel, as one has where a network may swallow everything.
    pub keep_alive: bool,
}

impl Place {
    /// Both on one device, TCP by loopback.
    pub fn one_device() -> Self {
        let device = variable(&format!("{}_DEVICE", kind().to_uppercase()));
        Self {
            server_device: device.clone(),
            client_device: device,
            tcp: Ipv4Addr::LOCALHOST.into(),
            keep_alive: false,
        }
    }

    /// At the two ends of a veth pair, TCP by loopback.
    pub fn veth() -> Self {
        Self {
            server_device: variable("VETH_DEVICE_B"),
            client_device: variable("VETH_DEVICE_A"),
            tcp: Ipv4Addr::LOCALHOST.into(),
            keep_alive: false,
        }
    }

    /// Within this host, by memory that the two share; TCP by loopback.
    pub fn shm() -> Self {
        Self {
            server_device: "shm".into(),
            client_device: "shm".into(),
            tcp: Ipv4Addr::LOCALHOST.into(),
            keep_alive: false,
        }
    }

    /// In another guest, at the other end of a cable.
    pub fn cable() -> Self {
        Self {
            server_device: String::new(),
            client_device: variable("CABLE_DEVICE"),
            tcp: variable("CABLE_SERVER").parse().unwrap(),
            keep_alive: true,
        }
    }

    /// Likewise, and TCP crosses the pair as well.
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

/// A server's process that serves.
pub async fn serve(at: SocketAddr, device: &str) -> Process {
    server_process::start("", "zero-copy", at, device).await
}

/// Before the first fault and behind the last one everything is at rest, and the same is held.
pub struct World {
    pub place: Place,
    pub at: SocketAddr,
    pub context: Context,
    fabric: FabricKind,
    /// None when it runs in another guest.
    server: Option<Process>,
    pub rng: SmallRng,
    log: Log,
    held: (Watch, Watch),
    /// Faults that were produced, and how calls ended.
    faults: usize,
    totals: Tally,
    begun: Instant,
}

impl World {
    pub async fn new(place: Place, log: Log) -> Self {
        Self::through("", place, log).await
    }

    /// With a server that another command starts.
    pub async fn through(through: &str, place: Place, log: Log) -> Self {
        let seed = rand::rng().random();
        eprintln!("seed {seed}, {place:?}");
        let mut rng = SmallRng::seed_from_u64(seed);
        let at = SocketAddr::new(place.tcp, fixed_port(place.tcp, &mut rng));
        let (fabric, context) = fabric_of(&place.client_device);
        let server = server_process::start(through, "zero-copy", at, &place.server_device).await;
        Self::with(place, at, (fabric, context), Some(server), rng, log).await
    }

    /// With the server that another guest has.
    pub async fn elsewhere(place: Place, log: Log) -> Self {
        let at = SocketAddr::new(place.tcp, variable("CABLE_PORT").parse().unwrap());
        let (fabric, context) = fabric_of(&place.client_device);
        let up = || async { tokio::net::TcpStream::connect(at).await.is_ok() };
        until("the server in the other guest does not come up", up, |up| *up).await;
        Self::with(place, at, (fabric, context), None, SmallRng::from_os_rng(), log).await
    }

    async fn with(
        place: Place,
        at: SocketAddr,
        (fabric, context): (FabricKind, Context),
        server: Option<Process>,
        rng: SmallRng,
        log: Log,
    ) -> Self {
        let (held, totals) = Default::default();
        let mut world = Self {
            place,
            at,
            context,
            fabric,
            server,
            rng,
            log,
            held,
            faults: 0,
            totals,
            begun: Instant::now(),
        };
        // What is made once and kept: as much as by all channels that a test has at a time, and
        // some that end meanwhile.
        let mut others = Vec::new();
        for _ in 0..CHANNELS {
            others.push(world.connect().await);
        }
        world.under_load().await.end().await;
        drop(others);
        world.rests().await;
        world
    }

    pub fn server(&mut self) -> &mut Process {
        self.server.as_mut().expect("the server runs elsewhere")
    }

    /// How often the server has said this in its log.
    pub fn said(&self, text: &str) -> usize {
        self.server.as_ref().map_or(0, |server| server.times_said(text))
    }

    pub fn counts_a_fault(&mut self) {
        self.faults += 1;
    }

    /// Another server, and with it another `server`, after the first has ended.
    pub async fn replace_server(&mut self) {
        self.server = Some(serve(self.at, &self.place.server_device).await);
        self.held.1 = Watch::default();
    }

    /// An endpoint for a server, on the devices of this end.
    pub fn endpoint(&self, server: SocketAddr) -> Endpoint {
        endpoint(server, self.place.keep_alive, (self.fabric, &self.context))
    }

    /// The fast path of this place.
    pub fn fast(&self) -> Path {
        match self.fabric {
            FabricKind::Shm => Path::Shm,
            _ => Path::Verbs,
        }
    }

    /// A new channel, whichever path it takes.
    pub async fn connect_somehow(&self) -> Channel {
        let endpoint = self.endpoint(self.at);
        bounded("connecting", endpoint.connect()).await.unwrap()
    }

    pub async fn connect(&self) -> Channel {
        let channel = self.connect_somehow().await;
        takes(&channel, self.fast()).await;
        channel
    }

    /// A new channel whose load runs over RDMA.
    pub async fn under_load(&mut self) -> UnderLoad<'_> {
        let channel = self.connect().await;
        let paths = Paths::watch(&channel);
        let (tally, seed) = (Tally::default(), self.rng.random());
        let load = Load::start(&channel, seed, &tally);
        let read = || async { tally.of("OK") };
        until("calls over RDMA", read, |calls| *calls >= 20).await;
        assert_eq!(channel.stats().calls_tcp, 0, "{:?}", channel.stats());
        self.log.forget();
        UnderLoad {
            world: self,
            channel,
            load,
            tally,
            paths,
            mark: 0,
            fallbacks: Vec::new(),
            struck: Instant::now(),
            said: Vec::new(),
        }
    }

    /// Nothing of the channels that are gone is left: not in pools, not in the system.
    pub async fn rests(&mut self) {
        let context = self.context.clone();
        until("in use, with no channel left", || in_use(&context), |bytes| *bytes == 0).await;
        self.held.0.check("self", self.faults).await;
        if let Some(server) = &mut self.server {
            unused(server).await;
            self.held.1.check(&server.id(), self.faults).await;
        }
    }

    /// The last look, and what it was: faults, and how calls ended.
    pub async fn end(mut self, name: &str) -> (usize, Tally) {
        self.rests().await;
        let Self { place, faults, totals, begun, .. } = self;
        println!(
            "{name} on {}: {faults} faults, calls {totals:?}, {} s",
            place.client_device,
            begun.elapsed().as_secs()
        );
        (faults, totals)
    }
}

/// Every path that a channel has had.
struct Paths {
    history: Arc<Mutex<Vec<(Instant, PathInfo)>>>,
    task: JoinHandle<()>,
}

impl Paths {
    fn watch(channel: &Channel) -> Self {
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

impl Drop for Paths {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A channel with load on it, before, under and after a fault.
pub struct UnderLoad<'a> {
    pub world: &'a mut World,
    pub channel: Channel,
    load: Load,
    tally: Tally,
    paths: Paths,
    mark: usize,
    /// Decisions for TCP by then, by the metrics.
    fallbacks: Vec<(ReasonCode, u64)>,
    struck: Instant,
    said: Vec<String>,
}

impl UnderLoad<'_> {
    /// Call it just before the fault.
    pub fn strikes(&mut self) {
        self.world.faults += 1;
        self.mark = self.paths.len();
        let by_code = |code: ReasonCode| (code, self.world.log.fallbacks(code));
        self.fallbacks = ReasonCode::ALL.map(by_code).into();
        self.struck = Instant::now();
    }

    pub fn note(&mut self, what: &str) {
        self.said.push(format!("{what} after {} ms", self.struck.elapsed().as_millis()));
    }

    /// The fault has ended the fast path: channel, log and counters say so, and why.
    pub async fn noticed(&mut self, codes: &[ReasonCode]) {
        let begin = Instant::now();
        let (at, info) = loop {
            if let Some(found) = self.paths.on_tcp_since(self.mark) {
                break found;
            }
            self.load.check();
            assert!(
                begin.elapsed() < DEAD_PEER * 4,
                "the fault goes unnoticed: {}",
                self.channel.path()
            );
            tokio::time::sleep(Duration::from_millis(1)).await;
        };
        self.said.push(format!("noticed after {} ms ({info})", (at - self.struck).as_millis()));
        // On a busy machine this may be what came of the first attempt to return: metrics and log
        // know what was before.
        let seen = info.reason.as_ref().map(|reason| reason.code()).unwrap();
        let more = |code: &ReasonCode| {
            self.fallbacks
                .iter()
                .any(|(c, before)| c == code && self.world.log.fallbacks(*code) > *before)
        };
        let code = *codes.iter().find(|code| **code == seen || more(code)).unwrap_or(&seen);
        assert!(codes.contains(&code), "{info}");
        let line = format!("code=\"{}\"", code.as_str());
        let read = || async { self.world.log.has(&["calls go over TCP", &line]) };
        until(&format!("no log line with {line}"), read, |there| *there).await;
        assert!(more(&code), "not in the metrics: {code}");
    }

    /// Calls end well over TCP.
    pub async fn goes_on_over_tcp(&mut self) {
        let calls = self.channel.stats().calls_tcp;
        bounded("a call that goes on", goes_on(&self.channel, &mut self.world.rng)).await;
        let ok = self.tally.of("OK");
        let (channel, tally) = (&self.channel, &self.tally);
        let read = || async { (channel.stats().calls_tcp, tally.of("OK"), channel.path().path) };
        // It may be back already.
        until("no calls over TCP", read, |(now, end, path)| {
            (*now > calls && *end > ok + 4) || (*path != Path::Tcp && *end > ok)
        })
        .await;
        self.load.check();
        self.note("calls go on");
    }

    /// The calls in flight fail, none hangs.
    pub async fn calls_fail(&mut self) {
        let failed = self.tally.failed();
        let read = || async { self.tally.failed() };
        until("calls neither fail nor end", read, |now| *now > failed).await;
        self.load.check();
        self.note("calls fail");
    }

    /// More calls end, either way.
    pub async fn calls_end(&mut self, count: u64) {
        let calls = self.tally.calls();
        let read = || async { self.tally.calls() };
        until("no calls end", read, |now| *now >= calls + count).await;
        self.load.check();
    }

    /// The channel is on its fast path, and calls go over it, without anybody's help.
    pub async fn returns(&mut self) {
        self.struck = Instant::now();
        let begin = Instant::now();
        loop {
            takes(&self.channel, self.world.fast()).await;
            self.load.check();
            let (fast, ok) = (self.channel.stats().calls_fast, self.tally.of("OK"));
            let mut client = client_of(AnyChannel::Rdma(self.channel.clone()));
            let call =
                bounded("a call after the return", one_call(&mut client, &mut self.world.rng))
                    .await;
            if call.is_ok()
                && self.channel.stats().calls_fast > fast
                && self.channel.path().path == self.world.fast()
            {
                self.calls_end(4).await;
                assert!(self.tally.of("OK") > ok, "{:?}", self.tally);
                break;
            }
            assert!(begin.elapsed() < LIMIT, "on the fast path, but no calls: {call:?}");
        }
        self.note("back on RDMA");
    }

    /// Stops the load. Fails if a call went wrong in any of this.
    pub async fn end(self) -> Tally {
        let Self { world, channel, load, tally, said, paths, .. } = self;
        load.stop().await;
        if !said.is_empty() {
            println!(
                "  {}; calls {tally:?}, {} over TCP",
                said.join(", "),
                channel.stats().calls_tcp
            );
        }
        drop(paths);
        world.totals.include(&tally);
        tally
    }
}
