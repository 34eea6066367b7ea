//! Prints a diagnosis for people.

use std::fmt;

use tonic_rdma::Diagnosis;
use tonic_rdma::diagnose::{
    Cure, DescriptorsReport, Device, Finding, Hint, MemlockReport, ModuleState, PoolSizeBy,
    RdmaNamespaces, RunsIn,
};

use crate::page::{TextPage, list, or_dash, shown, size};
use crate::{page, peer};

/// Maximum number of GIDs shown for each port. Adapters have long tables, and later entries are
/// similar to the first entries.
const GIDS: usize = 16;

/// Prints the examined parts, the problems that prevent RDMA, possible improvements, and the
/// verdict.
pub(crate) fn print(page: &mut TextPage<'_>, found: &Diagnosis) -> fmt::Result {
    system(page, found)?;
    kernel(page, found)?;
    for device in &found.devices {
        self::device(page, device)?;
    }
    if let Some(memlock) = &found.memlock {
        pinned(page, memlock)?;
    }
    huge_pages(page, found)?;
    if let Some(found) = &found.descriptors {
        descriptors(page, found)?;
    }
    if let Some(peer) = &found.peer {
        peer::print(page, peer)?;
    }
    for (title, blocks) in [("In the way", true), ("Could be better", false)] {
        findings(page, title, found.findings.iter().filter(|finding| finding.blocks == blocks))?;
    }
    hints(page, &found.hints)?;
    if found.rdma {
        own_code(page)?;
    }
    verdict(page, found)
}

/// Adds hints about mistakes in the program's own code, because an examination of the host cannot
/// find such mistakes.
fn own_code(page: &mut TextPage<'_>) -> fmt::Result {
    page.line(format_args!(
        "\nA program that still stays on TCP makes tonic's own channel. Look in its code for\n  \
         - `connect` of stubs that tonic-prost-build has generated: generate them with tonic-rdma-build, or\n    \
           pass `new` a channel of tonic_rdma::Endpoint\n  \
         - `tonic::transport::{{Channel, Endpoint}}`: tonic_rdma has both"
    ))
}

fn system(page: &mut TextPage<'_>, found: &Diagnosis) -> fmt::Result {
    let (host, library, settings) = (&found.host, &found.library, &found.settings);
    let mut table = page.table(["System", ""]);
    table.add_row([
        "kernel",
        &format!("{} {} {}", host.os, or_dash(host.kernel.as_ref()), host.arch),
    ]);
    table.add_row(["distribution", &or_dash(host.distribution.as_ref())]);
    let runs_in = match host.runs_in {
        RunsIn::Session => "a session",
        RunsIn::Service => "a systemd service",
        RunsIn::Container => "a container",
        RunsIn::Kubernetes => "Kubernetes",
        _ => "something else",
    };
    table.add_row([
        "runs in",
        &host
            .unit
            .as_ref()
            .map_or(runs_in.to_owned(), |unit| format!("{runs_in}, {}", shown(unit))),
    ]);
    let core = match (&library.version, &library.error) {
        (Some(version), _) => format!("version {}", shown(version)),
        (None, Some(error)) => shown(error),
        (None, None) => "found, version unknown".to_owned(),
    };
    table.add_row(["rdma-core", &core]);
    table.add_row(["libraries", &list(&library.paths)]);
    let namespaces = match host.rdma_namespaces {
        Some(RdmaNamespaces::Shared) => "all see each device",
        Some(RdmaNamespaces::Exclusive) => "one sees each device",
        _ => "-",
    };
    table.add_row(["network namespaces", namespaces]);
    table.add_row(["policy", &format!("{}, fabrics {}", settings.policy, list(&settings.fabrics))]);
    table.add_row(["only device", &or_dash(settings.device.as_ref())]);
    page.section("System", &table)
}

