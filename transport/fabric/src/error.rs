//! The errors of this crate. Each error says whose fault it is, which verb failed, and what to do.
//!
//! | error | what happened |
//! |---|---|
//! | [`FabricError`] | a device of this host cannot be used, at all or for the given purpose |
//! | [`ConnectError`] | a connection was not established |
//! | [`LinkError`] | an established connection has ended, or was [misused](LinkError::Misuse) |
//!
//! The documentation of each variant says whose fault it is: the caller's, this host's, the peer's,
//! or the network's.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use tonic_rdma_memory::PoolError;

use crate::addr::{Addr, PeerInfo};
use crate::device::PortState;
use crate::reject_reason::RejectReason;

/// The cure if a peer sends messages that no end of this version sends.
pub(crate) const ONE_VERSION: &str = "run one version of tonic-rdma at both ends";

/// A kind of work request, or a call to libibverbs, librdmacm or the system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Verb {
    /// A SEND work request.
    Send,
    /// RDMA WRITE.
    Write,
    /// RDMA READ: a [probe](crate::Link::probe) over iWARP.
    Read,
    /// A posted RECV.
    Recv,
    /// A SEND or a WRITE. The device does not say which.
    SendOrWrite,
    /// A call, by its C name.
    Call(&'static str),
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verb::Send => "SEND",
            Verb::Write => "RDMA WRITE",
            Verb::Read => "RDMA READ",
            Verb::Recv => "RECV",
            Verb::SendOrWrite => "SEND or RDMA WRITE",
            Verb::Call(name) => name,
        })
    }
}

