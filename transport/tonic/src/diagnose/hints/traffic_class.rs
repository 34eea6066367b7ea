//! Detects RoCE ports whose connections get different traffic classes.

use crate::diagnose::cures::{advice, quoted, root};
use crate::diagnose::report::{Device, Hint};

/// A hint if connections that set no type of service get different types on different ports, for
/// example because the host's set-up left out an adapter. `set` says whether the connections set a
/// type of service.
pub(super) fn hint(devices: &[Device], set: bool) -> Option<Hint> {
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
        advice("or set a type for this program: TONIC_RDMA_TOS, or Endpoint::type_of_service"),
    ];
    Some(Hint { name: "traffic-class", device: Some((*device).clone()), what, cures })
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;
    use crate::diagnose::hints::made_up::System;

    #[test]
    fn ports_of_different_classes() {
        let system = System::new();
        system.adapter("mlx5_1", "0000:82:00.0", "mlx5_core", "eth1");
        let hint_of = || hint(&system.devices(4096), false);
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
        // The program sets its own, or both ports have the same one. The second port's comes from
        // its driver's file.
        assert_eq!(super::hint(&system.devices(4096), true), None);
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
