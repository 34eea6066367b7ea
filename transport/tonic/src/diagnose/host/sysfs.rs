//! Reads RDMA devices, their PCI links and network interfaces as the kernel lists them, with or
//! without rdma-core.

use std::net::Ipv6Addr;

use crate::diagnose::host::{SystemFiles, after_colon, number};
use crate::diagnose::report::{Device, Gid, PcieLink, Port};

const CLASS: &str = "/sys/class/infiniband";
/// Maximum number of GID table entries to read. Software devices have 1024, most of them empty.
const GIDS: usize = 1024;

/// All devices by name. Addresses, MTUs and test results are added later.
pub(in crate::diagnose) fn devices(files: &SystemFiles, interfaces: &[Interface]) -> Vec<Device> {
    files.list(CLASS).into_iter().map(|name| device(files, name, interfaces)).collect()
}

fn device(files: &SystemFiles, name: String, interfaces: &[Interface]) -> Device {
    let dir = format!("{CLASS}/{name}");
    let node = files.read(&format!("{dir}/node_type")).unwrap_or_default();
    let guid = files.read(&format!("{dir}/node_guid"));
    let is_iwarp = after_colon(&node) == "RNIC";
    let ports: Vec<Port> = files
        .list(&format!("{dir}/ports"))
        .iter()
        .filter_map(|number| port(files, &name, number.parse().ok()?, is_iwarp))
        .collect();
    let transport = match ports.first().map(|port| port.link_layer.as_str()) {
        _ if is_iwarp => "iWARP",
        Some("Ethernet") => "RoCE",
        Some("InfiniBand") => "InfiniBand",
        _ => "unknown transport",
    };
    let mut on: Vec<String> = files.list(&format!("{dir}/device/net"));
    on.extend(files.read(&format!("{dir}/parent")));
    on.extend(ports.iter().flat_map(|port| &port.gids).filter_map(|gid| gid.interface.clone()));
    if on.is_empty() {
        // Software devices derive their GUID from the interface's hardware address.
        let same = |i: &&Interface| guid.is_some() && guid == i.mac.as_deref().and_then(eui64);
        on.extend(interfaces.iter().filter(same).map(|i| i.name.clone()));
    }
    let mut distinct = Vec::new();
    on.retain(|name| {
        !distinct.contains(name) && {
            distinct.push(name.clone());
            true
        }
    });
    Device {
        transport: transport.to_owned(),
        driver: files.target(&format!("{dir}/device/driver")),
        firmware: files.read(&format!("{dir}/fw_ver")),
        guid,
        interface_mtu: on
            .iter()
            .filter_map(|name| number(&files.read(&format!("/sys/class/net/{name}/mtu"))?))
            .filter_map(|mtu| u32::try_from(mtu).ok())
            .min(),
        pcie: pcie_link(files, &format!("{dir}/device")),
        interfaces: on,
        addresses: Vec::new(),
        ports,
        limits: None,
        steps: Vec::new(),
        usable: false,
        reason: None,
        name,
    }
}

fn port(files: &SystemFiles, device: &str, number_of_port: u32, is_iwarp: bool) -> Option<Port> {
    let dir = format!("{CLASS}/{device}/ports/{number_of_port}");
    let read = |file: &str| files.read(&format!("{dir}/{file}"));
    let state = read("state")?;
    let mut gids = Vec::new();
    for name in files.list(&format!("{dir}/gids")).into_iter().take(GIDS) {
        let Some(gid) =
            read(&format!("gids/{name}")).and_then(|text| text.parse::<Ipv6Addr>().ok())
        else {
            continue;
        };
        if gid.is_unspecified() {
            continue;
        }
        let kind = read(&format!("gid_attrs/types/{name}")).filter(|_| !is_iwarp).map(|kind| {
            match kind.as_str() {
                "RoCE v2" => "RoCE v2",
                // The kernel uses this term for InfiniBand and for RoCE v1.
                "IB/RoCE v1" if read("link_layer").as_deref() == Some("Ethernet") => "RoCE v1",
                _ => "InfiniBand",
            }
            .to_owned()
        });
        let interface = read(&format!("gid_attrs/ndevs/{name}"));
        gids.push(Gid { index: name.parse().unwrap_or(0), gid, kind, interface });
    }
    Some(Port {
        number: number_of_port,
        state: after_colon(&state).to_owned(),
        physical_state: read("phys_state").map(|text| after_colon(&text).to_owned()),
        link_layer: read("link_layer").unwrap_or_else(|| "unknown".to_owned()),
        mtu: None,
        rate: read("rate"),
        traffic_class: traffic_class(files, device, number_of_port).filter(|_| !is_iwarp),
        lid: read("lid").and_then(|text| number(&text)).and_then(|lid| u32::try_from(lid).ok()),
        gids,
    })
}

/// The type of service of connections that set none. NVIDIA's own driver has a file for all queue
/// pairs (`Global tclass=106`), and the connection manager has a file in configfs.
fn traffic_class(files: &SystemFiles, device: &str, port: u32) -> Option<u32> {
    let of_driver = files.read(&format!("{CLASS}/{device}/tc/{port}/traffic_class"));
    let of_driver = of_driver.and_then(|text| {
        let set = text.lines().find_map(|line| line.strip_prefix("Global tclass="))?;
        number(set.trim())
    });
    let of_manager = || {
        let file = format!("/sys/kernel/config/rdma_cm/{device}/ports/{port}/default_roce_tos");
        number(&files.read(&file)?)
    };
    let set = of_driver.or_else(of_manager).filter(|tos| *tos > 0)?;
    u32::try_from(set).ok()
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::diagnose) struct Interface {
    pub(in crate::diagnose) name: String,
    /// Whether the interface is up, as after `ip link set ... up`.
    pub(in crate::diagnose) up: bool,
    /// Whether the link has a carrier, such as a connected cable.
    pub(in crate::diagnose) carrier: bool,
    pub(in crate::diagnose) ethernet: bool,
    /// Whether a route leads through the interface, which then has an IPv4 address.
    pub(in crate::diagnose) routed: bool,
    /// Whether the default route leads through the interface.
    pub(in crate::diagnose) default: bool,
    /// The driver of the interface's PCI device.
    pub(in crate::diagnose) driver: Option<String>,
    mac: Option<String>,
}

