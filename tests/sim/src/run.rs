//! One run, from start to result.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tonic_rdma::{Channel, Path};
use tonic_rdma_fabric::sim::{InjectedBug, SimStats};

use crate::calls;
use crate::fault_injection::{self, Servers};
use crate::hosts::Hosts;
use crate::oracle::{Counts, Outcome};
use crate::panics::Panics;
use crate::plan::{Fault, Plan, Theme};
use crate::wire_checker::WireChecker;
use crate::world::World;

/// A run that takes longer than this in simulated time counts as hanging.
const HANG_LIMIT: Duration = Duration::from_secs(3600);
/// A channel returns to its fast path within this time after the last fault. The longest back-off
/// between attempts is 10 minutes.
const RETURN_LIMIT: Duration = Duration::from_secs(1_300);
/// After this time without calls, standing grants have been recalled and connections are quiet.
const IDLE_TIME: Duration = Duration::from_secs(30);

/// How to run a seed.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Replaces the theme that the seed draws.
    pub theme: Option<Theme>,
    /// Record every event.
    pub trace: bool,
    /// A guarantee that the fabric breaks, and the number of occasions on which it first keeps the
    /// guarantee.
    pub injected_bug: Option<(InjectedBug, u64)>,
    /// A bug to add above the fabric.
    pub sabotage: Option<Sabotage>,
}

/// A bug of the program under test, to check that the oracle finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sabotage {
    /// A received message is never released.
    HoldBytes,
    /// A task never ends.
    LeaveTask,
    /// A call is made twice.
    RepeatCall,
    /// A call never ends.
    Hang,
    /// A task panics.
    Panic,
}

/// The result of a run.
#[derive(Debug, Clone)]
pub struct Report {
    /// The seed that was run.
    pub seed: u64,
    /// The theme of the run.
    pub theme: Theme,
    /// The errors that were found. Empty if the run passed.
    pub wrong: Vec<String>,
    /// A hash of all events, their order and their times.
    pub hash: u64,
    /// Events on the fabric.
    pub events: u64,
    /// The faults that were injected, by name.
    pub faults: BTreeMap<&'static str, u64>,
    /// Statistics of the fabric.
    pub fabric: SimStats,
    /// Calls over the fast path.
    pub fast: u64,
    /// How calls ended.
    pub(crate) counts: Counts,
    /// Whether the fabric broke the guarantee that it was told to break.
    pub broken: bool,
    /// The recorded events, if `Options::trace` is set.
    pub trace: Vec<String>,
}

/// Runs the simulation of a seed to its end.
pub fn run(seed: u64, options: &Options) -> Report {
    let mut plan = Plan::draw(seed, options.theme);
    plan.net.injected_bug = options.injected_bug;
    let plan = Arc::new(plan);
    let mut report = Report {
        seed,
        theme: plan.theme,
        wrong: Vec::new(),
        hash: 0,
        events: 0,
        faults: BTreeMap::new(),
        fabric: SimStats::default(),
        fast: 0,
        counts: Counts::default(),
        broken: false,
        trace: Vec::new(),
    };
    let net = &plan.net;
    let kinds = [
        ("messages and completions late", net.latency > Duration::ZERO || net.delay > 0),
        ("wake-ups lost and idle", net.lost_wakeups > 0),
        ("send queues small", net.send_queue.is_some()),
        ("completions flushed", net.flushed > 0),
        ("bytes of WRITEs in any order", net.unordered > 0),
    ];
    for (name, _) in kinds.iter().filter(|(_, on)| *on) {
        *report.faults.entry(name).or_default() += 1;
    }
    for fault in &plan.faults {
        *report.faults.entry(fault.fault.name()).or_default() += 1;
    }
    let panics = Panics::capture();
    let lived = std::panic::catch_unwind(AssertUnwindSafe(|| {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_time().start_paused(true);
        #[cfg(tokio_unstable)]
        builder.rng_seed(tokio::runtime::RngSeed::from_bytes(&seed.to_le_bytes()));
        let runtime = match builder.build() {
            Ok(runtime) => runtime,
            Err(error) => return report.wrong.push(format!("no runtime: {error}")),
        };
        runtime.block_on(live(plan.clone(), options, &mut report));
    }));
    if lived.is_err() {
        report.wrong.push("the run itself panicked".into());
    }
    report.wrong.extend(panics.take());
    report
}

