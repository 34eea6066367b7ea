//! Detects a PCI Express link that carries less than the ports behind it.

use crate::diagnose::cures::{advice, quoted, root};
use crate::diagnose::host::system_files::SystemFiles;
use crate::diagnose::report::{Device, Hint, Port};

/// A hint if a device's link runs slower than the device can, and carries less than all active
/// ports in its slot together.
pub(super) fn hint(files: &SystemFiles, devices: &[Device], device: &Device) -> Option<Hint> {
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

/// The device's address, such as `0000:81:00.0`.
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
    use super::*;
    use crate::diagnose::hints::made_up::{PCI, System};

    fn hint_of(system: &System) -> Option<Hint> {
        let devices = system.devices(4096);
        let first = devices.iter().find(|device| device.name == "mlx5_0").unwrap();
        hint(&system.files(), &devices, first)
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
        // The other port is down, or nothing is known about it.
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
