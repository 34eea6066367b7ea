//! A fake system for tests: a directory with the files from which hints are derived.

use std::fs;
use std::os::unix::fs::symlink;

use tempfile::TempDir;

use crate::diagnose::host::SystemFiles;
use crate::diagnose::host::sysfs;
use crate::diagnose::report::Device;

/// The system has an adapter, `mlx5_0` with `eth0`, at a PCI address, on NUMA node 1 of two.
pub(super) struct System(TempDir);

pub(super) const PCI: &str = "0000:81:00.0";

impl System {
    pub(super) fn new() -> System {
        let system = System(tempfile::tempdir().unwrap());
        system.adapter("mlx5_0", PCI, "mlx5_core", "eth0");
        system.file("sys/devices/system/node/node1/cpulist", "8-15,24-31\n");
        system.runs_on("0-31");
        system
    }

    /// Adds an adapter with one port.
    pub(super) fn adapter(&self, name: &str, pci: &str, driver: &str, interface: &str) {
        let device = format!("sys/devices/{pci}");
        self.file(&format!("{device}/numa_node"), "1\n");
        fs::create_dir_all(self.0.path().join(format!("{device}/net/{interface}"))).unwrap();
        symlink(driver, self.0.path().join(format!("{device}/driver"))).unwrap();
        let class = format!("sys/class/infiniband/{name}");
        self.file(&format!("{class}/node_type"), "1: CA\n");
        self.file(&format!("{class}/ports/1/state"), "4: ACTIVE\n");
        self.file(&format!("{class}/ports/1/link_layer"), "Ethernet\n");
        let link = self.0.path().join(format!("{class}/device"));
        symlink(format!("../../../devices/{pci}"), link).unwrap();
        self.file(&format!("sys/class/net/{interface}/mtu"), "1500\n");
    }

    pub(super) fn file(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(super) fn runs_on(&self, processors: &str) {
        self.file("proc/self/status", &format!("Name:\tx\nCpus_allowed_list:\t{processors}\n"));
    }

    pub(super) fn files(&self) -> SystemFiles {
        SystemFiles::at(self.0.path())
    }

    pub(super) fn devices(&self, mtu: u32) -> Vec<Device> {
        let mut devices = sysfs::devices(&self.files(), &[]);
        devices.iter_mut().for_each(|device| device.ports[0].mtu = Some(mtu));
        let first = devices.iter().find(|device| device.name == "mlx5_0").unwrap();
        assert_eq!(first.interfaces, ["eth0"]);
        devices
    }
}
