//! Findings about devices without an IP address.

use crate::diagnose::cures::{advice, quoted, root};
use crate::diagnose::host::sysfs::Interface;
use crate::diagnose::report::{Cure, Device};
use crate::path::reason::Reason;

/// The problem of a device without an address. `on` lists its network interfaces.
pub(super) fn finding(device: &Device, reason: &Reason, on: &[&Interface]) -> (String, Vec<Cure>) {
    let cures = |interface: &str| {
        vec![root(
            "give the interface an address of your network, and the length of its prefix",
            format!("ip addr add ADDRESS/LENGTH dev {interface}"),
        )]
    };
    if let Some(down) = on.iter().find(|interface| !interface.up) {
        return interface_down(device, down);
    }
    match on.first() {
        Some(interface) => {
            let what = format!(
                "{} is on network interface {}, which has no address that other hosts can use",
                device.name, interface.name
            );
            (what, cures(&quoted(&interface.name)))
        }
        None if device.transport == "InfiniBand" => {
            let what = format!(
                "{} has no network interface here to hold addresses: IPoIB creates one",
                device.name
            );
            let load = root("load IPoIB", "modprobe ib_ipoib");
            (what, std::iter::once(load).chain(cures("INTERFACE")).collect())
        }
        None => (reason.detail().to_owned(), vec![advice(reason.cure())]),
    }
}

pub(super) fn interface_down(device: &Device, down: &Interface) -> (String, Vec<Cure>) {
    let what = format!("{} is on network interface {}, which is down", device.name, down.name);
    (what, vec![root("bring the interface up", format!("ip link set {} up", quoted(&down.name)))])
}

/// Whether the kernel says that the device is neither InfiniBand, RoCE nor iWARP. Only these three
/// have connections.
pub(super) fn is_unconnected(device: &Device) -> bool {
    device.transport == "unknown transport" && !device.ports.is_empty()
}

/// The cure for a device that can never be used.
pub(super) fn other_adapter() -> Vec<Cure> {
    vec![advice(
        "nothing on this host: use an adapter or a machine with RoCE, InfiniBand or iWARP; until \
         then calls go over TCP, and by shared memory within this host",
    )]
}