async fn live(plan: Arc<Plan>, options: &Options, report: &mut Report) {
    let checker = Arc::new(WireChecker::new(options.trace));
    let world = World::new(plan.clone(), checker.clone());
    let hosts = Hosts::new(&plan);
    checker.note(|| format!("{:#?}", (&plan.net, &plan.pools, &plan.channels, &plan.faults)));
    hosts.net.observe(checker.clone());

    if timeout(HANG_LIMIT, work(&world, &hosts, &checker, options, report)).await.is_err() {
        let at = world.started.elapsed();
        report.wrong.push(format!("hang: not done after {at:?} of simulated time"));
    }

    let Hosts { net, devices, contexts, .. } = hosts;
    drop(contexts);
    for device in &devices {
        let left = device.registrations();
        if left > 0 {
            report.wrong.push(format!("{left} registrations of {} are left", device.name()));
        }
    }
    report.wrong.extend(world.call_log().check_calls(&plan));
    report.wrong.extend(checker.wrong());
    report.wrong.extend(net.breaches());
    report.counts = world.call_log().counts(&plan);
    report.fabric = net.stats();
    report.broken = net.has_broken();
    report.events = checker.events();
    report.trace = checker.trace();
    let mut hash = DefaultHasher::new();
    checker.hash().hash(&mut hash);
    world.call_log().results().collect::<Vec<_>>().hash(&mut hash);
    report.hash = hash.finish();
}

/// Runs the plan, from the first connection to the end of the last task.
async fn work(
    world: &Arc<World>,
    hosts: &Hosts,
    checker: &WireChecker,
    options: &Options,
    report: &mut Report,
) {
    let plan = &world.plan;
    let mut servers = Servers::start(world, hosts);
    let mut tasks = JoinSet::new();
    let releaser = {
        let world = world.clone();
        tokio::spawn(async move { world.release_retained().await })
    };
    // Faults also occur while connections are made.
    let injecting = fault_injection::inject_faults(world, hosts, &mut servers);
    let calling = async {
        connect(world, hosts).await;
        for call in plan.calls.clone() {
            let world = world.clone();
            tasks.spawn(async move {
                tokio::time::sleep_until(world.started + call.at).await;
                match world.channel(call.channel) {
                    Some(channel) => calls::make(world, channel, call).await,
                    None => world.call_log().ended(call.id, Outcome::NotMade),
                }
            });
        }
        sabotage(world, options, &mut tasks).await;
        while tasks.join_next().await.is_some() {}
    };
    tokio::join!(injecting, calling);

    for n in 0..plan.channels.len() {
        if let Some(channel) = world.channel(n)
            && let Err(why) = recover(world, n, &channel).await
        {
            report.wrong.push(format!("channel {n}: {why}"));
        }
        report.fast += world.channel(n).map_or(0, |channel| channel.stats().calls_fast);
    }
    quiet(world, hosts, checker, report).await;
    close(world, hosts, servers, releaser, checker, report).await;
}

async fn connect(world: &Arc<World>, hosts: &Hosts) {
    let mut channels = Vec::new();
    for channel in &world.plan.channels {
        let mut lazy = channel.lazy;
        // TCP may be broken, in which case the channel connects when it is used.
        let made = loop {
            match hosts.connect(channel.host, channel.server, lazy).await {
                Ok(made) => break Some(made),
                Err(_) if !lazy => lazy = true,
                Err(_) => break None,
            }
        };
        channels.push(made);
    }
    world.set_channels(channels);
}

async fn sabotage(world: &Arc<World>, options: &Options, tasks: &mut JoinSet<()>) {
    match options.sabotage {
        None => {}
        Some(Sabotage::HoldBytes) => {
            if let Some(pool) = world.channel(0).map(|channel| channel.pool())
                && let Ok(mut buf) = pool.alloc(100).await
            {
                buf.resize_zeroed(100);
                world.keep(buf.freeze(), HANG_LIMIT * 2);
            }
        }
        Some(Sabotage::LeaveTask) => drop(tokio::spawn(std::future::pending::<()>())),
        Some(Sabotage::RepeatCall) => {
            if let (Some(channel), Some(call)) = (world.channel(0), world.plan.calls.first()) {
                let call = crate::load::CallPlan {
                    drop_after: None,
                    drop_after_responses: None,
                    deadline: None,
                    ..call.clone()
                };
                let world = world.clone();
                tasks.spawn(calls::make(world, channel, call));
            }
        }
        Some(Sabotage::Hang) => drop(tasks.spawn(std::future::pending())),
        Some(Sabotage::Panic) => drop(tasks.spawn(async { panic!("as told") })),
    }
}

