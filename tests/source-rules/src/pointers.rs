//! Documents point only at what exists: paths, headings, modules, and targets of the Makefile.
//!
//! | in a document | has to be |
//! |---|---|
//! | a link without a scheme | a file or folder, from the document's folder on; its anchor a heading |
//! | a path in a code span | a file or folder: below the root, or at the end of a path |
//! | `a::b::c` in a code span | a module of ours, or an item that its source has |
//! | `make NAME` in a code span or block | a rule of the Makefile |
//!
//! The documents in [`HISTORY`] describe earlier states of the source, and are left out.

use std::collections::BTreeSet;

use crate::files::Source;
use crate::workflows;

/// Documents that describe earlier states of the source.
pub const HISTORY: &[&str] = &["CHANGELOG.md", "docs/performance-log.md", "benches/RESULTS.md"];

/// Names of our crates in paths, and the folders of their source.
const CRATES: &[(&str, &str)] = &[
    ("memory", "memory/src"),
    ("tonic_rdma_memory", "memory/src"),
    ("proto", "transport/proto/src"),
    ("tonic_rdma_proto", "transport/proto/src"),
    ("codec", "transport/codec/src"),
    ("tonic_rdma_codec", "transport/codec/src"),
    ("fabric", "transport/fabric/src"),
    ("tonic_rdma_fabric", "transport/fabric/src"),
    ("rdma_sys", "transport/rdma-sys/src"),
    ("tonic_rdma_doctor", "transport/doctor/src"),
    ("tonic_rdma_build", "transport/build/src"),
    ("tonic_rdma", "transport/tonic/src"),
];
/// First parts of paths into other crates, in addition to the dependencies in the manifests.
const FOREIGN: &[&str] = &["std", "core", "alloc", "str", "rustls"];
/// Endings that make a code span with a slash a path, whatever the span begins with.
const ENDINGS: &[&str] = &["rs", "md", "toml", "proto", "py", "sh", "yml", "txt", "svg", "json"];

/// A pointer that leads nowhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// Number of the line, from 1.
    pub line: usize,
    /// The pointer.
    pub what: String,
}

/// Everything that a document may point at.
#[derive(Debug)]
pub struct Tree<'a> {
    sources: &'a [Source],
    paths: BTreeSet<&'a str>,
    targets: BTreeSet<&'a str>,
    foreign: BTreeSet<String>,
    /// Says whether a file exists that is not among `sources`, for example an image.
    is_file: fn(&str) -> bool,
}

impl<'a> Tree<'a> {
    /// Collects the paths, make targets and dependencies in `sources`. `is_file` says whether any
    /// other file exists.
    pub fn of(sources: &'a [Source], is_file: fn(&str) -> bool) -> Tree<'a> {
        let mut paths = BTreeSet::new();
        let mut foreign: BTreeSet<String> = FOREIGN.iter().map(|name| name.to_string()).collect();
        let mut targets = BTreeSet::new();
        for source in sources {
            let mut path = source.path.as_str();
            paths.insert(path);
            while let Some((folder, _)) = path.rsplit_once('/') {
                paths.insert(folder);
                path = folder;
            }
            if path.ends_with("Makefile") {
                targets = workflows::targets(&source.text);
            }
            if source.path.ends_with("Cargo.toml") {
                foreign.extend(dependencies(&source.text));
            }
        }
        for (name, _) in CRATES {
            foreign.remove(*name);
        }
        Tree { sources, paths, targets, foreign, is_file }
    }

    /// Returns the pointers of a document that lead nowhere, and the number of all its pointers.
    pub fn wrong(&self, document: &Source) -> (Vec<Wrong>, usize) {
        let (prose, code) = split(&document.text);
        let (mut found, mut pointers) = (Vec::new(), 0);
        let mut look = |line: usize, what: String, leads: Option<bool>| {
            pointers += usize::from(leads.is_some());
            if leads == Some(false) {
                found.push(Wrong { line, what });
            }
        };
        let line_at = |at: usize| prose.get(..at).unwrap_or_default().lines().count().max(1);
        let mut blanked = prose.clone().into_bytes();
        for (start, end) in spans(&prose) {
            let span = prose.get(start..end).unwrap_or_default().trim_matches('`');
            let span = span.split_whitespace().collect::<Vec<_>>().join(" ");
            let leads = self.span(&document.path, &span);
            look(line_at(start + 1), span, leads);
            blanked.get_mut(start..end).into_iter().flatten().for_each(|byte| *byte = b'x');
        }
        for (at, link) in links(&String::from_utf8_lossy(&blanked)) {
            let leads = (!link.contains(':')).then(|| self.link(document, &link));
            look(line_at(at + 1), link, leads);
        }
        for (line, text) in code {
            let text = text.trim_start().trim_start_matches("$ ");
            let leads = text.strip_prefix("make ").map(|words| self.make(words));
            look(line, text.to_owned(), leads);
        }
        found.sort_by_key(|wrong| wrong.line);
        (found, pointers)
    }

    /// Whether a code span leads somewhere. `None` if it is not a pointer.
    fn span(&self, document: &str, span: &str) -> Option<bool> {
        if let Some(words) = span.strip_prefix("make ") {
            return Some(self.make(words));
        }
        if self.is_path(span) {
            let path = span.trim_end_matches('/');
            let below = joined(document, path);
            // NAME is a placeholder.
            return Some(path.contains("NAME") || self.has(&below) || self.ends_some_path(path));
        }
        let path =
            span.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':').next()?;
        let segments: Vec<_> = path.split("::").filter(|segment| !segment.is_empty()).collect();
        match segments.first() {
            Some(first) if segments.len() > 1 && is_module(first) => self.module(&segments),
            _ => None,
        }
    }

