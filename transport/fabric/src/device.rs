//! The properties that a device reports.

use std::fmt;
use std::net::IpAddr;

/// An address of this host on an RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalAddress {
    /// The address.
    pub ip: IpAddr,
    /// Length of the network prefix, in bits.
    pub prefix: u8,
    /// Whether the interface has a carrier.
    pub running: bool,
    /// The name of the interface that has the address.
    pub interface: String,
    /// The name of the device in `rdma link`.
    pub device: String,
    /// Whether the device speaks iWARP. Such a device connects only to other iWARP devices.
    pub iwarp: bool,
}

impl LocalAddress {
    /// Whether another address is in the same network, so that no router is needed.
    pub fn is_beside(&self, peer: IpAddr) -> bool {
        let (own, peer, len) = match (self.ip, peer) {
            (IpAddr::V4(own), IpAddr::V4(peer)) => {
                (u128::from(own.to_bits()), u128::from(peer.to_bits()), 32)
            }
            (IpAddr::V6(own), IpAddr::V6(peer)) => (own.to_bits(), peer.to_bits(), 128),
            _ => return false,
        };
        let rest = len - u32::from(self.prefix).min(len);
        (own ^ peer).checked_shr(rest).unwrap_or(0) == 0
    }
}

/// The wire protocol of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Transport {
    /// InfiniBand.
    InfiniBand,
    /// RDMA over Converged Ethernet, v1 or v2; also Soft-RoCE.
    RoCE,
    /// iWARP; also Soft-iWARP. Shares TCP's port space and has no immediate data.
    IWarp,
    /// Memory shared by processes of one host.
    Shm,
    /// The in-process provider.
    Sim,
    /// A transport that this crate does not know.
    Unknown,
}

impl Transport {
    /// Whether the transport is iWARP.
    pub fn is_iwarp(self) -> bool {
        self == Transport::IWarp
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::InfiniBand => "InfiniBand",
            Transport::RoCE => "RoCE",
            Transport::IWarp => "iWARP",
            Transport::Shm => "shm",
            Transport::Sim => "sim",
            Transport::Unknown => "unknown transport",
        })
    }
}

/// The link layer that carries a port's packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// RoCE or iWARP over Ethernet.
    Ethernet,
    /// The device did not report its link layer. Some iWARP devices never report their link layer.
    Unspecified,
}

/// A port's state. Only an active port carries connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PortState {
    /// No link.
    Down,
    /// The link is up but not configured. On InfiniBand, the subnet manager has not configured the
    /// port yet.
    Init,
    /// Configured, not yet active.
    Armed,
    /// Ready.
    Active,
    /// Ready, in an error-deferring state.
    ActiveDefer,
    /// The state is not known.
    Unknown,
}

impl PortState {
    /// Whether the port can carry connections.
    pub fn is_active(self) -> bool {
        matches!(self, PortState::Active | PortState::ActiveDefer)
    }
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PortState::Down => "down",
            PortState::Init => "init",
            PortState::Armed => "armed",
            PortState::Active => "active",
            PortState::ActiveDefer => "active-defer",
            PortState::Unknown => "unknown",
        })
    }
}

/// One port of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortInfo {
    /// The number of the port, from 1.
    pub number: u8,
    /// The state of the port, which says whether the port can carry connections.
    pub state: PortState,
    /// The link layer of the port.
    pub link_layer: LinkLayer,
    /// Active path MTU in bytes, 0 if unknown.
    pub mtu: u32,
    /// Longest message in bytes.
    pub max_msg: u32,
    /// The nonzero GIDs in the port's table, as IPv6 addresses. The RoCE v2 GID of an IPv4 address
    /// is that address, mapped to IPv6.
    pub gids: Vec<std::net::Ipv6Addr>,
}

/// One device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name, as `rdma link` shows it (`mlx5_0`, `rxe0`).
    pub name: String,
    /// Wire protocol.
    pub transport: Transport,
    /// The device's ports, in the order of their numbers.
    pub ports: Vec<PortInfo>,
    /// This host's IP addresses that rdma_cm finds on the device. A device without an address
    /// cannot be used.
    pub addresses: Vec<IpAddr>,
    /// The errno with which this process failed to open the device. If this field is set, only the
    /// name of the device is known.
    pub unopened: Option<i32>,
}

impl DeviceInfo {
    /// Whether a port is active and the device has an address.
    pub fn is_usable(&self) -> bool {
        !self.addresses.is_empty() && self.ports.iter().any(|p| p.state.is_active())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_neighbour_has_the_same_prefix() {
        let beside = |ip: &str, prefix, peer: &str| {
            let (ip, device) = (ip.parse().unwrap(), String::new());
            let at = LocalAddress {
                ip,
                prefix,
                running: true,
                interface: "eth0".to_owned(),
                device,
                iwarp: false,
            };
            at.is_beside(peer.parse().unwrap())
        };
        assert!(beside("10.0.0.1", 24, "10.0.0.255") && !beside("10.0.0.1", 24, "10.0.1.0"));
        assert!(beside("10.0.0.1", 32, "10.0.0.1") && !beside("10.0.0.1", 32, "10.0.0.0"));
        assert!(beside("10.0.0.1", 0, "192.0.2.1") && !beside("10.0.0.1", 0, "2001:db8::1"));
        assert!(beside("2001:db8::1", 64, "2001:db8::2:0:0:1"));
        assert!(!beside("2001:db8::1", 64, "2001:db8:0:1::1"));
        assert!(beside("2001:db8::1", 0, "::1"));
    }
}
