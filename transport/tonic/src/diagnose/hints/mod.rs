//! Reasons why RDMA may be slower than possible on this host, as found in the system's files.
//!
//! | hint | condition |
//! |---|---|
//! | `roce-mtu` | a RoCE port sends packets of 1024 bytes or fewer, because of its interface's MTU |
//! | `roce-v1` | a RoCE port connects by version 1, whose packets do not reach ends that use version 2 |
//! | `sleep-states` | a processor may sleep so deeply that it wakes more slowly than a small call takes |
//! | `one-processor` | a device with several interrupt vectors interrupts almost only one processor |
//! | `remote-memory` | no processor of this process is on the device's NUMA node |
//! | `user-access-regions` | queue pairs on an mlx5 device share the library's default number of doorbells |
//! | `rdma-cgroup` | a control group limits its processes' objects on a device |
//! | `pcie-link` | a device's PCI Express link carries less than its ports, and less than it could |
//! | `traffic-class` | RoCE connections get a type of service that depends on their port |
//! | `arp-flux` | interfaces of two devices are in one subnet, and one interface answers for both |
//! | `losses` | counters of lost, repeated or marked packets grew while a peer was measured |

mod losses;
mod network;
#[cfg(test)]
#[cfg(unix)]
mod test_util;

use crate::context::sources::{self, FarNode};
use crate::diagnose::cures::{advice, quoted, root, user};
use crate::diagnose::host::{SystemFiles, number};
use crate::diagnose::report::{Device, Hint, Port};

pub(super) use losses::Losses;

/// Packet length in bytes of a RoCE port whose interface has an MTU of 1500.
const SHORT_MTU: u32 = 1024;
/// MTU in bytes of an interface for packets of 4096 bytes and at most 104 bytes of headers.
const LONG_INTERFACE: u32 = 4200;
/// A wake-up that takes more than this number of microseconds counts as slow, because a small call
/// takes less.
const SLOW_WAKE: u64 = 50;
/// Minimum number of a device's interrupts for a meaningful distribution over processors.
const MANY_INTERRUPTS: u64 = 10_000;
/// If a process may have fewer objects on a device than this number, the limit counts as low. A
/// server with 1,000 connections needs more, because each connection has a queue pair and some
/// chunks of memory.
const FEW_OBJECTS: u64 = 4_000;

/// Settings of the program and its environment that affect hints.
#[derive(Debug, Clone, Copy)]
pub(super) struct HintSettings {
    /// Whether MLX5_TOTAL_UUARS is set.
    pub(super) total_uuars: bool,
    /// The type of service that the program sets for its connections, if any.
    pub(super) type_of_service: Option<u8>,
}

pub(super) fn hints(files: &SystemFiles, devices: &[Device], settings: HintSettings) -> Vec<Hint> {
    let mut hints = Vec::new();
    for device in devices {
        hints.extend(roce_mtu(files, device));
        hints.extend(roce_v1(files, device));
        hints.extend(one_processor(files, device));
        hints.extend(remote_memory(files, device));
        hints.extend(user_access_regions(device, settings.total_uuars));
        hints.extend(rdma_cgroup(files, device));
        hints.extend(pcie_link(files, devices, device));
    }
    hints.extend(network::arp_flux(files, devices));
    hints.extend(network::traffic_class(devices, settings.type_of_service.is_some()));
    if !devices.is_empty() {
        hints.extend(sleep_states(files));
    }
    hints
}

fn hint(name: &'static str, device: &Device, what: String) -> Hint {
    Hint { name, device: Some(device.name.clone()), what, cures: Vec::new() }
}

fn roce_mtu(files: &SystemFiles, device: &Device) -> Option<Hint> {
    let port = device
        .ports
        .iter()
        .find(|port| device.transport == "RoCE" && port.mtu.is_some_and(|mtu| mtu <= SHORT_MTU))?;
    let interface = device.interfaces.first()?;
    let mtu = number(&files.read(&format!("/sys/class/net/{interface}/mtu"))?)?;
    let packets = port.mtu.unwrap_or(SHORT_MTU);
    let what = format!(
        "port {} sends packets of {packets} bytes, as {interface} has an MTU of {mtu}: with \
         {LONG_INTERFACE} they have 4096, which costs the device and the network less",
        port.number
    );
    let cures = vec![root(
        "raise the MTU at both ends and in the switches between them",
        format!("ip link set dev {} mtu {LONG_INTERFACE}", quoted(interface)),
    )];
    Some(Hint { cures, ..hint("roce-mtu", device, what) })
}

