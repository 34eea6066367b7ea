//! Prints the results for a server.

use std::fmt;

use tonic_rdma::diagnose::{Bare, Direction, Measured, Peer, Rates};

use crate::page::{TextPage, align, reason, shown, size};

/// Prints the steps of a connection to the server, and the measurements.
pub(crate) fn print(page: &mut TextPage<'_>, peer: &Peer) -> fmt::Result {
    let mut table = page.table(["Peer", &shown(&peer.uri)]);
    for offered in &peer.offered {
        table.add_row([format!("offers {}", offered.path), shown(&offered.place)]);
    }
    for refused in &peer.refused {
        table.add_row([format!("no {}", refused.path), reason(&refused.reason)]);
    }
    table.add_row(["chosen", &shown(&peer.path_detail)]);
    if let Some(mtu) = peer.path_mtu {
        table.add_row([
            "path MTU".to_owned(),
            format!("{mtu} bytes, the smaller of both ends' MTUs"),
        ]);
    }
    page.section("Peer", &table)?;
    page.steps(&peer.steps)?;
    match &peer.not_measured {
        Some(why) => page.line(format_args!("not measured: {}", shown(why)))?,
        None if peer.tcp.is_none() => {}
        None => measured(page, peer)?,
    }
    if !peer.rates.is_empty() {
        side_by_side(page, peer)?;
    }
    if let Some(why) = &peer.not_bare {
        page.line(format_args!("no SENDs and WRITEs without calls: {}", shown(why)))?;
    }
    layers(page, peer)
}

fn measured(page: &mut TextPage<'_>, peer: &Peer) -> fmt::Result {
    let mut table = page.table(["Path", "Calls", "64 bytes: median", "99 %", "1 MiB: up", "down"]);
    let mut row = |name: &str, m: &Measured| {
        table.add_row([
            name.to_owned(),
            m.calls.to_string(),
            format!("{:.0} us", m.latency_median_us),
            format!("{:.0} us", m.latency_p99_us),
            format!("{:.0} MiB/s", m.upload_mib_s),
            format!("{:.0} MiB/s", m.download_mib_s),
        ]);
    };
    if let Some(measured) = &peer.tcp {
        row("tcp", measured);
    }
    if let Some(measured) = &peer.fast {
        row(fast(peer), measured);
    }
    align(&mut table, 1..6);
    page.line(format_args!("{table}"))
}

/// The name of the fast path.
fn fast(peer: &Peer) -> &'static str {
    peer.path.map_or("fast", |path| path.as_str())
}

fn side_by_side(page: &mut TextPage<'_>, peer: &Peer) -> fmt::Result {
    let mut table = page.table(["Payload", "In flight", "bare", fast(peer), "tcp"]);
    for rates in &peer.rates {
        let shown = |per_s: Option<f64>| per_s.map_or("-".to_owned(), |per_s| rate(rates, per_s));
        table.add_row([
            payload(rates),
            rates.in_flight.to_string(),
            shown(rates.bare_per_s),
            shown(rates.fast_per_s),
            shown(rates.tcp_per_s),
        ]);
    }
    align(&mut table, 1..5);
    page.line(format_args!(
        "Calls over each path; bare: a SEND in each direction, or a WRITE, without calls\n{table}"
    ))
}

fn payload(rates: &Rates) -> String {
    let way = match rates.direction {
        Direction::Both => "there and back",
        Direction::Up => "to the server",
        _ => "from the server",
    };
    format!("{} {way}", size(rates.bytes.into()))
}

fn rate(rates: &Rates, per_s: f64) -> String {
    match (rates.direction, rates.in_flight) {
        (Direction::Both, 1) => format!("{:.1} us", 1e6 / per_s),
        (Direction::Both, _) => format!("{per_s:.0}/s"),
        _ => format!("{:.0} MiB/s", mib_s(rates, per_s)),
    }
}

fn mib_s(rates: &Rates, per_s: f64) -> f64 {
    per_s * f64::from(rates.bytes) / f64::from(1 << 20)
}

/// Prints how much each layer costs, and how much of the link is used.
fn layers(page: &mut TextPage<'_>, peer: &Peer) -> fmt::Result {
    let bulk = |rates: &&Rates| rates.direction != Direction::Both;
    let longest = peer.rates.iter().filter(bulk).map(|rates| rates.bytes).max();
    let told =
        |rates: &&Rates| rates.in_flight == 1 && (!bulk(rates) || Some(rates.bytes) == longest);
    for rates in peer.rates.iter().filter(told) {
        let (Some(bare), Some(call)) = (rates.bare_per_s, rates.fast_per_s) else { continue };
        let (below, all) = (1e6 / bare, 1e6 / call);
        let what = match rates.direction {
            Direction::Both => "two SENDs, and waking both ends",
            _ => "the WRITE",
        };
        page.line(format_args!(
            "{}: a call takes {all:.1} us. {below:.1} of them take {what}, {:.1} the transport, tonic and copies.",
            payload(rates),
            (all - below).max(0.0)
        ))?;
    }
    let fastest = |rates: &Rates| rates.bare_per_s.map(|per_s| mib_s(rates, per_s));
    let best = peer.rates.iter().filter(bulk).filter_map(fastest).reduce(f64::max);
    if let (Some(Bare { device, claimed_mib_s: Some(claimed), .. }), Some(best)) =
        (&peer.bare, best)
    {
        page.line(format_args!(
            "{}: the link claims {claimed:.0} MiB/s, bare WRITEs reach {best:.0}: {:.0} %.",
            shown(device),
            best / claimed * 100.0
        ))?;
    }
    Ok(())
}
