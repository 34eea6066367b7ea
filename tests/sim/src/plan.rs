//! The plan that a seed expands to: hosts, pools, calls, and faults with their times.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use tonic_rdma::PoolConfig;
use tonic_rdma_fabric::sim::SimConfig;

use crate::load::{self, CallPlan, ms};

/// The conditions of a run. Every theme has calls of all kinds and sizes, cancellations and
/// deadlines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Theme {
    /// No faults: every call ends as it should.
    Calm,
    /// Small pools, and readers that retain their messages.
    Pressure,
    /// Messages and completions take time.
    Latency,
    /// Wake-ups are lost, and others are spurious.
    Wakeups,
    /// Send queues have few entries.
    Queues,
    /// Links fail immediately, or after some work requests.
    Kill,
    /// A device makes no progress for a while, or for so long that the path counts as lost.
    Freeze,
    /// A process pauses for longer than any silence limit, while its device continues.
    Pause,
    /// Registrations of memory fail.
    Registrations,
    /// TCP breaks, stalls or is refused.
    TcpNet,
    /// A device is removed.
    Remove,
    /// Servers shut down gracefully, and some are replaced.
    Shutdown,
    /// Channels and servers close at the same time.
    Close,
    /// Several of these themes.
    Mixed,
}

pub(crate) const THEMES: [Theme; 14] = [
    Theme::Calm,
    Theme::Pressure,
    Theme::Latency,
    Theme::Wakeups,
    Theme::Queues,
    Theme::Kill,
    Theme::Freeze,
    Theme::Pause,
    Theme::Registrations,
    Theme::TcpNet,
    Theme::Remove,
    Theme::Shutdown,
    Theme::Close,
    Theme::Mixed,
];

impl Theme {
    /// All themes, in the order of their declaration.
    pub fn all() -> &'static [Theme] {
        &THEMES
    }
}

/// The index of a host: servers first, then clients.
pub(crate) type Host = usize;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    Cut(Host),
    /// Links made during the fault fail after this many work requests.
    KillAfter(Host, u64),
    Freeze(Host),
    Pause(Host),
    LoseConnects(Host),
    LoseDisconnects(Host),
    FailRegistrations(Host, u64, u64),
    Remove(Host),
    TcpReset,
    TcpStall,
    TcpRefuse,
    /// A server shuts down gracefully.
    Stop(Host),
    /// A server shuts down gracefully after another has taken its place.
    Replace(Host),
    /// A channel is dropped.
    Drop(usize),
}

impl Fault {
    /// The fault's name in the figures.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Fault::Cut(_) => "links cut",
            Fault::KillAfter(..) => "links killed after some work",
            Fault::Freeze(_) => "devices frozen",
            Fault::Pause(_) => "processes paused",
            Fault::LoseConnects(_) => "connects lost",
            Fault::LoseDisconnects(_) => "disconnects lost",
            Fault::FailRegistrations(..) => "registrations failing",
            Fault::Remove(_) => "devices removed",
            Fault::TcpReset => "TCP reset",
            Fault::TcpStall => "TCP stalled",
            Fault::TcpRefuse => "TCP refused",
            Fault::Stop(_) => "servers stopped",
            Fault::Replace(_) => "servers replaced",
            Fault::Drop(_) => "channels dropped",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FaultPlan {
    pub(crate) at: Duration,
    /// How long the fault lasts. Zero for a fault that happens at one instant.
    pub(crate) lasts: Duration,
    pub(crate) fault: Fault,
}

#[derive(Debug, Clone)]
pub(crate) struct ChannelPlan {
    pub(crate) host: Host,
    pub(crate) server: Host,
    pub(crate) lazy: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) theme: Theme,
    pub(crate) net: SimConfig,
    pub(crate) tcp_latency: Duration,
    pub(crate) servers: usize,
    /// The pools of the servers, then the pools of the clients.
    pub(crate) pools: Vec<PoolConfig>,
    pub(crate) channels: Vec<ChannelPlan>,
    pub(crate) calls: Vec<CallPlan>,
    pub(crate) faults: Vec<FaultPlan>,
}

/// The maximum total silence of a device that never makes a path count as lost. A silent device is
/// first probed after 1.25 s, and counts as gone after 5 s.
pub(crate) const MAX_HARMLESS_SILENCE: Duration = Duration::from_millis(3_600);

