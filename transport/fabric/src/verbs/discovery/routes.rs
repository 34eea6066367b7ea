//! Asks the kernel which destinations it routes from an address of this host, through the interface
//! of that address.
//!
//! librdmacm resolves a destination in the same way if its id is bound to an address. But without a
//! route, librdmacm treats the destination as a neighbour and waits for an ARP answer. So this
//! module asks for the entry of the routing table (RTM_F_FIB_MATCH, Linux 4.13), which is missing
//! without a route. rtnetlink(7) has the layouts. The kernel answers within the call that asks.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::netdevice::name_to_index;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::device::LocalAddress;

// linux/netlink.h and linux/rtnetlink.h.
const NLM_F_REQUEST: u16 = 1;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTM_F_FIB_MATCH: u32 = 0x2000;
const RTA_DST: u16 = 1;
const RTA_SRC: u16 = 2;
const RTA_OIF: u16 = 4;
const RTA_MULTIPATH: u16 = 9;
const RTN_UNICAST: u8 = 1;

/// Length of a message's header.
const HEADER: usize = 16;
/// The offset of the route's type in an answer, after the header.
const TYPE: usize = HEADER + 7;
/// The offset of the attributes in an answer, after the header and a `rtmsg`.
const ATTRIBUTES: usize = HEADER + 12;

/// Returns the pairs of source and destination for which the kernel has a route that leaves through
/// the interface of the source.
///
/// # Errors
/// The kernel does not answer, for instance because a filter of system calls forbids netlink.
pub(crate) fn routed(
    sources: &[LocalAddress],
    destinations: &[IpAddr],
) -> io::Result<Vec<(IpAddr, IpAddr)>> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    // A socket without a protocol is a NETLINK_ROUTE socket.
    let socket = net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    let mut found = Vec::new();
    for source in sources {
        // The interface may be gone by now.
        let Ok(interface) = name_to_index(&socket, &source.interface) else { continue };
        for destination in destinations {
            if source.ip.is_ipv4() == destination.is_ipv4()
                && has_route(&socket, source.ip, interface, *destination)?
            {
                found.push((source.ip, *destination));
            }
        }
    }
    Ok(found)
}

