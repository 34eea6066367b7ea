//! Human-readable form of a diagnosis.

use std::fmt::Display;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use tonic_rdma::diagnose::{
    Cure, DescriptorsReport, Device, Finding, Hint, Measured, MemlockReport, ModuleState, Peer,
    PoolSizeBy, RunsIn, Step,
};
use tonic_rdma::{Diagnosis, Reason, Side};

use crate::cli::size_shown;
use crate::failure::Failure;
use crate::names::Escaped;
use crate::output;

/// Maximum number of GIDs shown per port. Adapters have long tables, whose later entries resemble
/// the first ones.
const GIDS: usize = 16;

/// Minimum and maximum width of a table in columns.
const NARROWEST: u16 = 60;
const WIDEST: u16 = 120;
/// Maximum number of characters of a text that are shown.
const LONGEST: usize = 4000;

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
        self::peer(peer)?;
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

/// Width of a table in columns: that of the terminal, clamped, so that the terminal does not wrap
/// its lines.
fn width() -> u16 {
    let terminal = rustix::termios::tcgetwinsize(std::io::stdout()).map(|size| size.ws_col);
    terminal.ok().filter(|columns| *columns > 0).unwrap_or(WIDEST).clamp(NARROWEST, WIDEST)
}

fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY).set_header(header);
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width());
    table
}

fn section(title: &str, table: &Table) -> Result<(), Failure> {
    output::line(format_args!("\n{title}\n{table}"))
}

/// Escapes control characters in text that may come from a file, a peer or the environment. Every
/// command and reason fits into the limit; only a peer sends longer text.
fn shown(text: impl AsRef<str>) -> String {
    let text = text.as_ref();
    let end = text.char_indices().nth(LONGEST).map_or(text.len(), |(at, _)| at);
    Escaped(&text[..end]).to_string()
}

fn or_dash(value: Option<impl Display>) -> String {
    value.map_or("-".to_owned(), |value| shown(value.to_string()))
}

fn list<T: Display>(values: impl IntoIterator<Item = T>) -> String {
    let values: Vec<String> = values.into_iter().map(|value| shown(value.to_string())).collect();
    if values.is_empty() { "-".to_owned() } else { values.join(", ") }
}

fn system(found: &Diagnosis) -> Result<(), Failure> {
    let (host, library, settings) = (&found.host, &found.library, &found.settings);
    let mut table = table(["System", ""]);
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
    let mut table = table(["Module", "State", "For"]);
    for module in &found.modules {
        let state = match module.state {
            ModuleState::Loaded => "loaded",
            ModuleState::BuiltIn => "built in",
            _ => "not there",
        };
        table.add_row([module.name.as_str(), state, module.purpose]);
    }
    section("Kernel", &table)?;
    let mut table = self::table(["File", "Device", "Access"]);
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
    let mut table = table(["Device", &name]);
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
        .map_or("yes".to_owned(), |reason| format!("no: {}", self::reason(reason)));
    table.add_row(["usable", &usable]);
    section("Device", &table)?;

    let mut ports = self::table(["Port", "State", "Link layer", "MTU", "Rate", "LID"]);
    let mut gids = self::table(["Port", "GID", "", "Kind", "Interface"]);
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

fn steps(steps: &[Step]) -> Result<(), Failure> {
    if steps.is_empty() {
        return Ok(());
    }
    let mut table = table(["Step", "Time", "Result"]);
    for step in steps {
        let result = match &step.reason {
            Some(reason) => self::reason(reason),
            None if step.detail.is_empty() => "ok".to_owned(),
            None => format!("ok, {}", shown(&step.detail)),
        };
        table.add_row([shown(&step.name), format!("{:.3} ms", step.micros as f64 / 1e3), result]);
    }
    align(&mut table, 1..2);
    output::line(format_args!("{table}"))
}

fn align(table: &mut Table, columns: std::ops::Range<usize>) {
    for column in columns {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

fn reason(reason: &Reason) -> String {
    let side = if reason.side() == Side::Peer { "peer: " } else { "" };
    shown(format!("{side}{}: {}", reason.code(), reason.detail()))
}

fn pinned(memlock: &MemlockReport) -> Result<(), Failure> {
    let limit = |limit: Option<u64>| limit.map_or("no limit".to_owned(), size_shown);
    let mut table = table(["Pinned memory", ""]);
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
        PoolSizeBy::Limit => "the default under a limit, 64 MiB",
        PoolSizeBy::Memory => "a sixteenth of memory, as no limit applies",
        _ => "-",
    };
    table.add_row(["size chosen by", by]);
    section("Memory", &table)
}

fn huge_pages(found: &Diagnosis) -> Result<(), Failure> {
    let huge = &found.huge_pages;
    let mut table = table(["Huge pages", ""]);
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
    let mut table = table(["Descriptors", ""]);
    table.add_row([
        "limit, soft and hard",
        &format!("{}, {}", limit(found.soft), limit(found.hard)),
    ]);
    table.add_row(["in use", &found.in_use.to_string()]);
    table.add_row(["limit for a server's connections", &found.wanted.to_string()]);
    output::line(format_args!("{table}"))
}

fn peer(peer: &Peer) -> Result<(), Failure> {
    let mut table = table(["Peer", &shown(&peer.uri)]);
    for offered in &peer.offered {
        table.add_row([format!("offers {}", offered.path), shown(&offered.place)]);
    }
    for refused in &peer.refused {
        table.add_row([format!("no {}", refused.path), reason(&refused.reason)]);
    }
    table.add_row(["chosen", &shown(&peer.path_detail)]);
    section("Peer", &table)?;
    steps(&peer.steps)?;
    let mut table = self::table(["Path", "Calls", "64 bytes: median", "99 %", "1 MiB: up", "down"]);
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
        row(peer.path.map_or("fast", |path| path.as_str()), measured);
    }
    align(&mut table, 1..6);
    match &peer.not_measured {
        Some(why) => output::line(format_args!("not measured: {}", shown(why))),
        None if peer.tcp.is_none() => Ok(()),
        None => output::line(format_args!("{table}")),
    }
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
            output::line(format_args!("\nRDMA would not be used: {}", self::reason(reason)))
        }
        (_, None) => output::line(format_args!("\nRDMA would not be used.")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_broken_and_not_cut() {
        let words: Vec<String> = (0..200).map(|n| format!("word{n}")).collect();
        let mut table = table(["Device", ""]);
        table.add_row(["usable", &shown(words.join(" "))]);
        let text = table.to_string();
        assert!(text.lines().all(|line| line.chars().count() <= usize::from(WIDEST)), "{text}");
        assert!(words.iter().all(|word| text.contains(word.as_str())), "{text}");
    }

    #[test]
    fn a_command_is_whole_and_moves_no_cursor() {
        let command = format!("mkdir -p /etc/systemd/system/{}.service.d", "x".repeat(500));
        assert_eq!(shown(&command), command);
        assert_eq!(shown("a\u{1b}[2J\nb"), "a\\u{1b}[2J\\nb");
        assert_eq!(shown("y".repeat(1 << 20)).len(), LONGEST);
    }
}