/// A device cannot be used at all, or cannot be used for the given purpose.
///
/// The fault is this host's, except for [`NoSuchDevice`](FabricError::NoSuchDevice),
/// [`NotOnRdma`](FabricError::NotOnRdma), [`AddressInUse`](FabricError::AddressInUse) and
/// [`WrongAddress`](FabricError::WrongAddress), which the caller's settings cause.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// This build does not have the provider: RDMA needs Linux on x86-64 or AArch64 and the feature
    /// `verbs`, and shared memory needs Linux and the feature `shm`.
    #[error(
        "no RDMA in this build for {} on {}: the verbs provider needs Linux on x86-64 or AArch64, and the feature `verbs`",
        std::env::consts::OS,
        std::env::consts::ARCH
    )]
    Platform,
    /// A library of rdma-core cannot be loaded, usually because rdma-core is not installed.
    #[error(
        "{name} cannot be loaded: {dlerror}; install rdma-core (Debian: ibverbs-providers and librdmacm1)"
    )]
    NoLibrary {
        /// The name of the shared object.
        name: &'static str,
        /// The dynamic linker's message.
        dlerror: String,
    },
    /// An installed library lacks a function. The library is too old, or does not belong to
    /// rdma-core.
    #[error(
        "{library} has no function {function}: {dlerror}; install rdma-core 22 or newer, and look for a library of this name in LD_LIBRARY_PATH"
    )]
    NoFunction {
        /// The name of the shared object.
        library: &'static str,
        /// The missing function.
        function: &'static str,
        /// The dynamic linker's message, with the file that the linker has opened.
        dlerror: String,
    },
    /// This host has no RDMA device.
    #[error("no RDMA device on this host (`rdma link` would list it)")]
    NoDevice,
    /// The kernel's RDMA connection manager for user space is missing or cannot be used.
    #[error(
        "the connection manager cannot be used: {source}; /dev/infiniband/rdma_cm must exist (modprobe rdma_ucm) and be accessible"
    )]
    NoConnectionManager {
        /// The cause.
        source: Arc<io::Error>,
    },
    /// The caller named a device that this host does not have.
    #[error("no RDMA device is called {name:?}; this host has: {}", found.join(", "))]
    NoSuchDevice {
        /// The requested device name.
        name: String,
        /// The names of the devices that exist.
        found: Vec<String>,
    },
    /// No port of the device is active, or the address to be used lies on an inactive port. The
    /// fault is in this host, its cable or its switch.
    #[error(
        "no port of RDMA device {device} is active (it is {state}): check cable, switch or `ip link`"
    )]
    NoActivePort {
        /// The name of the device.
        device: String,
        /// The state of the port that has the address, or of the device's first port. In an error
        /// from a [`HostSnapshot`](crate::HostSnapshot), the state is always `Down`.
        state: PortState,
    },
    /// The network interface of the address to be used is down or has no carrier, although a port
    /// of the device is active or the states of its ports are unknown. The fault is in this host,
    /// its cable or its switch.
    #[error(
        "interface {interface} of RDMA device {device} is down or has no carrier: check cable, switch or `ip link`"
    )]
    NoCarrier {
        /// The name of the device.
        device: String,
        /// The name of the interface.
        interface: String,
    },
    /// The device has no IP address on this host.
    #[error(
        "no IP address of this host lies on RDMA device {device}: give its network interface an address"
    )]
    NoAddress {
        /// The name of the device.
        device: String,
    },
    /// The device has no IP address on this host, because it has no network interface. IPoIB makes
    /// such an interface.
    #[error(
        "no IP address of this host lies on InfiniBand device {device}, which has no network interface: load IPoIB (modprobe ib_ipoib), and give the interface that it makes an address"
    )]
    NoIpoib {
        /// Name of the device.
        device: String,
    },
    /// The device does not support reliable connections, so the connection manager does not serve
    /// it.
    #[error(
        "RDMA device {device} has no reliable connections (RC queue pairs), which calls need (AWS EFA has none either): an address does not help"
    )]
    NoConnections {
        /// Name of the device.
        device: String,
    },
    /// A local address does not lie on an RDMA device, or does not lie on the device of the
    /// listener.
    #[error("address {addr} does not lie on an RDMA device")]
    NotOnRdma {
        /// The address.
        addr: IpAddr,
    },
    /// A local address has moved to another RDMA device, for example because a bond has switched to
    /// its other device.
    #[error("address {addr} has moved from RDMA device {device} to {found}")]
    Moved {
        /// The address.
        addr: IpAddr,
        /// The device that had the address.
        device: String,
        /// The device that has the address now.
        found: String,
    },
    /// The device is listed, but this process cannot open the device, or cannot create a queue pair
    /// or an object that a queue pair needs.
    #[error(
        "RDMA device {device} refuses a queue pair ({verb}: {source}): it is listed but cannot be used by this process"
    )]
    QueuePairRefused {
        /// The name of the device.
        device: String,
        /// The call that failed.
        verb: Verb,
        /// The cause.
        source: Arc<io::Error>,
    },
    /// A call to libibverbs or librdmacm failed on this host.
    #[error("{verb} failed on {device}: {source}")]
    Verb {
        /// The call.
        verb: Verb,
        /// Device, or `"any device"`.
        device: String,
        /// The cause.
        source: Arc<io::Error>,
    },
    /// Another listener on this host uses the address.
    #[error("RDMA address {addr} is in use")]
    AddressInUse {
        /// The address.
        addr: Addr,
    },
    /// The caller gave an address of a kind that this fabric does not have.
    #[error("{addr} is no address of a {provider} device")]
    WrongAddress {
        /// `"verbs"`, `"shm"` or `"sim"`.
        provider: &'static str,
        /// The address.
        addr: Addr,
    },
    /// This host cannot share memory between processes.
    #[error("memory cannot be shared on this host: {what}: {source}")]
    Shm {
        /// The operation that failed.
        what: &'static str,
        /// The cause.
        source: Arc<io::Error>,
    },
    /// A parent of this process used RDMA before it forked, so RDMA belongs to that parent. The
    /// connection manager knows only one process for each device.
    #[error(
        "RDMA belongs to the parent of this process, which has used it before fork(2): fork first, or execute a program"
    )]
    Forked,
    /// The memory file that shared memory needs cannot be created or mapped.
    #[error("a memory file of {len} bytes for shared memory cannot be made: {source}")]
    MemoryFile {
        /// The size of the file in bytes.
        len: usize,
        /// The cause. `FileTooLarge` means that RLIMIT_FSIZE is too low.
        source: Arc<io::Error>,
    },
    /// The device was removed from this host.
    #[error("RDMA device {device} was removed")]
    DeviceRemoved {
        /// The name of the device.
        device: String,
    },
}

