//! Reads the kernel, its modules, the device files, and the process's environment.

use crate::diagnose::host::SystemFiles;
use crate::diagnose::report::{DeviceFile, Host, Module, ModuleState, RdmaNamespaces, RunsIn};

/// Modules that every device needs, each with its purpose and a path that exists if the module is
/// present.
const MODULES: [(&str, &str, &str); 4] = [
    ("ib_core", "RDMA core", "/sys/class/infiniband"),
    ("ib_uverbs", "user-space verbs", "/sys/class/infiniband_verbs"),
    ("rdma_cm", "connection manager", "/sys/class/misc/rdma_cm"),
    ("rdma_ucm", "user-space connections", "/sys/class/misc/rdma_cm"),
];

/// Device drivers, which are listed if they are present.
pub(in crate::diagnose) const DRIVERS: [&str; 14] = [
    "bnxt_re",
    "erdma",
    "hns_roce_hw_v2",
    "ib_mthca",
    "ionic_rdma",
    "irdma",
    "iw_cxgb4",
    "mana_ib",
    "mlx4_ib",
    "mlx5_ib",
    "ocrdma",
    "qedr",
    "rdma_rxe",
    "siw",
];

pub(in crate::diagnose) fn host(files: &SystemFiles) -> Host {
    let (runs_in, unit) = runs_in(files);
    Host {
        os: std::env::consts::OS,
        arch: std::env::consts::ARCH,
        kernel: files.read("/proc/sys/kernel/osrelease"),
        distribution: os_release(files, "ID"),
        runs_in,
        unit,
        rdma_namespaces: rdma_namespaces(files),
    }
}

/// `ID` and `ID_LIKE` of os-release(5), the closest first.
pub(in crate::diagnose) fn families(files: &SystemFiles) -> Vec<String> {
    let likes = os_release(files, "ID_LIKE").unwrap_or_default();
    os_release(files, "ID").into_iter().chain(likes.split_whitespace().map(str::to_owned)).collect()
}

fn os_release(files: &SystemFiles, key: &str) -> Option<String> {
    let text = files.read("/etc/os-release").or_else(|| files.read("/usr/lib/os-release"))?;
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='))?;
    Some(value.trim_matches(['"', '\'']).to_owned())
}

/// Reads a parameter of the module ib_core, which `rdma system set` also changes.
fn rdma_namespaces(files: &SystemFiles) -> Option<RdmaNamespaces> {
    match files.read("/sys/module/ib_core/parameters/netns_mode")?.as_str() {
        "Y" | "1" => Some(RdmaNamespaces::Shared),
        "N" | "0" => Some(RdmaNamespaces::Exclusive),
        _ => None,
    }
}

fn runs_in(files: &SystemFiles) -> (RunsIn, Option<String>) {
    let cgroup = files.read("/proc/self/cgroup").unwrap_or_default();
    if files.exists("/var/run/secrets/kubernetes.io") || cgroup.contains("kubepods") {
        return (RunsIn::Kubernetes, None);
    }
    let marks = ["docker", "libpod", "containerd", "/lxc"];
    if marks.iter().any(|mark| cgroup.contains(mark)) || (marked(files) && !on_a_disk(files)) {
        return (RunsIn::Container, None);
    }
    // A service's line has the form `0::/system.slice/store.service`. The processes of a login are
    // in a `.scope`, or below the user's own manager.
    let unit = cgroup
        .lines()
        .filter_map(|line| line.rsplit('/').next())
        .find(|name| name.ends_with(".service"));
    match unit {
        Some(unit) if cgroup.contains("/system.slice/") => (RunsIn::Service, Some(unit.to_owned())),
        _ => (RunsIn::Session, None),
    }
}

/// Whether the marker file of a container engine exists.
fn marked(files: &SystemFiles) -> bool {
    files.exists("/.dockerenv") || files.exists("/run/.containerenv")
}

