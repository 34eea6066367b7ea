//! The places in the repository that break the rules.

use std::collections::BTreeMap;

use crate::files::Source;
use crate::modules::Crate;
use crate::{circles, logging, names, size, unsafety, width, wording};

/// The roots of the crates that are searched for circles.
pub const CRATES: &[&str] = &[
    "memory/src/lib.rs",
    "transport/proto/src/lib.rs",
    "transport/fabric/src/lib.rs",
    "transport/tonic/src/lib.rs",
    "transport/rdma-sys/src/lib.rs",
    "rpc-demo/src/main.rs",
    "benches/src/lib.rs",
    "tests/src/lib.rs",
    "tests/sim/src/lib.rs",
    "tests/source-rules/src/lib.rs",
];

/// Files that are not searched for wordings to avoid, because they quote them.
const QUOTING: &[&str] =
    &["tests/source-rules/src/wording.rs", "tests/source-rules/tests/wording.rs"];

/// A file or folder that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Its path below the root.
    pub path: String,
    /// Where and how the rule is broken, as text for people.
    pub what: String,
}

/// The findings of each rule, by path, and how much was checked.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// Files that need each other.
    pub circles: Vec<Finding>,
    /// Files that need each other because one needs the module that it lies in.
    pub parents: Vec<Finding>,
    /// Files with lines of prose that are too long.
    pub wide: Vec<Finding>,
    /// Files with too many lines.
    pub long: Vec<Finding>,
    /// Folders with too many files.
    pub full: Vec<Finding>,
    /// Files that define a type with an ambiguous name: see [`names`].
    pub names: Vec<Finding>,
    /// Files with `unsafe` where there may be none.
    pub unsafe_files: Vec<Finding>,
    /// Wordings to avoid, each with its file.
    pub wordings: Vec<Finding>,
    /// Files that log without the throttle.
    pub unthrottled: Vec<Finding>,
    /// The places that keep clippy from asking for SAFETY comments.
    pub lint_is_off: Vec<String>,
    /// For each of [`CRATES`], the number of its files, and the number of pairs of files of which
    /// one needs the other.
    pub crates: Vec<(usize, usize)>,
    /// Number of type names that were checked.
    pub types: usize,
    /// Number of lines of prose whose width was checked.
    pub prose_lines: usize,
    /// Number of lines with `unsafe` in folders that may have it.
    pub unsafe_lines: usize,
    /// Number of log lines that go through the throttle.
    pub throttled_lines: usize,
}

impl Findings {
    /// Runs all checks on `sources`.
    ///
    /// # Errors
    ///
    /// When a file does not parse, or is missing.
    pub fn of(sources: &[Source]) -> Result<Findings, String> {
        let mut found = Findings::default();
        for root in CRATES {
            let crate_ = Crate::read(sources, root)?;
            let needs = circles::needs(&crate_);
            found.crates.push((crate_.files.len(), needs.values().map(|files| files.len()).sum()));
            found.circles.extend(circles_of(&circles::without_parents(&needs)));
            let is_new = |finding: &Finding| !found.circles.iter().any(|f| f.path == finding.path);
            let parents: Vec<_> = circles_of(&needs).into_iter().filter(is_new).collect();
            found.parents.extend(parents);
        }
        for source in sources {
            let path = source.path.clone();
            found.prose_lines += width::prose_lines(source);
            let long = width::long_lines(source);
            if let Some(first) = long.first() {
                let (n, line, width) = (long.len(), first.line, first.width);
                let what = format!("{path}:{line}: {width} columns wide; {n} such lines in all");
                found.wide.push(Finding { path: path.clone(), what });
            }
            if !QUOTING.contains(&path.as_str()) {
                for wording::Hit { line, pattern, text } in wording::found(source)? {
                    let what = format!("{path}:{line}: {pattern:?}: {text}");
                    found.wordings.push(Finding { path: path.clone(), what });
                }
            }
            if logging::holds(source) {
                let (lines, throttled) = logging::lines(source)?;
                found.throttled_lines += throttled;
                if let Some(first) = lines.first() {
                    let what = format!("{path}:{first}: logs without `throttled!`");
                    found.unthrottled.push(Finding { path: path.clone(), what });
                }
            }
            if source.is_rust() {
                let lines = unsafety::lines(source)?;
                if unsafety::ALLOWED.iter().any(|allowed| path.starts_with(allowed)) {
                    found.unsafe_lines += lines.len();
                } else if let Some(first) = lines.first() {
                    let what = format!("{path}:{first}: unsafe outside of memory and fabric");
                    found.unsafe_files.push(Finding { path, what });
                }
            }
        }
        for (path, lines, most) in size::long_files(sources)? {
            let what = format!("{path}: {lines} lines without tests, at most {most}");
            found.long.push(Finding { path, what });
        }
        for (path, files) in size::full_folders(sources) {
            let what = format!("{path}: {files} files, at most {}", size::MAX_FILES);
            found.full.push(Finding { path, what });
        }
        let types = names::types(sources)?;
        found.types = types.len();
        for (name, files) in names::ambiguous(&types) {
            for path in files {
                let what =
                    format!("{path}: the type `{name}`, one of {} of this name", files.len());
                found.names.push(Finding { path: path.clone(), what });
            }
        }
        found.lint_is_off = unsafety::lint_is_off(sources);
        Ok(found)
    }

