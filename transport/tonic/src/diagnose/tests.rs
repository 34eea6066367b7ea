//! Tests diagnoses of fake and simulated systems.
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use tempfile::TempDir;
use tonic_rdma_memory::{Memlock, Pinning};

use crate::diagnose::host::check::{self, Facts, read};
use crate::diagnose::host::{SystemFiles, limits};
use crate::diagnose::report::{
    Cure, Diagnosis, Finding, ModuleState, PoolSizeBy, RdmaNamespaces, RunsIn,
};
use crate::diagnose::request::DiagnosisRequest;
use crate::diagnose::{diagnose, findings};
use crate::path::policy::{EnvSettings, Policy};
use crate::tests::support::echo::Echo;
use crate::tests::support::world::{Serving, World, endpoint};
use crate::{Context, PoolConfig, Reason, ReasonCode};

/// A fake system made of files.
struct System(TempDir);

impl System {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn with(files: &[(&str, &str)]) -> Self {
        let this = Self::new();
        for (path, text) in files {
            this.file(path, text);
        }
        this
    }

    fn file(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn link(&self, path: &str, target: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    /// Adds a network interface that is up or down.
    fn interface(&self, name: &str, up: bool) {
        let dir = format!("sys/class/net/{name}");
        self.file(&format!("{dir}/flags"), if up { "0x1003\n" } else { "0x1002\n" });
        self.file(&format!("{dir}/carrier"), if up { "1\n" } else { "" });
        self.file(&format!("{dir}/type"), "1\n");
        self.file(&format!("{dir}/address"), "ba:b3:bd:07:5a:47\n");
    }

    /// Adds a device with one port and its file.
    fn device(&self, name: &str, layer: &str, state: &str) {
        let dir = format!("sys/class/infiniband/{name}");
        self.file(&format!("{dir}/node_type"), "1: CA\n");
        self.file(&format!("{dir}/node_guid"), "b8ce:f603:00ab:cdef\n");
        self.file(&format!("{dir}/fw_ver"), "20.31.1014\n");
        self.file(&format!("{dir}/ports/1/state"), state);
        self.file(&format!("{dir}/ports/1/phys_state"), "5: LinkUp\n");
        self.file(&format!("{dir}/ports/1/link_layer"), layer);
        self.file(&format!("{dir}/ports/1/rate"), "100 Gb/sec (4X EDR)\n");
        self.file(&format!("{dir}/ports/1/lid"), "0x2a\n");
        self.file("sys/class/infiniband_verbs/uverbs0/ibdev", name);
        self.file("sys/class/misc/rdma_cm/dev", "10:126\n");
        self.file("dev/infiniband/uverbs0", "");
        self.file("dev/infiniband/rdma_cm", "");
    }

    /// Sets the running kernel, and its modules' files.
    fn kernel(&self, modules: &[&str]) {
        self.file("proc/sys/kernel/osrelease", "6.1.0-28-amd64\n");
        self.file("lib/modules/6.1.0-28-amd64/modules.builtin", "kernel/fs/ext4/ext4.ko\n");
        for module in modules {
            self.file(&format!("lib/modules/6.1.0-28-amd64/{module}"), "");
        }
    }

    /// Sets a kernel with the modules that distributions ship.
    fn full_kernel(&self) {
        let dir = "kernel/drivers/infiniband";
        let of = |path: &str| format!("{dir}/{path}");
        let modules =
            [of("sw/rxe/rdma_rxe.ko.xz"), of("sw/siw/siw.ko.xz"), of("hw/mlx5/mlx5_ib.ko.xz")];
        self.kernel(&modules.each_ref().map(String::as_str));
    }

    fn read(&self) -> (Diagnosis, Facts) {
        read(&SystemFiles::at(self.0.path()), &request(EnvSettings::default()))
    }

    /// The findings if the transport gives this reason for the host and its devices.
    fn findings(&self, code: ReasonCode) -> Vec<Finding> {
        self.findings_with(code, |_, _| ())
    }

    fn findings_with(
        &self,
        code: ReasonCode,
        change: impl FnOnce(&mut Diagnosis, &mut Facts),
    ) -> Vec<Finding> {
        let (mut diagnosis, mut context) = self.read();
        diagnosis.library.found = true;
        context.parent = Some(4711);
        let reason = Reason::new(code, "why");
        for device in &mut diagnosis.devices {
            device.reason = Some(reason.clone());
        }
        diagnosis.reason = Some(reason);
        let limits =
            Memlock { soft: Some(64 << 10), hard: Some(64 << 10), pinned: 0, cap_ipc_lock: false };
        diagnosis.memlock =
            Some(limits::memlock(&limits, &PoolConfig::default(), None, Pinning::default()));
        change(&mut diagnosis, &mut context);
        let found = findings::findings(&diagnosis, &context);
        assert!(found[0].blocks, "{found:?}");
        assert_eq!(found[0].code, code);
        assert!(found.iter().all(|finding| !finding.cures.is_empty() && !finding.what.is_empty()));
        found
    }
}

fn request(env: EnvSettings) -> DiagnosisRequest {
    DiagnosisRequest { env, context: Context::builder().build(), peer: None }
}

fn first(found: &[Finding]) -> &Cure {
    &found[0].cures[0]
}

fn commands(found: &[Finding]) -> Vec<&str> {
    found[0].cures.iter().filter_map(|cure| cure.command.as_deref()).collect()
}

#[test]
fn nothing_there_is_no_trouble() {
    let (diagnosis, context) = System::new().read();
    assert!(diagnosis.devices.is_empty() && context.interfaces.is_empty());
    assert!(diagnosis.modules.iter().all(|module| module.state == ModuleState::Missing));
    assert!(diagnosis.files.iter().all(|file| !file.exists && !file.usable));
    assert_eq!(diagnosis.host.runs_in, RunsIn::Session);
    assert_eq!(diagnosis.huge_pages, Default::default());
}

#[test]
fn nonsense_is_no_trouble() {
    let system = System::new();
    system.device("mlx5_0", "\0\u{1}", "::");
    system.interface("eth0", true);
    let nonsense = ["", "\n\n", "0x", "zz:zz", ":::", "\u{0}\u{fffd}", "99999999999999999999999"];
    let mut files = Vec::new();
    let mut dirs = vec![system.0.path().to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { dirs.push(path) } else { files.push(path) }
        }
    }
    for path in &files {
        for text in nonsense {
            fs::write(path, text).unwrap();
            let (diagnosis, _) = system.read();
            assert_eq!(diagnosis.devices.len(), 1);
        }
    }
    for text in nonsense {
        system.file("sys/class/infiniband/mlx5_0/ports/1/gids/0", text);
        system.file("proc/net/route", text);
        system.file("proc/meminfo", text);
        system.file("proc/modules", text);
        system.file("proc/self/cgroup", text);
        system.file("etc/os-release", text);
        system.file("proc/sys/kernel/osrelease", text);
        system.read();
    }
    fs::write(&files[0], [0xff, 0xfe]).unwrap();
    system.read();
}

#[test]
fn a_device_is_described() {
    let system = System::new();
    system.device("mlx5_0", "Ethernet\n", "4: ACTIVE\n");
    system.interface("eth2", true);
    system.file("sys/class/net/eth2/mtu", "9000\n");
    let dir = "sys/class/infiniband/mlx5_0";
    system.link(&format!("{dir}/device/driver"), "../../bus/pci/drivers/mlx5_core");
    for (index, gid, kind) in [
        (0, "fe80:0000:0000:0000:ba59:9fff:fe00:0001", "IB/RoCE v1"),
        (1, "fe80:0000:0000:0000:ba59:9fff:fe00:0001", "RoCE v2"),
        (10, "0000:0000:0000:0000:0000:ffff:0a09:0001", "RoCE v2"),
        (2, "0000:0000:0000:0000:0000:0000:0000:0000", ""),
    ] {
        system.file(&format!("{dir}/ports/1/gids/{index}"), gid);
        system.file(&format!("{dir}/ports/1/gid_attrs/types/{index}"), kind);
        system.file(&format!("{dir}/ports/1/gid_attrs/ndevs/{index}"), "eth2\n");
    }
    let (diagnosis, _) = system.read();
    let device = &diagnosis.devices[0];
    assert_eq!((device.name.as_str(), device.transport.as_str()), ("mlx5_0", "RoCE"));
    assert_eq!(device.driver.as_deref(), Some("mlx5_core"));
    assert_eq!(device.firmware.as_deref(), Some("20.31.1014"));
    assert_eq!(device.interfaces, ["eth2"]);
    assert_eq!((device.interface_mtu, device.pcie), (Some(9000), None));
    let port = &device.ports[0];
    assert_eq!((port.number, port.state.as_str(), port.lid), (1, "ACTIVE", Some(42)));
    assert_eq!(port.rate.as_deref(), Some("100 Gb/sec (4X EDR)"));
    let gids: Vec<_> =
        port.gids.iter().map(|gid| (gid.index, gid.kind.as_deref().unwrap())).collect();
    assert_eq!(gids, [(0, "RoCE v1"), (1, "RoCE v2"), (10, "RoCE v2")]);
    assert_eq!(port.gids[2].gid.to_string(), "::ffff:10.9.0.1");
    assert_eq!(port.gids[2].interface.as_deref(), Some("eth2"));
    assert!(diagnosis.files.iter().all(|file| file.usable));
}

#[test]
fn an_iwarp_device_is_known_by_its_kind_and_its_interface_by_its_address() {
    let system = System::new();
    system.device("siw0", "Ethernet\n", "4: ACTIVE\n");
    system.interface("d1", true);
    system.file("sys/class/infiniband/siw0/node_type", "4: RNIC\n");
    system.file("sys/class/infiniband/siw0/node_guid", "b8b3:bdff:fe07:5a47\n");
    let (diagnosis, _) = system.read();
    assert_eq!(diagnosis.devices[0].transport, "iWARP");
    assert_eq!(diagnosis.devices[0].interfaces, ["d1"]);
}

#[test]
fn an_infiniband_port_without_a_subnet_manager() {
    let system = System::new();
    system.device("mlx4_0", "InfiniBand\n", "2: INIT\n");
    system.file("etc/os-release", "ID=debian\n");
    let found = system.findings(ReasonCode::NoActivePort);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].device.as_deref(), Some("mlx4_0"));
    assert!(found[0].what.contains("no subnet manager"), "{}", found[0].what);
    let command = first(&found).command.as_deref().unwrap();
    assert_eq!(command, "apt-get install -y opensm && systemctl enable --now opensm");
}