/// The step of connection establishment that was in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConnectStep {
    /// Resolving the address to a device.
    ResolveAddress,
    /// Resolving the route from the device to the peer.
    ResolveRoute,
    /// The connect request was sent, but not answered yet.
    Connect,
    /// The request was accepted, but the connection is not established yet.
    Accept,
    /// The connection is established, but the message of 4,096 bytes, which tests the path with the
    /// longest packet, has not arrived.
    LongPacket,
}

impl fmt::Display for ConnectStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ConnectStep::ResolveAddress => "resolving the address",
            ConnectStep::ResolveRoute => "resolving the route",
            ConnectStep::Connect => "waiting for the answer to the connect request",
            ConnectStep::Accept => "waiting for the accepted connection to stand",
            ConnectStep::LongPacket => "waiting for a message of 4096 bytes to arrive",
        })
    }
}

/// A connection was not established. Everything that was created for the connection is freed. Over
/// verbs, another thread frees it, and may finish after the error is returned.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The peer did not answer in time. Either the peer does not run, the peer is overloaded, or
    /// the network loses packets.
    #[error("{} to {addr} timed out after {} ms while {step}", addr.connection(), after.as_millis())]
    Timeout {
        /// The peer.
        addr: Addr,
        /// The step that was in progress.
        step: ConnectStep,
        /// The limit.
        after: Duration,
    },
    /// The connection was lost before a message of 4,096 bytes had arrived in each direction. Short
    /// packets do arrive, so the MTU at this end, at the peer or at a switch between them is too
    /// small, or the peer has ended.
    #[error("{} to {addr} was lost before a message of 4096 bytes arrived: {source}", addr.connection())]
    LongPackets {
        /// The peer.
        addr: Addr,
        /// How the connection ended.
        source: Box<LinkError>,
    },
    /// No route leads to the address, or no host answers the address resolution. The network or the
    /// given address is at fault.
    #[error("no RDMA route to {addr} ({step}: {source})")]
    NoRoute {
        /// The peer.
        addr: Addr,
        /// The step that failed.
        step: ConnectStep,
        /// The cause.
        source: Arc<io::Error>,
    },
    /// The route to the address leaves through an interface without RDMA. This host's routing or
    /// the given address is at fault.
    #[error("the route to {addr} does not leave through an RDMA device")]
    NotOnRdma {
        /// The peer.
        addr: Addr,
    },
    /// The route to the address does not leave through the device to be used. This host's routing
    /// or the caller's choice of device is at fault.
    #[error("the route to {addr} leaves through RDMA device {routed}, not {wanted}")]
    OtherDevice {
        /// The peer.
        addr: Addr,
        /// The device to be used.
        wanted: String,
        /// The device of the route.
        routed: String,
    },
    /// The peer is reachable, but no program listens on the port or, over shared memory, under the
    /// name. Over iWARP, the peer's program may instead have rejected the request without private
    /// data.
    #[error("nobody listens for a {} on {addr}", addr.connection())]
    Refused {
        /// The peer.
        addr: Addr,
    },
    /// The peer's program rejected the connect request. Without private data, the peer may instead
    /// have closed the connection without an answer (over shared memory), or have no listener on
    /// the port (over iWARP).
    #[error("{addr} rejected the {}", addr.connection())]
    Rejected {
        /// The peer.
        addr: Addr,
        /// The private data of the rejection, which the network may have padded with zeros.
        private_data: Vec<u8>,
    },
    /// The peer's connection manager, not its program, rejected the connect request. The program
    /// may have seen the request only if the reason is [`RejectReason::TIMEOUT`].
    #[error("{addr} rejected the {}: {reason}; {}", addr.connection(), reason.cure())]
    RejectedByManager {
        /// The peer.
        addr: Addr,
        /// The reason for the rejection.
        reason: RejectReason,
    },
    /// The connect request failed. Perhaps the peer is not an RDMA listener. `source` gives the
    /// cause.
    #[error("the {} to {addr} failed while {step}: {source}", addr.connection())]
    Failed {
        /// The peer.
        addr: Addr,
        /// The step that was in progress.
        step: ConnectStep,
        /// The cause.
        source: Arc<io::Error>,
    },
    /// The peer accepted the connect request, and its answer names a path MTU that no device has.
    /// The peer's program is faulty, or is not a listener of this crate.
    #[error("the answer from {addr} names path MTU {code}, and the codes are 1 to 5")]
    UnknownPathMtu {
        /// The peer.
        addr: Addr,
        /// The code in the answer.
        code: u8,
    },
    /// The peer gave up while the connection was being established.
    #[error("the peer {addr} gave up the connection while {step}")]
    PeerGone {
        /// The peer.
        addr: Addr,
        /// The step that was in progress.
        step: ConnectStep,
    },
    /// This process's [`ShmAccess`](crate::ShmAccess) does not allow sharing memory with the peer's
    /// user.
    #[error("{addr} runs as user {uid}, with whom this process does not share memory (ShmAccess)")]
    NotAllowed {
        /// The peer.
        addr: Addr,
        /// The peer's effective user.
        uid: u32,
    },
    /// The peer's [`ShmAccess`](crate::ShmAccess) does not allow sharing memory with this process's
    /// user.
    #[error("{addr} does not share memory with user {uid}, as whom this process runs (ShmAccess)")]
    NotWelcome {
        /// The peer.
        addr: Addr,
        /// The effective user of this process, as the peer sees it.
        uid: u32,
    },
    /// The peer's process, or its host, has no more descriptors or memory for a connection over
    /// shared memory.
    #[error("{addr} can make no further connection: {source}")]
    PeerLimit {
        /// The peer.
        addr: Addr,
        /// The error at the peer.
        source: Arc<io::Error>,
    },
    /// The peer speaks another version of the shared-memory protocol.
    #[error("{addr} has version {version} of the shared-memory protocol, this process {own}")]
    OtherVersion {
        /// The peer.
        addr: Addr,
        /// The peer's protocol version.
        version: u8,
        /// The version of this process.
        own: u8,
    },
    /// The caller gave more than [`MAX_PRIVATE_DATA`](crate::MAX_PRIVATE_DATA) bytes of private
    /// data.
    #[error("private data of {len} bytes: at most 56 fit into a connect request")]
    PrivateDataTooLong {
        /// Number of bytes given.
        len: usize,
    },
    /// The caller's link configuration is invalid, or exceeds the limits of the device.
    #[error("link configuration: {0}")]
    Config(String),
    /// The caller's pool has no memory left for the control block.
    #[error("no memory for the connection's control block: {0}")]
    Memory(Arc<PoolError>),
    /// A device of this host cannot be used.
    #[error(transparent)]
    Fabric(#[from] FabricError),
}

