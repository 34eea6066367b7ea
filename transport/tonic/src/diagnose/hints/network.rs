//! Hints about networks: interfaces that answer for each other, and ports that get different
//! traffic classes.

use std::collections::BTreeMap;

use crate::diagnose::cures::{advice, quoted, root};
use crate::diagnose::host::{SystemFiles, number};
use crate::diagnose::report::{Device, Hint};

/// Columns in a line of `/proc/net/route`.
const DESTINATION: usize = 1;
const GATEWAY: usize = 2;
const MASK: usize = 7;
/// A route with these digits as its gateway has no gateway. A route with these digits as its mask
/// is a default route.
const NONE: &str = "00000000";

/// A hint if interfaces of RDMA devices are in one subnet and one interface answers for all of them
/// (ARP flux). librdmacm's documentation names the settings that prevent this.
pub(super) fn arp_flux(files: &SystemFiles, devices: &[Device]) -> Option<Hint> {
    let routes = files.read("/proc/net/route")?;
    let mut subnets: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for line in routes.lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (Some(interface), Some(mask)) = (fields.first(), fields.get(MASK)) else { continue };
        let is_rdma =
            devices.iter().any(|device| device.interfaces.iter().any(|name| name == interface));
        if !is_rdma || fields[GATEWAY] != NONE || *mask == NONE {
            continue;
        }
        let subnet = subnets.entry((fields[DESTINATION], mask)).or_default();
        if !subnet.contains(interface) {
            subnet.push(interface);
        }
    }
    let answers_for_all = |interface: &&str| {
        let set = |of: &str| {
            let ignore = files.read(&format!("/proc/sys/net/ipv4/conf/{of}/arp_ignore"));
            ignore.as_deref().and_then(number).unwrap_or(0)
        };
        // The larger setting applies (ip-sysctl.rst).
        set("all").max(set(interface)) == 0
    };
    let both = subnets
        .into_values()
        .find(|subnet| subnet.len() > 1 && subnet.iter().any(answers_for_all))?;
    let what = format!(
        "{} are in one subnet, and each answers ARP for the others' addresses: packets arrive at \
         the wrong device, which drops them",
        both.join(" and ")
    );
    let cures = vec![
        root(
            "have each interface answer for its own address only",
            "sysctl -w net.ipv4.conf.all.arp_ignore=2 net.ipv4.conf.all.arp_announce=2",
        ),
        advice("and write both settings to a file of /etc/sysctl.d, for the next boot"),
    ];
    Some(Hint { name: "arp-flux", device: None, what, cures })
}

