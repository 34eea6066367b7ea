//! The table of `top`: a row for each channel and server, and for each of its connections.

use std::fmt::Write;
use std::time::Duration;

use tonic_rdma_channelz::pb::{Connection, Owner, Reason, Role};

use super::look::{Before, Look, Rates, Totals};

/// The columns, and whether they are aligned to the right.
const COLUMNS: [(&str, bool); 14] = [
    ("ROLE", false),
    ("PEER", false),
    ("PATH", false),
    ("DEVICE", false),
    ("REASON", false),
    ("AGE", true),
    ("RAILS", true),
    ("CALLS", true),
    ("CREDITS", true),
    ("CALLS/S", true),
    ("SENT/S", true),
    ("RECVD/S", true),
    ("MEMORY", true),
    ("GRANTED", true),
];

/// Maximum length of a cell. Longer text is cut.
const MAX_CELL: usize = 40;
const NONE: &str = "-";

type Row = [String; COLUMNS.len()];

/// The header and the rows. `before` has the totals of the previous snapshot, and the time since
/// then.
pub(crate) fn lines(look: &Look, before: Option<(&Before, Duration)>) -> Vec<String> {
    let mut rows = vec![COLUMNS.map(|(name, _)| name.to_owned())];
    for (owner, connections) in &look.owners {
        let rates = |id: u64, now: Totals| {
            let (before, time) = before?;
            Some(now.since(*before.get(&(owner.id, id))?, time))
        };
        rows.push(of_owner(owner, connections, rates(0, Totals::of_owner(owner))));
        let mut active: Vec<_> = connections
            .iter()
            .map(|connection| {
                let usage = connection.usage.as_ref();
                let rates = usage.and_then(|usage| rates(connection.id, Totals::of_usage(usage)));
                (connection, rates)
            })
            .collect();
        // The busiest connections come first. Among equals the fast path comes before TCP.
        active.sort_by(|(a, a_rates), (b, b_rates)| {
            let load = |rates: &Option<Rates>| rates.map_or(0.0, |r| r.sent + r.received);
            let by_load = load(b_rates).total_cmp(&load(a_rates));
            by_load.then(b.usage.is_some().cmp(&a.usage.is_some())).then(a.id.cmp(&b.id))
        });
        rows.extend(active.into_iter().map(|(connection, rates)| of_connection(connection, rates)));
    }
    align(&rows)
}

fn of_owner(owner: &Owner, connections: &[Connection], rates: Option<Rates>) -> Row {
    let in_flight = connections.iter().filter_map(|c| c.usage.as_ref());
    let (mut calls, mut memory, mut granted) = (0u64, 0u64, 0u64);
    for usage in in_flight {
        calls = calls.saturating_add(usage.calls_in_flight);
        memory = memory.saturating_add(usage.control_memory.saturating_add(usage.landing_memory));
        granted = granted.saturating_add(usage.granted);
    }
    let role = match owner.role() {
        Role::Channel => "channel",
        Role::Server => "server",
        Role::Unspecified => "?",
    };
    let rails = match owner.role() {
        Role::Channel => connections.len().to_string(),
        Role::Server | Role::Unspecified => NONE.to_owned(),
    };
    row([
        role,
        &shown(&owner.name),
        &shown(&owner.path),
        NONE,
        &code(owner.reason.as_ref()),
        NONE,
        &rails,
        &calls.to_string(),
        NONE,
        &rates.map_or(NONE.to_owned(), |rates| count(rates.calls)),
        &rates.map_or(NONE.to_owned(), |rates| size(rates.sent)),
        &rates.map_or(NONE.to_owned(), |rates| size(rates.received)),
        &size(memory as f64),
        &size(granted as f64),
    ])
}

