//! Detects interfaces in one subnet that answer for each other's addresses (ARP flux). librdmacm's
//! documentation names the settings.

use std::collections::BTreeMap;

use crate::diagnose::cures::{advice, root};
use crate::diagnose::host::system_files::{SystemFiles, number};
use crate::diagnose::report::{Device, Hint};

/// Columns of these fields in a line of `/proc/net/route`.
const DESTINATION: usize = 1;
const GATEWAY: usize = 2;
const MASK: usize = 7;
/// A route with these digits has no gateway, or is a default route.
const NONE: &str = "00000000";

/// A hint if interfaces of RDMA devices are in one subnet and one interface answers for all of
/// them.
pub(super) fn hint(files: &SystemFiles, devices: &[Device]) -> Option<Hint> {
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

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;
    use crate::diagnose::host::sysfs;

    /// A fake system with the adapters `mlx5_0` and `mlx5_1`, and their interfaces.
    struct System(TempDir);

    const HEAD: &str =
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n";

    impl System {
        fn new(routes: &str) -> System {
            let system = System(tempfile::tempdir().unwrap());
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
            hint(&files, &devices)
        }
    }

    fn route(interface: &str, destination: &str, gateway: &str, mask: &str) -> String {
        format!("{interface}\t{destination}\t{gateway}\t0001\t0\t0\t0\t{mask}\t0\t0\t0\n")
    }

    #[test]
    fn two_devices_in_one_subnet_answer_for_each_other() {
        let both = ["eth0", "eth1"].map(|name| route(name, "0000000A", NONE, "00FFFFFF")).concat();
        let system = System::new(&both);
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
            assert_eq!(System::new(&routes).hint(), None, "{routes}");
        }
    }
}