/// A hint if connections that set no type of service get different types on different ports, for
/// example because the host's set-up left out an adapter. `set` says whether the connections set a
/// type of service.
pub(super) fn traffic_class(devices: &[Device], set: bool) -> Option<Hint> {
    let ports = devices.iter().filter(|device| device.transport == "RoCE").flat_map(|device| {
        let active = device.ports.iter().filter(|port| port.is_active());
        active.map(|port| (&device.name, port.number, port.traffic_class.unwrap_or(0)))
    });
    let ports: Vec<_> = ports.filter(|_| !set).collect();
    let highest = ports.iter().max_by_key(|(.., class)| *class)?;
    let (device, port, class) =
        ports.iter().min_by_key(|(.., class)| *class).filter(|lowest| lowest.2 < highest.2)?;
    let what = format!(
        "RoCE packets have the type of service {} from {} and {class} from {device}: the network \
         may drop packets of one class and keep those of the other",
        highest.2, highest.0
    );
    let dir = quoted(&format!("/sys/kernel/config/rdma_cm/{device}"));
    let command =
        format!("mkdir -p {dir} && echo {} > {dir}/ports/{port}/default_roce_tos", highest.2);
    let cures = vec![
        root("give both the same type until the next boot", command),
        advice(
            "or set a type for this program: TONIC_RDMA_TOS, or ContextBuilder::type_of_service",
        ),
    ];
    Some(Hint { name: "traffic-class", device: Some((*device).clone()), what, cures })
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;
    use crate::diagnose::hints::test_util::System;
    use crate::diagnose::host::sysfs;

    /// A fake system with the adapters `mlx5_0` and `mlx5_1`, and their interfaces.
    struct TwoAdapters(TempDir);

    const HEAD: &str =
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n";

    impl TwoAdapters {
        fn new(routes: &str) -> TwoAdapters {
            let system = TwoAdapters(tempfile::tempdir().unwrap());
            for (device, interface) in [("mlx5_0", "eth0"), ("mlx5_1", "eth1")] {
                let class = format!("sys/class/infiniband/{device}");
                system.file(&format!("{class}/node_type"), "1: CA\n");
                system.file(&format!("{class}/ports/1/state"), "4: ACTIVE\n");
                system.file(&format!("{class}/device/net/{interface}/mtu"), "4200\n");
            }
            system.file("proc/net/route", &format!("{HEAD}{routes}"));
            system
        }

        fn file(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn hint(&self) -> Option<Hint> {
            let files = SystemFiles::at(self.0.path());
            let devices = sysfs::devices(&files, &[]);
            assert_eq!(devices[1].interfaces, ["eth1"]);
            arp_flux(&files, &devices)
        }
    }

    fn route(interface: &str, destination: &str, gateway: &str, mask: &str) -> String {
        format!("{interface}\t{destination}\t{gateway}\t0001\t0\t0\t0\t{mask}\t0\t0\t0\n")
    }

    #[test]
    fn two_devices_in_one_subnet_answer_for_each_other() {
        let both = ["eth0", "eth1"].map(|name| route(name, "0000000A", NONE, "00FFFFFF")).concat();
        let system = TwoAdapters::new(&both);
        let hint = system.hint().unwrap();
        assert!(hint.what.starts_with("eth0 and eth1 are in one subnet"), "{hint:?}");
        assert!(hint.cures[0].command.as_deref().unwrap().contains("arp_ignore=2"), "{hint:?}");
        // One interface still answers for both.
        system.file("proc/sys/net/ipv4/conf/eth0/arp_ignore", "1\n");
        assert!(system.hint().is_some());
        system.file("proc/sys/net/ipv4/conf/all/arp_ignore", "2\n");
        assert_eq!(system.hint(), None);
    }

    #[test]
    fn other_routes_are_none_of_it() {
        for routes in [
            String::new(),
            "eth0 0000000A\n".to_owned(),
            // A different prefix length means a different subnet.
            route("eth0", "0000000A", NONE, "00FFFFFF")
                + &route("eth1", "0000000A", NONE, "0000FFFF"),
            // Two default routes, and two routes through gateways.
            route("eth0", NONE, "0100000A", NONE) + &route("eth1", NONE, "0100000A", NONE),
            route("eth0", "0000000A", "0100000B", "00FFFFFF")
                + &route("eth1", "0000000A", "0100000B", "00FFFFFF"),
            // One interface does not belong to an RDMA device.
            route("eth0", "0000000A", NONE, "00FFFFFF")
                + &route("eth2", "0000000A", NONE, "00FFFFFF"),
            // The same route twice.
            route("eth0", "0000000A", NONE, "00FFFFFF").repeat(2),
        ] {
            assert_eq!(TwoAdapters::new(&routes).hint(), None, "{routes}");
        }
    }

    #[test]
    fn ports_of_different_classes() {
        let system = System::new();
        system.adapter("mlx5_1", "0000:82:00.0", "mlx5_core", "eth1");
        let hint_of = || traffic_class(&system.devices(4096), false);
        assert_eq!(hint_of(), None);
        let tos = |device: &str, text: &str| {
            let file = format!("sys/kernel/config/rdma_cm/{device}/ports/1/default_roce_tos");
            system.file(&file, text);
        };
        tos("mlx5_0", "106\n");
        assert_eq!(system.devices(4096)[0].ports[0].traffic_class, Some(106));
        let hint = hint_of().unwrap();
        assert_eq!((hint.name, hint.device.as_deref()), ("traffic-class", Some("mlx5_1")));
        assert!(hint.what.contains("106 from mlx5_0 and 0 from mlx5_1"), "{hint:?}");
        let dir = "/sys/kernel/config/rdma_cm/mlx5_1";
        assert_eq!(
            hint.cures[0].command.as_deref(),
            Some(&*format!("mkdir -p {dir} && echo 106 > {dir}/ports/1/default_roce_tos"))
        );
        // The program sets its own type of service, or both ports have the same type. The second
        // port's type comes from the driver's file.
        assert_eq!(traffic_class(&system.devices(4096), true), None);
        tos("mlx5_1", "12\n");
        assert!(hint_of().is_some());
        system.file("sys/class/infiniband/mlx5_1/tc/1/traffic_class", "Global tclass=106\n");
        assert_eq!(hint_of(), None);
        // iWARP has no traffic class, and a port that is down sends nothing.
        tos("mlx5_0", "0\n");
        assert!(hint_of().is_some());
        system.file("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n");
        assert_eq!(hint_of(), None);
    }
}
