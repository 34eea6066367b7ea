//! Tables and texts that fit a terminal.

use std::fmt::Display;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use tonic_rdma::diagnose::Step;
use tonic_rdma::{Reason, Side};

use crate::failure::Failure;
use crate::names::Escaped;
use crate::output;

/// Minimum and maximum width of a table in columns.
const NARROWEST: u16 = 60;
const WIDEST: u16 = 120;
/// Maximum number of characters of a text that are shown.
const LONGEST: usize = 4000;

/// Width of a table in columns: that of the terminal, clamped, so that the terminal does not wrap
/// its lines.
fn width() -> u16 {
    let terminal = rustix::termios::tcgetwinsize(std::io::stdout()).map(|size| size.ws_col);
    terminal.ok().filter(|columns| *columns > 0).unwrap_or(WIDEST).clamp(NARROWEST, WIDEST)
}

pub(super) fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY).set_header(header);
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width());
    table
}

pub(super) fn section(title: &str, table: &Table) -> Result<(), Failure> {
    output::line(format_args!("\n{title}\n{table}"))
}

/// Escapes control characters in text that may come from a file, a peer or the environment. Every
/// command and reason fits into the limit; only a peer sends longer text.
pub(super) fn shown(text: impl AsRef<str>) -> String {
    let text = text.as_ref();
    let end = text.char_indices().nth(LONGEST).map_or(text.len(), |(at, _)| at);
    Escaped(&text[..end]).to_string()
}

pub(super) fn or_dash(value: Option<impl Display>) -> String {
    value.map_or("-".to_owned(), |value| shown(value.to_string()))
}

pub(super) fn list<T: Display>(values: impl IntoIterator<Item = T>) -> String {
    let values: Vec<String> = values.into_iter().map(|value| shown(value.to_string())).collect();
    if values.is_empty() { "-".to_owned() } else { values.join(", ") }
}

pub(super) fn steps(steps: &[Step]) -> Result<(), Failure> {
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

pub(super) fn align(table: &mut Table, columns: std::ops::Range<usize>) {
    for column in columns {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

pub(super) fn reason(reason: &Reason) -> String {
    let side = if reason.side() == Side::Peer { "peer: " } else { "" };
    shown(format!("{side}{}: {}", reason.code(), reason.detail()))
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