#[test]
fn an_interface_that_is_down() {
    let system = System::new();
    system.device("rxe0", "Ethernet\n", "1: DOWN\n");
    system.file("sys/class/infiniband/rxe0/parent", "eth 3\n");
    system.interface("eth 3", false);
    for code in [ReasonCode::NoActivePort, ReasonCode::NotOnRdmaDevice] {
        let found = system.findings(code);
        assert_eq!(commands(&found), ["ip link set 'eth 3' up"]);
        assert!(first(&found).root);
    }
    // The interface is up but not active, so the cable is the cause.
    system.interface("eth 3", true);
    system.file("sys/class/net/eth 3/carrier", "0\n");
    let found = system.findings(ReasonCode::NoActivePort);
    assert_eq!(commands(&found), [""; 0]);
    assert!(found[0].what.contains("no carrier"), "{}", found[0].what);
}

#[test]
fn an_interface_without_an_address() {
    let system = System::new();
    system.device("rxe0", "Ethernet\n", "4: ACTIVE\n");
    system.file("sys/class/infiniband/rxe0/parent", "eth3\n");
    system.interface("eth3", true);
    let found = system.findings(ReasonCode::NotOnRdmaDevice);
    assert_eq!(commands(&found), ["ip addr add ADDRESS/LENGTH dev eth3"]);
}