impl Plan {
    /// Whether the servers of the run have buffers for requests. If so, they give no standing
    /// grants.
    pub(crate) fn buffers_at_servers(&self) -> bool {
        self.seed % 4 == 3
    }

    pub(crate) fn draw(seed: u64, theme: Option<Theme>) -> Plan {
        let mut rng = StdRng::seed_from_u64(seed ^ 0x7465_7374_7369_6d75);
        let drawn = THEMES.choose(&mut rng).copied().unwrap_or(Theme::Calm);
        let theme = theme.unwrap_or(drawn);
        let rng = &mut rng;
        let has = |one: Theme, rng: &mut StdRng| {
            theme == one || (theme == Theme::Mixed && rng.random_bool(0.3))
        };

        let mut net = SimConfig { seed: rng.random(), audit: true, ..SimConfig::default() };
        net.delay = *[0, 0, 1, 3, 10].choose(rng).unwrap_or(&0);
        if has(Theme::Latency, rng) {
            net.latency = ms(rng.random_range(1..=20));
        }
        if has(Theme::Wakeups, rng) {
            net.lost_wakeups = rng.random_range(3..=60);
            net.idle_wakeups = rng.random_range(2..=20);
        }
        if has(Theme::Queues, rng) {
            net.send_queue = Some(rng.random_range(4..=12));
        }
        net.flushed = *[0, 2].choose(rng).unwrap_or(&0);

        let servers = *[1, 1, 1, 2].choose(rng).unwrap_or(&1);
        let clients = rng.random_range(1..=2);
        let pressure = has(Theme::Pressure, rng);
        // These settings follow from the seed itself instead of `rng`, so that they do not change
        // the rest of the plan.
        net.unordered = [0, 1, 4][(seed / 3 % 3) as usize];
        net.lends_pool = seed.is_multiple_of(3);
        net.lends_on = seed.is_multiple_of(2);
        let pools = (0..servers + clients).map(|_| pool(pressure, rng)).collect();
        let channels: Vec<ChannelPlan> = (0..rng.random_range(clients..=3))
            .map(|n| ChannelPlan {
                host: servers + n % clients,
                server: rng.random_range(0..servers),
                lazy: rng.random_bool(0.3),
            })
            .collect();
        // The time within which calls begin.
        let span = ms(*[1, 50, 1_000, 8_000].choose(rng).unwrap_or(&50));
        let mut calls = load::draw(rng, channels.len(), span, pressure);
        if net.lends_on {
            calls.iter_mut().for_each(CallPlan::echo);
        }

        let mut plan = Plan {
            seed,
            theme,
            net,
            tcp_latency: ms(*[0, 0, 1, 5].choose(rng).unwrap_or(&0)),
            servers,
            pools,
            channels,
            calls,
            faults: Vec::new(),
        };
        for one in THEMES {
            if !matches!(one, Theme::Calm | Theme::Mixed) && has(one, rng) {
                plan.add_faults(one, span, rng);
            }
        }
        plan.faults.sort_by_key(|f| f.at);
        plan
    }

    /// Whether something in the plan may end links before the run is over.
    pub(crate) fn may_lose_links(&self) -> bool {
        let frozen: Duration = self
            .faults
            .iter()
            .filter(|f| matches!(f.fault, Fault::Freeze(_)))
            .map(|f| f.lasts)
            .sum();
        // A wake-up that is never delivered looks like a path that is gone.
        frozen > MAX_HARMLESS_SILENCE
            || self.net.lost_wakeups > 0
            || self.faults.iter().any(|f| match f.fault {
                Fault::Cut(_) | Fault::KillAfter(..) | Fault::Remove(_) => true,
                Fault::Stop(_) | Fault::Replace(_) | Fault::Drop(_) => true,
                // An end that cannot register landing memory takes its calls off the path (R21).
                Fault::FailRegistrations(..) => true,
                Fault::Pause(_)
                | Fault::Freeze(_)
                | Fault::LoseConnects(_)
                | Fault::LoseDisconnects(_) => false,
                Fault::TcpReset | Fault::TcpStall | Fault::TcpRefuse => false,
            })
    }

    fn hosts(&self) -> usize {
        self.pools.len()
    }