/// Whether the root file system is on a disk, as in a virtual machine. A virtual machine that was
/// built from a container image still has the engine's marker files.
fn on_a_disk(files: &SystemFiles) -> bool {
    let mounts = files.read("/proc/self/mountinfo").unwrap_or_default();
    // Lines have the form `22 1 254:0 / / rw - ext4 /dev/vda rw`.
    mounts.lines().any(|line| {
        let at_root = line.split(' ').nth(4) == Some("/");
        let mut kind = line.split(" - ").nth(1).unwrap_or_default().split(' ');
        let (kind, source) = (kind.next(), kind.next().unwrap_or_default());
        at_root && (source.starts_with("/dev/") || kind == Some("hostfs"))
    })
}

pub(in crate::diagnose) fn modules(files: &SystemFiles) -> Vec<Module> {
    let loaded = files.read("/proc/modules").unwrap_or_default();
    let is_loaded = |name: &str| loaded.lines().any(|line| line.split(' ').next() == Some(name));
    let needed = MODULES.iter().map(|(name, purpose, trace)| Module {
        name: (*name).to_owned(),
        purpose,
        state: if is_loaded(name) {
            ModuleState::Loaded
        } else if files.exists(trace) {
            ModuleState::BuiltIn
        } else {
            ModuleState::Missing
        },
    });
    let drivers = DRIVERS.iter().filter(|name| is_loaded(name)).map(|name| Module {
        name: (*name).to_owned(),
        purpose: "driver of devices",
        state: ModuleState::Loaded,
    });
    needed.chain(drivers).collect()
}

/// Drivers that the running kernel has, whether loaded or not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::diagnose) struct Loadable {
    /// Whether the kernel's module directory is visible. Without the directory the drivers are
    /// unknown, and no module can be loaded from here.
    pub(in crate::diagnose) known: bool,
    /// The names in [`DRIVERS`] of drivers that are built in or exist as a file.
    pub(in crate::diagnose) drivers: Vec<&'static str>,
}

/// Directories for RDMA drivers below a kernel's module directory, for the kernel's own modules and
/// for added modules.
const PLACES: [&str; 4] = ["kernel/drivers/infiniband", "updates", "extra", "weak-updates"];
/// Maximum depth of the directory walk.
const DEPTH: usize = 6;

pub(in crate::diagnose) fn loadable(files: &SystemFiles) -> Loadable {
    let Some(release) = files.read("/proc/sys/kernel/osrelease") else {
        return Loadable::default();
    };
    let dir = format!("/lib/modules/{release}");
    let mut there = Vec::new();
    for place in PLACES {
        modules_below(files, &format!("{dir}/{place}"), DEPTH, &mut there);
    }
    // Lines have the form `kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko`.
    let built_in = files.read(&format!("{dir}/modules.builtin")).unwrap_or_default();
    there.extend(built_in.lines().filter_map(|line| line.rsplit('/').next()).filter_map(module_of));
    let drivers = DRIVERS.into_iter().filter(|driver| there.iter().any(|name| name == driver));
    Loadable { known: !files.list(&dir).is_empty(), drivers: drivers.collect() }
}

/// The name of the module in a file, compressed or not. File names use either `-` or `_`.
fn module_of(file: &str) -> Option<String> {
    Some(file.split_once(".ko")?.0.replace('-', "_"))
}

fn modules_below(files: &SystemFiles, dir: &str, depth: usize, there: &mut Vec<String>) {
    for name in files.list(dir) {
        match module_of(&name) {
            Some(module) => there.push(module),
            None if depth > 0 => modules_below(files, &format!("{dir}/{name}"), depth - 1, there),
            None => {}
        }
    }
}

/// The connection manager's file, and the file of each device.
pub(in crate::diagnose) fn files(files: &SystemFiles) -> Vec<DeviceFile> {
    let file = |path: String, device: Option<String>| {
        let opened = files.try_open(&path);
        DeviceFile {
            device,
            usable: opened.is_ok(),
            exists: files.exists(&path),
            error: opened.err().map(|error| error.to_string()),
            path,
        }
    };
    let verbs = files.list("/sys/class/infiniband_verbs");
    let verbs = verbs.iter().filter(|name| name.starts_with("uverbs")).map(|name| {
        let device = files.read(&format!("/sys/class/infiniband_verbs/{name}/ibdev"));
        file(format!("/dev/infiniband/{name}"), device)
    });
    std::iter::once(file("/dev/infiniband/rdma_cm".to_owned(), None)).chain(verbs).collect()
}