/// A hint if a port connects by RoCE v1. The connection manager uses the version that is set in
/// configfs, and otherwise the port's newest version. A device has a directory in configfs only if
/// somebody created the directory.
fn roce_v1(files: &SystemFiles, device: &Device) -> Option<Hint> {
    const V1: &str = "RoCE v1";
    const V2: &str = "RoCE v2";
    let ports = device.ports.iter().filter(|_| device.transport == "RoCE");
    let mut by_v1 = ports.filter_map(|port| {
        let mode = format!(
            "/sys/kernel/config/rdma_cm/{}/ports/{}/default_roce_mode",
            device.name, port.number
        );
        let has = |kind| port.gids.iter().any(|gid| gid.kind.as_deref() == Some(kind));
        if files.read(&mode).is_some_and(|set| set.trim().ends_with(V1)) && has(V2) {
            let set = root("use version 2", format!("echo '{V2}' > {}", quoted(&mode)));
            return Some((port.number, set));
        }
        let none = advice("set the adapter to version 2, by its firmware or driver");
        (has(V1) && !has(V2)).then_some((port.number, none))
    });
    let (number, cure) = by_v1.next()?;
    let what = format!(
        "port {number} connects by {V1}: routers do not forward it, and an end that uses {V2} \
         does not receive it"
    );
    Some(Hint { cures: vec![cure], ..hint("roce-v1", device, what) })
}

fn sleep_states(files: &SystemFiles) -> Option<Hint> {
    let dir = "/sys/devices/system/cpu/cpu0/cpuidle";
    let deepest = files.list(dir).into_iter().filter_map(|state| {
        let read = |file: &str| files.read(&format!("{dir}/{state}/{file}"));
        let latency = number(&read("latency")?)?;
        let enabled = number(&read("disable")?)? == 0;
        (enabled && latency > SLOW_WAKE).then(|| (latency, read("name").unwrap_or(state.clone())))
    });
    let (latency, name) = deepest.max()?;
    let what = format!(
        "processors may sleep in state {name}, from which they need {latency} us to wake: a call \
         that arrives alone waits for that"
    );
    let cures = vec![
        root("disable the state until the next boot", format!("cpupower idle-set -D {SLOW_WAKE}")),
        root("or by a profile of tuned", "tuned-adm profile network-latency"),
    ];
    Some(Hint { name: "sleep-states", device: None, what, cures })
}

fn one_processor(files: &SystemFiles, device: &Device) -> Option<Hint> {
    let address = files.target(&format!("/sys/class/infiniband/{}/device", device.name))?;
    let interrupts = files.read("/proc/interrupts")?;
    let mut lines = interrupts.lines();
    let processors = lines.next()?.split_whitespace().count();
    let of_device = |line: &&str| {
        line.contains(&address) || device.interfaces.iter().any(|name| line.contains(name.as_str()))
    };
    let (mut vectors, mut counts) = (0, vec![0_u64; processors]);
    for line in lines.filter(of_device) {
        vectors += 1;
        let numbers = line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok());
        counts.iter_mut().zip(numbers).for_each(|(count, number)| *count += number);
    }
    let (total, (busiest, most)) =
        (counts.iter().sum::<u64>(), counts.iter().enumerate().max_by_key(|(_, count)| **count)?);
    if vectors < 2 || processors < 2 || total < MANY_INTERRUPTS || *most < total / 20 * 19 {
        return None;
    }
    let what = format!(
        "{most} of its {total} interrupts went to processor {busiest}, from {vectors} vectors: \
         this processor limits what the device carries"
    );
    let cures = vec![
        root("let a daemon distribute them", "systemctl enable --now irqbalance"),
        advice("or write a processor to each /proc/irq/NUMBER/smp_affinity_list"),
    ];
    Some(Hint { cures, ..hint("one-processor", device, what) })
}

fn remote_memory(files: &SystemFiles, device: &Device) -> Option<Hint> {
    let FarNode { node, there, allowed } =
        sources::far_node(|path| files.read(path), &device.name)?;
    let what = format!(
        "it is on NUMA node {node} with processors {there}, and this process runs only on \
         {allowed}: its accesses to the pool cross nodes"
    );
    let cures = vec![user(
        "run the program on the device's node",
        format!("numactl --cpunodebind={node} --membind={node} -- PROGRAM"),
    )];
    Some(Hint { cures, ..hint("remote-memory", device, what) })
}

