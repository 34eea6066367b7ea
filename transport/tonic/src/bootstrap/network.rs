//! The network of a client, because clients are counted by network.

use std::net::IpAddr;

/// Length in bits of the IPv6 prefix that counts as one client network. A host can take any address
/// of its /64.
const IPV6_PREFIX: u32 = 64;

/// An IPv4 address, or the /64 prefix of an IPv6 address. An IPv4-mapped IPv6 address counts as the
/// IPv4 address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Network(IpAddr);

impl From<IpAddr> for Network {
    fn from(addr: IpAddr) -> Self {
        Self(match addr.to_canonical() {
            IpAddr::V4(v4) => v4.into(),
            IpAddr::V6(v6) => {
                let prefix = v6.to_bits() & (u128::MAX << (u128::BITS - IPV6_PREFIX));
                IpAddr::V6(prefix.into())
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(addr: &str) -> Network {
        Network::from(addr.parse::<IpAddr>().unwrap())
    }

    #[test]
    fn an_ipv6_64_is_one_and_an_ipv4_address_is_one() {
        assert_eq!(network("2001:db8:1:2::1"), network("2001:db8:1:2:ffff:ffff:ffff:ffff"));
        assert_ne!(network("2001:db8:1:2::1"), network("2001:db8:1:3::1"));
        assert_ne!(network("192.0.2.1"), network("192.0.2.2"));
        assert_eq!(network("::ffff:192.0.2.1"), network("192.0.2.1"));
        assert_ne!(network("::ffff:192.0.2.1"), network("::ffff:192.0.2.2"));
    }
}