/// The flag IFF_UP of netdevice(7): the interface is up.
const UP: u64 = 1;
/// The type of an Ethernet interface, ARPHRD_ETHER, as sysfs shows it.
const ETHERNET: &str = "1";

/// All interfaces except loopback.
pub(in crate::diagnose) fn interfaces(files: &SystemFiles) -> Vec<Interface> {
    let routes = files.read("/proc/net/route").unwrap_or_default();
    // Each line begins with the interface and the destination. A destination of zero means the
    // default route.
    let routes: Vec<(&str, bool)> = routes
        .lines()
        .skip(1)
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            Some((words.next()?, words.next()? == "00000000"))
        })
        .collect();
    let one = |name: String| {
        let read = |file: &str| files.read(&format!("/sys/class/net/{name}/{file}"));
        Interface {
            up: read("flags").and_then(|flags| number(&flags)).is_some_and(|flags| flags & UP != 0),
            carrier: read("carrier").as_deref() == Some("1"),
            ethernet: read("type").as_deref() == Some(ETHERNET),
            routed: routes.iter().any(|(on, _)| *on == name),
            default: routes.iter().any(|(on, default)| *on == name && *default),
            driver: files.target(&format!("/sys/class/net/{name}/device/driver")),
            mac: read("address"),
            name,
        }
    };
    files.list("/sys/class/net").into_iter().filter(|name| name != "lo").map(one).collect()
}

/// The EUI-64 of a hardware address, in sysfs's form.
fn eui64(mac: &str) -> Option<String> {
    let bytes: Vec<u8> =
        mac.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect::<Result<_, _>>().ok()?;
    let [a, b, c, d, e, f] = bytes.try_into().ok()?;
    Some(format!("{:02x}{b:02x}:{c:02x}ff:fe{d:02x}:{e:02x}{f:02x}", a ^ 2))
}

/// The link of the PCI device in this directory. A virtual function uses its physical function's
/// link.
fn pcie_link(files: &SystemFiles, dir: &str) -> Option<PcieLink> {
    let of = |dir: &str| {
        let read = |file: &str| files.read(&format!("{dir}/{file}"));
        Some(PcieLink {
            gt_s: speed(&read("current_link_speed")?)?,
            lanes: lanes(&read("current_link_width")?)?,
            max_gt_s: speed(&read("max_link_speed")?)?,
            max_lanes: lanes(&read("max_link_width")?)?,
        })
    };
    of(dir).or_else(|| of(&format!("{dir}/physfn")))
}

/// Parses `16.0 GT/s PCIe`. `Unknown` gives `None`.
fn speed(text: &str) -> Option<f64> {
    let (number, _) = text.split_once(" GT/s")?;
    number.parse().ok().filter(|speed| *speed > 0.0)
}

/// The number of lanes. 0 and 255 mean that the number is unknown.
fn lanes(text: &str) -> Option<u32> {
    text.parse().ok().filter(|lanes| (1..=32).contains(lanes))
}

impl PcieLink {
    /// Approximate payload in Gb/s that the link carries in each direction.
    pub(in crate::diagnose) fn gbit_s(&self) -> f64 {
        // `code` is the share of data in the lane's encoding, and 0.9 is the share of payload in
        // packets of 256 bytes.
        let code = if self.gt_s > 5.0 { 128.0 / 130.0 } else { 0.8 };
        self.gt_s * f64::from(self.lanes) * code * 0.9
    }

    /// Whether the device could run at a higher speed or on more lanes.
    pub(in crate::diagnose) fn is_reduced(&self) -> bool {
        self.gt_s < self.max_gt_s || self.lanes < self.max_lanes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guid_is_made_of_the_hardware_address() {
        assert_eq!(eui64("ba:b3:bd:07:5a:47").as_deref(), Some("b8b3:bdff:fe07:5a47"));
        for bad in ["", "ba:b3", "zz:b3:bd:07:5a:47", "ba:b3:bd:07:5a:47:00"] {
            assert_eq!(eui64(bad), None, "{bad}");
        }
    }

    #[test]
    fn speeds_and_lanes() {
        assert_eq!(speed("16.0 GT/s PCIe"), Some(16.0));
        assert_eq!(speed("8 GT/s"), Some(8.0));
        for bad in ["", "Unknown", "Unknown speed", "x GT/s", "0 GT/s", "-1 GT/s"] {
            assert_eq!(speed(bad), None, "{bad}");
        }
        assert_eq!(["16", "0", "255", ""].map(lanes), [Some(16), None, None, None]);
    }

    #[test]
    fn a_link_carries_less_than_its_lanes_transfer() {
        let link = PcieLink { gt_s: 8.0, lanes: 8, max_gt_s: 16.0, max_lanes: 8 };
        assert!((56.0..57.0).contains(&link.gbit_s()) && link.is_reduced());
        let old = PcieLink { gt_s: 5.0, lanes: 8, max_gt_s: 5.0, max_lanes: 8 };
        assert!((28.0..29.0).contains(&old.gbit_s()) && !old.is_reduced());
    }
}
