//! The result of a diagnosis. With the feature `serde`, the whole result can be serialized. The
//! names of fields and the words for kinds and states are stable. Later versions may add further
//! names and words.

use std::net::IpAddr;

use crate::diagnose::peer_report::{Peer, Step};
use crate::path::policy::{FabricKind, Policy};
use crate::path::reason::{Reason, ReasonCode};

/// The result of [`diagnose`](crate::diagnose()).
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Diagnosis {
    /// Whether calls would use RDMA. Without a [peer](Diagnosis::peer), the value says whether a
    /// client and a server on this host could both use RDMA. With a peer, the value says whether
    /// calls to the peer take a fast path and succeed. The fast path is shared memory if the peer
    /// runs on this host, and otherwise RDMA.
    pub rdma: bool,
    /// The transport's reason if calls would not use RDMA, otherwise `None`.
    pub reason: Option<Reason>,
    /// Problems and possible improvements, with the commands that fix them. Findings that keep
    /// calls on TCP come first.
    pub findings: Vec<Finding>,
    /// Reasons why RDMA may be slower than possible on this host. Empty without a device.
    pub hints: Vec<Hint>,
    /// The settings from environment and code.
    pub settings: PathSettings,
    /// This host: operating system, kernel and environment.
    pub host: Host,
    /// The libraries of rdma-core.
    pub library: Library,
    /// The parts of the kernel that RDMA needs.
    pub modules: Vec<Module>,
    /// The device files that RDMA needs, and whether this process may use them.
    pub files: Vec<DeviceFile>,
    /// All RDMA devices of the kernel, including those that rdma-core does not list.
    pub devices: Vec<Device>,
    /// How much memory this process may pin. `None` if the limit cannot be read.
    pub memlock: Option<MemlockReport>,
    /// The kernel's settings for huge pages.
    pub huge_pages: HugePagesReport,
    /// How many descriptors this process may have. `None` if the limit cannot be read.
    pub descriptors: Option<DescriptorsReport>,
    /// The server that was queried, if any.
    pub peer: Option<Peer>,
}

/// A condition of this host that makes RDMA slower than it could be.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Hint {
    /// The kind of condition, as a stable name.
    pub name: &'static str,
    /// The device concerned, if the condition concerns only one device.
    pub device: Option<String>,
    /// A description of the condition, with details.
    pub what: String,
    /// Cures, in the order in which to try them. In most cases one suffices.
    pub cures: Vec<Cure>,
}

/// A problem, or a possible improvement.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Finding {
    /// The reason code that the transport gives, or would give.
    pub code: ReasonCode,
    /// Whether the finding keeps calls on TCP. False if RDMA works despite the finding.
    pub blocks: bool,
    /// The device concerned, if any.
    pub device: Option<String>,
    /// A description of the problem, with details.
    pub what: String,
    /// Cures, in the order in which to try them. In most cases one suffices. The first is for this
    /// system.
    pub cures: Vec<Cure>,
}

/// A way to fix a problem.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Cure {
    /// A description of the cure, and where it applies.
    pub what: String,
    /// A shell command. Replace only parts in capitals, which [`what`](Self::what) explains. `None`
    /// if no command helps.
    pub command: Option<String>,
    /// Whether root must run the command.
    pub root: bool,
}

/// The settings from environment and code.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PathSettings {
    /// The policy: the value of `TONIC_RDMA`, or else the given endpoint's setting, or else `auto`.
    pub policy: Policy,
    /// The allowed fabrics, in order of preference.
    pub fabrics: Vec<FabricKind>,
    /// The only allowed RDMA device, from `TONIC_RDMA_DEVICE` or the context.
    pub device: Option<String>,
    /// Whether RDMA is built in, which requires Linux and the feature `verbs`.
    pub verbs: bool,
}

/// A host: its operating system and kernel, and the environment of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Host {
    /// The name of the operating system: `linux`, `macos`, ...
    pub os: &'static str,
    /// The processor architecture: `x86_64`, `aarch64`, ...
    pub arch: &'static str,
    /// The kernel's release, as `uname -r` shows it.
    pub kernel: Option<String>,
    /// The distribution, as `ID` of os-release(5) names it: `debian`, `fedora`, ...
    pub distribution: Option<String>,
    /// The kind of environment that the process runs in.
    pub runs_in: RunsIn,
    /// The unit of the systemd service that the process runs in, if any.
    pub unit: Option<String>,
    /// Which network namespaces see an RDMA device. `None` if the kernel does not report it.
    pub rdma_namespaces: Option<RdmaNamespaces>,
}

/// Which network namespaces see an RDMA device (`rdma system show`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum RdmaNamespaces {
    /// All namespaces. Each namespace sees only the GIDs of its own network interfaces.
    Shared,
    /// Only the namespace that the device was given to.
    Exclusive,
}

/// The environment of a process, which determines where limits and devices are configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum RunsIn {
    /// A session: a login shell and the processes that it starts.
    Session,
    /// A systemd service.
    Service,
    /// A container that Kubernetes does not manage.
    Container,
    /// A container of Kubernetes.
    Kubernetes,
}

/// The libraries of rdma-core, and whether this process could load them.
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
    /// The error of the dynamic linker, or of a build without the libraries, if they could not be
    /// loaded.
    pub error: Option<String>,
}

/// A part of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Module {
    /// The name that `lsmod` shows.
    pub name: String,
    /// Whether the part is present.
    pub state: ModuleState,
    /// Why RDMA needs this part.
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
    /// The path, which begins with `/dev/infiniband/`.
    pub path: String,
    /// The file's RDMA device. `None` for the connection manager's file.
    pub device: Option<String>,
    /// Whether the file exists and this process can open it for reading and writing.
    pub usable: bool,
    /// Whether the file exists.
    pub exists: bool,
    /// The error if the file could not be opened.
    pub error: Option<String>,
}

