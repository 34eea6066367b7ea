//! Which way calls travel.

use crate::reason::Reason;
use std::{fmt, net::SocketAddr};

/// The way calls travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Path {
    /// gRPC over HTTP/2 over TCP, by tonic itself.
    Tcp,
    /// RDMA through rdma-core.
    Verbs,
    /// The simulated fabric, for tests.
    Sim,
}

impl Path {
    /// `tcp`, `verbs` or `sim`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Verbs => "verbs",
            Self::Sim => "sim",
        }
    }

    /// True for every path but TCP.
    pub fn is_fast(self) -> bool {
        self != Self::Tcp
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The path a [`Channel`](crate::Channel) sends new calls over, and why.
///
/// Displays as `verbs (rxe0, 10.0.0.2:4791 -> 10.0.0.1:50051)` or
/// `tcp (no-device: no RDMA device on this host)`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathInfo {
    /// The path that a call started now takes.
    pub path: Path,
    /// Why it is TCP. `None` on a fast path.
    pub reason: Option<Reason>,
    /// The RDMA device in use. `None` on TCP.
    pub device: Option<String>,
    /// This end's address on the fast path. `None` on TCP.
    pub local_addr: Option<SocketAddr>,
    /// The peer's address on the fast path. `None` on TCP.
    pub remote_addr: Option<SocketAddr>,
}

impl PathInfo {
    pub(crate) fn tcp(reason: Reason) -> Self {
        Self { path: Path::Tcp, reason: Some(reason), device: None, local_addr: None, remote_addr: None }
    }
}

impl fmt::Display for PathInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path)?;
        if let Some(reason) = &self.reason {
            return write!(f, " ({reason})");
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
    use crate::reason::ReasonCode;

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
        };
        assert_eq!(fast.to_string(), "verbs (rxe0, 10.0.0.2:9 -> 10.0.0.1:7)");
    }
}
