//! Injects the faults of a plan at their times, and ends those that last.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep_until;

use crate::hosts::{Hosts, RunningServer};
use crate::plan::{Fault, Host};
use crate::world::World;

/// The servers of a run: for each host the one that accepts new connections, and those that are
/// shutting down.
pub(crate) struct Servers {
    pub(crate) current: Vec<RunningServer>,
    pub(crate) ending: Vec<RunningServer>,
}

impl Servers {
    pub(crate) fn start(world: &Arc<World>, hosts: &Hosts) -> Self {
        let current =
            (0..world.plan.servers).map(|host| RunningServer::start(world, hosts, host)).collect();
        Servers { current, ending: Vec::new() }
    }

    fn replace(&mut self, world: &Arc<World>, hosts: &Hosts, host: Host) {
        if self.current[host].is_stopped() {
            return;
        }
        let new = RunningServer::start(world, hosts, host);
        let mut old = std::mem::replace(&mut self.current[host], new);
        old.stop();
        self.ending.push(old);
    }
}

/// Injects the plan's faults. When it returns, every fault that can end has ended.
pub(crate) async fn inject_faults(world: &Arc<World>, hosts: &Hosts, servers: &mut Servers) {
    // The start of every fault, and the end of those that last.
    let mut moments: Vec<(Duration, bool, &Fault)> = Vec::new();
    for fault in &world.plan.faults {
        moments.push((fault.at, true, &fault.fault));
        if !fault.lasts.is_zero() {
            moments.push((fault.at + fault.lasts, false, &fault.fault));
        }
    }
    moments.sort_by_key(|(at, begins, _)| (*at, !begins));
    for (at, begins, fault) in moments {
        sleep_until(world.started + at).await;
        world.checker.note(|| format!("{fault:?} {}", if begins { "begins" } else { "is over" }));
        apply(world, hosts, servers, fault, begins);
    }
    for device in &hosts.devices {
        device.fail_registrations(0, 0);
    }
}

fn apply(world: &Arc<World>, hosts: &Hosts, servers: &mut Servers, fault: &Fault, begins: bool) {
    match *fault {
        Fault::Cut(host) => hosts.devices[host].cut(),
        Fault::KillAfter(host, work) => {
            hosts.devices[host].kill_links_after(begins.then_some(work))
        }
        Fault::Freeze(host) => hosts.devices[host].freeze(begins),
        Fault::Pause(host) => hosts.devices[host].pause(begins),
        Fault::LoseConnects(host) => hosts.devices[host].lose_connects(begins),
        Fault::LoseDisconnects(host) => hosts.devices[host].lose_disconnects(begins),
        Fault::FailRegistrations(host, after, count) => {
            hosts.devices[host].fail_registrations(after, count);
        }
        Fault::Remove(host) => hosts.devices[host].remove(),
        Fault::TcpReset => hosts.tcp_net.reset(),
        Fault::TcpStall => hosts.tcp_net.stall(begins),
        Fault::TcpRefuse => hosts.tcp_net.refuse(begins),
        Fault::Stop(host) => servers.current[host].stop(),
        Fault::Replace(host) => servers.replace(world, hosts, host),
        Fault::Drop(channel) => world.drop_channel(channel),
    }
}