fn of_connection(connection: &Connection, rates: Option<Rates>) -> Row {
    let peer = match connection.peer_pid {
        Some(pid) => format!("process {pid}"),
        None => shown(&connection.remote),
    };
    let reason = match (&connection.reason, connection.usage.is_some(), connection.asked) {
        (Some(_), _, _) => code(connection.reason.as_ref()),
        (None, true, _) => NONE.to_owned(),
        (None, false, true) => "offered".to_owned(),
        (None, false, false) => "not asked".to_owned(),
    };
    let usage = connection.usage.as_ref();
    let number = |text: Option<String>| text.unwrap_or_else(|| NONE.to_owned());
    row([
        "  link",
        &peer,
        &shown(&connection.path),
        &shown(&connection.device),
        &reason,
        &age(Duration::from_millis(connection.age_ms)),
        NONE,
        &number(usage.map(|usage| usage.calls_in_flight.to_string())),
        &number(usage.map(|usage| format!("{}/{}", usage.credits, usage.peer_credits))),
        &number(rates.map(|rates| count(rates.calls))),
        &number(rates.map(|rates| size(rates.sent))),
        &number(rates.map(|rates| size(rates.received))),
        &number(
            usage.map(|usage| {
                size(usage.control_memory.saturating_add(usage.landing_memory) as f64)
            }),
        ),
        &number(usage.map(|usage| size(usage.granted as f64))),
    ])
}

fn row(cells: [&str; COLUMNS.len()]) -> Row {
    cells.map(|cell| if cell.is_empty() { NONE.to_owned() } else { cell.to_owned() })
}

