//! Text that a peer chose, made safe for logs and reasons.

use std::fmt::{self, Write};

/// Maximum characters of a peer's text in a log line.
pub(crate) const SHORT: usize = 80;
/// Maximum characters of a peer's text in a reason's details.
pub(crate) const DETAIL: usize = 512;

/// Displays a peer's text, up to this number of characters. Every character that is not printable
/// is escaped, so a peer can neither begin a new log line nor move a terminal's cursor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PeerText<'a>(pub(crate) &'a str, pub(crate) usize);

impl fmt::Display for PeerText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PeerText(text, most) = *self;
        let mut left = most;
        for char in text.chars() {
            // Quotes and backslashes need no escape, because they are harmless in log lines.
            let is_plain = matches!(char, '"' | '\'' | '\\');
            let escaped = char.escape_debug();
            let len = if is_plain { 1 } else { escaped.len() };
            let Some(rest) = left.checked_sub(len) else { return f.write_str("...") };
            left = rest;
            match is_plain {
                true => f.write_char(char)?,
                false => write!(f, "{escaped}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_and_escaped() {
        let shown = |text: &str, most| PeerText(text, most).to_string();
        assert_eq!(shown("it's \"fine\": C:\\x \u{fc}", 80), "it's \"fine\": C:\\x \u{fc}");
        let evil = "ok\nWARN forged\r\u{1b}[2J\u{202e}\0";
        assert_eq!(shown(evil, 80), r"ok\nWARN forged\r\u{1b}[2J\u{202e}\0");
        assert_eq!(shown(&"\u{1f980}".repeat(300), 80), "\u{1f980}".repeat(80) + "...");
        // An escape is written completely or not at all.
        assert_eq!(shown("abc\u{1b}", 8), "abc...");
        for most in 0..40 {
            let (short, cut) = (shown(evil, most), shown(&"\n".repeat(99), most));
            assert!(short.len() <= most + 3 && cut.len() <= most + 3);
            assert!(!short.chars().chain(cut.chars()).any(char::is_control));
        }
    }
}
