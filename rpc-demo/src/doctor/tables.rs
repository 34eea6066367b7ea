//! Human-readable form of a diagnosis.

use tonic_rdma::Diagnosis;
use tonic_rdma::diagnose::{
    Cure, DescriptorsReport, Device, Finding, Hint, MemlockReport, ModuleState, PoolSizeBy, RunsIn,
};

use super::layout::{list, or_dash, section, shown, steps};
use super::{layout, peer};
use crate::cli::size_shown;
use crate::failure::Failure;
use crate::output;

/// Maximum number of GIDs shown per port. Adapters have long tables, whose later entries resemble
/// the first ones.
const GIDS: usize = 16;

/// Prints what was examined, what prevents RDMA, and the verdict.
pub(super) fn print(found: &Diagnosis) -> Result<(), Failure> {
    system(found)?;
    kernel(found)?;
    for device in &found.devices {
        self::device(device)?;
    }
    if let Some(memlock) = &found.memlock {
        pinned(memlock)?;
    }
    huge_pages(found)?;
    if let Some(found) = &found.descriptors {
        descriptors(found)?;
    }
    if let Some(peer) = &found.peer {
        peer::print(peer)?;
    }
    for (title, blocks) in [("In the way", true), ("Could be better", false)] {
        findings(title, found.findings.iter().filter(|finding| finding.blocks == blocks))?;
    }
    hints(&found.hints)?;
    if found.rdma {
        own_code()?;
    }
    verdict(found)
}

/// What no examination of a host finds.
fn own_code() -> Result<(), Failure> {
    output::line(format_args!(
        "\nA program that stays on TCP all the same makes tonic's own channel. Look in its code for\n  \
         - `connect` of stubs that tonic-prost-build has generated: generate them with tonic-rdma-build, or\n    \
           give `new` a channel of tonic_rdma::Endpoint\n  \
         - `tonic::transport::{{Channel, Endpoint}}`: tonic_rdma has both"
    ))
}

fn system(found: &Diagnosis) -> Result<(), Failure> {
    let (host, library, settings) = (&found.host, &found.library, &found.settings);
    let mut table = layout::table(["System", ""]);
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
        (None, None) => "found, version not known".to_owned(),
    };
    table.add_row(["rdma-core", &core]);
    table.add_row(["libraries", &list(&library.paths)]);
    table.add_row(["policy", &format!("{}, fabrics {}", settings.policy, list(&settings.fabrics))]);
    table.add_row(["only device", &or_dash(settings.device.as_ref())]);
    section("System", &table)
}

fn kernel(found: &Diagnosis) -> Result<(), Failure> {
    let mut table = layout::table(["Module", "State", "For"]);
    for module in &found.modules {
        let state = match module.state {
            ModuleState::Loaded => "loaded",
            ModuleState::BuiltIn => "built in",
            _ => "not there",
        };
        table.add_row([module.name.as_str(), state, module.purpose]);
    }
    section("Kernel", &table)?;
    let mut table = layout::table(["File", "Device", "Access"]);
    for file in &found.files {
        let access = match (file.usable, &file.error) {
            (true, _) => "yes".to_owned(),
            (false, error) => or_dash(error.as_ref()),
        };
        table.add_row([shown(&file.path), or_dash(file.device.as_ref()), access]);
    }
    section("Device files", &table)
}

fn device(device: &Device) -> Result<(), Failure> {
    let name = shown(&device.name);
    let mut table = layout::table(["Device", &name]);
    table.add_row(["transport", &shown(&device.transport)]);
    table.add_row([
        "driver, firmware",
        &format!("{}, {}", or_dash(device.driver.as_ref()), or_dash(device.firmware.as_ref())),
    ]);
    table.add_row(["node GUID", &or_dash(device.guid.as_ref())]);
    table.add_row(["interfaces", &list(&device.interfaces)]);
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
        .map_or("yes".to_owned(), |reason| format!("no: {}", layout::reason(reason)));
    table.add_row(["usable", &usable]);
    section("Device", &table)?;

    let mut ports = layout::table(["Port", "State", "Link layer", "MTU", "Rate", "LID"]);
    let mut gids = layout::table(["Port", "GID", "", "Kind", "Interface"]);
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
    output::line(format_args!("{ports}"))?;
    if gids.row_count() > 0 {
        output::line(format_args!("{gids}"))?;
    }
    if more > 0 {
        output::line(format_args!("({more} more GIDs: see --json)"))?;
    }
    steps(&device.steps)
}

