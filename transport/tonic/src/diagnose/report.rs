//! What a diagnosis says. With the feature `serde` all of it can be serialized; the names of fields
//! and the words for kinds and states are stable, new ones may be added.

use std::net::{IpAddr, SocketAddr};

use crate::path::Path;
use crate::path::policy::{FabricKind, Policy};
use crate::path::reason::{Reason, ReasonCode};

/// What [`diagnose`](crate::diagnose()) found out.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Diagnosis {
    /// Whether calls would go by RDMA. Without a [peer](Diagnosis::peer): whether a client and a
    /// server on this host could both use it. With one: whether calls to it take a fast path, which
    /// is shared memory where the peer runs on this host and RDMA elsewhere.
    pub rdma: bool,
    /// Why not, in the words of the transport. `None` if they would.
    pub reason: Option<Reason>,
    /// What is in the way, and what could be better, with the commands that mend it. What keeps
    /// calls on TCP comes first.
    pub findings: Vec<Finding>,
    /// What environment and code ask for.
    pub settings: Settings,
    /// The system.
    pub host: Host,
    /// rdma-core.
    pub library: Library,
    /// The kernel's parts that RDMA needs.
    pub modules: Vec<Module>,
    /// The device files that RDMA needs, and whether this process may use them.
    pub files: Vec<DeviceFile>,
    /// RDMA devices: those of the kernel, whether rdma-core lists them or not.
    pub devices: Vec<Device>,
    /// How much this process may pin. `None` where it cannot be read.
    pub memlock: Option<MemlockReport>,
    /// Huge pages.
    pub huge_pages: HugePagesReport,
    /// The server that was asked, if one was.
    pub peer: Option<Peer>,
}

/// Something in the way, or that could be better.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Finding {
    /// The code that the transport gives, or would give.
    pub code: ReasonCode,
    /// True when it keeps calls on TCP; false when RDMA works all the same.
    pub blocks: bool,
    /// The device it is about, if it is about one.
    pub device: Option<String>,
    /// What is wrong, with the particulars.
    pub what: String,
    /// Ways to mend it. Any one of them will do; the first is the one for this system.
    pub cures: Vec<Cure>,
}

/// A way to mend something.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Cure {
    /// What it does, and where it applies.
    pub what: String,
    /// The command for a shell, to be used as it is; `None` where no command helps.
    pub command: Option<String>,
    /// Whether root must run it.
    pub root: bool,
}

/// What environment and code ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Settings {
    /// `TONIC_RDMA`, or what the endpoint that was given says, or `auto`.
    pub policy: Policy,
    /// The fabrics that are allowed, best first.
    pub fabrics: Vec<FabricKind>,
    /// The only RDMA device that is allowed: `TONIC_RDMA_DEVICE`, or the context's.
    pub device: Option<String>,
    /// Whether RDMA is built in: Linux, and the feature `verbs`.
    pub verbs: bool,
}

/// The system.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Host {
    /// `linux`, `macos`, ...
    pub os: &'static str,
    /// `x86_64`, `aarch64`, ...
    pub arch: &'static str,
    /// The kernel's release, as `uname -r` gives it.
    pub kernel: Option<String>,
    /// `ID` of os-release(5): `debian`, `fedora`, ...
    pub distribution: Option<String>,
    /// What the process runs in.
    pub runs_in: RunsIn,
    /// The systemd unit, where it runs in one.
    pub unit: Option<String>,
}

/// What a process runs in, as far as it decides where limits and devices are granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum RunsIn {
    /// A session: a login shell and what it starts.
    Session,
    /// A systemd service.
    Service,
    /// A container.
    Container,
    /// A container of Kubernetes.
    Kubernetes,
}

/// rdma-core.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Library {
    /// Whether libibverbs and librdmacm could be loaded.
    pub found: bool,
    /// The version of rdma-core, from the name of the library's file.
    pub version: Option<String>,
    /// The files that were loaded.
    pub paths: Vec<String>,
    /// What the dynamic linker, or the build, says when they could not.
    pub error: Option<String>,
}

/// A part of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Module {
    /// As `lsmod` shows it.
    pub name: String,
    /// Whether it is there.
    pub state: ModuleState,
    /// What it is for.
    pub purpose: &'static str,
}

/// Whether a part of the kernel is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum ModuleState {
    /// Loaded as a module.
    Loaded,
    /// Part of the kernel's image.
    BuiltIn,
    /// Not there.
    Missing,
}

/// A file in /dev/infiniband.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DeviceFile {
    /// Its path.
    pub path: String,
    /// The RDMA device behind it; none for that of the connection manager.
    pub device: Option<String>,
    /// Whether it is there and this process can open it to read and write.
    pub usable: bool,
    /// Whether it is there.
    pub exists: bool,
    /// Why it cannot be opened.
    pub error: Option<String>,
}

/// An RDMA device.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Device {
    /// Its name, as `rdma link` shows it.
    pub name: String,
    /// `InfiniBand`, `RoCE`, `iWARP`, `sim` or `unknown transport`.
    pub transport: String,
    /// The kernel driver of its PCI device; none for devices made of software.
    pub driver: Option<String>,
    /// Version of its firmware.
    pub firmware: Option<String>,
    /// Its node GUID.
    pub guid: Option<String>,
    /// Its network interfaces.
    pub interfaces: Vec<String>,
    /// IP addresses of this host that lie on it.
    pub addresses: Vec<IpAddr>,
    /// Its ports.
    pub ports: Vec<Port>,
    /// What it allows, where it could be asked.
    pub limits: Option<Limits>,
    /// What was tried on it, in that order. What depends on a step that failed is left out.
    pub steps: Vec<Step>,
    /// Whether the transport can use it.
    pub usable: bool,
    /// Why not, as the transport says it.
    pub reason: Option<Reason>,
}

