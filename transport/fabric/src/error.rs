//! Errors: whose fault, which verb, and what to do.
//!
//! - [`FabricError`]: a device cannot be used, or not for this. Nothing was connected.
//! - [`ConnectError`]: one connection did not come about.
//! - [`LinkError`]: a connection that stood is dead (or [misused](LinkError::Misuse)).

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use tonic_rdma_memory::PoolError;

use crate::addr::Addr;
use crate::device::PortState;
use crate::peer::PeerInfo;

/// A call of the verbs or the connection manager, by the name that its manual page has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Verb {
    /// SEND.
    Send,
    /// RDMA WRITE.
    Write,
    /// RECV.
    Recv,
    /// A SEND or a WRITE, it is not known which.
    SendOrWrite,
    /// Any other, by its C name.
    Call(&'static str),
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verb::Send => "SEND",
            Verb::Write => "RDMA WRITE",
            Verb::Recv => "RECV",
            Verb::SendOrWrite => "SEND or RDMA WRITE",
            Verb::Call(name) => name,
        })
    }
}

/// A device cannot be used, or not for what was asked.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// RDMA exists on Linux only, and only with the feature `verbs`.
    #[error(
        "no RDMA on this platform: this build has no verbs provider (it needs Linux and the feature `verbs`)"
    )]
    Platform,
    /// rdma-core is not installed.
    #[error(
        "{name} cannot be loaded: {dlerror}; install rdma-core (Debian: ibverbs-providers and librdmacm1)"
    )]
    NoLibrary {
        /// The shared object that was looked for.
        name: &'static str,
        /// What the dynamic linker says.
        dlerror: String,
    },
    /// There is no device at all.
    #[error("no RDMA device on this host (`rdma link` would list it)")]
    NoDevice,
    /// The kernel has no RDMA connection manager for user space.
    #[error(
        "the connection manager cannot be used: {source}; /dev/infiniband/rdma_cm must exist (modprobe rdma_ucm) and be accessible"
    )]
    NoConnectionManager {
        /// Why.
        source: Arc<io::Error>,
    },
    /// No device by the wanted name.
    #[error("no RDMA device is called {name:?}; this host has: {}", found.join(", "))]
    NoSuchDevice {
        /// What was asked for.
        name: String,
        /// What there is.
        found: Vec<String>,
    },
    /// A device without an active port.
    #[error(
        "no port of RDMA device {device} is active (it is {state}): check cable, switch or `ip link`"
    )]
    NoActivePort {
        /// Device.
        device: String,
        /// State of its first port.
        state: PortState,
    },
    /// A device that no local IP address leads to.
    #[error(
        "no IP address of this host lies on RDMA device {device}: give its network interface an address"
    )]
    NoAddress {
        /// Device.
        device: String,
    },
    /// A local address that does not lie on an RDMA device.
    #[error("address {addr} does not lie on an RDMA device")]
    NotOnRdma {
        /// The address.
        addr: IpAddr,
    },
    /// A listed device that gives no queue pair.
    #[error(
        "RDMA device {device} refuses a queue pair ({verb}: {source}): it is listed but cannot be used by this process"
    )]
    QueuePairRefused {
        /// Device.
        device: String,
        /// The call that failed.
        verb: Verb,
        /// Why.
        source: Arc<io::Error>,
    },
    /// A call failed.
    #[error("{verb} failed on {device}: {source}")]
    Verb {
        /// The call.
        verb: Verb,
        /// Device, or `"any device"`.
        device: String,
        /// Why.
        source: Arc<io::Error>,
    },
    /// An address is in use by another listener.
    #[error("RDMA address {addr} is in use")]
    AddressInUse {
        /// The address.
        addr: Addr,
    },
    /// An address of a kind that the fabric has not.
    #[error("{addr} is no address of a {provider} device")]
    WrongAddress {
        /// `"verbs"`, `"shm"` or `"sim"`.
        provider: &'static str,
        /// The address.
        addr: Addr,
    },
    /// Memory cannot be shared with other processes.
    #[error("memory cannot be shared on this host: {what}: {source}")]
    Shm {
        /// What failed.
        what: &'static str,
        /// Why.
        source: Arc<io::Error>,
    },
    /// The device was removed from the host.
    #[error("RDMA device {device} was removed")]
    DeviceRemoved {
        /// Device.
        device: String,
    },
}

/// The step of a connection's making that was in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConnectStep {
    /// Address to device.
    ResolveAddress,
    /// Device to path.
    ResolveRoute,
    /// Connect request sent, no answer yet.
    Connect,
    /// Accepted, not yet established.
    Accept,
}

impl fmt::Display for ConnectStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ConnectStep::ResolveAddress => "resolving the address",
            ConnectStep::ResolveRoute => "resolving the route",
            ConnectStep::Connect => "waiting for the answer to the connect request",
            ConnectStep::Accept => "waiting for the accepted connection to stand",
        })
    }
}