fn align(rows: &[Row]) -> Vec<String> {
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<_> = (0..COLUMNS.len()).map(width).collect();
    let line = |row: &Row| {
        let mut line = String::new();
        for ((cell, width), (_, right)) in row.iter().zip(&widths).zip(COLUMNS) {
            // Writing to a string does not fail.
            let _ = match right {
                true => write!(line, "{cell:>width$}  "),
                false => write!(line, "{cell:<width$}  "),
            };
        }
        line.trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

fn code(reason: Option<&Reason>) -> String {
    reason.map_or_else(String::new, |reason| shown(&reason.code))
}

/// Returns a peer's text in ASCII, so that it has no control characters and each character takes
/// one column. Other characters are escaped, and long text is cut.
pub(super) fn shown(text: &str) -> String {
    let mut safe = String::new();
    for c in text.chars() {
        match c {
            ' '..='~' => safe.push(c),
            _ => safe.extend(c.escape_default()),
        }
        if safe.len() > MAX_CELL {
            safe.truncate(MAX_CELL - 3);
            safe.push_str("...");
            break;
        }
    }
    safe
}

/// Formats an age in at most two units: `3d 4h`, `12m 3s`, `7s`.
fn age(age: Duration) -> String {
    let seconds = age.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m {}s", seconds % 60),
        (0, _, _) => format!("{hours}h {minutes}m"),
        _ => format!("{days}d {hours}h"),
    }
}

/// Formats a number of calls, with one decimal below 10.
fn count(number: f64) -> String {
    if number > 0.0 && number < 9.95 { format!("{number:.1}") } else { format!("{number:.0}") }
}

/// Formats bytes in the binary unit that leaves at most four digits: `512`, `1.5K`, `20M`.
fn size(bytes: f64) -> String {
    let mut value = bytes;
    let mut units = ["", "K", "M", "G", "T", "P"].into_iter();
    let mut unit = units.next().unwrap_or_default();
    for next in units {
        if value < 1023.5 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    match unit {
        "" => format!("{value:.0}"),
        _ if value < 9.95 => format!("{value:.1}{unit}"),
        _ => format!("{value:.0}{unit}"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use tonic_rdma_channelz::pb::Usage;

    use super::*;

    fn link(id: u64, usage: Option<Usage>) -> Connection {
        Connection {
            id,
            path: if usage.is_some() { "verbs" } else { "tcp" }.into(),
            device: if usage.is_some() { "mlx5_0" } else { "" }.into(),
            remote: format!("10.0.0.{id}:50051"),
            age_ms: 3_725_000,
            asked: id != 3,
            usage,
            ..Connection::default()
        }
    }

    fn look() -> Look {
        let usage = Usage {
            calls_in_flight: 2,
            calls: 1000,
            bytes_sent: 3 << 20,
            bytes_received: 512,
            credits: 63,
            peer_credits: 64,
            control_memory: 64 << 10,
            landing_memory: 1 << 20,
            granted: 1 << 20,
            ..Usage::default()
        };
        let mut refused = link(4, None);
        let reason = Reason { code: "through-gateway".into(), ..Reason::default() };
        refused.reason = Some(reason);
        let links = vec![link(2, Some(usage)), link(3, None), refused, link(5, None)];
        let server = Owner {
            id: 1,
            role: Role::Server.into(),
            name: "public".into(),
            calls_fast: 1000,
            calls_tcp: 5,
            bytes_sent_fast: 3 << 20,
            ..Owner::default()
        };
        let channel = Owner {
            id: 2,
            role: Role::Channel.into(),
            name: "store\u{1b}[31m\n\u{202e}ü".into(),
            path: "tcp".into(),
            reason: Some(Reason { code: "no-device".into(), ..Reason::default() }),
            ..Owner::default()
        };
        Look { at: Instant::now(), owners: vec![(server, links), (channel, Vec::new())] }
    }

    #[test]
    fn the_table_has_this_shape() {
        let look = look();
        let mut before = look.totals();
        before.insert((1, 2), Totals { calls: 500, sent: 1 << 20, received: 512 });
        before.insert((1, 0), Totals::default());
        let lines = lines(&look, Some((&before, Duration::from_secs(2))));
        let expected = r"
ROLE     PEER                               PATH   DEVICE  REASON               AGE  RAILS  CALLS  CREDITS  CALLS/S  SENT/S  RECVD/S  MEMORY  GRANTED
server   public                             -      -       -                      -      -      2        -      502    1.5M        0    1.1M     1.0M
  link   10.0.0.2:50051                     verbs  mlx5_0  -                  1h 2m      -      2    63/64      250    1.0M        0    1.1M     1.0M
  link   10.0.0.3:50051                     tcp    -       not asked          1h 2m      -      -        -        -       -        -       -        -
  link   10.0.0.4:50051                     tcp    -       through-gateway    1h 2m      -      -        -        -       -        -       -        -
  link   10.0.0.5:50051                     tcp    -       offered            1h 2m      -      -        -        -       -        -       -        -
channel  store\u{1b}[31m\n\u{202e}\u{fc}    tcp    -       no-device              -      0      0        -        0       0        0       0        0
";
        let squeeze = |text: &str| {
            let lines = text.trim().lines().map(|line| {
                line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect::<Vec<_>>()
            });
            lines.map(|cells| cells.join("|")).collect::<Vec<_>>()
        };
        assert_eq!(squeeze(&lines.join("\n")), squeeze(expected));
        assert!(lines.iter().all(|line| line.is_ascii() && !line.contains('\u{1b}')));
        // The columns are aligned.
        let end = lines[0].find("CALLS/S").unwrap() + "CALLS/S".len();
        assert!(lines.iter().all(|line| line.len() >= end && line.as_bytes()[end - 1] != b' '));
    }

    #[test]
    fn without_an_earlier_look_there_are_no_rates() {
        let lines = lines(&look(), None);
        assert!(lines[1].contains(" - "), "{}", lines[1]);
        assert!(
            lines[2].ends_with("63/64        -       -        -    1.1M     1.0M"),
            "{}",
            lines[2]
        );
    }

    #[test]
    fn numbers_are_short() {
        let sizes = [0.0, 1023.0, 1024.0, 1536.0, 10_240.0, 1023.9 * 1024.0, 1e30];
        let shown: Vec<_> = sizes.map(size).into();
        assert_eq!(&shown[..6], ["0", "1023", "1.0K", "1.5K", "10K", "1.0M"]);
        assert_eq!([0.0, 0.25, 9.9, 9.96, 1e6].map(count), ["0", "0.2", "9.9", "10", "1000000"]);
        let ages = [0, 59, 60, 3_599, 3_600, 86_399, 86_400, 400 * 86_400];
        let shown = ages.map(|seconds| age(Duration::from_secs(seconds)));
        assert_eq!(
            shown,
            ["0s", "59s", "1m 0s", "59m 59s", "1h 0m", "23h 59m", "1d 0h", "400d 0h"]
        );
    }

    #[test]
    fn text_of_a_peer_is_short_and_plain() {
        assert_eq!(shown("a\tb\u{7f}\u{9b}é"), "a\\tb\\u{7f}\\u{9b}\\u{e9}");
        let long = shown(&"x".repeat(1 << 20));
        assert_eq!((long.len(), &long[MAX_CELL - 4..]), (MAX_CELL, "x..."));
        let cut = shown(&"\u{202e}".repeat(1 << 20));
        assert!(cut.len() <= MAX_CELL + 3 && cut.is_ascii(), "{cut}");
    }
}
