//! The addresses of listeners and of both ends of a link.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// Maximum length in bytes of the name of an abstract unix socket: `sun_path` without its leading
/// zero byte.
const MAX_NAME: usize = 107;

/// Address of a listener, or of an end of a link.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Addr {
    /// IP address and RDMA port.
    Ip(SocketAddr),
    /// A listener for shared memory on this host.
    Shm(ShmAddr),
    /// An end of a shared-memory link, identified by its process id.
    Process(u32),
}

/// An IP address of this host, with its network and its interface.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LocalNetwork {
    pub(crate) ip: IpAddr,
    /// Length of the network's prefix, in bits.
    pub(crate) prefix: u8,
    /// Whether the interface has a carrier.
    pub(crate) running: bool,
    /// The name of the interface.
    pub(crate) interface: String,
}

/// Whether peers on other hosts can use an address: it is neither a loopback nor a link-local
/// address.
pub(crate) fn is_reachable(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local(),
    }
}

impl Addr {
    /// The IP address, or `None` for an address of another kind.
    pub fn ip(&self) -> Option<SocketAddr> {
        match self {
            Addr::Ip(addr) => Some(*addr),
            _ => None,
        }
    }

    /// The kind of connection to this address, for error messages.
    pub(crate) fn connection(&self) -> &'static str {
        match self {
            Addr::Ip(_) => "RDMA connection",
            Addr::Shm(_) | Addr::Process(_) => "shared-memory connection",
        }
    }

    /// The name of a shared-memory listener, or `None` for an address of another kind.
    pub fn shm(&self) -> Option<&ShmAddr> {
        match self {
            Addr::Shm(addr) => Some(addr),
            _ => None,
        }
    }
}

impl fmt::Display for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Addr::Ip(addr) => addr.fmt(f),
            Addr::Shm(addr) => addr.fmt(f),
            Addr::Process(pid) => write!(f, "process {pid}"),
        }
    }
}

impl From<SocketAddr> for Addr {
    fn from(addr: SocketAddr) -> Addr {
        Addr::Ip(addr)
    }
}

impl From<ShmAddr> for Addr {
    fn from(addr: ShmAddr) -> Addr {
        Addr::Shm(addr)
    }
}

/// The name of an abstract unix socket, without its leading zero byte. Cheap to clone.
///
/// ```
/// use tonic_rdma_fabric::ShmAddr;
///
/// let addr: ShmAddr = "tonic-rdma.0123abcd".parse()?;
/// assert_eq!(addr.name(), "tonic-rdma.0123abcd");
/// assert!("no spaces".parse::<ShmAddr>().is_err());
/// # Ok::<(), tonic_rdma_fabric::BadShmAddr>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ShmAddr(Arc<str>);

/// The given text is not a valid name of a shared-memory listener.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{name:?} is no name of a shared-memory listener: 1 to 107 of the characters a-z, A-Z, 0-9, '.', '-' and '_'"
)]
pub struct BadShmAddr {
    name: String,
}

impl ShmAddr {
    /// Creates a unique name that cannot be guessed.
    pub fn unique() -> ShmAddr {
        use std::hash::{BuildHasher, RandomState};
        // Each `RandomState` has new keys, from the system's randomness.
        let random = || RandomState::new().hash_one(std::process::id());
        ShmAddr(format!("tonic-rdma.{:016x}{:016x}", random(), random()).into())
    }

    /// The name, as text.
    pub fn name(&self) -> &str {
        &self.0
    }
}

impl std::str::FromStr for ShmAddr {
    type Err = BadShmAddr;

    fn from_str(name: &str) -> Result<ShmAddr, BadShmAddr> {
        let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
        match (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(fits) {
            true => Ok(ShmAddr(name.into())),
            false => Err(BadShmAddr { name: name.chars().take(2 * MAX_NAME).collect() }),
        }
    }
}

impl fmt::Display for ShmAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "shm:{}", self.0)
    }
}

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
    /// are no packets, or if this end does not choose the length of packets. Over iWARP, or if
    /// librdmacm brings queue pairs up, this end does not choose that length.
    pub path_mtu: Option<u32>,
}

impl fmt::Display for PeerInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.remote, self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        for bad in ["", "a b", "a/b", "\0", "ä", &"x".repeat(108)] {
            assert!(bad.parse::<ShmAddr>().is_err(), "{bad:?}");
        }
        let longest = "x".repeat(107);
        assert_eq!(longest.parse::<ShmAddr>().unwrap().name(), longest);
    }

    #[test]
    fn addresses_show_what_they_are() {
        let ip: SocketAddr = "10.0.0.1:7".parse().unwrap();
        let shm: ShmAddr = "x".parse().unwrap();
        assert_eq!(Addr::from(ip).to_string(), "10.0.0.1:7");
        assert_eq!(Addr::from(shm.clone()).to_string(), "shm:x");
        assert_eq!(Addr::Process(7).to_string(), "process 7");
        assert_eq!((Addr::from(ip).ip(), Addr::from(ip).shm()), (Some(ip), None));
        assert_eq!(
            (Addr::from(shm.clone()).ip(), Addr::from(shm.clone()).shm()),
            (None, Some(&shm))
        );
    }
}