    /// The lists of findings. Each comes with the name of its constant in `tests/known/mod.rs`, and
    /// with a heading.
    pub fn lists(&self) -> [(&'static str, &'static str, &[Finding]); 8] {
        [
            ("CIRCLES", "Files that need each other.", &self.circles),
            (
                "PARENTS",
                "Files in a circle that a module's need of its parent closes.",
                &self.parents,
            ),
            ("WIDE", "Files with comments or prose beyond column 100.", &self.wide),
            ("LONG", "Files with too many lines.", &self.long),
            ("FULL", "Folders with too many files.", &self.full),
            ("NAMES", "Files that define types of ambiguous names.", &self.names),
            ("UNSAFE", "Files with `unsafe` outside of memory and fabric.", &self.unsafe_files),
            ("UNTHROTTLED", "Files that log without the throttle.", &self.unthrottled),
        ]
    }

    /// The number of wordings to avoid, by file or folder.
    pub fn wording_counts(&self) -> BTreeMap<String, usize> {
        wording::counts(self.wordings.iter().map(|finding| (finding.path.as_str(), 1)))
    }

    /// The content of a `tests/known/mod.rs` that lists exactly these findings.
    pub fn known(&self) -> String {
        let mut text = String::from(
            "//! The files and folders that still break the rules. These lists only get shorter: print\n\
             //! them again by `cargo run -q -p tonic-rdma-source-rules -- --known` into this file.\n",
        );
        for (name, about, findings) in self.lists() {
            let mut paths: Vec<_> = findings.iter().map(|finding| &finding.path).collect();
            paths.sort();
            paths.dedup();
            text += &format!("\n/// {about}\n");
            if paths.is_empty() {
                text += &format!("pub(crate) const {name}: &[&str] = &[];\n");
                continue;
            }
            // One path on each line merges well, and `rustfmt::skip` keeps it so.
            text += &format!("#[rustfmt::skip]\npub(crate) const {name}: &[&str] = &[\n");
            for path in paths {
                text += &format!("    \"{path}\",\n");
            }
            text += "];\n";
        }
        text
    }
}

fn circles_of(needs: &circles::Needs) -> Vec<Finding> {
    let described = circles::describe(needs);
    let mut found = Vec::new();
    for path in circles::groups(needs).into_iter().flatten() {
        let through = |circle: &&String| circle.starts_with(&format!("{path}\n"));
        let what = described.iter().find(through).cloned();
        let what = what.unwrap_or_else(|| format!("{path}: as above"));
        found.push(Finding { path, what });
    }
    found
}