#[test]
fn infiniband_without_ipoib() {
    let system = System::new();
    system.device("mlx5_0", "InfiniBand\n", "4: ACTIVE\n");
    // The interface has the address of another adapter.
    system.interface("eth0", true);
    system.file("sys/class/net/eth0/address", "02:00:00:00:00:01\n");
    let found = system.findings(ReasonCode::NotOnRdmaDevice);
    let address = "ip addr add ADDRESS/LENGTH dev INTERFACE";
    assert_eq!(commands(&found), ["modprobe ib_ipoib", address]);
    assert!(found[0].what.contains("no network interface"), "{found:?}");
    system.file("sys/class/infiniband/mlx5_0/device/net/ib0/mtu", "2044\n");
    system.interface("ib0", true);
    let found = system.findings(ReasonCode::NotOnRdmaDevice);
    assert_eq!(commands(&found), ["ip addr add ADDRESS/LENGTH dev ib0"]);
}

#[test]
fn a_device_without_connections() {
    let system = System::new();
    system.device("efa_0", "Unknown\n", "4: ACTIVE\n");
    system.file("sys/class/infiniband/efa_0/node_type", "7: unspecified\n");
    let found = system.findings(ReasonCode::QueuePairRefused);
    assert_eq!(commands(&found), [""; 0]);
    assert!(first(&found).what.starts_with("nothing on this host"), "{found:?}");
    // For another device, the limits may be the cause.
    system.device("mlx5_0", "Ethernet\n", "4: ACTIVE\n");
    let found = system.findings(ReasonCode::QueuePairRefused);
    assert!(found[1].cures[0].what.contains("limits"), "{found:?}");
}

