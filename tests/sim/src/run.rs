//! One run, from start to verdict.

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
use crate::chaos::{self, Servers};
use crate::oracle::{Counts, Outcome};
use crate::plan::{Fault, Plan, Theme};
use crate::wire_checker::WireChecker;
use crate::world::{Hosts, World};

/// Longer than anything takes, in simulated time.
const HANG: Duration = Duration::from_secs(3600);
/// A channel returns to its fast path within this, once nothing stands in its way: the longest
/// pause between attempts is 10 minutes.
const RETURN: Duration = Duration::from_secs(1_300);
/// Standing grants are recalled and connections quiet after this.
const QUIET: Duration = Duration::from_secs(30);

/// What to do other than plainly run the seed.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// In place of the theme that the seed draws.
    pub theme: Option<Theme>,
    /// Write down every event.
    pub trace: bool,
    /// A promise of the fabric to break, and after how many occasions.
    pub injected_bug: Option<(InjectedBug, u64)>,
    /// Something to do wrong above the fabric.
    pub sabotage: Option<Sabotage>,
}

/// What a program under test could do wrong, to see that the oracle finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sabotage {
    /// A received message is held for ever.
    HoldBytes,
    /// A task is left behind.
    LeaveTask,
    /// A call is made twice.
    RepeatCall,
    /// A call never ends.
    Hang,
    /// A task panics.
    Panic,
}

/// What came of a run.
#[derive(Debug, Clone)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// What it was about.
    pub theme: Theme,
    /// What is wrong: nothing, if all is well.
    pub wrong: Vec<String>,
    /// Stands for all events, their order and their moments.
    pub hash: u64,
    /// Events on the fabric.
    pub events: u64,
    /// The faults that struck, by name.
    pub faults: BTreeMap<&'static str, u64>,
    /// What the fabric carried.
    pub fabric: SimStats,
    /// Calls that came by the fast path.
    pub fast: u64,
    /// How calls ended.
    pub(crate) counts: Counts,
    /// The promise was broken, if one was to be.
    pub broken: bool,
    /// Events in words, if they were to be kept.
    pub trace: Vec<String>,
}

/// Runs a seed.
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
    ];
    for (name, _) in kinds.iter().filter(|(_, on)| *on) {
        *report.faults.entry(name).or_default() += 1;
    }
    for fault in &plan.faults {
        *report.faults.entry(fault.fault.name()).or_default() += 1;
    }
    let panics = crate::runner::Panics::watch();
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
    report.wrong.extend(panics.seen());
    report
}

async fn live(plan: Arc<Plan>, options: &Options, report: &mut Report) {
    let checker = Arc::new(WireChecker::new(options.trace));
    let world = World::new(plan.clone(), checker.clone());
    let hosts = Hosts::new(&plan);
    checker.note(|| format!("{:#?}", (&plan.net, &plan.pools, &plan.channels, &plan.faults)));
    hosts.net.observe(checker.clone());

    if timeout(HANG, work(&world, &hosts, &checker, options, report)).await.is_err() {
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
    report.wrong.extend(world.book().judge(&plan));
    report.wrong.extend(checker.wrong());
    report.wrong.extend(net.breaches());
    report.counts = world.book().counts(&plan);
    report.fabric = net.stats();
    report.broken = net.has_broken();
    report.events = checker.events();
    report.trace = checker.trace();
    let mut hash = DefaultHasher::new();
    checker.hash().hash(&mut hash);
    world.book().results().collect::<Vec<_>>().hash(&mut hash);
    report.hash = hash.finish();
}

/// From the first connection to the end of the last task.
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
    let housekeeper = {
        let world = world.clone();
        tokio::spawn(async move { world.housekeeping().await })
    };
    // Faults strike while connections are made, too.
    let striking = chaos::strike(world, hosts, &mut servers);
    let calling = async {
        connect(world, hosts).await;
        for call in plan.calls.clone() {
            let world = world.clone();
            tasks.spawn(async move {
                tokio::time::sleep_until(world.started + call.at).await;
                match world.channel(call.channel) {
                    Some(channel) => calls::make(world, channel, call).await,
                    None => world.book().ended(call.id, Outcome::NotMade),
                }
            });
        }
        sabotage(world, options, &mut tasks).await;
        while tasks.join_next().await.is_some() {}
    };
    tokio::join!(striking, calling);

    for n in 0..plan.channels.len() {
        if let Some(channel) = world.channel(n)
            && let Err(why) = recover(world, n, &channel).await
        {
            report.wrong.push(format!("channel {n}: {why}"));
        }
        report.fast += world.channel(n).map_or(0, |channel| channel.stats().calls_fast);
    }
    quiet(world, hosts, checker, report).await;
    close(world, hosts, servers, housekeeper, checker, report).await;
}

