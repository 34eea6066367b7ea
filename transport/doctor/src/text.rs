//! Formats text and sizes for a terminal.

use std::fmt;

/// Text from a file, a peer or the environment, made safe for one line of a terminal. Control
/// characters are escaped, and also characters that change the direction of text.
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
mod tests {
    use super::*;

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