#[test]
fn no_device_and_the_adapters_module_is_not_loaded() {
    let system = System::new();
    system.full_kernel();
    system.interface("eth0", true);
    system.interface("eth1", true);
    system.link("sys/class/net/eth1/device/driver", "../../bus/pci/drivers/mlx5_core");
    let routes = "Iface Destination Gateway\neth0 00000000 0101A8C0\neth0 0001A8C0 00000000\n";
    system.file("proc/net/route", routes);
    let found = system.findings(ReasonCode::NoDevice);
    assert_eq!(
        commands(&found),
        [
            "modprobe mlx5_ib",
            "rdma link add rxe0 type rxe netdev eth0",
            "rdma link add siw0 type siw netdev eth0"
        ]
    );
    system.file("proc/modules", "mlx5_ib 1 0 - Live 0x0\nib_core 2 0 - Live 0x0\n");
    assert_eq!(commands(&system.findings(ReasonCode::NoDevice)).len(), 2);
}

#[test]
fn no_device_as_another_namespace_has_it() {
    let system = System::new();
    system.full_kernel();
    system.interface("eth0", true);
    let mode = "sys/module/ib_core/parameters/netns_mode";
    for shared in ["Y\n", "nonsense\n"] {
        system.file(mode, shared);
        let soft = system.findings(ReasonCode::NoDevice);
        assert!(commands(&soft)[0].starts_with("rdma link add"), "{soft:?}");
    }
    system.file(mode, "N\n");
    assert_eq!(system.read().0.host.rdma_namespaces, Some(RdmaNamespaces::Exclusive));
    let found = system.findings(ReasonCode::NoDevice);
    assert_eq!(commands(&found)[0], "rdma dev set DEVICE netns NAMESPACE");
    assert_eq!(commands(&found)[1], "rdma system set netns shared");
}

#[test]
fn no_device_and_no_interface_is_up() {
    let system = System::new();
    system.full_kernel();
    system.interface("eth0", false);
    let found = system.findings(ReasonCode::NoDevice);
    assert_eq!(
        commands(&found)[0],
        "ip link set eth0 up && rdma link add rxe0 type rxe netdev eth0"
    );
    let system = System::new();
    system.full_kernel();
    let found = system.findings(ReasonCode::NoDevice);
    assert!(first(&found).what.contains("none but loopback"));
}

#[test]
fn a_kernel_without_rdma_is_given_no_device() {
    // RDMA is neither built in nor a module, as in small virtual machines and in containers on
    // them.
    let system = System::with(&[
        ("proc/sys/kernel/osrelease", "6.1.0-microvm\n"),
        ("etc/os-release", "ID=debian\n"),
    ]);
    system.interface("eth0", true);
    let found = system.findings(ReasonCode::NoDevice);
    assert_eq!(commands(&found), [""; 0]);
    assert!(found[0].what.contains("no /lib/modules/6.1.0-microvm"), "{}", found[0].what);
    assert!(first(&found).what.starts_with("run a kernel that has RDMA"));
    system.file("proc/self/cgroup", "0::/docker/0123456789\n");
    let found = system.findings(ReasonCode::NoDevice);
    assert_eq!(commands(&found), [""; 0]);
    assert!(first(&found).what.contains("the host's"), "{}", first(&found).what);

    // There are modules, but none for RDMA, not even for an adapter.
    let system = System::new();
    system.kernel(&["kernel/drivers/net/tun.ko"]);
    system.interface("eth0", true);
    system.link("sys/class/net/eth0/device/driver", "../../bus/pci/drivers/mlx5_core");
    let found = system.findings(ReasonCode::NoDevice);
    assert_eq!(commands(&found), [""; 0]);
    assert!(found[0].what.contains("none is in /lib/modules/6.1.0-28-amd64"), "{}", found[0].what);
    system.file("etc/os-release", "ID=ubuntu\nID_LIKE=debian\n");
    let found = system.findings(ReasonCode::NoDevice);
    assert_eq!(commands(&found), ["apt-get install -y linux-modules-extra-6.1.0-28-amd64"]);
}

