//! Tables, texts and sizes that fit a terminal.

use std::fmt::{self, Display};

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use tonic_rdma::diagnose::Step;
use tonic_rdma::{Reason, Side};

/// Minimum and maximum width of a table in columns.
const NARROWEST: u16 = 60;
const WIDEST: u16 = 120;
/// Maximum number of characters of a text that are shown.
const LONGEST: usize = 4000;

/// Columns of the terminal behind stdout.
pub(crate) fn terminal_width() -> Option<u16> {
    terminal_size::terminal_size_of(std::io::stdout())
        .map(|(terminal_size::Width(columns), _)| columns)
}

/// The width of a table in columns: the width of the terminal, limited to [`NARROWEST`] to
/// [`WIDEST`]. On a terminal of at least [`NARROWEST`] columns, the lines of tables are not
/// wrapped.
pub(crate) fn fitting(columns: Option<u16>) -> u16 {
    columns.filter(|columns| *columns > 0).unwrap_or(WIDEST).clamp(NARROWEST, WIDEST)
}

/// The report while it is being written.
pub(crate) struct TextPage<'a> {
    pub(crate) out: &'a mut dyn fmt::Write,
    pub(crate) width: u16,
}

impl TextPage<'_> {
    pub(crate) fn line(&mut self, text: fmt::Arguments<'_>) -> fmt::Result {
        writeln!(self.out, "{text}")
    }

    /// Writes the last line.
    pub(crate) fn end(&mut self, text: fmt::Arguments<'_>) -> fmt::Result {
        write!(self.out, "\n{text}")
    }

    pub(crate) fn table<const N: usize>(&self, header: [&str; N]) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::UTF8_BORDERS_ONLY).set_header(header);
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(self.width);
        table
    }

    pub(crate) fn section(&mut self, title: &str, table: &Table) -> fmt::Result {
        self.line(format_args!("\n{title}\n{table}"))
    }

    pub(crate) fn steps(&mut self, steps: &[Step]) -> fmt::Result {
        if steps.is_empty() {
            return Ok(());
        }
        let mut table = self.table(["Step", "Time", "Result"]);
        for step in steps {
            let result = match &step.reason {
                Some(reason) => self::reason(reason),
                None if step.detail.is_empty() => "ok".to_owned(),
                None => format!("ok, {}", shown(&step.detail)),
            };
            let time = format!("{:.3} ms", step.micros as f64 / 1e3);
            table.add_row([shown(&step.name), time, result]);
        }
        align(&mut table, 1..2);
        self.line(format_args!("{table}"))
    }
}

/// Escapes control characters in text that may come from a file, a peer or the environment, and
/// limits its length. Commands and reasons are shorter than this limit. Only text from a peer may
/// be longer.
pub(crate) fn shown(text: impl AsRef<str>) -> String {
    let text = text.as_ref();
    let end = text.char_indices().nth(LONGEST).map_or(text.len(), |(at, _)| at);
    Escaped(&text[..end]).to_string()
}

pub(crate) fn or_dash(value: Option<impl Display>) -> String {
    value.map_or("-".to_owned(), |value| shown(value.to_string()))
}

pub(crate) fn list<T: Display>(values: impl IntoIterator<Item = T>) -> String {
    let values: Vec<String> = values.into_iter().map(|value| shown(value.to_string())).collect();
    if values.is_empty() { "-".to_owned() } else { values.join(", ") }
}

pub(crate) fn size(bytes: u64) -> String {
    ByteSize(bytes).to_string()
}

pub(crate) fn align(table: &mut Table, columns: std::ops::Range<usize>) {
    for column in columns {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

pub(crate) fn reason(reason: &Reason) -> String {
    let side = if reason.side() == Side::Peer { "peer: " } else { "" };
    shown(format!("{side}{}: {}", reason.code(), reason.detail()))
}

/// Text from a file, a peer or the environment, made safe for one line of a terminal. Control
/// characters, and characters that change the direction of text, are escaped.
#[derive(Debug, Clone, Copy)]
pub struct Escaped<'a>(pub &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| escaped(c, f))
    }
}

fn escaped(c: char, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    // Bidirectional overrides can make one name look like another.
    let turns =
        matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if c.is_control() || turns {
        write!(f, "{}", c.escape_default())
    } else {
        fmt::Write::write_char(f, c)
    }
}

/// A number of bytes, in the largest binary unit that makes it a whole number: `64 MiB`.
#[derive(Debug, Clone, Copy)]
pub struct ByteSize(pub u64);

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
        let fits =
            |&&(_, shift): &&(&str, u32)| self.0 >> shift > 0 && self.0.trailing_zeros() >= shift;
        match units.iter().find(fits) {
            Some((unit, shift)) => write!(f, "{} {unit}", self.0 >> shift),
            None => write!(f, "{} B", self.0),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_broken_and_not_cut() {
        let words: Vec<String> = (0..200).map(|n| format!("word{n}")).collect();
        for (asked, columns) in [(None, WIDEST), (Some(80), 80), (Some(7), NARROWEST)] {
            let mut text = String::new();
            let mut page = TextPage { out: &mut text, width: fitting(asked) };
            let mut table = page.table(["Device", ""]);
            table.add_row(["usable", &shown(words.join(" "))]);
            page.section("Devices", &table).unwrap();
            // A line is broken between words.
            let columns = usize::from(columns);
            let widest = text.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(widest <= columns && widest > columns - 10, "{text}");
            assert!(words.iter().all(|word| text.contains(word.as_str())), "{text}");
        }
    }

    #[test]
    fn a_command_is_whole_and_moves_no_cursor() {
        let command = format!("mkdir -p /etc/systemd/system/{}.service.d", "x".repeat(500));
        assert_eq!(shown(&command), command);
        assert_eq!(shown("a\u{1b}[2J\nb"), "a\\u{1b}[2J\\nb");
        assert_eq!(shown("y".repeat(1 << 20)).len(), LONGEST);
    }

    #[test]
    fn control_characters_and_turned_text_are_escaped() {
        let text = "a\nb\u{1b}[31m\u{202e}é";
        assert_eq!(Escaped(text).to_string(), "a\\nb\\u{1b}[31m\\u{202e}é");
    }

    #[test]
    fn sizes_are_whole_numbers_of_their_unit() {
        let shown = |bytes| ByteSize(bytes).to_string();
        assert_eq!([shown(0), shown(1023), shown(1024)], ["0 B", "1023 B", "1 KiB"]);
        assert_eq!([shown(64 << 20), shown((1 << 20) + 1)], ["64 MiB", "1048577 B"]);
        assert_eq!(shown(3 << 40), "3 TiB");
    }
}
