//! Comments and documents end at column 100.
//!
//! Tables, code blocks and links are excepted, because they cannot be wrapped. Code is left to
//! rustfmt.

use crate::files::Source;

/// Columns that a line of prose may have.
pub const MAX_WIDTH: usize = 100;

/// A line that is too long: its number, from 1, and its width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Long {
    /// Number of the line, from 1.
    pub line: usize,
    /// Its width in characters.
    pub width: usize,
}

/// Where the prose of a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Everything.
    Markdown,
    /// `//` and `/* */`, parsed.
    Rust,
    /// Lines that begin with `//`.
    Slashes,
    /// Lines that begin with `#`.
    Hashes,
}

pub(crate) fn kind(source: &Source) -> Option<Kind> {
    let name = source.path.rsplit('/').next().unwrap_or_default();
    let ending = name.rsplit_once('.').map(|(_, ending)| ending);
    match ending {
        Some("md") => Some(Kind::Markdown),
        Some("rs") => Some(Kind::Rust),
        Some("c" | "h" | "proto") => Some(Kind::Slashes),
        Some("toml" | "yml" | "yaml" | "py" | "sh" | "mk" | "config") => Some(Kind::Hashes),
        _ if name == "Makefile" || source.text.starts_with("#!") => Some(Kind::Hashes),
        _ => None,
    }
}

/// Returns the text of the comment or document in each line of a file, and `None` for a line
/// without prose.
pub(crate) fn prose(source: &Source, kind: Kind) -> Vec<Option<&str>> {
    let marked =
        |line: &'_ str, marks: &[&str]| marks.iter().any(|m| line.trim_start().starts_with(m));
    match kind {
        Kind::Markdown => source.text.lines().map(Some).collect(),
        Kind::Slashes => source
            .text
            .lines()
            .map(|line| marked(line, &["//", "/*", "*"]).then(|| strip(line)))
            .collect(),
        Kind::Hashes => source
            .text
            .lines()
            .map(|line| {
                // In a Makefile, the help text of a target follows the target.
                let help = line.split_once(" ## ").map(|(_, help)| help);
                if marked(line, &["#"]) && !line.starts_with("#!") {
                    Some(strip(line))
                } else {
                    help
                }
            })
            .collect(),
        Kind::Rust => {
            let comments = comment_starts(&source.text);
            source
                .text
                .lines()
                .zip(comments)
                .map(|(line, start)| start.map(|start| strip(line.get(start..).unwrap_or(line))))
                .collect()
        }
    }
}

/// A comment without its marks.
fn strip(line: &str) -> &str {
    let line = line.trim_start();
    let line = line.trim_start_matches(['/', '#', '*']);
    line.strip_prefix('!').unwrap_or(line)
}

/// How many lines of prose a file has.
pub fn prose_lines(source: &Source) -> usize {
    kind(source).map_or(0, |kind| prose(source, kind).iter().flatten().count())
}

/// The lines of prose that are too long.
pub fn long_lines(source: &Source) -> Vec<Long> {
    let Some(kind) = kind(source) else { return Vec::new() };
    let mut found = Vec::new();
    // The mark that ends the code block, and whether the line before was blank or indented code.
    let mut fence: Option<&str> = None;
    let mut may_be_code = true;
    for (n, (line, prose)) in source.text.lines().zip(prose(source, kind)).enumerate() {
        let Some(text) = prose else {
            (fence, may_be_code) = (None, true);
            continue;
        };
        let trimmed = text.trim_start();
        if let Some(mark) = fence {
            if trimmed.starts_with(mark) {
                fence = None;
            }
            continue;
        }
        fence = ["```", "~~~"].into_iter().find(|mark| trimmed.starts_with(mark));
        // A comment has a space after its mark.
        let indent = if kind == Kind::Markdown { 4 } else { 5 };
        let is_code = may_be_code && text.len() - trimmed.len() >= indent;
        may_be_code = trimmed.is_empty() || is_code;
        let width = line.chars().count();
        let is_table = trimmed.starts_with('|');
        if width > MAX_WIDTH && fence.is_none() && !is_code && !is_table && !ends_in_link(line) {
            found.push(Long { line: n + 1, width });
        }
    }
    found
}