    fn link(&self, document: &Source, link: &str) -> bool {
        let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
        let path = match path {
            "" => document.path.clone(),
            path => joined(&document.path, path),
        };
        let headed = |source: &&Source| source.path == path && path.ends_with(".md");
        match self.sources.iter().find(headed) {
            Some(target) if !anchor.is_empty() => headings(&target.text).contains(anchor),
            _ => self.has(&path),
        }
    }

    /// Whether all targets at the start of `words` have rules.
    fn make(&self, words: &str) -> bool {
        let is_name = |word: &&str| word.bytes().all(|b| b.is_ascii_lowercase() || b == b'-');
        words.split_whitespace().take_while(is_name).all(|target| self.targets.contains(target))
    }

    fn has(&self, path: &str) -> bool {
        path.is_empty() || self.paths.contains(path) || (self.is_file)(path)
    }

    fn ends_some_path(&self, path: &str) -> bool {
        let end = format!("/{path}");
        self.has(path) || self.paths.iter().any(|known| known.ends_with(&end))
    }

    fn is_path(&self, span: &str) -> bool {
        let is_part = |part: &str| {
            let known = |b: u8| b.is_ascii_alphanumeric() || b"_.-".contains(&b);
            !part.is_empty() && part.bytes().all(known)
        };
        let parts: Vec<_> = span.trim_end_matches('/').split('/').collect();
        if !parts.iter().all(|part| is_part(part)) {
            return false;
        }
        let ending = parts.last().and_then(|name| name.rsplit_once('.')).map(|(_, ending)| ending);
        match ending {
            Some("rs" | "md") => true,
            Some(ending) if ENDINGS.contains(&ending) && span.contains('/') => true,
            _ => {
                span.contains('/') && parts.first().is_some_and(|first| self.paths.contains(first))
            }
        }
    }

    /// Whether these segments name a module or an item of ours. `None` if they name one of another
    /// crate.
    fn module(&self, segments: &[&str]) -> Option<bool> {
        let (first, mut rest) = segments.split_first()?;
        // The modules that the segments so far may name, as paths without `.rs` or `/mod.rs`.
        let mut places: Vec<String> = match CRATES.iter().find(|(name, _)| name == first) {
            Some((_, source)) => vec![(*source).to_owned()],
            None if self.foreign.contains(*first) => return None,
            None => self.modules_named(&format!("/{first}")),
        };
        while let Some((next, after)) = rest.split_first() {
            let below: Vec<_> = places
                .iter()
                .map(|place| format!("{place}/{next}"))
                .filter(|place| self.is_source(place))
                .collect();
            if below.is_empty() {
                let item = after.first().filter(|_| !is_module(next)).into_iter().chain([next]);
                return Some(item.copied().all(|word| self.declares(&places, word)));
            }
            (places, rest) = (below, after);
        }
        Some(!places.is_empty())
    }

    fn modules_named(&self, end: &str) -> Vec<String> {
        let module = |path: &&str| {
            let path = path.strip_suffix(".rs")?;
            let path = path.strip_suffix("/mod").unwrap_or(path);
            path.ends_with(end).then(|| path.to_owned())
        };
        self.paths.iter().filter_map(module).collect()
    }

    fn is_source(&self, module: &str) -> bool {
        ["rs", "/mod.rs"].iter().any(|end| {
            let dot = if end.starts_with('/') { "" } else { "." };
            self.paths.contains(format!("{module}{dot}{end}").as_str())
        })
    }

