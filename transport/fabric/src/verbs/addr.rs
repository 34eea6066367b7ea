//! Converts socket addresses between their C and Rust forms.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use crate::addr::{LocalNetwork, is_reachable};

/// Room for any address, in C's form.
pub(super) struct CAddr(libc::sockaddr_storage);

impl CAddr {
    pub(super) fn new(addr: SocketAddr) -> CAddr {
        // SAFETY: all zeros is a valid sockaddr_storage (AF_UNSPEC).
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        match addr {
            SocketAddr::V4(v4) => {
                let sin = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                    sin_zero: [0; 8],
                };
                // SAFETY: sockaddr_storage is at least as large and as aligned as any sockaddr.
                unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(sin) };
            }
            SocketAddr::V6(v6) => {
                let sin6 = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                    sin6_scope_id: v6.scope_id(),
                };
                // SAFETY: as above.
                unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(sin6) };
            }
        }
        CAddr(storage)
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.0).cast()
    }
}

/// Reads an address. Returns `None` if the address is neither IPv4 nor IPv6.
///
/// # Safety
/// `addr` is null or points to a sockaddr that is as long as its family says.
pub(super) unsafe fn read(addr: *const libc::sockaddr) -> Option<SocketAddr> {
    if addr.is_null() {
        return None;
    }
    // SAFETY: the caller's promise; every sockaddr begins with its family. The reads are unaligned,
    // because getifaddrs and rdma_cm promise no alignment.
    unsafe {
        match i32::from((&raw const (*addr).sa_family).read_unaligned()) {
            libc::AF_INET => {
                let sin = addr.cast::<libc::sockaddr_in>().read_unaligned();
                let ip = Ipv4Addr::from(sin.sin_addr.s_addr.to_ne_bytes());
                Some(SocketAddrV4::new(ip, u16::from_be(sin.sin_port)).into())
            }
            libc::AF_INET6 => {
                let sin6 = addr.cast::<libc::sockaddr_in6>().read_unaligned();
                let ip = Ipv6Addr::from(sin6.sin6_addr.s6_addr);
                let port = u16::from_be(sin6.sin6_port);
                Some(SocketAddrV6::new(ip, port, sin6.sin6_flowinfo, sin6.sin6_scope_id).into())
            }
            _ => None,
        }
    }
}

/// The IP addresses of this host's interfaces that are up. Loopback addresses are left out because
/// they belong to no particular device. Link-local addresses are left out because they mean nothing
/// to a peer.
pub(crate) fn local_networks() -> std::io::Result<Vec<LocalNetwork>> {
    let mut list = std::ptr::null_mut();
    // SAFETY: getifaddrs writes a list that is freed below.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut at = list;
    while !at.is_null() {
        // SAFETY: `at` is an entry of the list, which lives until freeifaddrs.
        let entry = unsafe { &*at };
        if entry.ifa_flags & libc::IFF_UP as libc::c_uint != 0 {
            // SAFETY: both are null or a sockaddr of its family.
            let (addr, mask) = unsafe { (read(entry.ifa_addr), read(entry.ifa_netmask)) };
            if let Some(ip) = addr.map(|addr| addr.ip())
                && is_reachable(&ip)
                && found.iter().all(|known: &LocalNetwork| known.ip != ip)
            {
                let prefix = prefix(ip, mask.map(|mask| mask.ip()));
                let running = entry.ifa_flags & libc::IFF_RUNNING as libc::c_uint != 0;
                // SAFETY: the name of an entry is a string that lives as long as the entry.
                let interface = unsafe { CStr::from_ptr(entry.ifa_name) };
                let interface = interface.to_string_lossy().into_owned();
                found.push(LocalNetwork { ip, prefix, running, interface });
            }
        }
        at = entry.ifa_next;
    }
    // SAFETY: the list came from getifaddrs and is not used again.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
}

/// The length of a mask in bits. Without a mask, the network is the address alone.
fn prefix(ip: IpAddr, mask: Option<IpAddr>) -> u8 {
    let ones = match mask {
        Some(IpAddr::V4(mask)) => mask.to_bits().leading_ones(),
        Some(IpAddr::V6(mask)) => mask.to_bits().leading_ones(),
        None if ip.is_ipv4() => 32,
        None => 128,
    };
    ones as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_way_to_c_and_back() {
        for text in
            ["10.9.0.1:18700", "0.0.0.0:0", "[::1]:1", "[fe80::1%3]:65535", "[2001:db8::7]:443"]
        {
            let addr: SocketAddr = text.parse().unwrap();
            let mut c = CAddr::new(addr);
            // SAFETY: CAddr holds a whole address.
            assert_eq!(unsafe { read(c.as_mut_ptr()) }, Some(addr));
        }
    }

    #[test]
    fn loopback_is_not_listed() {
        assert!(local_networks().unwrap().iter().all(|at| !at.ip.is_loopback()));
    }

    #[test]
    fn a_mask_is_a_length() {
        let [v4, v6] = ["10.0.0.1", "2001:db8::1"].map(|ip| ip.parse().unwrap());
        for (ip, mask, length) in [
            (v4, Some("255.255.255.0"), 24),
            (v4, Some("255.255.255.255"), 32),
            (v4, Some("0.0.0.0"), 0),
            (v4, None, 32),
            (v6, Some("ffff:ffff:ffff:ffff::"), 64),
            (v6, None, 128),
        ] {
            assert_eq!(prefix(ip, mask.map(|mask| mask.parse().unwrap())), length, "{mask:?}");
        }
    }
}
