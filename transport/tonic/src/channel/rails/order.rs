//! Pairs the devices of this host with the server's places. A place is an address at which the
//! server listens, with the address's device.
//!
//! A place is reached from each device of this host that has an address in the place's network. If
//! no device has such an address, the place is reached from each device on the kernel's route to
//! the place, as in fabrics where each port has its own network (a /31). Without such a route, the
//! device that the application has named is used, or else the kernel chooses the device. iWARP
//! pairs only with iWARP.
//!
//! Routed rails come after rails within one network. Rails whose device the kernel chooses come
//! last, in the server's order, which begins with the place that the client reached over TCP. The
//! i-th device of this host is paired with the server's i-th device before any other. So the first
//! rails share no device at either end. This order also fits networks in which the rails are not
//! connected with each other.

use std::net::IpAddr;

use tonic_rdma_fabric::{Addr, LocalAddress};

use crate::bootstrap::client::OfferedPlace;
use crate::context::{RailKey, Sources};
use crate::path::Path;

/// A pair of a device of this host and a place of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rail {
    pub(crate) path: Path,
    pub(crate) addr: Addr,
    /// This host's address to connect from. With `None`, the kernel chooses the address.
    pub(crate) source: Option<IpAddr>,
    /// Whether the place is outside the networks of this host's devices.
    routed: bool,
    /// The device of this host that has the address `source`.
    pub(super) local: Option<String>,
    /// The server's device, or its address if the server has not named the device.
    pub(super) remote: String,
    /// How many of the rails of this path share no device with each other.
    pub(super) apart: usize,
    /// Whether this host's device is on a NUMA node on which the process is not allowed to run.
    pub(super) far: bool,
}

impl Rail {
    pub(crate) fn key(&self) -> RailKey {
        (self.source, self.addr.ip().map(|addr| addr.ip()))
    }

    /// Whether the two rails share a device at either end. If the kernel chooses a device of this
    /// host, the rails are assumed to share it.
    pub(super) fn meets(&self, other: &Rail) -> bool {
        self.remote == other.remote
            || self.local.is_none()
            || other.local.is_none()
            || self.local == other.local
    }
}

/// Returns the rails to places of one path. Rails that share no device come first. `turn` selects
/// the devices of the first rail.
pub(super) fn rails(places: Vec<OfferedPlace>, sources: &Sources, turn: usize) -> Vec<Rail> {
    let pairs: Vec<_> = places.into_iter().flat_map(|place| from_each(place, sources)).collect();
    let locals = distinct(sources.addresses.iter().map(|source| source.device.as_str()));
    let remotes = distinct(pairs.iter().map(|rail| rail.remote.as_str()));
    let width = locals.len().max(remotes.len()).max(1);
    let index = |of: &[&str], name: &str| {
        let at = of.iter().position(|known| *known == name).unwrap_or(0);
        (at + of.len() - turn % of.len().max(1)) % of.len().max(1)
    };
    let place_of = |rail: &Rail| {
        let remote = index(&remotes, &rail.remote);
        let local = rail.local.as_deref().map(|name| index(&locals, name));
        local.map_or((true, true, 0, 0, 0), |local| {
            (false, rail.routed, (remote + width - local) % width, local, remote)
        })
    };
    let mut order: Vec<_> = pairs.iter().map(|rail| (place_of(rail), rail)).collect();
    order.sort_by_key(|(place, _)| *place);
    let (mut apart, mut rest): (Vec<Rail>, Vec<Rail>) = Default::default();
    for (_, rail) in order {
        let meets = apart.iter().any(|other| rail.meets(other));
        if meets { &mut rest } else { &mut apart }.push(rail.clone());
    }
    let count = apart.len();
    apart.append(&mut rest);
    apart.iter_mut().for_each(|rail| rail.apart = count);
    apart
}

/// The rails to one place.
fn from_each(place: OfferedPlace, from: &Sources) -> Vec<Rail> {
    let sources = &from.addresses;
    let rail = |source: Option<&LocalAddress>, routed: bool| Rail {
        path: place.path,
        addr: place.addr.clone(),
        source: source.map(|source| source.ip),
        routed,
        local: source.map(|source| source.device.clone()),
        remote: match place.device.as_str() {
            "" => place.addr.to_string(),
            device => device.to_owned(),
        },
        apart: 1,
        far: source.is_some_and(|source| from.far.contains(&source.device)),
    };
    // This host reaches its own address internally, without any other device.
    let Some(ip) = place.addr.ip().map(|addr| addr.ip()).filter(|ip| !is_own(*ip, sources)) else {
        return vec![rail(None, false)];
    };
    let fits = |source: &&LocalAddress| place.iwarp.is_none_or(|iwarp| iwarp == source.iwarp);
    let sources: Vec<_> = sources.iter().filter(fits).collect();
    let rails = |fits: &dyn Fn(&LocalAddress) -> bool, routed| -> Vec<_> {
        let sources = sources.iter().filter(|source| fits(source));
        sources.map(|source| rail(Some(source), routed)).collect()
    };
    let mut found = rails(&|source| source.is_beside(ip), false);
    if found.is_empty() {
        found = rails(&|source| from.routed.contains(&(source.ip, ip)), true);
    }
    if found.is_empty() && from.named {
        found = rails(&|source| source.ip.is_ipv4() == ip.is_ipv4(), true);
    }
    if found.is_empty() {
        found.push(rail(None, true));
    }
    found
}

