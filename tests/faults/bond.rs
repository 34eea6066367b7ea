//! Both ends are bonds of two slaves with one in use. The other slave takes over.

use std::process::Command;

use tonic_rdma_tests::load::poll_until;

use crate::fault_test::{FaultTest, Topology, kind, run};
use crate::log::Log;

const ENDS: [&str; 2] = ["va", "vb"];
/// Number of calls that end after each change of slaves.
const CALLS: u64 = 50;

/// The cable of the slaves in use drops all packets until the bonds use the other slaves. This is
/// the effect of a switch that fails while the carrier stays, on a bond that checks the network by
/// ARP (`arp_interval`).
pub async fn slaves_are_cut(log: Log) {
    let drop_all = async |gone, stays| {
        for end in ENDS {
            run(&format!("tc qdisc add dev {end}{gone} root netem loss 100%"));
        }
        for end in ENDS {
            let dropped = || async { dropped(&format!("{end}{gone}")) };
            poll_until("nothing was on its way", dropped, |dropped| *dropped > 0).await;
        }
        for end in ENDS {
            run(&format!("ip link set {end} type bond active_slave {end}{stays}"));
        }
    };
    let pass_all = |gone| {
        ENDS.iter().for_each(|end| run(&format!("tc qdisc del dev {end}{gone} root")));
    };
    change("slaves of a bond that are cut", log, drop_all, pass_all).await;
}

/// The slaves in use lose their carrier, but the bonds keep theirs.
pub async fn slaves_go_down(log: Log) {
    // This also removes the other end's carrier.
    let down = async |gone, _| run(&format!("ip link set vb{gone} down"));
    let up = |gone| run(&format!("ip link set vb{gone} up"));
    change("slaves of a bond that go down", log, down, up).await;
}

/// Slaves change twice under load. On Soft-iWARP no call fails, and the connection survives.
///
/// Linux removes the GIDs of a bond when its slave changes, and adds them again. Soft-RoCE of Linux
/// 6.1 looks up a queue pair's GID for each packet, and ends the queue pair if the GID is missing.
/// So there the connection is lost, and calls move to another one.
async fn change(name: &str, log: Log, lose: impl AsyncFn(u32, u32), restore: impl Fn(u32)) {
    let mut test = FaultTest::new(Topology::veth(), log).await;
    let mut load = test.under_load().await;
    for (gone, stays) in [(1, 2), (2, 1)] {
        is_active(gone);
        load.begin_fault();
        lose(gone, stays).await;
        load.wait_for_calls(CALLS).await;
        is_active(stays);
        restore(gone);
        load.wait_for_calls(CALLS).await;
    }
    if kind() == "rxe" {
        load.wait_for_recovery().await;
        load.end().await;
    } else {
        let stats = load.channel.stats();
        let failed = load.end().await.failed();
        assert_eq!((failed, stats.connections_lost, stats.calls_tcp), (0, 0, 0));
    }
    test.end(name).await;
}

fn is_active(slave: u32) {
    for end in ENDS {
        let active = std::fs::read_to_string(format!("/sys/class/net/{end}/bonding/active_slave"));
        assert_eq!(active.unwrap().trim(), format!("{end}{slave}"));
    }
}

/// Packets that the queueing discipline of an interface has dropped.
fn dropped(netdev: &str) -> u64 {
    let shown = Command::new("tc").args(["-s", "qdisc", "show", "dev", netdev]).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    let (_, count) = shown.split_once("dropped ").unwrap();
    count.split(',').next().unwrap().parse().unwrap()
}