fn user_access_regions(device: &Device, total_uuars: bool) -> Option<Hint> {
    let is_mlx5 = device.driver.as_deref().is_some_and(|driver| driver.starts_with("mlx5"));
    if !is_mlx5 || total_uuars {
        return None;
    }
    let what = "queue pairs share the library's 16 doorbells, and take turns if a process has \
                more connections than that";
    let cures = vec![user(
        "give a process with many busy connections more (mlx5dv(7))",
        "export MLX5_TOTAL_UUARS=128",
    )];
    Some(Hint { cures, ..hint("user-access-regions", device, what.to_owned()) })
}

fn rdma_cgroup(files: &SystemFiles, device: &Device) -> Option<Hint> {
    let own = files.read("/proc/self/cgroup")?;
    let own = own.lines().find_map(|line| line.strip_prefix("0::"))?.trim_end_matches('/');
    // The limit of each parent group applies as well.
    let groups = std::iter::successors(Some(own), |group| Some(group.rsplit_once('/')?.0));
    let limits = groups.filter_map(|group| {
        let limits = files.read(&format!("/sys/fs/cgroup{group}/rdma.max"))?;
        let of_device =
            limits.lines().find(|line| line.starts_with(&format!("{} ", device.name)))?;
        let objects = of_device.split(' ').find_map(|word| word.strip_prefix("hca_object="))?;
        Some((objects.parse::<u64>().ok()?, group.to_owned()))
    });
    let (objects, group) = limits.min().filter(|(objects, _)| *objects < FEW_OBJECTS)?;
    let what = format!(
        "control group {} allows its processes {objects} objects there: each connection and each \
         chunk of memory takes at least one",
        if group.is_empty() { "/" } else { &group }
    );
    let command = format!(
        "echo '{} hca_object=max' > {}",
        device.name,
        quoted(&format!("/sys/fs/cgroup{group}/rdma.max"))
    );
    let cures = vec![root("lift the limit (for a container, on its host)", command)];
    Some(Hint { cures, ..hint("rdma-cgroup", device, what) })
}

/// A hint if a device's link runs slower than the device can, and carries less than all active
/// ports in the device's slot together.
fn pcie_link(files: &SystemFiles, devices: &[Device], device: &Device) -> Option<Hint> {
    let link = device.pcie.filter(|link| link.is_reduced())?;
    let address = pci_address(files, device)?;
    let slot = slot(&address)?;
    let in_slot =
        |other: &&Device| pci_address(files, other).is_some_and(|at| self::slot(&at) == Some(slot));
    let ports = devices.iter().filter(in_slot).flat_map(|device| &device.ports);
    let rate: f64 = ports.filter(|port| port.is_active()).filter_map(Port::gbit_s).sum();
    let carries = link.gbit_s();
    if carries >= rate {
        return None;
    }
    let what = format!(
        "its PCI Express link runs at {} GT/s on {} lanes, and the device can {} GT/s on {}: it \
         carries about {carries:.0} Gb/s, but the active ports in its slot carry {rate:.0}",
        link.gt_s, link.lanes, link.max_gt_s, link.max_lanes
    );
    let cures = vec![
        root(
            "find the end that limits it: LnkCap shows what the device can do, LnkSta what it does",
            format!("lspci -vv -s {} | grep -E 'LnkCap:|LnkSta:'", quoted(&address)),
        ),
        advice(
            "put the adapter into a slot with that speed and number of lanes, or lift a limit in \
             the host's firmware",
        ),
    ];
    Some(Hint { name: "pcie-link", device: Some(device.name.clone()), what, cures })
}

/// The device's PCI address, such as `0000:81:00.0`.
fn pci_address(files: &SystemFiles, device: &Device) -> Option<String> {
    files.target(&format!("/sys/class/infiniband/{}/device", device.name))
}

