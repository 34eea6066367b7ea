//! The result of a diagnosis. With the feature `serde` all of it can be serialized; the names of
//! fields and the words for kinds and states are stable, and new ones may be added.

use std::net::IpAddr;

use crate::diagnose::peer_report::Peer;
use crate::diagnose::step::Step;
use crate::path::policy::{FabricKind, Policy};
use crate::path::reason::{Reason, ReasonCode};

/// The result of [`diagnose`](crate::diagnose()).
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Diagnosis {
    /// Whether calls would use RDMA. Without a [peer](Diagnosis::peer): whether a client and a
    /// server on this host could both use it. With one: whether calls to it take a fast path and
    /// pass. That path is shared memory if the peer runs on this host and RDMA otherwise.
    pub rdma: bool,
    /// The transport's reason if they would not, otherwise `None`.
    pub reason: Option<Reason>,
    /// Problems and possible improvements, with the commands that fix them. Findings that keep
    /// calls on TCP come first.
    pub findings: Vec<Finding>,
    /// What makes RDMA slower than it could be on this host, where there is a device.
    pub hints: Vec<Hint>,
    /// The settings of environment and code.
    pub settings: Settings,
    /// The operating system.
    pub host: Host,
    /// rdma-core.
    pub library: Library,
    /// The parts of the kernel that RDMA needs.
    pub modules: Vec<Module>,
    /// The device files that RDMA needs, and whether this process may use them.
    pub files: Vec<DeviceFile>,
    /// All RDMA devices of the kernel, including those that rdma-core does not list.
    pub devices: Vec<Device>,
    /// How much memory this process may pin. `None` if it cannot be read.
    pub memlock: Option<MemlockReport>,
    /// Huge pages.
    pub huge_pages: HugePagesReport,
    /// How many descriptors this process may have. `None` if it cannot be read.
    pub descriptors: Option<DescriptorsReport>,
    /// The server that was queried, if any.
    pub peer: Option<Peer>,
}

/// Something about this host that makes RDMA slower than it could be.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Hint {
    /// What kind it is, in a word that stays.
    pub name: &'static str,
    /// The device concerned, if it is one.
    pub device: Option<String>,
    /// What was found.
    pub what: String,
    /// Alternative cures, of which one suffices.
    pub cures: Vec<Cure>,
}

/// A problem, or a possible improvement.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Finding {
    /// The reason code that the transport gives, or would give.
    pub code: ReasonCode,
    /// Whether it keeps calls on TCP. False if RDMA works in spite of it.
    pub blocks: bool,
    /// The device concerned, if any.
    pub device: Option<String>,
    /// A description of the problem, with details.
    pub what: String,
    /// Alternative cures, of which one suffices; the first is the one for this system.
    pub cures: Vec<Cure>,
}

/// A way to fix a problem.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Cure {
    /// What it does, and where it applies.
    pub what: String,
    /// A shell command, to be used unchanged; `None` if no command helps.
    pub command: Option<String>,
    /// Whether root must run it.
    pub root: bool,
}

/// The settings of environment and code.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Settings {
    /// `TONIC_RDMA`, or else the setting of the given endpoint, or else `auto`.
    pub policy: Policy,
    /// The allowed fabrics, preferred first.
    pub fabrics: Vec<FabricKind>,
    /// The only allowed RDMA device: `TONIC_RDMA_DEVICE`, or the context's.
    pub device: Option<String>,
    /// Whether RDMA is built in: Linux, and the feature `verbs`.
    pub verbs: bool,
}

/// The operating system.
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
    /// The systemd unit, if it runs in one.
    pub unit: Option<String>,
    /// Which network namespaces see an RDMA device. `None` if the kernel does not tell.
    pub rdma_namespaces: Option<RdmaNamespaces>,
}

/// Which network namespaces see an RDMA device (`rdma system show`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum RdmaNamespaces {
    /// All of them, each with the GIDs of its own network interfaces.
    Shared,
    /// The one that the device was given to.
    Exclusive,
}

/// The environment of a process, which determines where limits and devices are granted.
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
    /// The error of the dynamic linker, or of a build without them, if they could not be loaded.
    pub error: Option<String>,
}

/// A part of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Module {
    /// The name as in `lsmod`.
    pub name: String,
    /// Whether it is present.
    pub state: ModuleState,
    /// What it is needed for.
    pub purpose: &'static str,
}

/// Whether a part of the kernel is present.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum ModuleState {
    /// Loaded as a module.
    Loaded,
    /// Part of the kernel's image.
    BuiltIn,
    /// Not present.
    Missing,
}

/// A file in /dev/infiniband.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DeviceFile {
    /// Its path.
    pub path: String,
    /// The RDMA device of the file; none for the connection manager's file.
    pub device: Option<String>,
    /// Whether it exists and this process can open it for reading and writing.
    pub usable: bool,
    /// Whether it exists.
    pub exists: bool,
    /// The error when it was opened.
    pub error: Option<String>,
}