/// An RDMA device.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Device {
    /// The device's name, as `rdma link` shows it.
    pub name: String,
    /// The transport: `InfiniBand`, `RoCE`, `iWARP`, `sim` or `unknown transport`.
    pub transport: String,
    /// The kernel driver of the PCI device. `None` for software devices.
    pub driver: Option<String>,
    /// The version of the firmware.
    pub firmware: Option<String>,
    /// The device's node GUID.
    pub guid: Option<String>,
    /// The device's network interfaces.
    pub interfaces: Vec<String>,
    /// The smallest MTU of the device's interfaces in bytes.
    pub interface_mtu: Option<u32>,
    /// The device's PCI Express link. `None` for software devices.
    pub pcie: Option<PcieLink>,
    /// This host's IP addresses that belong to the device.
    pub addresses: Vec<IpAddr>,
    /// The device's ports, by number.
    pub ports: Vec<Port>,
    /// The device's limits, if the device could be queried.
    pub limits: Option<Limits>,
    /// The steps that were tried on the device, in order. Steps that need a failed step are left
    /// out.
    pub steps: Vec<Step>,
    /// Whether the transport can use the device.
    pub usable: bool,
    /// The transport's reason why it cannot use the device.
    pub reason: Option<Reason>,
}

/// A PCI Express link. Speeds are in gigatransfers per second for each lane.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PcieLink {
    /// The current speed.
    pub gt_s: f64,
    /// The current number of lanes.
    pub lanes: u32,
    /// The device's highest speed.
    pub max_gt_s: f64,
    /// The device's number of lanes.
    pub max_lanes: u32,
}

/// A port of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Port {
    /// The port number, from 1.
    pub number: u32,
    /// The port's state: `DOWN`, `INIT`, `ARMED`, `ACTIVE`, ...
    pub state: String,
    /// The physical state: `LinkUp`, `Disabled`, `Polling`, ...
    pub physical_state: Option<String>,
    /// The link layer: `Ethernet` or `InfiniBand`.
    pub link_layer: String,
    /// Active MTU in bytes. `None` if rdma-core does not report it.
    pub mtu: Option<u32>,
    /// The kernel's text for the rate, for example `100 Gb/sec (4X EDR)`.
    pub rate: Option<String>,
    /// The type of service that the host sets for RoCE connections whose program sets none. `None`
    /// if the host sets no type either.
    pub traffic_class: Option<u32>,
    /// The port's local identifier on InfiniBand. 0 until the subnet manager has assigned an
    /// identifier.
    pub lid: Option<u32>,
    /// The port's GIDs, without unused entries.
    pub gids: Vec<Gid>,
}

impl Port {
    /// The claimed rate in Gb/s.
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
    /// The index of the entry in the table.
    pub index: u32,
    /// The GID in the form of an IPv6 address.
    pub gid: std::net::Ipv6Addr,
    /// The kind of the GID: `RoCE v1`, `RoCE v2` or `InfiniBand`. `None` on iWARP, which does not
    /// use GIDs.
    pub kind: Option<String>,
    /// The network interface that the GID belongs to.
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

/// The origin of the pool's configured size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum PoolSizeBy {
    /// The program has set the size with [`ContextBuilder::pool`](crate::ContextBuilder::pool).
    Program,
    /// The operator has set the size with `TONIC_RDMA_POOL`.
    Environment,
    /// The size is the default of 64 MiB, because RLIMIT_MEMLOCK limits this process.
    Limit,
    /// The size is a sixteenth of the memory that this process may use, between 64 MiB and 1 GiB,
    /// because no limit applies.
    Memory,
}

/// How much memory this process may pin. All sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct MemlockReport {
    /// The soft limit. `None` means no limit.
    pub soft: Option<u64>,
    /// The hard limit, up to which the transport raises the soft limit. `None` means no limit.
    pub hard: Option<u64>,
    /// Bytes already pinned or locked.
    pub pinned: u64,
    /// Whether this process has CAP_IPC_LOCK in the initial user namespace, which lifts the limit
    /// for all devices but Soft-iWARP.
    pub cap_ipc_lock: bool,
    /// The lowest limit under which the transport uses RDMA.
    pub needed: u64,
    /// The limit that the pool's configured size requires.
    pub wanted: u64,
    /// The configured size of the pool.
    pub pool_configured: u64,
    /// The origin of the configured size.
    pub pool_size_by: PoolSizeBy,
    /// The pool's size under the limit. `None` if no pool is possible.
    pub pool_gets: Option<u64>,
}

/// How many descriptors this process may have.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DescriptorsReport {
    /// The soft limit, RLIMIT_NOFILE. `None` means no limit.
    pub soft: Option<u64>,
    /// The hard limit, up to which a process may raise the soft limit. `None` means no limit.
    pub hard: Option<u64>,
    /// The number of descriptors in use.
    pub in_use: u64,
    /// The limit for the default maximum of a server's connections
    /// ([`Server::max_connections`](crate::Server::max_connections)), with three descriptors each.
    pub wanted: u64,
}

/// The kernel's settings for huge pages.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct HugePagesReport {
    /// The setting for transparent huge pages: `always`, `madvise` or `never`. `None` if the kernel
    /// has none.
    pub transparent: Option<String>,
    /// Size of a reserved huge page in bytes.
    pub size: Option<u64>,
    /// Number of reserved huge pages.
    pub reserved: u64,
    /// Number of reserved huge pages that are free.
    pub free: u64,
}