#[test]
fn only_what_the_kernel_has_is_proposed() {
    let system = System::new();
    system.kernel(&["updates/dkms/siw.ko.zst"]);
    system.interface("eth0", true);
    let siw = "rdma link add siw0 type siw netdev eth0";
    let rxe = "rdma link add rxe0 type rxe netdev eth0";
    assert_eq!(commands(&system.findings(ReasonCode::NoDevice)), [siw]);
    let builtin = "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko\n";
    system.file("lib/modules/6.1.0-28-amd64/modules.builtin", builtin);
    assert_eq!(commands(&system.findings(ReasonCode::NoDevice)), [rxe, siw]);

    // There is no module directory, but RDMA is present, so all of it may be built in.
    let system = System::with(&[
        ("sys/class/infiniband/.keep", ""),
        ("proc/sys/kernel/osrelease", "6.1.90\n"),
    ]);
    system.interface("eth0", true);
    let (mut diagnosis, context) = system.read();
    diagnosis.devices.clear();
    diagnosis.reason = Some(Reason::new(ReasonCode::NoDevice, "why"));
    assert_eq!(commands(&findings::findings(&diagnosis, &context)), [rxe, siw]);
}

#[test]
fn another_device_than_the_one_that_is_named() {
    let system = System::new();
    system.device("rxe0", "Ethernet\n", "4: ACTIVE\n");
    let found = system.findings_with(ReasonCode::NoDevice, |diagnosis, context| {
        diagnosis.settings.device = Some("mlx5_9".into());
        diagnosis.devices[0].reason = None;
        context.device_from_env = true;
    });
    assert_eq!(commands(&found), ["unset TONIC_RDMA_DEVICE", "export TONIC_RDMA_DEVICE=rxe0"]);
}

#[test]
fn the_kernel_has_a_device_that_rdma_core_does_not_list() {
    let system = System::new();
    system.device("mlx5_0", "Ethernet\n", "4: ACTIVE\n");
    system.file(
        "etc/os-release",
        "NAME=\"Rocky Linux\"\nID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"\n",
    );
    let found = system.findings(ReasonCode::NoDevice);
    assert!(found[0].what.contains("provider"), "{}", found[0].what);
    assert_eq!(commands(&found), ["dnf install -y libibverbs librdmacm"]);
    // The file is missing, which is the cause.
    fs::remove_file(system.0.path().join("dev/infiniband/uverbs0")).unwrap();
    let found = system.findings(ReasonCode::NoDevice);
    assert!(found[0].what.contains("/dev/infiniband/uverbs0 does not exist"), "{}", found[0].what);
    assert!(commands(&found)[0].starts_with("udevadm trigger"));
    system.file("proc/self/cgroup", "0::/docker/0123456789\n");
    let found = system.findings(ReasonCode::NoDevice);
    assert!(commands(&found)[0].starts_with("docker run --device /dev/infiniband"));
}

#[test]
fn no_library() {
    let system = System::with(&[("etc/os-release", "ID=ubuntu\nID_LIKE=debian\n")]);
    let found = system
        .findings_with(ReasonCode::NoRdmaCore, |diagnosis, _| diagnosis.library.found = false);
    assert_eq!(commands(&found), ["apt-get install -y libibverbs1 librdmacm1 ibverbs-providers"]);
    assert!(first(&found).root);
}

#[test]
fn no_connection_manager() {
    let system = System::with(&[("sys/class/infiniband_verbs/abi_version", "6\n")]);
    let found = system.findings(ReasonCode::NoRdmaCore);
    assert_eq!(commands(&found), ["modprobe rdma_ucm"]);
    // The module is loaded but the file is missing, because of a container or udev.
    system.file("sys/class/misc/rdma_cm/dev", "10:126\n");
    assert!(commands(&system.findings(ReasonCode::NoRdmaCore))[0].starts_with("udevadm"));
    system.file("var/run/secrets/kubernetes.io/x", "");
    assert!(first(&system.findings(ReasonCode::NoRdmaCore)).what.contains("device plugin"));
}