/// A connection did not come about. Everything that was made for it has been freed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Time ran out. The address may not answer, or packets get lost.
    #[error("{} to {addr} timed out after {} ms while {step}", addr.connection(), after.as_millis())]
    Timeout {
        /// The peer.
        addr: Addr,
        /// What was in flight.
        step: ConnectStep,
        /// The limit.
        after: Duration,
    },
    /// No route to the address, or it does not answer address resolution.
    #[error("no RDMA route to {addr} ({step}: {source})")]
    NoRoute {
        /// The peer.
        addr: Addr,
        /// What failed.
        step: ConnectStep,
        /// Why.
        source: Arc<io::Error>,
    },
    /// The route to the address leaves through an interface without RDMA.
    #[error("the route to {addr} does not leave through an RDMA device")]
    NotOnRdma {
        /// The peer.
        addr: Addr,
    },
    /// The route to the address leaves through another device than the one to be used.
    #[error("the route to {addr} leaves through RDMA device {routed}, not {wanted}")]
    OtherDevice {
        /// The peer.
        addr: Addr,
        /// The device to be used.
        wanted: String,
        /// The device of the route.
        routed: String,
    },
    /// Nobody listens on the peer's port.
    #[error("nobody listens for a {} on {addr}", addr.connection())]
    Refused {
        /// The peer.
        addr: Addr,
    },
    /// The peer's program said no.
    #[error("{addr} rejected the {}", addr.connection())]
    Rejected {
        /// The peer.
        addr: Addr,
        /// What it said; the network may have padded it with zeros.
        private_data: Vec<u8>,
    },
    /// The connect request came to nothing: what answers there may be no RDMA listener.
    #[error("the {} to {addr} failed while {step}: {source}", addr.connection())]
    Failed {
        /// The peer.
        addr: Addr,
        /// What was in flight.
        step: ConnectStep,
        /// Why.
        source: Arc<io::Error>,
    },
    /// The peer went away while the connection was being made.
    #[error("the peer {addr} gave up the connection while {step}")]
    PeerGone {
        /// The peer.
        addr: Addr,
        /// What was in flight.
        step: ConnectStep,
    },
    /// The process at the other end runs as a user with whom memory is not shared.
    #[error("{addr} runs as user {uid}, with whom this process does not share memory (ShmAccess)")]
    NotAllowed {
        /// The peer.
        addr: Addr,
        /// Its effective user.
        uid: u32,
    },
    /// The process at the other end does not share memory with the user as whom this process runs.
    #[error("{addr} does not share memory with user {uid}, as whom this process runs (ShmAccess)")]
    NotWelcome {
        /// The peer.
        addr: Addr,
        /// The effective user of this process, as the peer sees it.
        uid: u32,
    },
    /// More than [`MAX_PRIVATE_DATA`](crate::MAX_PRIVATE_DATA) bytes of private data.
    #[error("private data of {len} bytes: at most 56 fit into a connect request")]
    PrivateDataTooLong {
        /// Bytes that were given.
        len: usize,
    },
    /// The link configuration makes no sense, or goes past the device.
    #[error("link configuration: {0}")]
    Config(String),
    /// No memory for the control block.
    #[error("no memory for the connection's control block: {0}")]
    Memory(Arc<PoolError>),
    /// The device failed.
    #[error(transparent)]
    Fabric(#[from] FabricError),
}

/// A link is dead, except for [`Misuse`](LinkError::Misuse).
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// A work request failed (R7).
    #[error("{verb} to {peer} failed: {status} (status {code}, vendor error {vendor_err:#x})")]
    Completion {
        /// Which kind of work.
        verb: Verb,
        /// The completion status in words.
        status: String,
        /// The completion status, `enum ibv_wc_status`.
        code: u32,
        /// The vendor's own code.
        vendor_err: u32,
        /// The peer.
        peer: Box<PeerInfo>,
    },
    /// The device refused a call.
    #[error("{verb} failed on {}, connection to {peer}: {source}", peer.device)]
    Device {
        /// The call.
        verb: Verb,
        /// Why.
        source: Arc<io::Error>,
        /// The peer.
        peer: Box<PeerInfo>,
    },
    /// The peer closed the connection, died, or its device ended it.
    #[error("{peer} closed the {}", peer.remote.connection())]
    Disconnected {
        /// The peer.
        peer: Box<PeerInfo>,
    },
    /// This end called [`Link::disconnect`](crate::Link::disconnect).
    #[error("the {} to {peer} was closed here", peer.remote.connection())]
    Closed {
        /// The peer.
        peer: Box<PeerInfo>,
    },
    /// The peer broke a rule that its device would have held it to.
    #[error("{peer} broke the rules of shared memory: {what}")]
    Breach {
        /// How.
        what: String,
        /// The peer.
        peer: Box<PeerInfo>,
    },
    /// The device was removed from the host.
    #[error("RDMA device {} was removed, connection to {peer}", peer.device)]
    DeviceRemoved {
        /// The peer.
        peer: Box<PeerInfo>,
    },
    /// The caller broke the rules of [`Link`](crate::Link). The link lives.
    #[error("misuse of the link to {peer}: {what}")]
    Misuse {
        /// How.
        what: String,
        /// The peer.
        peer: Box<PeerInfo>,
    },
}

impl LinkError {
    /// The two ends.
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

    /// True when the connection ended without a fault being seen: closed by either end.
    pub fn is_clean(&self) -> bool {
        matches!(self, LinkError::Disconnected { .. } | LinkError::Closed { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
                Box::new(PeerInfo { provider: "", device: "x".to_owned(), local, remote })
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