/// An RDMA device.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Device {
    /// Its name, as in `rdma link`.
    pub name: String,
    /// `InfiniBand`, `RoCE`, `iWARP`, `sim` or `unknown transport`.
    pub transport: String,
    /// The kernel driver of its PCI device; none for software devices.
    pub driver: Option<String>,
    /// Version of its firmware.
    pub firmware: Option<String>,
    /// Its node GUID.
    pub guid: Option<String>,
    /// Its network interfaces.
    pub interfaces: Vec<String>,
    /// The smallest MTU of these interfaces in bytes.
    pub interface_mtu: Option<u32>,
    /// Its PCI Express link; none for software devices.
    pub pcie: Option<PcieLink>,
    /// IP addresses of this host that belong to it.
    pub addresses: Vec<IpAddr>,
    /// Its ports.
    pub ports: Vec<Port>,
    /// Its limits, if it could be queried.
    pub limits: Option<Limits>,
    /// The steps that were tried on it, in order. Steps that depend on a failed one are left out.
    pub steps: Vec<Step>,
    /// Whether the transport can use it.
    pub usable: bool,
    /// The transport's reason if it cannot.
    pub reason: Option<Reason>,
}

/// A PCI Express link. The speeds are in gigatransfers a second for each lane.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PcieLink {
    /// The speed that it runs at.
    pub gt_s: f64,
    /// The number of lanes that it runs on.
    pub lanes: u32,
    /// The highest speed of the device.
    pub max_gt_s: f64,
    /// The number of lanes of the device.
    pub max_lanes: u32,
}

/// A port of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Port {
    /// The port number, from 1.
    pub number: u32,
    /// `DOWN`, `INIT`, `ARMED`, `ACTIVE`, ...
    pub state: String,
    /// `LinkUp`, `Disabled`, `Polling`, ...
    pub physical_state: Option<String>,
    /// `Ethernet` or `InfiniBand`.
    pub link_layer: String,
    /// Active MTU in bytes. `None` if rdma-core does not report it.
    pub mtu: Option<u32>,
    /// As the kernel reports it, for example `100 Gb/sec (4X EDR)`.
    pub rate: Option<String>,
    /// The type of service that the host gives to RoCE connections that set none. `None` if it
    /// sets none either.
    pub traffic_class: Option<u32>,
    /// Its local identifier on InfiniBand, assigned by the subnet manager; 0 before that.
    pub lid: Option<u32>,
    /// Its GIDs, without unused entries.
    pub gids: Vec<Gid>,
}

impl Port {
    /// The rate that it claims, in Gb/s.
    pub(in crate::diagnose) fn gbit_s(&self) -> Option<f64> {
        self.rate.as_ref()?.split_whitespace().next()?.parse().ok()
    }

    pub(in crate::diagnose) fn is_active(&self) -> bool {
        self.state.contains("ACTIVE")
    }
}

/// An entry of a GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Gid {
    /// Its index in the table.
    pub index: u32,
    /// In the form of an IPv6 address.
    pub gid: std::net::Ipv6Addr,
    /// `RoCE v1`, `RoCE v2` or `InfiniBand`; none on iWARP, which does not use it.
    pub kind: Option<String>,
    /// The network interface it belongs to.
    pub interface: Option<String>,
}

/// The limits of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Limits {
    /// Maximum number of queue pairs.
    pub max_qp: u64,
    /// Maximum number of work requests in one queue.
    pub max_qp_wr: u64,
    /// Maximum number of completion queues.
    pub max_cq: u64,
    /// Maximum number of entries of one completion queue.
    pub max_cqe: u64,
    /// Maximum number of memory regions.
    pub max_mr: u64,
    /// Maximum size of one memory region in bytes.
    pub max_mr_size: u64,
}

/// What chose the configured size of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum PoolSizeBy {
    /// The program, by [`ContextBuilder::pool`](crate::ContextBuilder::pool).
    Program,
    /// The operator, by `TONIC_RDMA_POOL`.
    Environment,
    /// The default of 64 MiB, because RLIMIT_MEMLOCK limits this process.
    Limit,
    /// A sixteenth of the memory that this process may use, between 64 MiB and 1 GiB, because no
    /// limit applies.
    Memory,
}

/// How much memory this process may pin. All sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct MemlockReport {
    /// The soft limit. `None` means no limit.
    pub soft: Option<u64>,
    /// The hard limit, up to which the transport raises the soft one. `None` means no limit.
    pub hard: Option<u64>,
    /// Bytes already pinned or locked.
    pub pinned: u64,
    /// Whether CAP_IPC_LOCK lifts the limit, as it does for all devices but Soft-iWARP.
    pub cap_ipc_lock: bool,
    /// The lowest limit under which the transport uses RDMA.
    pub needed: u64,
    /// The limit that the configured size of the pool requires.
    pub wanted: u64,
    /// The configured size of the pool.
    pub pool_configured: u64,
    /// What chose that size.
    pub pool_size_by: PoolSizeBy,
    /// The size of the pool under the limit. `None` if there can be no pool.
    pub pool_gets: Option<u64>,
}

/// How many descriptors this process may have.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DescriptorsReport {
    /// The soft limit, RLIMIT_NOFILE. `None` means no limit.
    pub soft: Option<u64>,
    /// The hard limit, up to which a process may raise the soft one. `None` means no limit.
    pub hard: Option<u64>,
    /// The number of descriptors in use.
    pub in_use: u64,
    /// The limit for as many connections as a server allows by default
    /// ([`Server::max_connections`](crate::Server::max_connections)), three descriptors each.
    pub wanted: u64,
}

/// Huge pages.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct HugePagesReport {
    /// `always`, `madvise` or `never`. `None` if the kernel has no transparent huge pages.
    pub transparent: Option<String>,
    /// Size of a reserved huge page in bytes.
    pub size: Option<u64>,
    /// Number of reserved huge pages.
    pub reserved: u64,
    /// Number of reserved huge pages that are free.
    pub free: u64,
}