fn pinned(memlock: &MemlockReport) -> Result<(), Failure> {
    let limit = |limit: Option<u64>| limit.map_or("no limit".to_owned(), size_shown);
    let mut table = layout::table(["Pinned memory", ""]);
    table.add_row([
        "limit, soft and hard",
        &format!("{}, {}", limit(memlock.soft), limit(memlock.hard)),
    ]);
    let ignored =
        if memlock.cap_ipc_lock { "yes: the limit counts on Soft-iWARP only" } else { "no" };
    table.add_row(["CAP_IPC_LOCK", ignored]);
    table.add_row(["pinned already", &size_shown(memlock.pinned)]);
    table.add_row(["limit that RDMA needs", &size_shown(memlock.needed)]);
    table.add_row(["limit for the whole pool", &size_shown(memlock.wanted)]);
    let gets = memlock.pool_gets.map_or("nothing".to_owned(), size_shown);
    table.add_row([
        "pool configured, and got",
        &format!("{}, {gets}", size_shown(memlock.pool_configured)),
    ]);
    let by = match memlock.pool_size_by {
        PoolSizeBy::Program => "the program",
        PoolSizeBy::Environment => "TONIC_RDMA_POOL",
        PoolSizeBy::Limit => "the default under a limit, 64 MiB",
        PoolSizeBy::Memory => "a sixteenth of memory, as no limit applies",
        _ => "-",
    };
    table.add_row(["size chosen by", by]);
    section("Memory", &table)
}

fn huge_pages(found: &Diagnosis) -> Result<(), Failure> {
    let huge = &found.huge_pages;
    let mut table = layout::table(["Huge pages", ""]);
    table.add_row(["transparent", &or_dash(huge.transparent.as_ref())]);
    table.add_row([
        "reserved",
        &format!(
            "{} of {}, {} free",
            huge.reserved,
            huge.size.map_or("-".to_owned(), size_shown),
            huge.free
        ),
    ]);
    output::line(format_args!("{table}"))
}

fn descriptors(found: &DescriptorsReport) -> Result<(), Failure> {
    let limit = |limit: Option<u64>| limit.map_or("no limit".to_owned(), |n| n.to_string());
    let mut table = layout::table(["Descriptors", ""]);
    table.add_row([
        "limit, soft and hard",
        &format!("{}, {}", limit(found.soft), limit(found.hard)),
    ]);
    table.add_row(["in use", &found.in_use.to_string()]);
    table.add_row(["limit for a server's connections", &found.wanted.to_string()]);
    output::line(format_args!("{table}"))
}

fn findings<'a>(title: &str, found: impl Iterator<Item = &'a Finding>) -> Result<(), Failure> {
    for (index, finding) in found.enumerate() {
        if index == 0 {
            output::line(format_args!("\n{title}"))?;
        }
        output::line(format_args!("  {}: {}", finding.code, shown(&finding.what)))?;
        for cure in &finding.cures {
            self::cure(cure)?;
        }
    }
    Ok(())
}

fn hints(hints: &[Hint]) -> Result<(), Failure> {
    for (index, hint) in hints.iter().enumerate() {
        if index == 0 {
            output::line(format_args!("\nCould be faster"))?;
        }
        let of = hint.device.as_ref().map_or(String::new(), |name| format!("{}: ", shown(name)));
        output::line(format_args!("  {}: {of}{}", hint.name, shown(&hint.what)))?;
        for cure in &hint.cures {
            self::cure(cure)?;
        }
    }
    Ok(())
}

fn cure(cure: &Cure) -> Result<(), Failure> {
    let who = if cure.root { " (as root)" } else { "" };
    match &cure.command {
        // Unmodified, because the user copies it.
        Some(command) => output::line(format_args!(
            "    - {}{who}:\n        {}",
            shown(&cure.what),
            shown(command)
        )),
        None => output::line(format_args!("    - {}", shown(&cure.what))),
    }
}

fn verdict(found: &Diagnosis) -> Result<(), Failure> {
    match (&found.peer, &found.reason) {
        (Some(peer), _) if found.rdma => output::line(format_args!(
            "\nCalls to {} go by {}.",
            shown(&peer.uri),
            shown(&peer.path_detail)
        )),
        (_, None) if found.rdma => output::line(format_args!("\nRDMA would be used.")),
        (_, Some(reason)) => {
            output::line(format_args!("\nRDMA would not be used: {}", layout::reason(reason)))
        }
        (_, None) => output::line(format_args!("\nRDMA would not be used.")),
    }
}