/// Whether everything beyond the last column is one link, or the rest of one.
fn ends_in_link(line: &str) -> bool {
    let start = line.trim_start();
    if start.starts_with("![") || start.starts_with("[![") || start.starts_with("<img") {
        return true;
    }
    let mut column = 0;
    for word in line.split(' ') {
        let end = column + word.chars().count();
        if end > MAX_WIDTH {
            let is_link = word.contains("://") || word.contains("](") || word.contains("]:");
            let is_last = line.trim_end().ends_with(word) && !word.is_empty();
            return is_link && is_last;
        }
        column = end + 1;
    }
    false
}

/// For each line of Rust, the byte offset at which a comment begins, if the line has a comment.
fn comment_starts(text: &str) -> Vec<Option<usize>> {
    let mut starts = Vec::new();
    let bytes = text.as_bytes();
    let mut at = 0;
    let (mut line_start, mut comment) = (0, None);
    // Advances to `to`, and records each line that ends on the way. `inside` says whether the next
    // line begins within a comment.
    let mut advance = |at: &mut usize, to: usize, comment: &mut Option<usize>, inside: bool| {
        while *at < to.min(bytes.len()) {
            if bytes[*at] == b'\n' {
                starts.push(*comment);
                line_start = *at + 1;
                *comment = inside.then_some(0);
            }
            *at += 1;
        }
        line_start
    };
    while at < bytes.len() {
        let rest = &bytes[at..];
        if rest.starts_with(b"//") {
            let line = advance(&mut at, 0, &mut comment, false);
            comment = comment.or(Some(at - line));
            let end = rest.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |n| at + n);
            advance(&mut at, end, &mut comment, false);
        } else if rest.starts_with(b"/*") {
            let line = advance(&mut at, 0, &mut comment, false);
            comment = comment.or(Some(at - line));
            let end = at + block_comment(rest);
            advance(&mut at, end, &mut comment, true);
            // The rest of this line is code.
        } else {
            let end = at + code(rest, at > 0 && is_word(bytes[at - 1]));
            advance(&mut at, end, &mut comment, false);
        }
    }
    if !text.is_empty() && !text.ends_with('\n') {
        starts.push(comment);
    }
    starts
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

/// Length of the block comment that `rest` begins with. Block comments nest.
fn block_comment(rest: &[u8]) -> usize {
    let (mut depth, mut n) = (0, 0);
    while n < rest.len() {
        if rest[n..].starts_with(b"/*") {
            (depth, n) = (depth + 1, n + 2);
        } else if rest[n..].starts_with(b"*/") {
            (depth, n) = (depth - 1, n + 2);
            if depth == 0 {
                return n;
            }
        } else {
            n += 1;
        }
    }
    n
}

/// Length of the literal that `rest` begins with, or 1 if it begins with something else.
fn code(rest: &[u8], in_word: bool) -> usize {
    match rest[0] {
        b'"' => quoted(rest, b'"'),
        b'\'' => {
            let is_char = rest.get(1) == Some(&b'\\')
                || (1..=4).any(|length| {
                    rest.get(1 + length) == Some(&b'\'')
                        && std::str::from_utf8(&rest[1..1 + length])
                            .is_ok_and(|text| text.chars().count() == 1)
                });
            if is_char { quoted(rest, b'\'') } else { 1 }
        }
        b'r' | b'b' | b'c' if !in_word => {
            let prefix = rest.iter().take_while(|byte| b"rbc".contains(byte)).count();
            let hashes = rest[prefix..].iter().take_while(|byte| **byte == b'#').count();
            if prefix > 2
                || !rest[..prefix].contains(&b'r')
                || rest.get(prefix + hashes) != Some(&b'"')
            {
                return 1;
            }
            let mut end = vec![b'"'];
            end.resize(1 + hashes, b'#');
            let body = prefix + hashes + 1;
            rest[body..]
                .windows(end.len())
                .position(|window| window == end)
                .map_or(rest.len(), |n| body + n + end.len())
        }
        _ => 1,
    }
}

fn quoted(rest: &[u8], mark: u8) -> usize {
    let mut n = 1;
    while n < rest.len() && rest[n] != mark {
        n += if rest[n] == b'\\' { 2 } else { 1 };
    }
    (n + 1).min(rest.len())
}