#[test]
fn the_memlock_cure_is_the_one_for_where_the_process_runs() {
    // A pool of 64 MiB and a margin of about a quarter of a MiB, rounded up to whole MiB.
    let bytes = 65 << 20;
    let system = System::new();
    let found = system.findings(ReasonCode::Memlock);
    assert_eq!(commands(&found)[0], format!("prlimit --pid 4711 --memlock={bytes}:{bytes}"));
    let lasting =
        format!("echo '* - memlock {}' > /etc/security/limits.d/90-memlock.conf", bytes / 1024);
    assert_eq!(commands(&found)[1], lasting);

    system.file("proc/self/cgroup", "0::/system.slice/store@1.service\n");
    let found = system.findings(ReasonCode::Memlock);
    let unit = commands(&found)[0];
    assert!(unit.contains(&format!("LimitMEMLOCK={bytes}")), "{unit}");
    assert!(unit.ends_with("systemctl restart store@1.service"), "{unit}");

    system.file("proc/self/cgroup", "0::/\n");
    system.file(".dockerenv", "");
    let mount =
        |kind: &str, source: &str| format!("22 1 254:0 / / rw,relatime - {kind} {source} rw\n");
    system.file("proc/self/mountinfo", &mount("ext4", "/dev/vda"));
    assert!(commands(&system.findings(ReasonCode::Memlock))[0].starts_with("prlimit"));
    system.file("proc/self/mountinfo", &mount("overlay", "overlay"));
    let docker = format!("docker run --ulimit memlock={bytes}:{bytes}");
    assert!(commands(&system.findings(ReasonCode::Memlock))[0].starts_with(&docker));
    system.file("proc/self/cgroup", "0::/kubepods/pod1\n");
    assert!(commands(&system.findings(ReasonCode::Memlock))[0].contains("containerd.service"));
}

#[test]
fn the_limit_is_told_once_for_all_devices_and_a_small_pool_without_alarm() {
    let system = System::new();
    system.device("rxe0", "Ethernet\n", "4: ACTIVE\n");
    system.device("rxe1", "Ethernet\n", "4: ACTIVE\n");
    let found = system.findings(ReasonCode::Memlock);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].device, None);

    let (mut diagnosis, context) = system.read();
    let limits =
        Memlock { soft: Some(8 << 20), hard: Some(8 << 20), pinned: 4096, cap_ipc_lock: false };
    diagnosis.memlock =
        Some(limits::memlock(&limits, &PoolConfig::default(), None, Pinning::default()));
    diagnosis.rdma = true;
    let found = findings::findings(&diagnosis, &context);
    assert_eq!((found.len(), found[0].code, found[0].blocks), (1, ReasonCode::Memlock, false));
    assert!(found[0].what.contains("of 67108864 bytes"), "{}", found[0].what);
    let report = diagnosis.memlock.unwrap();
    assert_eq!(report.wanted, (64 << 20) + (256 << 10) + 4096);
    assert!(report.pool_gets.is_some_and(|gets| gets < 8 << 20 && gets > 7 << 20));
}

#[test]
fn one_bad_device_beside_a_good_one_blocks_nothing() {
    let system = System::new();
    system.device("rxe0", "Ethernet\n", "4: ACTIVE\n");
    system.device("rxe1", "Ethernet\n", "1: DOWN\n");
    let (mut diagnosis, context) = system.read();
    diagnosis.rdma = true;
    diagnosis.library.found = true;
    diagnosis.devices[1].reason = Some(Reason::new(ReasonCode::NoActivePort, "down"));
    let found = findings::findings(&diagnosis, &context);
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].device.as_deref(), found[0].blocks), (Some("rxe1"), false));
}

#[test]
fn what_the_server_says_is_mended_at_the_server() {
    let system = System::new();
    system.device("rxe0", "Ethernet\n", "4: ACTIVE\n");
    let found = system.findings_with(ReasonCode::Memlock, |diagnosis, _| {
        diagnosis.devices[0].reason = None;
        diagnosis.reason = Some(Reason::from_peer(ReasonCode::Memlock, "needed 2, limit 1"));
    });
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].what, "the server says: needed 2, limit 1");
    assert!(first(&found).what.starts_with("on the server: ") && commands(&found).is_empty());
}

#[test]
fn a_server_that_answers_over_tcp_only() {
    let told = |file: Option<&str>| {
        let system = System::new();
        system.device("dev0", "Ethernet\n", "4: ACTIVE\n");
        if let Some(kind) = file {
            system.file("sys/class/infiniband/dev0/node_type", kind);
        }
        let found = system.findings_with(ReasonCode::HandshakeTimeout, |diagnosis, _| {
            diagnosis.devices[0].reason = None;
        });
        found[0].cures.iter().map(|cure| cure.what.clone()).collect::<Vec<_>>().join("; ")
    };
    let roce = told(None);
    assert!(roce.contains("UDP port 4791") && roce.contains("roce-v1"), "{roce}");
    assert!(!roce.contains("TCP port that"), "{roce}");
    let iwarp = told(Some("4: RNIC\n"));
    assert!(iwarp.contains("TCP port that") && !iwarp.contains("4791"), "{iwarp}");
}