fn is_own(ip: IpAddr, sources: &[LocalAddress]) -> bool {
    sources.iter().any(|source| source.ip == ip)
}

fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut distinct = Vec::new();
    for name in names {
        if !distinct.contains(&name) {
            distinct.push(name);
        }
    }
    distinct
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(ip: &str, device: &str) -> OfferedPlace {
        let addr = Addr::Ip((ip.parse::<IpAddr>().unwrap(), 50051).into());
        OfferedPlace { path: Path::Verbs, addr, device: device.to_owned(), iwarp: None }
    }

    fn source(ip: &str, device: &str) -> LocalAddress {
        let (ip, device) = (ip.parse().unwrap(), device.to_owned());
        let interface = format!("{device}-eth");
        LocalAddress { ip, prefix: 24, running: true, interface, device, iwarp: false }
    }

    /// Returns the pairs of client device and server device: first the rails that share no device,
    /// then the others.
    fn told(
        places: &[(&str, &str)],
        sources: &[(&str, &str)],
        named: bool,
        turn: usize,
    ) -> (Vec<String>, Vec<String>) {
        told_with(places, sources, &[], named, turn)
    }

    /// Like `told`, with the pairs of addresses that the kernel routes.
    fn told_with(
        places: &[(&str, &str)],
        sources: &[(&str, &str)],
        routed: &[(&str, &str)],
        named: bool,
        turn: usize,
    ) -> (Vec<String>, Vec<String>) {
        let places = places.iter().map(|(ip, device)| place(ip, device)).collect();
        let addresses = sources.iter().map(|(ip, device)| source(ip, device)).collect();
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let routed = routed.iter().map(|(from, to)| (ip(from), ip(to))).collect();
        let rails = rails(places, &Sources { addresses, named, far: Vec::new(), routed }, turn);
        let mut told: Vec<_> = rails
            .iter()
            .map(|rail| format!("{} {}", rail.local.as_deref().unwrap_or("route"), rail.remote))
            .collect();
        let behind = told.split_off(rails[0].apart);
        (told, behind)
    }

    const SERVER: [(&str, &str); 2] = [("10.0.0.1", "s0"), ("10.0.0.2", "s1")];
    const CLIENT: [(&str, &str); 2] = [("10.0.0.11", "c0"), ("10.0.0.12", "c1")];

    #[test]
    fn two_devices_in_one_network_are_two_rails_and_the_others_wait_behind() {
        let (front, behind) = told(&SERVER, &CLIENT, false, 0);
        assert_eq!(front, ["c0 s0", "c1 s1"]);
        assert_eq!(behind, ["c0 s1", "c1 s0"]);
        assert_eq!(told(&SERVER, &CLIENT, false, 1).0, ["c1 s1", "c0 s0"]);
        assert_eq!(told(&SERVER, &CLIENT, false, 2).0, front);
    }

    #[test]
    fn clients_of_one_device_take_turns_at_those_of_the_server() {
        let firsts: Vec<_> =
            (0..4).map(|turn| told(&SERVER, &CLIENT[..1], false, turn).0).collect();
        assert_eq!(firsts, [["c0 s0"], ["c0 s1"], ["c0 s0"], ["c0 s1"]]);
        let (front, behind) = told(&SERVER[..1], &CLIENT, false, 1);
        assert_eq!((front, behind), (vec!["c1 s0".to_owned()], vec!["c0 s0".to_owned()]));
    }

    #[test]
    fn all_devices_of_the_larger_side_are_used() {
        let server =
            [("10.0.0.1", "s0"), ("10.0.0.2", "s1"), ("10.0.0.3", "s2"), ("10.0.0.4", "s3")];
        let fronts: Vec<_> = (0..4).map(|turn| told(&server, &CLIENT, false, turn).0).collect();
        assert_eq!(fronts[0], ["c0 s0", "c1 s1"]);
        assert_eq!(fronts[1], ["c1 s1", "c0 s2"]);
        assert_eq!(fronts[2], ["c0 s2", "c1 s3"]);
        assert_eq!(fronts[3], ["c1 s3", "c0 s0"]);
    }

    #[test]
    fn rails_that_do_not_meet_are_paired_by_network() {
        let server = [("10.0.1.1", "s0"), ("10.0.0.1", "s1")];
        let client = [("10.0.0.11", "c0"), ("10.0.1.11", "c1")];
        let (front, behind) = told(&server, &client, false, 0);
        assert_eq!(front, ["c0 s1", "c1 s0"]);
        assert!(behind.is_empty(), "{behind:?}");
    }

    #[test]
    fn iwarp_goes_with_iwarp() {
        let places = vec![
            OfferedPlace { iwarp: Some(false), ..place("10.0.0.1", "roce") },
            OfferedPlace { iwarp: Some(true), ..place("10.0.0.2", "iwarp") },
        ];
        let iwarp = LocalAddress { iwarp: true, ..source("10.0.0.11", "c0") };
        let addresses = vec![iwarp, source("10.0.0.12", "c1")];
        let rails = rails(places, &Sources { addresses, ..Sources::default() }, 0);
        let pairs: Vec<_> =
            rails.iter().map(|rail| (rail.local.as_deref().unwrap(), &*rail.remote)).collect();
        assert_eq!(pairs, [("c0", "iwarp"), ("c1", "roce")]);
    }

    #[test]
    fn two_addresses_of_one_device_are_one_rail() {
        let server = [("10.0.0.1", "s0"), ("2001:db8::1", "s0")];
        let v6 = LocalAddress { prefix: 64, ..source("2001:db8::2", "c0") };
        let addresses = vec![source("10.0.0.11", "c0"), v6];
        let places = server.iter().map(|(ip, device)| place(ip, device)).collect();
        let rails = rails(places, &Sources { addresses, ..Sources::default() }, 0);
        assert_eq!((rails.len(), rails[0].apart), (2, 1));
    }

    #[test]
    fn without_a_neighbour_the_route_decides_or_the_device_that_was_named() {
        let far = [("10.9.0.1", "s0"), ("10.9.0.2", "s1")];
        for turn in 0..2 {
            let (front, behind) = told(&far, &CLIENT, false, turn);
            assert_eq!((front, behind), (vec!["route s0".to_owned()], vec!["route s1".to_owned()]));
        }
        let mixed = [("10.9.0.1", "s0"), ("10.0.0.1", "s1")];
        let (front, behind) = told(&mixed, &CLIENT[..1], false, 0);
        assert_eq!((front, behind), (vec!["c0 s1".to_owned()], vec!["route s0".to_owned()]));
        assert_eq!(told(&far, &CLIENT[..1], true, 0).0, ["c0 s0"]);
        assert_eq!(told(&[("2001:db8::1", "s0")], &CLIENT[..1], true, 0).0, ["route s0"]);
        assert_eq!(told(&far, &[], false, 0).0, ["route s0"]);
    }

    #[test]
    fn routed_devices_are_paired_one_to_one_behind_neighbours() {
        let far = [("10.9.0.1", "s0"), ("10.9.1.1", "s1")];
        let all: Vec<_> =
            CLIENT.iter().flat_map(|from| far.iter().map(|to| (from.0, to.0))).collect();
        let (front, behind) = told_with(&far, &CLIENT, &all, false, 0);
        assert_eq!(front, ["c0 s0", "c1 s1"]);
        assert_eq!(behind, ["c0 s1", "c1 s0"]);
        assert_eq!(told_with(&far, &CLIENT, &all, false, 1).0, ["c1 s1", "c0 s0"]);
        // The kernel has a route from one of the devices to one place.
        let (front, behind) = told_with(&far, &CLIENT, &[all[3]], false, 0);
        assert_eq!((front, behind), (vec!["c1 s1".to_owned()], vec!["route s0".to_owned()]));
        // A named device is used, whatever the kernel routes.
        assert_eq!(told_with(&far, &CLIENT[..1], &[all[3]], true, 0).0, ["c0 s0"]);
        // Rails within one network come first.
        let mixed = [("10.9.0.1", "s0"), ("10.0.0.2", "s1")];
        let routed = [(CLIENT[0].0, mixed[0].0), (CLIENT[1].0, mixed[0].0)];
        let (front, behind) = told_with(&mixed, &CLIENT, &routed, false, 0);
        assert_eq!(front, ["c1 s1", "c0 s0"]);
        assert_eq!(behind, ["c0 s1", "c1 s0"]);
    }

    #[test]
    fn an_address_of_this_host_is_reached_by_its_route() {
        assert_eq!(told(&[("10.0.0.12", "c1")], &CLIENT, false, 0).0, ["route c1"]);
    }

    #[test]
    fn a_server_that_names_no_device_has_one_at_each_address() {
        let server = [("10.0.0.1", ""), ("10.0.0.2", "")];
        let (front, _) = told(&server, &CLIENT, false, 0);
        assert_eq!(front, ["c0 10.0.0.1:50051", "c1 10.0.0.2:50051"]);
    }
}