/// Waits until a channel works and is back on the fast path. If one of its devices was removed, the
/// channel only has to work over TCP. A channel whose server was stopped is not checked.
async fn recover(world: &World, n: usize, channel: &Channel) -> Result<(), String> {
    let plan = &world.plan;
    let planned = &plan.channels[n];
    let stopped = |f: &Fault| matches!(f, Fault::Stop(server) if *server == planned.server);
    if plan.faults.iter().any(|f| stopped(&f.fault)) {
        return Ok(());
    }
    let removed = |f: &Fault| matches!(f, Fault::Remove(host) if *host == planned.server || *host == planned.host);
    let removed = plan.faults.iter().any(|f| removed(&f.fault));
    let until = Instant::now() + RETURN_LIMIT;
    let mut failures = 0;
    loop {
        if let Err(status) = calls::probe(channel).await {
            failures += 1;
            // The first calls may find connections that died while they were idle.
            if failures > 3 {
                return Err(format!("a probe failed for the fourth time: {status}"));
            }
        }
        let path = channel.path();
        match (path.path, removed) {
            (Path::Tcp, true) | (Path::Sim, false) => return Ok(()),
            _ if removed => {}
            // A small pool may lack memory for all connections.
            _ if path
                .reason
                .as_ref()
                .is_some_and(|r| r.code() == tonic_rdma::ReasonCode::PoolExhausted) =>
            {
                return Ok(());
            }
            _ => {}
        }
        if Instant::now() > until {
            return Err(format!("not back on its path after {RETURN_LIMIT:?}: {path}"));
        }
        sleep(Duration::from_secs(1)).await;
    }
}

/// Checks that connections without calls have no open streams, grants or leases, and use no memory.
async fn quiet(world: &World, hosts: &Hosts, checker: &WireChecker, report: &mut Report) {
    while !world.retains_nothing() {
        sleep(Duration::from_millis(100)).await;
        if world.started.elapsed() > HANG_LIMIT / 2 {
            report.wrong.push("bytes are still held".into());
            break;
        }
    }
    sleep(IDLE_TIME).await;
    if checker.deaths() > 0 && !world.plan.may_lose_links() {
        report.wrong.push(format!("R7: {} ends of links died without a cause", checker.deaths()));
    }
    let mut left = checker.quiet();
    if world.plan.net.lost_wakeups > 0 || !world.plan.net.latency.is_zero() {
        // A PING may be in flight, or may lie undetected until a timer makes its receiver look for
        // it.
        for _ in 0..200 {
            if left.is_empty() {
                break;
            }
            sleep(Duration::from_millis(700)).await;
            left = checker.quiet();
        }
    }
    report.wrong.extend(left.into_iter().map(|left| format!("at rest: {left}")));
    for context in &hosts.contexts {
        for (device, stats) in context.pool_stats().await {
            if stats.send + stats.granted + stats.filled + stats.application > 0 {
                report.wrong.push(format!("at rest: memory of {device} is in use: {stats:?}"));
            }
        }
    }
    if let Some(wrong) = more_than_at_rest(hosts, checker).await {
        report.wrong.push(wrong);
    }
}

/// Returns the error if connections at rest do not return the control memory that only a busy
/// connection needs. SEND slots are freed when all their work has completed. Each PING frees one
/// extra RECV.
async fn more_than_at_rest(hosts: &Hosts, checker: &WireChecker) -> Option<String> {
    const EACH: usize = 8 << 10;
    let mut wrong = None;
    for _ in 0..60 {
        let mut control = 0;
        for context in &hosts.contexts {
            control += context.pool_stats().await.iter().map(|(_, s)| s.control).sum::<usize>();
        }
        let ends = checker.living();
        if control <= ends * EACH {
            return None;
        }
        wrong =
            Some(format!("at rest: {control} bytes of control memory for {ends} ends of links"));
        sleep(Duration::from_secs(1)).await;
    }
    wrong
}

/// Ends channels and servers, and checks that nothing is left.
async fn close(
    world: &Arc<World>,
    hosts: &Hosts,
    mut servers: Servers,
    releaser: tokio::task::JoinHandle<()>,
    checker: &WireChecker,
    report: &mut Report,
) {
    // The seed decides which side ends first.
    let servers_first = world.plan.seed.is_multiple_of(2);
    if servers_first {
        servers.current.iter_mut().for_each(|server| server.stop());
    }
    world.set_channels(Vec::new());
    servers.current.iter_mut().for_each(|server| server.stop());
    for server in servers.ending.into_iter().chain(servers.current) {
        match timeout(Duration::from_secs(60), server.task).await {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(error))) => report.wrong.push(format!("a server failed: {error}")),
            Ok(Err(error)) => report.wrong.push(format!("a server's task failed: {error}")),
            Err(_) => report.wrong.push("a server that was told to end has not".into()),
        }
    }
    releaser.abort();
    let metrics = tokio::runtime::Handle::current().metrics();
    let until = Instant::now() + Duration::from_secs(60);
    while metrics.num_alive_tasks() > 0 && Instant::now() < until {
        sleep(Duration::from_millis(10)).await;
    }
    let left = metrics.num_alive_tasks();
    if left > 0 {
        report.wrong.push(format!("{left} tasks are left"));
    }
    let living = checker.living();
    if living > 0 {
        report.wrong.push(format!("{living} ends of links are left"));
    }
    for context in &hosts.contexts {
        for (device, stats) in context.pool_stats().await {
            if stats.in_use_bytes() + stats.application > 0 || stats.leased > 0 {
                report.wrong.push(format!("at the end: memory of {device} is in use: {stats:?}"));
            }
        }
    }
}
