//! Faults at their moments, and their end.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep_until;

use crate::plan::{Fault, Host};
use crate::world::{Hosts, Serving, World};

/// The servers of a run: the one that takes new connections of each host, and those that are
/// ending.
pub(crate) struct Servers {
    pub(crate) current: Vec<Serving>,
    pub(crate) ending: Vec<Serving>,
}

impl Servers {
    pub(crate) fn start(world: &Arc<World>, hosts: &Hosts) -> Self {
        let current =
            (0..world.plan.servers).map(|host| Serving::start(world, hosts, host)).collect();
        Servers { current, ending: Vec::new() }
    }

    fn replace(&mut self, world: &Arc<World>, hosts: &Hosts, host: Host) {
        if self.current[host].is_stopped() {
            return;
        }
        let new = Serving::start(world, hosts, host);
        let mut old = std::mem::replace(&mut self.current[host], new);
        old.stop();
        self.ending.push(old);
    }
}

/// Lives through the plan's faults. When it returns, all that can be mended is.
pub(crate) async fn strike(world: &Arc<World>, hosts: &Hosts, servers: &mut Servers) {
    // Beginnings, and ends of those that last.
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
        Fault::LoseConnects(host) => hosts.devices[host].lose_connects(begins),
        Fault::LoseDisconnects(host) => hosts.devices[host].lose_disconnects(begins),
        Fault::FailRegistrations(host, after, count) => {
            hosts.devices[host].fail_registrations(after, count);
        }
        Fault::Remove(host) => hosts.devices[host].remove(),
        Fault::LanReset => hosts.lan.reset(),
        Fault::LanStall => hosts.lan.stall(begins),
        Fault::LanRefuse => hosts.lan.refuse(begins),
        Fault::Stop(host) => servers.current[host].stop(),
        Fault::Replace(host) => servers.replace(world, hosts, host),
        Fault::Drop(channel) => world.drop_channel(channel),
    }
}