/// The slot of an address. An adapter's functions differ only in the number after the point.
fn slot(address: &str) -> Option<&str> {
    Some(address.rsplit_once('.')?.0)
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::test_util::{PCI, System};
    use super::*;

    /// Settings that cause no hint.
    const SETTINGS: HintSettings = HintSettings { total_uuars: true, type_of_service: None };

    fn hints_of(system: &System) -> Vec<Hint> {
        hints(&system.files(), &system.devices(4096), SETTINGS)
    }

    /// The system's only hint.
    fn hint_of(system: &System) -> Hint {
        let mut hints = hints_of(system);
        assert_eq!(hints.len(), 1, "{hints:?}");
        hints.remove(0)
    }

    fn command(hint: &Hint) -> &str {
        hint.cures[0].command.as_deref().unwrap()
    }

    #[test]
    fn a_host_that_is_well_set_up_gets_none() {
        let system = System::new();
        assert_eq!(hints_of(&system), []);
        // Without devices, the depth of sleep does not matter.
        system.file("sys/devices/system/cpu/cpu0/cpuidle/state1/latency", "900\n");
        system.file("sys/devices/system/cpu/cpu0/cpuidle/state1/disable", "0\n");
        assert_eq!(hints(&system.files(), &[], SETTINGS), []);
    }

    #[test]
    fn short_packets() {
        let system = System::new();
        let found = hints(&system.files(), &system.devices(1024), SETTINGS);
        assert_eq!((found.len(), found[0].name), (1, "roce-mtu"));
        assert!(found[0].what.contains("1024 bytes, as eth0 has an MTU of 1500"), "{found:?}");
        assert_eq!(command(&found[0]), "ip link set dev eth0 mtu 4200");
        // InfiniBand has its own MTU.
        system.file("sys/class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand\n");
        assert_eq!(hints(&system.files(), &system.devices(1024), SETTINGS), []);
    }

    #[test]
    fn roce_of_version_1() {
        let system = System::new();
        let port = "sys/class/infiniband/mlx5_0/ports/1";
        let gid = |at: u32, kind: &str| {
            let gid = "0000:0000:0000:0000:0000:ffff:0a00:0001";
            system.file(&format!("{port}/gids/{at}"), gid);
            system.file(&format!("{port}/gid_attrs/types/{at}"), kind);
        };
        let mode = "sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_mode";
        gid(0, "IB/RoCE v1\n");
        gid(1, "RoCE v2\n");
        assert_eq!(hints_of(&system), []);
        system.file(mode, "RoCE v2\n");
        assert_eq!(hints_of(&system), []);
        system.file(mode, "IB/RoCE v1\n");
        let hint = hint_of(&system);
        assert_eq!(hint.name, "roce-v1");
        assert!(hint.what.starts_with("port 1 connects by RoCE v1"), "{hint:?}");
        assert_eq!(command(&hint), format!("echo 'RoCE v2' > /{mode}"));
        // The port has only version 1.
        gid(1, "IB/RoCE v1\n");
        let hint = hint_of(&system);
        assert_eq!((hint.name, &hint.cures[0].command), ("roce-v1", &None));
        // InfiniBand has only one version.
        system.file(&format!("{port}/link_layer"), "InfiniBand\n");
        assert_eq!(hints_of(&system), []);
    }

    #[test]
    fn processors_that_sleep_deep() {
        let system = System::new();
        let states = [("POLL", 0, 0), ("C1", 2, 0), ("C6", 133, 0), ("C8", 400, 1)];
        for (at, (name, latency, disabled)) in states.into_iter().enumerate() {
            let dir = format!("sys/devices/system/cpu/cpu0/cpuidle/state{at}");
            system.file(&format!("{dir}/name"), name);
            system.file(&format!("{dir}/latency"), &latency.to_string());
            system.file(&format!("{dir}/disable"), &disabled.to_string());
        }
        let hint = hint_of(&system);
        assert_eq!((hint.name, &hint.device), ("sleep-states", &None));
        assert!(hint.what.contains("state C6, from which they need 133 us"), "{hint:?}");
    }

    #[test]
    fn interrupts_of_one_processor() {
        let system = System::new();
        let interrupts = |of_first: u64, of_second: u64| {
            format!(
                "            CPU0       CPU1       \n\
                 \u{20} 9:         10  999999999  IO-APIC  acpi\n\
                 \u{20}98:  {of_first:>9}          0  PCI-MSI mlx5_comp0@pci:{PCI}\n\
                 \u{20}99:          0  {of_second:>9}  PCI-MSI mlx5_comp1@pci:{PCI}\n"
            )
        };
        for (first, second, is_told) in
            [(990_000, 10_000, true), (900_000, 100_000, false), (9_000, 0, false)]
        {
            system.file("proc/interrupts", &interrupts(first, second));
            let names: Vec<_> = hints_of(&system).iter().map(|hint| hint.name).collect();
            assert_eq!(names == ["one-processor"], is_told, "{first} {second}: {names:?}");
        }
    }

    #[test]
    fn processors_of_another_node() {
        let system = System::new();
        system.runs_on("0-7,16-23");
        let hint = hint_of(&system);
        assert_eq!(hint.name, "remote-memory");
        assert!(command(&hint).starts_with("numactl --cpunodebind=1 --membind=1"));
        system.runs_on("0-8");
        assert_eq!(hints_of(&system), []);
        // The machine has a single node, or the device's node is unknown.
        system.file(&format!("sys/devices/{PCI}/numa_node"), "-1\n");
        system.runs_on("0");
        assert_eq!(hints_of(&system), []);
    }

    #[test]
    fn doorbells_of_mlx5() {
        let system = System::new();
        let found = hints(
            &system.files(),
            &system.devices(4096),
            HintSettings { total_uuars: false, ..SETTINGS },
        );
        assert_eq!(found[0].name, "user-access-regions");
        assert_eq!(command(&found[0]), "export MLX5_TOTAL_UUARS=128");
    }

    #[test]
    fn limits_of_control_groups() {
        let system = System::new();
        system.file("proc/self/cgroup", "0::/kubepods/pod1\n");
        system.file("sys/fs/cgroup/kubepods/pod1/rdma.max", "mlx5_0 hca_handle=max hca_object=max");
        assert_eq!(hints_of(&system), []);
        // The parent group's limit also applies, but not another device's.
        let above = "mlx5_00 hca_handle=2 hca_object=1\nmlx5_0 hca_handle=2 hca_object=2000\n";
        system.file("sys/fs/cgroup/kubepods/rdma.max", above);
        let hint = hint_of(&system);
        assert_eq!(hint.name, "rdma-cgroup");
        assert!(hint.what.contains("/kubepods allows its processes 2000 objects"), "{hint:?}");
        let lift = "echo 'mlx5_0 hca_object=max' > /sys/fs/cgroup/kubepods/rdma.max";
        assert_eq!(command(&hint), lift);
    }
}