fn has_route(
    socket: &OwnedFd,
    source: IpAddr,
    interface: u32,
    destination: IpAddr,
) -> io::Result<bool> {
    let kernel = SocketAddrNetlink::new(0, 0);
    net::sendto(socket, &question(source, interface, destination), SendFlags::empty(), &kernel)?;
    let mut answer = [0; 4096];
    loop {
        match net::recv(socket, &mut answer, RecvFlags::empty()) {
            Ok((len, _)) => return Ok(is_route(&answer[..len], interface)),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// A request for the route between two addresses of one family.
fn question(source: IpAddr, interface: u32, destination: IpAddr) -> Vec<u8> {
    let (family, bits) = match destination {
        IpAddr::V4(_) => (libc::AF_INET as u8, 32),
        IpAddr::V6(_) => (libc::AF_INET6 as u8, 128),
    };
    let mut message = vec![0; HEADER];
    // rtm_family, rtm_dst_len, rtm_src_len, and five fields that are 0 in a question.
    message.extend([family, bits, bits, 0, 0, 0, 0, 0]);
    message.extend(RTM_F_FIB_MATCH.to_ne_bytes());
    let mut attribute = |kind: u16, value: &[u8]| {
        message.extend((4 + value.len() as u16).to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend(value);
    };
    let octets = |ip| match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    attribute(RTA_DST, &octets(destination));
    attribute(RTA_SRC, &octets(source));
    attribute(RTA_OIF, &interface.to_ne_bytes());
    let len = message.len() as u32;
    message[..4].copy_from_slice(&len.to_ne_bytes());
    message[4..6].copy_from_slice(&RTM_GETROUTE.to_ne_bytes());
    message[6..8].copy_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    message
}

/// Whether an answer is a route to another host through the interface. An error, a route to this
/// host and a route that discards packets do not count. For IPv6 the kernel prefers the interface
/// of the question, but may answer with a route through another interface.
fn is_route(answer: &[u8], interface: u32) -> bool {
    let is_unicast = answer.get(4..6) == Some(&RTM_NEWROUTE.to_ne_bytes())
        && answer.get(TYPE) == Some(&RTN_UNICAST);
    let Some(mut rest) = answer.get(ATTRIBUTES..).filter(|_| is_unicast) else { return false };
    let interface = interface.to_ne_bytes();
    let mut others = false;
    while let Some((kind, value)) = next_attribute(&mut rest) {
        let leaves_by_it = match kind {
            RTA_OIF => value == interface,
            RTA_MULTIPATH => next_hops(value).any(|index| index == interface),
            _ => continue,
        };
        if leaves_by_it {
            return true;
        }
        others = true;
    }
    // An entry without interfaces may name a next-hop object, so it counts as a route.
    !others
}

/// Takes the next attribute from `rest`, and returns its kind and value.
fn next_attribute<'a>(rest: &mut &'a [u8]) -> Option<(u16, &'a [u8])> {
    let (len, kind) = (rest.get(..2)?, rest.get(2..4)?);
    let len = usize::from(u16::from_ne_bytes([len[0], len[1]]));
    let value = rest.get(4..len)?;
    let kind = u16::from_ne_bytes([kind[0], kind[1]]);
    *rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
    Some((kind, value))
}

/// The interfaces of a route's next hops, as bytes. An `rtnexthop` has its length in bytes 0 and 1
/// and the interface in bytes 4 to 7. Attributes follow.
fn next_hops(mut hops: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let len = hops.get(..2)?;
        let len = usize::from(u16::from_ne_bytes([len[0], len[1]])).max(8);
        let index = hops.get(4..8)?;
        hops = hops.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some(index)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loopback(ip: &str) -> LocalAddress {
        LocalAddress {
            ip: ip.parse().unwrap(),
            prefix: 8,
            running: true,
            interface: "lo".to_owned(),
            device: "c0".to_owned(),
            iwarp: false,
        }
    }

    /// The kernel understands the questions: it says that the loopback interface leads to no other
    /// host. `routed_rails` of the fault tests has routes that lead somewhere.
    #[test]
    fn loopback_leads_nowhere() {
        let gone = LocalAddress { interface: "no-such0".to_owned(), ..loopback("127.0.0.1") };
        let sources = [loopback("127.0.0.1"), loopback("::1"), gone];
        let destinations =
            ["203.0.113.1", "127.0.0.2", "2001:db8::1"].map(|ip| ip.parse().unwrap());
        assert_eq!(routed(&sources, &destinations).unwrap(), []);
    }

    /// An answer with one attribute.
    fn answer(kind: u16, of_route: u8, attribute: u16, value: &[u8]) -> Vec<u8> {
        let mut answer = vec![0; ATTRIBUTES];
        answer[4..6].copy_from_slice(&kind.to_ne_bytes());
        answer[TYPE] = of_route;
        // RTA_TABLE, which comes first.
        answer.extend([8_u8, 0, 15, 0, 254, 0, 0, 0]);
        answer.extend((4 + value.len() as u16).to_ne_bytes());
        answer.extend(attribute.to_ne_bytes());
        answer.extend(value);
        answer
    }

    #[test]
    fn only_a_unicast_route_through_the_interface_is_an_answer() {
        let seven = 7_u32.to_ne_bytes();
        let through =
            |interface| is_route(&answer(RTM_NEWROUTE, RTN_UNICAST, RTA_OIF, &seven), interface);
        assert!(through(7) && !through(8));
        // RTN_LOCAL, RTN_BLACKHOLE.
        assert!(!is_route(&answer(RTM_NEWROUTE, 2, RTA_OIF, &seven), 7));
        assert!(!is_route(&answer(RTM_NEWROUTE, 6, RTA_OIF, &seven), 7));
        // NLMSG_ERROR.
        assert!(!is_route(&answer(2, RTN_UNICAST, RTA_OIF, &seven), 7));
        assert!(!is_route(&[], 7));
        // RTA_NH_ID.
        assert!(is_route(&answer(RTM_NEWROUTE, RTN_UNICAST, 30, &seven), 7));
    }

    #[test]
    fn one_of_several_next_hops_is_enough() {
        let hop = |interface: u32| {
            let mut hop = [16_u16.to_ne_bytes(), [0, 0]].concat();
            hop.extend(interface.to_ne_bytes());
            // RTA_GATEWAY.
            hop.extend([8_u8, 0, 5, 0, 10, 0, 0, 1]);
            hop
        };
        let hops = [hop(7), hop(8)].concat();
        let multipath = answer(RTM_NEWROUTE, RTN_UNICAST, RTA_MULTIPATH, &hops);
        assert!([7, 8].iter().all(|interface| is_route(&multipath, *interface)));
        assert!(!is_route(&multipath, 9));
        for len in 0..multipath.len() {
            is_route(&multipath[..len], 9);
        }
        let mut rest = &[0, 0, 4, 0][..];
        assert_eq!(next_attribute(&mut rest), None, "an attribute without its header");
    }
}
