//! The path that calls take.

pub(crate) mod from_error;
pub(crate) mod policy;
mod pool_totals;
pub(crate) mod reason;

use std::fmt;
use std::net::SocketAddr;

use tonic_rdma_fabric::{Addr, PeerInfo};

use crate::path::reason::Reason;

/// The path of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Path {
    /// gRPC over HTTP/2 over TCP, by tonic itself.
    Tcp,
    /// Memory shared by two processes on one host.
    Shm,
    /// RDMA through rdma-core.
    Verbs,
    /// The simulated fabric, for tests.
    #[cfg(feature = "test-util")]
    Sim,
}

impl Path {
    /// Returns `tcp`, `shm` or `verbs`; `sim` on the simulated fabric of the feature `test-util`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Shm => "shm",
            Self::Verbs => "verbs",
            #[cfg(feature = "test-util")]
            Self::Sim => "sim",
        }
    }

    /// The path of a link.
    pub(crate) fn of(peer: &PeerInfo) -> Self {
        match peer.provider {
            "shm" => Self::Shm,
            #[cfg(feature = "test-util")]
            "sim" => Self::Sim,
            _ => Self::Verbs,
        }
    }

    /// The peer's process ID, if the link knows it.
    pub(crate) fn process(peer: &PeerInfo) -> Option<u32> {
        match peer.remote {
            Addr::Process(pid) => Some(pid),
            _ => None,
        }
    }

    /// Whether calls go over a device, so that they may leave this host.
    pub(crate) fn leaves_host(self) -> bool {
        !matches!(self, Self::Tcp | Self::Shm)
    }

    /// Whether this path is not TCP.
    pub fn is_fast(self) -> bool {
        self != Self::Tcp
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The path that a [`Channel`](crate::Channel) uses for new calls, and the reason.
///
/// Displays as `verbs (rxe0, 10.0.0.2:4791 -> 10.0.0.1:50051)`,
/// `shm (process 4711)` or `tcp (no-device: no RDMA device on this host)`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathInfo {
    /// The path that a call would take now.
    pub path: Path,
    /// The reason for TCP. `None` on a fast path.
    pub reason: Option<Reason>,
    /// The RDMA device in use. `None` on TCP and shared memory.
    pub device: Option<String>,
    /// This end's address on the fast path. `None` on TCP and shared memory.
    pub local_addr: Option<SocketAddr>,
    /// The peer's address on the fast path. `None` on TCP and shared memory.
    pub remote_addr: Option<SocketAddr>,
    /// The server's process ID on shared memory, as reported by the kernel. `None` on other paths.
    pub peer_pid: Option<u32>,
    /// The payload of the longest packet in bytes, which is the smaller of both ends' MTUs. `None`
    /// on TCP, shared memory and iWARP, and with librdmacm before version 23, which brings queue
    /// pairs up itself.
    pub path_mtu: Option<u32>,
}

impl PathInfo {
    pub(crate) fn tcp(reason: Reason) -> Self {
        Self {
            path: Path::Tcp,
            reason: Some(reason),
            device: None,
            local_addr: None,
            remote_addr: None,
            peer_pid: None,
            path_mtu: None,
        }
    }

    /// Describes an established fast path to `peer`.
    pub(crate) fn fast(peer: &PeerInfo) -> Self {
        let path = Path::of(peer);
        Self {
            path,
            reason: None,
            device: (path != Path::Shm).then(|| peer.device.clone()),
            local_addr: peer.local.ip(),
            remote_addr: peer.remote.ip(),
            peer_pid: Path::process(peer),
            path_mtu: peer.path_mtu,
        }
    }
}

impl fmt::Display for PathInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path)?;
        if let Some(reason) = &self.reason {
            return write!(f, " ({reason})");
        }
        if let Some(pid) = self.peer_pid {
            return write!(f, " (process {pid})");
        }
        let device = self.device.as_deref().unwrap_or("unnamed device");
        write!(f, " ({device}")?;
        if let (Some(local), Some(remote)) = (self.local_addr, self.remote_addr) {
            write!(f, ", {local} -> {remote}")?;
        }
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::reason::ReasonCode;

    #[test]
    fn display_names_reason_or_device() {
        let tcp = PathInfo::tcp(Reason::new(ReasonCode::NoDevice, "none found"));
        assert_eq!(tcp.to_string(), "tcp (no-device: none found)");
        let fast = PathInfo {
            path: Path::Verbs,
            reason: None,
            device: Some("rxe0".into()),
            local_addr: Some(([10, 0, 0, 2], 9).into()),
            remote_addr: Some(([10, 0, 0, 1], 7).into()),
            peer_pid: None,
            path_mtu: Some(1024),
        };
        assert_eq!(fast.to_string(), "verbs (rxe0, 10.0.0.2:9 -> 10.0.0.1:7)");
        let shared = PathInfo {
            path: Path::Shm,
            device: None,
            local_addr: None,
            remote_addr: None,
            peer_pid: Some(4711),
            ..fast
        };
        assert_eq!(shared.to_string(), "shm (process 4711)");
    }
}
