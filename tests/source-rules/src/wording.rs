//! Wordings that make a reader read a sentence twice, and what to write instead.
//!
//! | [`Pattern`] | write |
//! |---|---|
//! | `Opening` | a noun or a verb: "The key ...", "Returns ...", "Like `x`, but ..." |
//! | `Genitive` | a compound or a possessive: "application memory", "the peer's keys" |
//! | `Word` | "also", "again", "while X", or nothing |
//! | `Riddle` | the number, the condition |
//! | `Parenthesis` | a sentence of its own |
//! | `Semicolons` | two sentences, or a list |
//! | `Signature` | what the signature does not say, or nothing |
//!
//! The first and the last pattern apply to doc comments, the others to all prose.

use std::collections::{BTreeMap, HashSet};

use crate::files::Source;
use crate::prose::{self, Documented, Paragraph};

/// Folders whose wordings to avoid are counted together. They may have fewer than the list of known
/// wordings says.
pub const AT_MOST: &[&str] =
    &["transport/fabric/src/verbs/", "transport/proto/", "transport/tonic/"];

/// Words that a parenthesis may have.
pub const MAX_PARENTHESIS: usize = 12;

/// First words of a doc comment that make it a fragment of a sentence about the item.
const OPENINGS: &[&str] =
    &["What", "Whom", "Of", "As", "Who", "Whose", "By", "Than", "And", "But", "Or", "Nor"];

/// Owners whose name makes a compound.
const OWNERS: &[&str] = &["application", "peer", "system"];

/// Words before "of" that make it a part of a phrase, and not a genitive.
const NO_GENITIVE: &[&str] =
    &["instead", "because", "out", "ahead", "regardless", "independent", "independently", "inside"];

/// Words of a dialect.
const WORDS: &[&str] = &["anew", "meanwhile", "likewise", "in vain", "as ever"];

/// Words that follow "beside" when it means "in addition to".
const BESIDE: &[&str] = &["that", "this", "these", "those", "what", "which", "whom"];

/// Phrases instead of a number or a condition.
const RIDDLES: &[&str] = &["there is none", "there are none", "so many", "if there are more"];

/// Words that add nothing to a doc comment.
const FILLERS: &[&str] = &[
    "a", "an", "the", "this", "that", "its", "it", "is", "are", "of", "for", "to", "in", "with",
    "new", "return", "get", "give", "create", "make",
];

/// A way of writing to avoid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pattern {
    /// A doc comment that begins as a fragment: "What", "Of", "As", ...
    Opening,
    /// "of the application", "of the peer", "of the system" as a genitive.
    Genitive,
    /// A word of a dialect, such as "anew", or ", too".
    Word,
    /// "there is none", "so many", "if there are more".
    Riddle,
    /// A parenthesis of more than [`MAX_PARENTHESIS`] words.
    Parenthesis,
    /// A sentence with two semicolons, other than a cell of a table, which may be a list.
    Semicolons,
    /// A doc comment that has no other words than the item.
    Signature,
}

/// A place with a wording to avoid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hit {
    /// Number of the line in which the paragraph begins, from 1.
    pub line: usize,
    /// What is wrong.
    pub pattern: Pattern,
    /// The words.
    pub text: String,
}

/// All hits in a file.
///
/// # Errors
///
/// When a Rust file does not parse.
pub fn found(source: &Source) -> Result<Vec<Hit>, String> {
    let mut hits = Vec::new();
    for paragraph in prose::paragraphs(source)? {
        let mut hit = |pattern, text: &str| {
            hits.push(Hit { line: paragraph.line, pattern, text: text.to_owned() });
        };
        phrases(&paragraph.text, &mut hit);
        parentheses(&paragraph.text, &mut hit);
        if !paragraph.is_cell {
            semicolons(&paragraph.text, &mut hit);
        }
        if let Some(documented) = &paragraph.documents {
            doc_comment(&paragraph, documented, &mut hit);
        }
    }
    hits.sort_by_key(|hit| hit.line);
    Ok(hits)
}

/// The number of hits by file, and by folder for [`AT_MOST`].
pub fn counts<'a>(hits: impl IntoIterator<Item = (&'a str, usize)>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for (path, n) in hits {
        let folder = AT_MOST.iter().find(|folder| path.starts_with(**folder));
        *counts.entry((*folder.unwrap_or(&path)).to_owned()).or_default() += n;
    }
    counts.retain(|_, n| *n > 0);
    counts
}

/// Compares `found` with `known`. Returns a line for each path at which they differ.
pub fn compare(known: &BTreeMap<String, usize>, found: &BTreeMap<String, usize>) -> Vec<String> {
    let mut wrong = Vec::new();
    let paths: std::collections::BTreeSet<_> = known.keys().chain(found.keys()).collect();
    for path in paths {
        let [listed, there] = [known, found].map(|counts| counts.get(path).copied().unwrap_or(0));
        if there > listed {
            wrong.push(format!("{path}: {there}, at most {listed}"));
        } else if there < listed && !AT_MOST.contains(&path.as_str()) {
            wrong.push(format!("{path}: {there} only, and the list says {listed}"));
        }
    }
    wrong
}

