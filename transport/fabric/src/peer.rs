//! The identities of the two ends of a link.

use std::fmt;

use crate::addr::Addr;

/// The two ends of a link, for error messages and connect-info.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerInfo {
    /// `"verbs"`, `"shm"` or `"sim"`.
    pub provider: &'static str,
    /// The local device, as `rdma link` names it.
    pub device: String,
    /// This end's address and RDMA port, or its process.
    pub local: Addr,
    /// The peer's address and RDMA port, or its process.
    pub remote: Addr,
    /// The payload of the longest packet in bytes, the smaller of both ends' MTUs. `None` if there
    /// are no packets, or if this end does not choose their length. This end does not choose it
    /// over iWARP, or if librdmacm brings queue pairs up.
    pub path_mtu: Option<u32>,
}

impl fmt::Display for PeerInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.remote, self.device)
    }
}
