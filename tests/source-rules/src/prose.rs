//! The prose of a file by paragraphs: comments, documents and the texts that a program prints.

use proc_macro2::{TokenStream, TokenTree};

use crate::files::Source;
use crate::width::{self, Kind};

/// Minimum number of words in a line of a string literal that counts as prose.
const MIN_WORDS: usize = 4;

/// Words that belong together: a paragraph, an item of a list, a heading, a cell of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paragraph {
    /// Number of the first line, from 1.
    pub line: usize,
    /// The words, with one space between them. A piece of code is one word.
    pub text: String,
    /// For the first paragraph of a Rust doc comment, the item that the comment documents.
    pub documents: Option<Documented>,
    /// True for a cell of a table.
    pub is_cell: bool,
}

/// The item that a doc comment documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Documented {
    /// The first line of the item's code; empty for a module's own comment.
    pub item: String,
    /// True when the doc comment has no further paragraph.
    pub is_whole: bool,
}

/// All paragraphs of a file.
///
/// # Errors
///
/// When a Rust file does not parse.
pub fn paragraphs(source: &Source) -> Result<Vec<Paragraph>, String> {
    let Some(kind) = width::kind(source) else { return Ok(Vec::new()) };
    let mut found = written(source, kind);
    if kind == Kind::Rust {
        let syntax = source.text.parse::<TokenStream>();
        let tokens = syntax.map_err(|error| format!("{}: {error}", source.path))?;
        let lines: Vec<_> = source.text.lines().collect();
        literals(tokens, &lines, &mut found);
    }
    Ok(found)
}

/// The paragraphs of comments and documents.
fn written(source: &Source, kind: Kind) -> Vec<Paragraph> {
    let lines: Vec<_> = source.text.lines().collect();
    let mut found: Vec<Paragraph> = Vec::new();
    // Whether the next line continues the last paragraph, and the mark that ends a code block.
    let (mut open, mut fence): (bool, Option<&str>) = (false, None);
    let mut last_mark = "";
    for (n, prose) in width::prose(source, kind).into_iter().enumerate() {
        let Some(text) = prose else {
            (open, fence, last_mark) = (false, None, "");
            continue;
        };
        let line = lines[n].trim_start();
        let mark = if kind == Kind::Rust { doc_mark(line) } else { "" };
        let is_trailing = kind == Kind::Rust && !line.starts_with(['/', '*']);
        let begins_doc = !mark.is_empty() && mark != last_mark;
        open &= mark == last_mark && !is_trailing;
        last_mark = mark;
        let trimmed = text.trim();
        if let Some(end) = fence {
            if trimmed.starts_with(end) {
                fence = None;
            }
            continue;
        }
        fence = ["```", "~~~"].into_iter().find(|mark| trimmed.starts_with(mark));
        let indent = text.len() - text.trim_start().len();
        let is_code = !open && indent >= if kind == Kind::Markdown { 4 } else { 5 };
        if trimmed.is_empty() || fence.is_some() || is_code || trimmed.starts_with('<') {
            open = false;
            continue;
        }
        let documents = begins_doc.then(|| documented(&lines, n, mark));
        if trimmed.starts_with('|') {
            for cell in trimmed.trim_matches('|').split(" | ") {
                let text = cell.trim().to_owned();
                found.push(Paragraph { line: n + 1, text, documents: None, is_cell: true });
            }
            open = false;
        } else if open && !begins_item(trimmed) {
            let last = found.last_mut().expect("an open paragraph was found");
            last.text = format!("{} {trimmed}", last.text);
        } else {
            found.push(Paragraph {
                line: n + 1,
                text: trimmed.to_owned(),
                documents,
                is_cell: false,
            });
            open = !is_trailing && !trimmed.starts_with('#');
        }
    }
    for paragraph in &mut found {
        paragraph.text = without_code(&paragraph.text);
    }
    found
}

/// Returns `///` or `//!` if the line begins with this mark, and an empty string otherwise.
fn doc_mark(line: &str) -> &'static str {
    let is_doc = line.starts_with("///") && !line.starts_with("////");
    let is_inner = line.starts_with("//!");
    if is_doc {
        "///"
    } else if is_inner {
        "//!"
    } else {
        ""
    }
}

/// Returns the item that a doc comment documents. The comment begins in line `n`, and its lines
/// begin with `mark`.
fn documented(lines: &[&str], n: usize, mark: &str) -> Documented {
    let lines = || lines[n..].iter().map(|line| line.trim_start());
    let comment = || lines().take_while(|line| line.starts_with(mark));
    let is_whole = comment().all(|line| line.len() > mark.len());
    let mut below = lines().skip(comment().count());
    let item = below.find(|line| !line.starts_with("#[") && !line.starts_with("//"));
    let item = item.filter(|_| mark == "///").unwrap_or_default().to_owned();
    Documented { item, is_whole }
}

/// True for the first line of an item of a list.
fn begins_item(line: &str) -> bool {
    let number = line.trim_start_matches(|c: char| c.is_ascii_digit());
    ["- ", "* ", "+ ", "#"].iter().any(|mark| line.starts_with(mark))
        || (number.len() < line.len() && (number.starts_with(". ") || number.starts_with(") ")))
}

/// Replaces each code span of a paragraph by one word, and removes the targets of links.
fn without_code(text: &str) -> String {
    let mut plain = String::new();
    for (n, part) in text.split('`').enumerate() {
        if n % 2 == 1 && !part.is_empty() {
            plain += "`_`";
        } else if n % 2 == 0 {
            plain += part;
        }
    }
    while let Some(start) = plain.find("](") {
        let Some(length) = plain[start..].find(')') else { break };
        plain.replace_range(start + 1..=start + length, "");
    }
    plain.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Adds the string literals that are prose.
fn literals(tokens: TokenStream, lines: &[&str], found: &mut Vec<Paragraph>) {
    for tree in tokens {
        match tree {
            TokenTree::Group(group) => literals(group.stream(), lines, found),
            TokenTree::Literal(literal) => {
                let start = literal.span().start();
                // Skip doc comments: they are literals as well, but do not begin with a quote in
                // the source.
                let code = lines.get(start.line - 1).copied().unwrap_or_default();
                let code: String = code.chars().skip(start.column).take(1).collect();
                if code != "\"" && code != "r" {
                    continue;
                }
                let Ok(text) = syn::parse_str::<syn::LitStr>(&literal.to_string()) else {
                    continue;
                };
                for (n, part) in text.value().split('\n').enumerate() {
                    if part.split_whitespace().count() >= MIN_WORDS && !is_code(part) {
                        let text = without_code(part);
                        found.push(Paragraph {
                            line: start.line + n,
                            text,
                            documents: None,
                            is_cell: false,
                        });
                    }
                }
            }
            _ => {}
        }
    }
}

/// Whether a line of a text is code, because it ends a statement or a block, or opens a block. A
/// placeholder of `format!` at the end of the line, such as `{name:?}`, is no block.
fn is_code(line: &str) -> bool {
    let line = line.trim_end();
    if !line.ends_with('}') {
        return line.ends_with([';', '{']);
    }
    let placeholder = line.trim_end_matches('}').rsplit_once('{').map(|(_, inside)| inside);
    placeholder.is_none_or(|inside| inside.contains(|c: char| c == '}' || c.is_whitespace()))
}