#[cfg(test)]
#[cfg(unix)]
mod pcie_tests {
    use super::*;
    use crate::diagnose::hints::test_util::{PCI, System};

    fn hint_of(system: &System) -> Option<Hint> {
        let devices = system.devices(4096);
        let first = devices.iter().find(|device| device.name == "mlx5_0").unwrap();
        pcie_link(&system.files(), &devices, first)
    }

    fn link(system: &System, pci: &str, now: (&str, &str), max: (&str, &str)) {
        let files =
            ["current_link_speed", "current_link_width", "max_link_speed", "max_link_width"];
        for (file, text) in files.into_iter().zip([now.0, now.1, max.0, max.1]) {
            system.file(&format!("sys/devices/{pci}/{file}"), text);
        }
    }

    fn rate(system: &System, name: &str) {
        let port = format!("sys/class/infiniband/{name}/ports/1");
        system.file(&format!("{port}/rate"), "100 Gb/sec (4X EDR)\n");
    }

    #[test]
    fn a_link_below_its_device_is_told_where_it_is_too_slow() {
        let system = System::new();
        let full = ("16.0 GT/s PCIe\n", "16\n");
        rate(&system, "mlx5_0");
        link(&system, PCI, full, full);
        assert_eq!(hint_of(&system), None);
        for (now, carries) in
            [(("8.0 GT/s PCIe\n", "8\n"), "about 57 Gb/s"), (("2.5 GT/s", "16"), "29")]
        {
            link(&system, PCI, now, full);
            let hint = hint_of(&system).unwrap();
            assert_eq!((hint.name, hint.device.as_deref()), ("pcie-link", Some("mlx5_0")));
            assert!(hint.what.contains(carries), "{hint:?}");
            assert!(hint.what.contains("can 16 GT/s on 16"), "{hint:?}");
            let command = hint.cures[0].command.as_deref().unwrap();
            assert!(command.starts_with("lspci -vv -s 0000:81:00.0 |"), "{hint:?}");
        }
        // Half of the lanes are enough for one port, but not for two.
        link(&system, PCI, ("16.0 GT/s PCIe", "8"), full);
        assert_eq!(hint_of(&system), None);
        system.adapter("mlx5_1", "0000:81:00.1", "mlx5_core", "eth1");
        rate(&system, "mlx5_1");
        assert_eq!(hint_of(&system).unwrap().name, "pcie-link");
        // The other port is down, or nothing is known about the link.
        system.file("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n");
        assert_eq!(hint_of(&system), None);
        link(&system, PCI, ("Unknown", "0"), full);
        assert_eq!(hint_of(&system), None);
    }

    #[test]
    fn a_virtual_function_has_the_link_of_its_physical_one() {
        let system = System::new();
        rate(&system, "mlx5_0");
        link(&system, PCI, ("Unknown", "0"), ("Unknown", "0"));
        link(&system, &format!("{PCI}/physfn"), ("8.0 GT/s", "4"), ("8.0 GT/s", "8"));
        let device = system.devices(4096).remove(0);
        assert_eq!(device.pcie.map(|link| (link.lanes, link.max_lanes)), Some((4, 8)));
        assert_eq!(hint_of(&system).unwrap().name, "pcie-link");
    }
}