    /// Whether a source of these modules has the word. A lower-case word must be the name of a
    /// function, module, macro or public field there.
    fn declares(&self, places: &[String], word: &str) -> bool {
        let of_place = |path: &str, place: &String| {
            let rest = path.strip_prefix(place.as_str());
            rest.is_some_and(|rest| rest.starts_with('/') || rest == ".rs")
        };
        let declared = |text: &str| match is_module(word) {
            true => {
                ["fn ", "mod ", "macro_rules! "]
                    .iter()
                    .any(|kind| has_word(text, &format!("{kind}{word}")))
                    || has_word(text, &format!("pub {word}:"))
            }
            false => has_word(text, word),
        };
        self.sources
            .iter()
            .filter(|source| source.is_rust())
            .filter(|source| places.iter().any(|place| of_place(&source.path, place)))
            .any(|source| declared(&source.text))
    }
}

fn is_module(segment: &str) -> bool {
    !segment.is_empty()
        && segment.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

/// Whether `text` has `word` as a whole word.
fn has_word(text: &str, word: &str) -> bool {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    text.match_indices(word).any(|(at, _)| {
        let (before, behind) = (text.get(..at), text.get(at + word.len()..));
        !part(before.and_then(|text| text.chars().last()))
            && !part(behind.and_then(|text| text.chars().next()))
    })
}

/// The dependencies of a manifest, by the names that they have in source.
fn dependencies(manifest: &str) -> Vec<String> {
    let (mut names, mut listed) = (Vec::new(), false);
    for line in manifest.lines() {
        if line.starts_with('[') {
            listed = line.contains("dependencies");
        } else if listed && let Some(end) = line.find(['.', '=', ' ']) {
            names.push(line.get(..end).unwrap_or_default().replace('-', "_"));
        }
    }
    names
}

/// Resolves `path` relative to the folder of `document`.
fn joined(document: &str, path: &str) -> String {
    let mut parts: Vec<_> = document.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Returns the text with its fenced code blocks blanked, and the lines of all code blocks with
/// their numbers.
fn split(text: &str) -> (String, Vec<(usize, &str)>) {
    let (mut prose, mut code) = (String::new(), Vec::new());
    let mut fence: Option<&str> = None;
    for (line, number) in text.lines().zip(1..) {
        let mark = ["```", "~~~"].into_iter().find(|mark| line.trim_start().starts_with(mark));
        match (fence, mark) {
            (None, Some(_)) => fence = mark,
            (Some(open), mark) => {
                code.push((number, line));
                if mark == Some(open) {
                    fence = None;
                }
            }
            (None, None) => {
                prose.push_str(line);
                if line.starts_with("    ") {
                    code.push((number, line));
                }
            }
        }
        prose.push('\n');
    }
    (prose, code)
}

/// Where code spans begin and end, including their backticks. A span does not extend over a blank
/// line.
fn spans(prose: &str) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (at, _) in prose.match_indices('`') {
        match runs.last_mut() {
            Some((_, end)) if *end == at => *end += 1,
            _ => runs.push((at, at + 1)),
        }
    }
    let (mut found, mut from) = (Vec::new(), 0);
    while let Some(&(start, open)) = runs.get(from) {
        let closes = |&(at, end): &(usize, usize)| {
            end - at == open - start && !prose.get(open..at).unwrap_or_default().contains("\n\n")
        };
        if let Some(ahead) = runs.iter().skip(from + 1).position(closes) {
            from += ahead + 1;
            found.extend(runs.get(from).map(|&(_, end)| (start, end)));
        }
        from += 1;
    }
    found
}

/// The targets of links and of reference definitions, each with the offset at which it begins.
fn links(prose: &str) -> Vec<(usize, String)> {
    let inline = prose.match_indices("](").map(|(at, mark)| at + mark.len());
    let definitions = prose.match_indices("]: ").filter_map(|(at, mark)| {
        let line = prose.get(..at)?.rsplit('\n').next()?;
        line.starts_with('[').then_some(at + mark.len())
    });
    let target = |at: usize| {
        let rest = prose.get(at..).unwrap_or_default();
        let end = rest.find(|c: char| c == ')' || c.is_whitespace()).unwrap_or(rest.len());
        (at, rest.get(..end).unwrap_or_default().to_owned())
    };
    inline.chain(definitions).map(target).collect()
}

/// The anchors of a document's headings, as the hosting site makes them.
fn headings(text: &str) -> BTreeSet<String> {
    let (prose, _) = split(text);
    let mut found = BTreeSet::new();
    for line in prose.lines().filter(|line| line.starts_with('#')) {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let letter = |c: char| match c {
            ' ' => Some('-'),
            c => (c.is_alphanumeric() || c == '-' || c == '_').then_some(c),
        };
        let anchor: String = title.chars().filter_map(letter).collect();
        let again = (1..).map(|n| format!("{anchor}-{n}")).find(|other| !found.contains(other));
        found.insert(match found.contains(&anchor) {
            true => again.unwrap_or_default(),
            false => anchor,
        });
    }
    found
}