/// An error of a link. The link is dead, except after [`Misuse`](LinkError::Misuse), and after a
/// [`Breach`](LinkError::Breach) that [`Link::borrow`](crate::Link::borrow) returns.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// A work request failed (R7). The status shows whose fault it is. Exceeded retries mean that
    /// the peer or the network does not answer. A remote access error means that the peer took its
    /// memory back, or that this end wrote to memory that it may not write to.
    #[error("{verb} to {peer} failed: {status} (status {code}, vendor error {vendor_err:#x})")]
    Completion {
        /// The kind of work.
        verb: Verb,
        /// The completion status in words.
        status: String,
        /// The completion status, `enum ibv_wc_status`.
        code: u32,
        /// The vendor's own code.
        vendor_err: u32,
        /// The peer at the other end.
        peer: Box<PeerInfo>,
    },
    /// A call failed on this host's device.
    #[error("{verb} failed on {}, connection to {peer}: {source}", peer.device)]
    Device {
        /// The call.
        verb: Verb,
        /// The cause.
        source: Arc<io::Error>,
        /// The peer at the other end.
        peer: Box<PeerInfo>,
    },
    /// The peer closed the connection, its process ended, or its device was lost.
    #[error("{peer} closed the {}", peer.remote.connection())]
    Disconnected {
        /// The peer at the other end.
        peer: Box<PeerInfo>,
    },
    /// This end called [`Link::disconnect`](crate::Link::disconnect).
    #[error("the {} to {peer} was closed here", peer.remote.connection())]
    Closed {
        /// The peer at the other end.
        peer: Box<PeerInfo>,
    },
    /// The peer broke the protocol of shared memory, which no device enforces.
    #[error("{peer} broke the rules of shared memory: {what}; {}", ONE_VERSION)]
    Breach {
        /// A description of the breach.
        what: String,
        /// The peer at the other end.
        peer: Box<PeerInfo>,
    },
    /// The device was removed from this host.
    #[error("RDMA device {} was removed, connection to {peer}", peer.device)]
    DeviceRemoved {
        /// The peer at the other end.
        peer: Box<PeerInfo>,
    },
    /// The caller broke the contract of [`Link`](crate::Link). The link is still usable.
    #[error("misuse of the link to {peer}: {what}")]
    Misuse {
        /// A description of the misuse.
        what: String,
        /// The peer at the other end.
        peer: Box<PeerInfo>,
    },
}