#[test]
fn every_reason_gives_a_finding_with_a_cure() {
    let bare = System::new();
    let equipped = System::new();
    equipped.device("mlx5_0", "Ethernet\n", "4: ACTIVE\n");
    equipped.interface("eth0", true);
    for code in ReasonCode::ALL {
        bare.findings(code);
        equipped.findings(code);
    }
}

#[tokio::test]
async fn switched_off_by_the_environment() {
    let world = World::new();
    let env = EnvSettings { policy: Some(Policy::Off), ..EnvSettings::default() };
    let request = DiagnosisRequest { env, context: world.client_context.clone(), peer: None };
    let (diagnosis, context) = check::run(&request).await;
    assert!(!diagnosis.rdma);
    assert_eq!(diagnosis.reason.as_ref().map(Reason::code), Some(ReasonCode::Policy));
    let found = findings::findings(&diagnosis, &context);
    assert_eq!(commands(&found), ["unset TONIC_RDMA"]);
}

#[tokio::test]
async fn a_simulated_device_passes_every_step() {
    let world = World::new();
    let diagnosis = diagnose().context(world.client_context.clone()).await.unwrap();
    assert!(diagnosis.rdma, "{:?}", diagnosis.reason);
    let device = &diagnosis.devices[0];
    assert_eq!((device.name.as_str(), device.transport.as_str()), ("sim-client", "sim"));
    assert!(device.usable && device.steps.iter().all(|step| step.ok()), "{:?}", device.steps);
    let names: Vec<_> = device.steps.iter().map(|step| step.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "pool of pinned memory",
            "connection to 10.0.0.2",
            "SEND of 64 bytes",
            "RDMA WRITE of 4096 bytes"
        ]
    );
    let stats = world.client_context.pool_stats().await;
    assert_eq!(stats[0].1.in_use_bytes(), 0, "all memory has come back");
}

#[tokio::test]
async fn a_peer_is_walked_to_and_measured_by_both_paths() {
    let world = World::new();
    let serving = Serving::start(world.builder().measuring(true).add_service(Echo)).await;
    let diagnosis = diagnose().peer(world.endpoint(&serving)).await.unwrap();
    assert!(diagnosis.rdma, "{:?}", diagnosis.reason);
    let peer = diagnosis.peer.unwrap();
    assert_eq!(peer.path, Some(crate::Path::Sim), "{}", peer.path_detail);
    assert!(peer.steps.iter().all(|step| step.ok()), "{:?}", peer.steps);
    assert_eq!(peer.steps.len(), 4);
    assert_eq!(peer.offered.len(), 1);
    for measured in [peer.tcp.unwrap(), peer.fast.unwrap()] {
        assert!(measured.calls >= 25, "{measured:?}");
        assert!(
            measured.latency_median_us > 0.0
                && measured.latency_p99_us >= measured.latency_median_us
        );
        assert!(measured.upload_mib_s > 0.0 && measured.download_mib_s > 0.0, "{measured:?}");
    }
    assert_eq!((peer.not_measured, peer.not_bare), (None, None));
    let bare = peer.bare.unwrap();
    assert_eq!(
        (bare.device.as_str(), bare.place.as_str()),
        ("sim-client", peer.offered[0].place.as_str())
    );
    assert!(bare.sends >= 25 && bare.latency_p99_us >= bare.latency_median_us, "{bare:?}");
    assert!(bare.latency_median_us > 0.0, "{bare:?}");
    assert_eq!(peer.rates.len(), 14);
    for rates in &peer.rates {
        assert!(rates.fast_per_s > Some(0.0) && rates.tcp_per_s > Some(0.0), "{rates:?}");
        // An eighth of the landing memory of a pool of 8 MiB has no room for 1 MiB.
        assert_eq!(rates.bare_per_s > Some(0.0), rates.bytes < 1 << 20, "{rates:?}");
    }
}