/// Parses a list of `known`. Each line of its file has a number and a path.
///
/// # Errors
///
/// The error names the line that is not a number and a path.
pub fn read_list(text: &str) -> Result<BTreeMap<String, usize>, String> {
    let entry = |line: &str| {
        let (n, path) = line.split_once(' ')?;
        Some((path.to_owned(), n.parse().ok()?))
    };
    text.lines().map(|line| entry(line).ok_or_else(|| format!("no entry: {line}"))).collect()
}

/// Formats a list for [`read_list`].
pub fn write_list(counts: &BTreeMap<String, usize>) -> String {
    counts.iter().map(|(path, n)| format!("{n} {path}\n")).collect()
}

fn phrases(text: &str, hit: &mut impl FnMut(Pattern, &str)) {
    let words: Vec<_> = text.split(' ').collect();
    let plain: Vec<_> = words.iter().map(|word| plain(word)).collect();
    let ends = |n: usize| words[n].ends_with(['.', ',', ';', ':', ')', '?', '!']);
    let has = |n: usize, phrase: &str| {
        let mut parts = phrase.split(' ').enumerate();
        parts.all(|(k, part)| plain.get(n + k).is_some_and(|word| word == part))
    };
    let from = |n: usize| words[n..words.len().min(n + 5)].join(" ");
    for n in 0..words.len() {
        let last = n + 1 == words.len();
        if plain[n] == "too" && (last || ends(n)) && n > 0 && words[n - 1].ends_with(',') {
            hit(Pattern::Word, &from(n - 1));
        }
        if WORDS.iter().any(|phrase| has(n, phrase)) {
            hit(Pattern::Word, &from(n));
        }
        if plain[n] == "beside" && BESIDE.iter().any(|word| has(n + 1, word)) {
            hit(Pattern::Word, &from(n));
        }
        if RIDDLES.iter().any(|phrase| has(n, phrase)) {
            hit(Pattern::Riddle, &from(n));
        }
        let is_genitive = has(n, "of the")
            && OWNERS.iter().any(|owner| has(n + 2, owner))
            && !(has(n + 3, "call") || has(n + 3, "calls"))
            && !(n > 0 && NO_GENITIVE.contains(&plain[n - 1].as_str()));
        if is_genitive {
            hit(Pattern::Genitive, &from(n));
        }
    }
}

/// A word in small letters, without punctuation around it.
fn plain(word: &str) -> String {
    word.trim_matches(|c: char| !c.is_alphanumeric()).to_lowercase()
}

fn parentheses(text: &str, hit: &mut impl FnMut(Pattern, &str)) {
    let (mut depth, mut start) = (0_usize, 0);
    for (n, c) in text.char_indices() {
        match c {
            '(' => {
                if depth == 0 {
                    start = n;
                }
                depth += 1;
            }
            ')' if depth > 0 => {
                depth -= 1;
                let inside = &text[start..=n];
                let words = inside.split(' ').filter(|word| !plain(word).is_empty()).count();
                if depth == 0 && words > MAX_PARENTHESIS {
                    hit(Pattern::Parenthesis, inside);
                }
            }
            _ => {}
        }
    }
}

fn semicolons(text: &str, hit: &mut impl FnMut(Pattern, &str)) {
    for sentence in sentences(text) {
        // Skip lines of shell scripts, which contain variables.
        if sentence.matches("; ").count() >= 2 && !sentence.contains('$') {
            hit(Pattern::Semicolons, sentence);
        }
    }
}

/// The sentences of a paragraph.
fn sentences(text: &str) -> Vec<&str> {
    let (mut found, mut start) = (Vec::new(), 0);
    for (n, _) in text.match_indices(['.', '?', '!']) {
        let rest = text[n + 1..].trim_start_matches([')', '"']);
        let mut next = rest.trim_start().chars();
        let begins = next.next().is_none_or(|c| !c.is_lowercase());
        if rest.starts_with(' ') && begins {
            found.push(&text[start..=n]);
            start = n + 1;
        }
    }
    found.push(&text[start..]);
    found
}

fn doc_comment(
    paragraph: &Paragraph,
    documented: &Documented,
    hit: &mut impl FnMut(Pattern, &str),
) {
    let text = &paragraph.text;
    let first = text.split(' ').next().unwrap_or_default();
    if OPENINGS.contains(&first) {
        hit(Pattern::Opening, text.get(..60).unwrap_or(text));
    }
    let item = identifiers(&documented.item);
    let words: Vec<_> = text.split(' ').map(plain).collect();
    let is_filler = |word: &str| FILLERS.contains(&word) || FILLERS.contains(&&*stem(word));
    let mut own = words.iter().filter(|word| !is_filler(word)).peekable();
    let says_something = text.contains('`') || words.len() > 6 || own.peek().is_none();
    if documented.is_whole && !says_something && own.all(|word| item.contains(&stem(word))) {
        hit(Pattern::Signature, text);
    }
}

/// A word without a final "s", the ending of plural and third person.
fn stem(word: &str) -> String {
    word.strip_suffix('s').unwrap_or(word).to_owned()
}

/// The words of the names in a line of code.
fn identifiers(code: &str) -> HashSet<String> {
    let mut words = HashSet::new();
    let mut word = String::new();
    for c in code.chars().chain([' ']) {
        if !c.is_alphanumeric() || c.is_uppercase() {
            words.insert(stem(&std::mem::take(&mut word)));
        }
        if c.is_alphanumeric() {
            word.extend(c.to_lowercase());
        }
    }
    words
}