fn kernel(page: &mut TextPage<'_>, found: &Diagnosis) -> fmt::Result {
    let mut table = page.table(["Module", "State", "For"]);
    for module in &found.modules {
        let state = match module.state {
            ModuleState::Loaded => "loaded",
            ModuleState::BuiltIn => "built in",
            _ => "not there",
        };
        table.add_row([module.name.as_str(), state, module.purpose]);
    }
    page.section("Kernel", &table)?;
    let mut table = page.table(["File", "Device", "Access"]);
    for file in &found.files {
        let access = match (file.usable, &file.error) {
            (true, _) => "yes".to_owned(),
            (false, error) => or_dash(error.as_ref()),
        };
        table.add_row([shown(&file.path), or_dash(file.device.as_ref()), access]);
    }
    page.section("Device files", &table)
}

fn device(page: &mut TextPage<'_>, device: &Device) -> fmt::Result {
    let name = shown(&device.name);
    let mut table = page.table(["Device", &name]);
    table.add_row(["transport", &shown(&device.transport)]);
    table.add_row([
        "driver, firmware",
        &format!("{}, {}", or_dash(device.driver.as_ref()), or_dash(device.firmware.as_ref())),
    ]);
    table.add_row(["node GUID", &or_dash(device.guid.as_ref())]);
    table.add_row(["interfaces", &list(&device.interfaces)]);
    table.add_row(["MTU of interfaces", &or_dash(device.interface_mtu)]);
    let pcie = device.pcie.map(|link| {
        format!(
            "{} GT/s on {} lanes, at most {} on {}",
            link.gt_s, link.lanes, link.max_gt_s, link.max_lanes
        )
    });
    table.add_row(["PCI Express", &or_dash(pcie)]);
    table.add_row(["IP addresses", &list(&device.addresses)]);
    if let Some(limits) = &device.limits {
        let queues = format!(
            "{} queue pairs of {} requests, {} completion queues of {}",
            limits.max_qp, limits.max_qp_wr, limits.max_cq, limits.max_cqe
        );
        table.add_row(["limits", &queues]);
        table.add_row(["", &format!("{} regions of {} bytes", limits.max_mr, limits.max_mr_size)]);
    }
    let usable = device
        .reason
        .as_ref()
        .map_or("yes".to_owned(), |reason| format!("no: {}", page::reason(reason)));
    table.add_row(["usable", &usable]);
    page.section("Device", &table)?;

    let mut ports = page.table(["Port", "State", "Link layer", "MTU", "Rate", "Class", "LID"]);
    let mut gids = page.table(["Port", "GID", "", "Kind", "Interface"]);
    let mut more = 0;
    for port in &device.ports {
        let state = match &port.physical_state {
            Some(physical) => format!("{}, {}", shown(&port.state), shown(physical)),
            None => shown(&port.state),
        };
        let lid = port.lid.filter(|lid| *lid > 0);
        ports.add_row([
            port.number.to_string(),
            state,
            shown(&port.link_layer),
            or_dash(port.mtu),
            or_dash(port.rate.as_ref()),
            or_dash(port.traffic_class),
            or_dash(lid),
        ]);
        for gid in port.gids.iter().take(GIDS) {
            gids.add_row([
                port.number.to_string(),
                gid.index.to_string(),
                gid.gid.to_string(),
                or_dash(gid.kind.as_ref()),
                or_dash(gid.interface.as_ref()),
            ]);
        }
        more += port.gids.len().saturating_sub(GIDS);
    }
    page.line(format_args!("{ports}"))?;
    if gids.row_count() > 0 {
        page.line(format_args!("{gids}"))?;
    }
    if more > 0 {
        page.line(format_args!("({more} more GIDs: see --json)"))?;
    }
    page.steps(&device.steps)
}