/// A port of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Port {
    /// From 1.
    pub number: u32,
    /// `DOWN`, `INIT`, `ARMED`, `ACTIVE`, ...
    pub state: String,
    /// `LinkUp`, `Disabled`, `Polling`, ...
    pub physical_state: Option<String>,
    /// `Ethernet` or `InfiniBand`.
    pub link_layer: String,
    /// Active MTU in bytes. None where rdma-core does not tell.
    pub mtu: Option<u32>,
    /// As the kernel says it, such as `100 Gb/sec (4X EDR)`.
    pub rate: Option<String>,
    /// Its entry in the subnet manager's tables, on InfiniBand; 0 before the subnet manager was
    /// there.
    pub lid: Option<u32>,
    /// Its GIDs, without those that are not in use.
    pub gids: Vec<Gid>,
}

/// An entry of a GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Gid {
    /// Its place in the table.
    pub index: u32,
    /// In the form of an IPv6 address.
    pub gid: std::net::Ipv6Addr,
    /// `RoCE v1`, `RoCE v2` or `InfiniBand`; none on iWARP, which has no use for it.
    pub kind: Option<String>,
    /// The network interface it belongs to.
    pub interface: Option<String>,
}

/// What a device allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Limits {
    /// Queue pairs.
    pub max_qp: u64,
    /// Work requests in one queue.
    pub max_qp_wr: u64,
    /// Completion queues.
    pub max_cq: u64,
    /// Entries of one completion queue.
    pub max_cqe: u64,
    /// Memory regions.
    pub max_mr: u64,
    /// Bytes of one memory region.
    pub max_mr_size: u64,
}

/// Something that was tried.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Step {
    /// What was tried.
    pub name: String,
    /// Microseconds that it took.
    pub micros: u64,
    /// Why it failed, with the code that the transport would give. None: it did not.
    pub reason: Option<Reason>,
    /// What came of it, where there is more to say than that it worked.
    pub detail: String,
}

impl Step {
    /// Whether it worked.
    pub fn ok(&self) -> bool {
        self.reason.is_none()
    }
}

/// How much this process may pin, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct MemlockReport {
    /// The soft limit. None: no limit.
    pub soft: Option<u64>,
    /// The hard limit, up to which the transport raises the soft one. None: no limit.
    pub hard: Option<u64>,
    /// Pinned or locked already.
    pub pinned: u64,
    /// Whether CAP_IPC_LOCK lifts the limit, as it does on all devices but Soft-iWARP.
    pub cap_ipc_lock: bool,
    /// The lowest limit under which the transport uses RDMA.
    pub needed: u64,
    /// The limit under which the pool becomes as large as configured.
    pub wanted: u64,
    /// The size of the pool that is configured.
    pub pool_configured: u64,
    /// The size that it gets. None: none at all.
    pub pool_gets: Option<u64>,
}

/// Huge pages.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct HugePagesReport {
    /// `always`, `madvise` or `never`. None: the kernel has no transparent ones.
    pub transparent: Option<String>,
    /// Bytes of a reserved huge page.
    pub size: Option<u64>,
    /// Reserved huge pages.
    pub reserved: u64,
    /// Reserved ones that are free.
    pub free: u64,
}

/// What a server says, and how it can be reached.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Peer {
    /// Its address, as it was given.
    pub uri: String,
    /// From the TCP connection to the RDMA connections, with what each took.
    pub steps: Vec<Step>,
    /// Where the server offers to be reached.
    pub offered: Vec<Offered>,
    /// Fabrics that the server does not offer, or this side cannot take, and why.
    pub refused: Vec<Refused>,
    /// The path that a channel takes. None when there is no TCP connection either.
    pub path: Option<Path>,
    /// The same with the particulars, as [`PathInfo`](crate::PathInfo) displays it.
    pub path_detail: String,
    /// Why it is TCP, if it is.
    pub reason: Option<Reason>,
    /// Why the server cannot be reached at all, even by TCP.
    pub error: Option<String>,
    /// What was measured over TCP.
    pub tcp: Option<Measured>,
    /// What was measured over the fast path.
    pub fast: Option<Measured>,
    /// Why nothing was measured, if nothing was.
    pub not_measured: Option<String>,
}

/// A place where a server offers to be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Offered {
    /// By which path.
    pub path: Path,
    /// Where, in words.
    pub place: String,
    /// Address and port, where it has them.
    pub addr: Option<SocketAddr>,
}

/// A fabric that cannot be taken.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Refused {
    /// Which.
    pub path: Path,
    /// Why.
    pub reason: Reason,
}

/// A short measurement of one path: unary calls of a service of the server's transport.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Measured {
    /// Calls of 64 bytes there and back that were timed.
    pub calls: u32,
    /// Their median in microseconds.
    pub latency_median_us: f64,
    /// Their 99th percentile in microseconds.
    pub latency_p99_us: f64,
    /// MiB/s to the server, in messages of 1 MiB, four at a time.
    pub upload_mib_s: f64,
    /// MiB/s from the server, likewise.
    pub download_mib_s: f64,
}