    fn add_faults(&mut self, theme: Theme, span: Duration, rng: &mut StdRng) {
        let hosts = self.hosts();
        let times = rng.random_range(1..=3);
        let mut push = |rng: &mut StdRng, lasts: u64, fault: Fault| {
            // Some faults begin at time 0, while connections are made.
            let at = if rng.random_bool(0.2) {
                0
            } else {
                rng.random_range(0..=span.as_millis() as u64 + 20)
            };
            self.faults.push(FaultPlan { at: ms(at), lasts: ms(lasts), fault });
        };
        let short = |rng: &mut StdRng| rng.random_range(1..=2_000);
        match theme {
            Theme::Kill => {
                for _ in 0..times {
                    let host = rng.random_range(0..hosts);
                    let work = *[0, 1, 2, 3, 5, 8, 20, 60, 200].choose(rng).unwrap_or(&0);
                    match rng.random_range(0..4) {
                        0 => push(rng, 0, Fault::Cut(host)),
                        1 => {
                            let lasts = short(rng);
                            push(rng, lasts, Fault::LoseDisconnects(host));
                            push(rng, 0, Fault::Cut(host));
                        }
                        _ => {
                            let lasts = short(rng);
                            push(rng, lasts, Fault::KillAfter(host, work));
                            // The cut makes channels reconnect soon.
                            push(rng, 0, Fault::Cut(host));
                        }
                    }
                }
                if rng.random_bool(0.5) {
                    // This fault affects even the first links.
                    let (host, work) = (rng.random_range(0..hosts), rng.random_range(0..40));
                    let lasts = short(rng);
                    let fault = Fault::KillAfter(host, work);
                    self.faults.push(FaultPlan { at: ms(0), lasts: ms(lasts), fault });
                }
            }
            Theme::Freeze => {
                for _ in 0..times {
                    let host = rng.random_range(0..hosts);
                    let lasts = if rng.random_bool(0.5) {
                        short(rng)
                    } else {
                        rng.random_range(1..=12_000)
                    };
                    push(rng, lasts, Fault::Freeze(host));
                    if rng.random_bool(0.3) {
                        let lasts = short(rng);
                        push(rng, lasts, Fault::LoseConnects(host));
                    }
                }
            }
            Theme::Pause => {
                // A paused process keeps its grants. If another connection needs their memory, the
                // connection of the paused process ends. With only one channel, a process may pause
                // for any time.
                let most = if self.channels.len() == 1 { 60_000 } else { 3_000 };
                for _ in 0..times {
                    let host = rng.random_range(0..hosts);
                    let lasts = rng.random_range(1..=most);
                    push(rng, lasts, Fault::Pause(host));
                }
            }
            Theme::Registrations => {
                for _ in 0..times {
                    let host = rng.random_range(0..hosts);
                    let (after, count) = (rng.random_range(0..6), rng.random_range(1..=5));
                    push(rng, 0, Fault::FailRegistrations(host, after, count));
                }
            }
            Theme::TcpNet => {
                for _ in 0..times {
                    let lasts = short(rng);
                    match rng.random_range(0..3) {
                        0 => push(rng, 0, Fault::TcpReset),
                        1 => push(rng, lasts, Fault::TcpStall),
                        _ => {
                            push(rng, lasts, Fault::TcpRefuse);
                            push(rng, 0, Fault::TcpReset);
                        }
                    }
                }
            }
            Theme::Remove => {
                let host = rng.random_range(0..hosts);
                push(rng, 0, Fault::Remove(host));
            }
            Theme::Shutdown => {
                for server in 0..self.servers {
                    let fault = if rng.random_bool(0.5) {
                        Fault::Replace(server)
                    } else {
                        Fault::Stop(server)
                    };
                    push(rng, 0, fault);
                }
            }
            Theme::Close => {
                let at = ms(rng.random_range(0..=span.as_millis() as u64));
                for n in 0..self.channels.len() {
                    self.faults.push(FaultPlan { at, lasts: ms(0), fault: Fault::Drop(n) });
                }
                for server in 0..self.servers {
                    self.faults.push(FaultPlan { at, lasts: ms(0), fault: Fault::Stop(server) });
                }
            }
            _ => {}
        }
    }
}

fn pool(pressure: bool, rng: &mut StdRng) -> PoolConfig {
    let total = if pressure { rng.random_range(2..=3) } else { rng.random_range(4..=24) };
    PoolConfig::default().total(total << 20)
}