impl LinkError {
    /// Both ends of the link.
    pub fn peer(&self) -> &PeerInfo {
        match self {
            LinkError::Completion { peer, .. }
            | LinkError::Device { peer, .. }
            | LinkError::Disconnected { peer }
            | LinkError::Closed { peer }
            | LinkError::Breach { peer, .. }
            | LinkError::DeviceRemoved { peer }
            | LinkError::Misuse { peer, .. } => peer,
        }
    }

    /// Whether no failure is known: the error is [`Disconnected`](LinkError::Disconnected) or
    /// [`Closed`](LinkError::Closed).
    pub fn is_clean(&self) -> bool {
        matches!(self, LinkError::Disconnected { .. } | LinkError::Closed { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_platform_without_rdma_is_named_with_those_that_have_it() {
        let text = FabricError::Platform.to_string();
        for named in [std::env::consts::OS, std::env::consts::ARCH, "x86-64 or AArch64", "`verbs`"]
        {
            assert!(text.contains(named), "{named}: {text}");
        }
    }

    #[test]
    fn a_connection_is_called_what_it_is() {
        let shm: Addr = "x".parse::<crate::ShmAddr>().unwrap().into();
        for (addr, is_rdma) in
            [(Addr::Process(7), false), (shm, false), (Addr::Ip(([10, 0, 0, 1], 7).into()), true)]
        {
            let step = ConnectStep::Connect;
            let source = || Arc::new(io::Error::other("why"));
            let peer = || {
                let (local, remote) = (addr.clone(), addr.clone());
                Box::new(PeerInfo {
                    provider: "",
                    device: "x".to_owned(),
                    local,
                    remote,
                    path_mtu: None,
                })
            };
            let addr = || addr.clone();
            let said = [
                ConnectError::Timeout { addr: addr(), step, after: Duration::ZERO }.to_string(),
                ConnectError::Refused { addr: addr() }.to_string(),
                ConnectError::Rejected { addr: addr(), private_data: Vec::new() }.to_string(),
                ConnectError::Failed { addr: addr(), step, source: source() }.to_string(),
                LinkError::Disconnected { peer: peer() }.to_string(),
                LinkError::Closed { peer: peer() }.to_string(),
            ];
            for text in said {
                assert_eq!(text.contains("RDMA connection"), is_rdma, "{text}");
                assert_eq!(text.contains("shared-memory connection"), !is_rdma, "{text}");
            }
        }
    }
}
