//! Both ends are bonds of two slaves, one of them in use. The other one takes over.

use std::time::Duration;

use crate::fault_test::{FaultTest, Topology, UnderLoad, kind, run};
use crate::log::Log;

/// The slave in use, and the other one.
const TURNS: [(u32, u32); 2] = [(1, 2), (2, 1)];
/// Calls that end after each change of slaves.
const CALLS: u64 = 50;

fn is_active(slave: u32) {
    for end in ["va", "vb"] {
        let active = std::fs::read_to_string(format!("/sys/class/net/{end}/bonding/active_slave"));
        assert_eq!(active.unwrap().trim(), format!("{end}{slave}"));
    }
}

/// On Soft-iWARP no call has failed, and the connection stands.
///
/// Linux takes the GIDs of a bond away when its slave changes, and gives them again. Soft-RoCE of
/// Linux 6.1 looks the GID of a queue pair up for each packet, and ends one whose GID was taken. So
/// there the connection is lost, and calls have returned to another one.
async fn changed(mut load: UnderLoad<'_>) {
    if kind() == "rxe" {
        load.wait_for_recovery().await;
        load.end().await;
        return;
    }
    let stats = load.channel.stats();
    let tally = load.end().await;
    assert_eq!((tally.failed(), stats.connections_lost, stats.calls_tcp), (0, 0, 0), "{tally:?}");
}

/// The cable of the slaves in use drops all packets, until the bonds use the others: as with a
/// switch that fails behind a carrier, and a bond that asks for it (`arp_interval`).
pub async fn slaves_are_cut(log: Log) {
    let mut test = FaultTest::new(Topology::veth(), log).await;
    let mut load = test.under_load().await;
    for (gone, stays) in TURNS {
        is_active(gone);
        load.begin_fault();
        for end in ["va", "vb"] {
            run(&format!("tc qdisc add dev {end}{gone} root netem loss 100%"));
        }
        // How long the bonds take to notice.
        tokio::time::sleep(Duration::from_millis(300)).await;
        for end in ["va", "vb"] {
            run(&format!("ip link set {end} type bond active_slave {end}{stays}"));
        }
        load.wait_for_calls(CALLS).await;
        is_active(stays);
        for end in ["va", "vb"] {
            run(&format!("tc qdisc del dev {end}{gone} root"));
        }
    }
    changed(load).await;
    test.end("slaves of a bond that are cut").await;
}

/// The slaves in use lose their carrier. The bonds keep theirs, so calls stay.
pub async fn slaves_go_down(log: Log) {
    let mut test = FaultTest::new(Topology::veth(), log).await;
    let mut load = test.under_load().await;
    for (gone, stays) in TURNS {
        is_active(gone);
        load.begin_fault();
        // Takes the carrier of the other end, too.
        run(&format!("ip link set vb{gone} down"));
        load.wait_for_calls(CALLS).await;
        is_active(stays);
        run(&format!("ip link set vb{gone} up"));
        load.wait_for_calls(CALLS).await;
    }
    changed(load).await;
    test.end("slaves of a bond that go down").await;
}