async fn connect(world: &Arc<World>, hosts: &Hosts) {
    let mut channels = Vec::new();
    for channel in &world.plan.channels {
        let mut lazy = channel.lazy;
        // TCP may be broken: the channel then connects when it is used.
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
                world.keep(buf.freeze(), HANG * 2);
            }
        }
        Some(Sabotage::LeaveTask) => drop(tokio::spawn(std::future::pending::<()>())),
        Some(Sabotage::RepeatCall) => {
            if let (Some(channel), Some(call)) = (world.channel(0), world.plan.calls.first()) {
                let call = crate::load::CallPlan {
                    give_up: None,
                    enough: None,
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

/// Every channel whose server lives works, and is back on the fast path if nothing stands in its
/// way for good.
async fn recover(world: &World, n: usize, channel: &Channel) -> Result<(), String> {
    let plan = &world.plan;
    let planned = &plan.channels[n];
    let stopped = |f: &Fault| matches!(f, Fault::Stop(server) if *server == planned.server);
    if plan.faults.iter().any(|f| stopped(&f.fault)) {
        return Ok(());
    }
    let removed = |f: &Fault| matches!(f, Fault::Remove(host) if *host == planned.server || *host == planned.host);
    let removed = plan.faults.iter().any(|f| removed(&f.fault));
    let until = Instant::now() + RETURN;
    let mut failures = 0;
    loop {
        if let Err(status) = calls::probe(channel).await {
            failures += 1;
            // A connection may have died that nobody has used since.
            if failures > 3 {
                return Err(format!("a probe failed for the fourth time: {status}"));
            }
        }
        let path = channel.path();
        match (path.path, removed) {
            (Path::Tcp, true) | (Path::Sim, false) => return Ok(()),
            _ if removed => {}
            // More connections than a small pool has memory for.
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
            return Err(format!("not back on its path after {RETURN:?}: {path}"));
        }
        sleep(Duration::from_secs(1)).await;
    }
}

/// Nothing is in use when nothing is done.
async fn quiet(world: &World, hosts: &Hosts, checker: &WireChecker, report: &mut Report) {
    while !world.holds_nothing() {
        sleep(Duration::from_millis(100)).await;
        if world.started.elapsed() > HANG / 2 {
            report.wrong.push("bytes are still held".into());
            break;
        }
    }
    sleep(QUIET).await;
    if checker.deaths() > 0 && !world.plan.may_lose_links() {
        report.wrong.push(format!("R7: {} ends of links died without a cause", checker.deaths()));
    }
    let mut left = checker.quiet();
    if world.plan.net.lost_wakeups > 0 || !world.plan.net.latency.is_zero() {
        // A PING may be on its way, or lie there until a timer finds it.
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
            if stats.send + stats.granted + stats.filled > 0 {
                report.wrong.push(format!("at rest: memory of {device} is in use: {stats:?}"));
            }
        }
    }
}

/// Everything ends, and nothing is left.
async fn close(
    world: &Arc<World>,
    hosts: &Hosts,
    mut servers: Servers,
    housekeeper: tokio::task::JoinHandle<()>,
    checker: &WireChecker,
    report: &mut Report,
) {
    // Either side first, by the seed.
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
    housekeeper.abort();
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
            if stats.in_use_bytes() > 0 || stats.leased > 0 {
                report.wrong.push(format!("at the end: memory of {device} is in use: {stats:?}"));
            }
        }
    }
}