fn pinned(page: &mut TextPage<'_>, memlock: &MemlockReport) -> fmt::Result {
    let limit = |limit: Option<u64>| limit.map_or("no limit".to_owned(), size);
    let mut table = page.table(["Pinned memory", ""]);
    table.add_row([
        "limit, soft and hard",
        &format!("{}, {}", limit(memlock.soft), limit(memlock.hard)),
    ]);
    let ignored =
        if memlock.cap_ipc_lock { "yes: the limit applies only to Soft-iWARP" } else { "no" };
    table.add_row(["CAP_IPC_LOCK", ignored]);
    table.add_row(["pinned already", &size(memlock.pinned)]);
    table.add_row(["limit that RDMA needs", &size(memlock.needed)]);
    table.add_row(["limit for the whole pool", &size(memlock.wanted)]);
    let gets = memlock.pool_gets.map_or("nothing".to_owned(), size);
    table.add_row([
        "pool size, configured and actual",
        &format!("{}, {gets}", size(memlock.pool_configured)),
    ]);
    let by = match memlock.pool_size_by {
        PoolSizeBy::Program => "the program",
        PoolSizeBy::Environment => "TONIC_RDMA_POOL",
        PoolSizeBy::Limit => "the default under a limit, 64 MiB",
        PoolSizeBy::Memory => "a sixteenth of memory, because no limit applies",
        _ => "-",
    };
    table.add_row(["size set by", by]);
    page.section("Memory", &table)
}

fn huge_pages(page: &mut TextPage<'_>, found: &Diagnosis) -> fmt::Result {
    let huge = &found.huge_pages;
    let mut table = page.table(["Huge pages", ""]);
    table.add_row(["transparent", &or_dash(huge.transparent.as_ref())]);
    table.add_row([
        "reserved",
        &format!(
            "{} of {}, {} free",
            huge.reserved,
            huge.size.map_or("-".to_owned(), size),
            huge.free
        ),
    ]);
    page.line(format_args!("{table}"))
}

fn descriptors(page: &mut TextPage<'_>, found: &DescriptorsReport) -> fmt::Result {
    let limit = |limit: Option<u64>| limit.map_or("no limit".to_owned(), |n| n.to_string());
    let mut table = page.table(["Descriptors", ""]);
    table.add_row([
        "limit, soft and hard",
        &format!("{}, {}", limit(found.soft), limit(found.hard)),
    ]);
    table.add_row(["in use", &found.in_use.to_string()]);
    table.add_row(["limit for a server's connections", &found.wanted.to_string()]);
    page.line(format_args!("{table}"))
}

fn findings<'a>(
    page: &mut TextPage<'_>,
    title: &str,
    found: impl Iterator<Item = &'a Finding>,
) -> fmt::Result {
    for (index, finding) in found.enumerate() {
        if index == 0 {
            page.line(format_args!("\n{title}"))?;
        }
        page.line(format_args!("  {}: {}", finding.code, shown(&finding.what)))?;
        for cure in &finding.cures {
            self::cure(page, cure)?;
        }
    }
    Ok(())
}

fn hints(page: &mut TextPage<'_>, hints: &[Hint]) -> fmt::Result {
    for (index, hint) in hints.iter().enumerate() {
        if index == 0 {
            page.line(format_args!("\nCould be faster"))?;
        }
        let of = hint.device.as_ref().map_or(String::new(), |name| format!("{}: ", shown(name)));
        page.line(format_args!("  {}: {of}{}", hint.name, shown(&hint.what)))?;
        for cure in &hint.cures {
            self::cure(page, cure)?;
        }
    }
    Ok(())
}

fn cure(page: &mut TextPage<'_>, cure: &Cure) -> fmt::Result {
    let who = if cure.root { " (as root)" } else { "" };
    match &cure.command {
        // The command is printed whole, on a line of its own, because the user copies it.
        Some(command) => {
            page.line(format_args!("    - {}{who}:\n        {}", shown(&cure.what), shown(command)))
        }
        None => page.line(format_args!("    - {}", shown(&cure.what))),
    }
}

fn verdict(page: &mut TextPage<'_>, found: &Diagnosis) -> fmt::Result {
    match (&found.peer, &found.reason) {
        (Some(peer), _) if found.rdma => page.end(format_args!(
            "Calls to {} go over {}.",
            shown(&peer.uri),
            shown(&peer.path_detail)
        )),
        (_, None) if found.rdma => page.end(format_args!("RDMA would be used.")),
        (_, Some(reason)) => {
            page.end(format_args!("RDMA would not be used: {}", page::reason(reason)))
        }
        (_, None) => page.end(format_args!("RDMA would not be used.")),
    }
}