/// A path that connects but does not carry calls does not count as success.
#[tokio::test]
async fn a_path_that_fails_under_calls_is_told() {
    let world = World::new();
    let serving = world.serve().await;
    // 24 work requests are enough for a connection and a first call, but for no more.
    world.client.kill_links_after(Some(24));
    let asked = diagnose().peer(world.endpoint(&serving)).await.unwrap();
    assert!(!asked.rdma);
    assert_eq!(asked.reason.map(|reason| reason.code()), Some(ReasonCode::LinkLost));
    let finding = asked.findings.iter().find(|finding| finding.blocks).unwrap();
    assert!(finding.cures[0].what.contains("MTU"), "{finding:?}");
    let peer = asked.peer.unwrap();
    assert_eq!(peer.path, Some(crate::Path::Sim));
    let why = peer.fast_failed.expect("calls over the fast path failed");
    assert_eq!(peer.not_measured, Some(why));
    assert!(peer.tcp.is_none() && peer.fast.is_none());
}

#[tokio::test]
async fn a_stock_server_is_told_apart() {
    let world = World::new();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let server = tonic::transport::Server::builder()
        .add_routes(tonic::service::Routes::default())
        .serve_with_incoming(tonic::transport::server::TcpIncoming::from(listener));
    let server = tokio::spawn(server);
    let asked =
        diagnose().peer(endpoint(addr).context(world.client_context.clone())).await.unwrap();
    server.abort();
    assert!(!asked.rdma);
    assert_eq!(asked.reason.map(|reason| reason.code()), Some(ReasonCode::PeerNotCapable));
    assert_eq!(
        (asked.findings[0].code, asked.findings[0].blocks),
        (ReasonCode::PeerNotCapable, true)
    );
    let peer = asked.peer.unwrap();
    assert_eq!(peer.path, Some(crate::Path::Tcp));
    assert!(peer.not_measured.unwrap().contains("no Probe"));
}

#[tokio::test]
async fn nobody_there_is_said_so() {
    let world = World::new();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    drop(listener);
    let asked = diagnose().peer(endpoint(addr).context(world.client_context)).await.unwrap();
    assert!(!asked.rdma);
    let peer = asked.peer.unwrap();
    assert_eq!(peer.path, None);
    assert!(peer.error.unwrap().contains("refused"));
}

#[cfg(feature = "serde")]
#[tokio::test]
async fn names_in_json_are_stable() {
    let world = World::new();
    let mut diagnosis = diagnose().context(world.client_context.clone()).await.unwrap();
    let reason = Reason::from_peer(ReasonCode::Memlock, "needed 2, limit 1");
    diagnosis.reason = Some(reason);
    let json = serde_json::to_value(&diagnosis).unwrap();
    let mut keys: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    assert_eq!(
        keys,
        [
            "descriptors",
            "devices",
            "files",
            "findings",
            "hints",
            "host",
            "huge_pages",
            "library",
            "memlock",
            "modules",
            "peer",
            "rdma",
            "reason",
            "settings"
        ]
    );
    assert_eq!(
        json["reason"],
        serde_json::json!({"code": "memlock", "side": "peer", "detail": "needed 2, limit 1"})
    );
    assert_eq!(json["settings"]["fabrics"], serde_json::json!(["shm", "verbs"]));
    assert_eq!(json["settings"]["policy"], "auto");
    assert_eq!(json["devices"][0]["steps"][1]["name"], "connection to 10.0.0.2");
}

#[test]
fn this_very_system_can_be_looked_at() {
    let (diagnosis, _) = read(&SystemFiles::real(), &request(EnvSettings::default()));
    assert_eq!(diagnosis.host.os, std::env::consts::OS);
    assert!(Path::new("/proc/self/maps").exists() == diagnosis.host.kernel.is_some());
}

#[test]
fn the_report_says_what_chose_the_size_of_the_pool() {
    let by = |hard, cap_ipc_lock, set_by, ignores_ipc_lock| {
        let limits = Memlock { soft: Some(8 << 20), hard, pinned: 0, cap_ipc_lock };
        let pinning = Pinning { ignores_ipc_lock, queue_bytes: 0 };
        limits::memlock(&limits, &PoolConfig::default(), set_by, pinning).pool_size_by
    };
    assert_eq!(by(Some(8 << 20), false, None, false), PoolSizeBy::Limit);
    assert_eq!(by(None, false, None, false), PoolSizeBy::Memory, "the soft limit is raised");
    assert_eq!(by(Some(8 << 20), true, None, false), PoolSizeBy::Memory);
    assert_eq!(by(Some(8 << 20), true, None, true), PoolSizeBy::Limit, "as on Soft-iWARP");
    for set_by in [PoolSizeBy::Program, PoolSizeBy::Environment] {
        assert_eq!(by(None, true, Some(set_by), false), set_by);
    }
}
