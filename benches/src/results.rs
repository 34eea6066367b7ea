//! Recorded runs, and the documents that are generated from them: RESULTS.md, and the headline
//! numbers in README.md.
//!
//! A recorded run is the JSON that `compare` writes, kept in `benches/results`. Figures that a run
//! did not measure are null in the JSON, and are left out of the tables.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::machine::Machine;

/// Maximum width of generated text in columns.
const WIDTH: usize = 100;
/// Start marker of the headline numbers in README.md.
const BEGIN: &str = "<!-- Generated from results/ by the program results: begin -->";
/// End marker of the generated text.
const END: &str = "<!-- Generated: end -->";

/// The origin of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The heading of the run.
    pub title: String,
    /// The measured commit; `unknown` outside of a repository.
    pub commit: String,
    /// The date of that commit.
    pub date: String,
    /// The command line.
    pub command: String,
}

impl Origin {
    /// Describes this process and the repository in the current directory.
    pub fn here(title: &str) -> Self {
        let git = |args: &[&str]| {
            let out = Command::new("git").args(args).output().ok()?;
            let text = String::from_utf8(out.stdout).ok()?.trim().to_owned();
            (out.status.success() && !text.is_empty()).then_some(text)
        };
        let unknown = || "unknown".to_owned();
        let mut args = std::env::args();
        let program = args.next().unwrap_or_default();
        let program = Path::new(&program).file_name().unwrap_or_default().to_string_lossy();
        Self {
            title: title.to_owned(),
            commit: git(&["describe", "--always", "--dirty", "--exclude=*"])
                .unwrap_or_else(unknown),
            date: git(&["log", "-1", "--format=%cs"]).unwrap_or_else(unknown),
            command: [program.into_owned()]
                .into_iter()
                .chain(args.map(|arg| quoted(&arg)))
                .collect::<Vec<_>>()
                .join(" "),
        }
    }
}

/// Quotes an argument for a shell if it contains whitespace.
fn quoted(arg: &str) -> String {
    match arg.contains(char::is_whitespace) {
        true => format!("'{arg}'"),
        false => arg.to_owned(),
    }
}

/// A recorded run.
#[derive(Clone, Debug, Deserialize)]
pub struct Recorded {
    /// The name of its file, without `.json`.
    #[serde(skip)]
    pub name: String,
    /// The origin of the results.
    #[serde(flatten)]
    pub origin: Origin,
    /// The machine on which the results were measured.
    pub machine: Machine,
    /// Notes on the procedure.
    pub notes: Vec<String>,
    /// One entry per row and contender.
    pub results: Vec<Figures>,
}

/// The median figures of one contender in one row.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Figures {
    row: String,
    unit: String,
    contender: String,
    allocator: Option<String>,
    median: Option<f64>,
    ratio: Option<f64>,
    cpu_us_per_call: Option<f64>,
    cpu_s_per_gb: Option<f64>,
    switches_per_call: Option<f64>,
    page_faults_per_call: Option<f64>,
    system_calls_per_call: Option<f64>,
    copies: Option<f64>,
    failure: Option<String>,
}

/// Selects a figure of [`Figures`].
type Figure = fn(&Figures) -> Option<f64>;

/// The columns of costs, for both processes together: the name of a column, and its figure.
const COSTS: [(&str, Figure); 6] = [
    ("CPU us/call", |f| f.cpu_us_per_call),
    ("CPU s/GB", |f| f.cpu_s_per_gb),
    ("switches/call", |f| f.switches_per_call),
    ("page faults/call", |f| f.page_faults_per_call),
    ("system calls/call", |f| f.system_calls_per_call),
    ("copies of each byte", |f| f.copies),
];

impl Figures {
    /// The contender, with its allocator if it does not use the C library's.
    fn variant(&self) -> String {
        match self.allocator.as_deref() {
            None | Some("glibc") => self.contender.clone(),
            Some(allocator) => format!("{}+{allocator}", self.contender),
        }
    }

    fn figure(&self) -> String {
        match (&self.failure, self.median, self.ratio) {
            (Some(_), ..) => "failed".to_owned(),
            (None, Some(median), Some(ratio)) => format!("{} ({})", digits(median), digits(ratio)),
            (None, Some(median), None) => digits(median),
            (None, None, _) => String::new(),
        }
    }
}

/// One of the headline numbers in README.md.
struct Headline {
    what: &'static str,
    run: &'static str,
    row: &'static str,
    contender: &'static str,
    figure: Figure,
}

const fn median(
    what: &'static str,
    run: &'static str,
    row: &'static str,
    contender: &'static str,
) -> Headline {
    Headline { what, run, row, contender, figure: |f| f.median }
}

const HEADLINES: [Headline; 10] = [
    median("64 B, one at a time: us", "01-shared-memory", "latency-64", "shm"),
    median("64 B, 64 in flight: thousand calls/s", "01-shared-memory", "rate-64-x64", "shm"),
    median("1 MiB requests, 8 in flight: MB/s", "01-shared-memory", "up-1MiB-x8", "shm"),
    median("the same with tonic's codec", "01-shared-memory", "up-1MiB-x8", "shm-plain"),
    median("16 MiB requests, 8 in flight: MB/s", "01-shared-memory", "up-16MiB-x8", "shm"),
    median("64 B beside a transfer of 64 MiB: us", "01-shared-memory", "beside-64MiB", "shm"),
    Headline {
        what: "1 MiB requests, 8 in flight: CPU s/GB, both ends",
        run: "03-shared-memory-costs",
        row: "up-1MiB-x8",
        contender: "shm",
        figure: |f| f.cpu_s_per_gb,
    },
    median("Soft-RoCE in the guest, 64 B: us", "06-soft-roce-short", "latency-64", "verbs"),
    median(
        "Soft-RoCE in the guest, 1 MiB, 8 in flight: MB/s",
        "06-soft-roce-short",
        "up-1MiB-x8",
        "verbs",
    ),
    median(
        "Soft-iWARP in the guest, 1 MiB, 8 in flight: MB/s",
        "09-soft-iwarp-short",
        "up-1MiB-x8",
        "verbs",
    ),
];

/// Reads the runs in `folder`, ordered by file name.
///
/// # Errors
/// A file cannot be read or parsed.
pub fn load(folder: &Path) -> anyhow::Result<Vec<Recorded>> {
    let named = |(name, run): (String, Recorded)| Recorded { name, ..run };
    Ok(read(folder)?.into_iter().map(named).collect())
}

/// Parses the JSON files in `folder`. Returns file names without `.json` and contents, ordered by
/// name.
///
/// # Errors
/// A file cannot be read or parsed.
pub fn read<T: DeserializeOwned>(folder: &Path) -> anyhow::Result<Vec<(String, T)>> {
    let cannot_read = || format!("cannot read {}", folder.display());
    let mut runs = Vec::new();
    for entry in fs::read_dir(folder).with_context(cannot_read)? {
        let path = entry.with_context(cannot_read)?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let run = serde_json::from_str(&text)
            .with_context(|| format!("{} holds no run", path.display()))?;
        runs.push((path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), run));
    }
    runs.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(runs)
}

/// Generates RESULTS.md.
pub fn document(runs: &[Recorded]) -> String {
    let mut out = String::from("# Results\n\n");
    out += &wrapped(
        "",
        "Generated from the JSON files in `results/` by `cargo run -p benches --bin results`; \
         edit those, not this. Compare figures within a run only. The figure in parentheses is \
         the median of the ratios to the first contender in the same round. \
         [README.md](README.md) explains contenders, rows and units, and how to record a run.",
    );
    for run in runs {
        out += &format!(
            "\n## {}\n\n{}",
            run.origin.title,
            provenance(&run.origin, &run.machine, &run.notes)
        );
        for table in [figures(run), costs(run)] {
            if !table.is_empty() {
                out += &format!("\n{table}");
            }
        }
    }
    out
}

/// The origin of a run: command, commit, machine, notes.
pub(crate) fn provenance(origin: &Origin, machine: &Machine, notes: &[String]) -> String {
    let mut out = format!("```sh\n{}\n```\n\n", origin.command);
    out += &wrapped("- ", &format!("Commit {} of {}.", origin.commit, origin.date));
    out += &wrapped("- ", &format!("Machine: {machine}."));
    for note in notes.iter().filter(|note| **note != machine.to_string()) {
        out += &wrapped("- ", &sentence(note));
    }
    out
}

/// The figures: a table of rows by contenders. Empty if there are no figures.
fn figures(run: &Recorded) -> String {
    let measured = || run.results.iter().filter(|f| f.median.is_some() || f.failure.is_some());
    let variants = unique(measured().map(Figures::variant));
    if variants.is_empty() {
        return String::new();
    }
    let mut lines =
        vec![["row", "unit"].into_iter().map(str::to_owned).chain(variants.clone()).collect()];
    for row in unique(measured().map(|f| f.row.clone())) {
        let cells: Vec<&Figures> = measured().filter(|f| f.row == row).collect();
        let figure = |e: &String| {
            cells.iter().find(|f| f.variant() == *e).map_or_else(String::new, |f| f.figure())
        };
        let unit = cells.first().map_or_else(String::new, |f| f.unit.clone());
        lines.push(
            [format!("`{row}`"), unit].into_iter().chain(variants.iter().map(figure)).collect(),
        );
    }
    table(&lines, 2)
}

/// The costs per call. Empty if nothing was counted.
fn costs(run: &Recorded) -> String {
    let some = |figure: &Figure| run.results.iter().any(|f| figure(f).is_some());
    let columns: Vec<_> = COSTS.iter().filter(|(_, figure)| some(figure)).collect();
    if columns.is_empty() {
        return String::new();
    }
    let header = ["row", "contender"].into_iter().chain(columns.iter().map(|(name, _)| *name));
    let mut lines = vec![header.map(str::to_owned).collect()];
    for f in run.results.iter().filter(|f| columns.iter().any(|(_, figure)| figure(f).is_some())) {
        let figures = columns.iter().map(|(_, figure)| figure(f).map_or_else(String::new, digits));
        lines.push([format!("`{}`", f.row), f.variant()].into_iter().chain(figures).collect());
    }
    table(&lines, 2)
}

/// Replaces the headline numbers in the text of README.md by the numbers of `runs`.
///
/// # Errors
/// The markers are missing, or a run lacks a headline number.
pub fn readme(text: &str, runs: &[Recorded]) -> anyhow::Result<String> {
    between(text, BEGIN, &headlines(runs)?).context("README.md and the headline numbers")
}

/// Replaces the text between the markers `begin` and [`END`] by `generated`.
///
/// # Errors
/// A marker is missing.
pub(crate) fn between(text: &str, begin: &str, generated: &str) -> anyhow::Result<String> {
    let place = || format!("there is no place between {begin} and {END}");
    let (before, rest) = text.split_once(begin).with_context(place)?;
    let (_, after) = rest.split_once(END).with_context(place)?;
    Ok(format!("{before}{begin}\n\n{generated}\n{END}{after}"))
}

fn headlines(runs: &[Recorded]) -> anyhow::Result<String> {
    let header = ["", "tonic over TCP", "tonic-rdma", "factor", "run"];
    let mut lines = vec![header.map(str::to_owned).to_vec()];
    for Headline { what, run: name, row, contender, figure } in &HEADLINES {
        let run =
            runs.iter().find(|run| run.name == *name).with_context(|| format!("no run {name}"))?;
        let of = |wanted: &str| {
            let cell = run.results.iter().find(|f| f.row == *row && f.variant() == wanted);
            let reported = cell.and_then(|cell| Some((cell, figure(cell)?)));
            reported.with_context(|| format!("{name} has no {row} of {wanted}"))
        };
        let ((_, tonic), (cell, ours)) = (of("tonic-tcp")?, of(contender)?);
        ensure!(tonic > 0.0, "{name}: {row} of tonic-tcp is {tonic}");
        // The ratio of the medians differs from the median of the ratios, which the run contains.
        let reported = cell.ratio.filter(|_| figure(cell) == cell.median);
        let factor = reported.unwrap_or(ours / tonic);
        let link = format!("[{name}](RESULTS.md#{})", anchor(&run.origin.title));
        lines.push(vec![(*what).to_owned(), digits(tonic), digits(ours), digits(factor), link]);
    }
    Ok(table(&lines, 1))
}

/// A Markdown table. The columns from `left` on are right-aligned.
pub(crate) fn table(lines: &[Vec<String>], left: usize) -> String {
    let mut out = String::new();
    for (index, line) in lines.iter().enumerate() {
        let _ = writeln!(out, "| {} |", line.join(" | "));
        if index == 0 {
            let rule = |column| if column < left { "---" } else { "--:" };
            let _ = writeln!(out, "|{}|", (0..line.len()).map(rule).collect::<Vec<_>>().join("|"));
        }
    }
    out
}

/// Formats a number with three significant digits and with all digits before the decimal point, but
/// without trailing zeros after it.
pub(crate) fn digits(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return format!("{value}");
    }
    let decimals = (2 - value.abs().log10().floor() as i32).max(0) as usize;
    let text = format!("{value:.decimals$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

fn unique(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut out = Vec::new();
    for name in names {
        if !out.contains(&name) {
            out.push(name);
        }
    }
    out
}

/// Capitalizes the text and adds a full stop.
pub(crate) fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|c| c.to_uppercase().to_string()).unwrap_or_default();
    let stop = if text.ends_with('.') { "" } else { "." };
    format!("{first}{}{stop}", letters.as_str())
}

/// The anchor that GitHub generates for a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

/// A paragraph wrapped at [`WIDTH`] columns. The first line begins with `bullet`. The other lines
/// are indented by the length of `bullet`.
pub(crate) fn wrapped(bullet: &str, text: &str) -> String {
    let mut out = bullet.to_owned();
    let mut column = bullet.len();
    for (index, word) in text.split_whitespace().enumerate() {
        let length = word.chars().count();
        if index > 0 && column + 1 + length > WIDTH {
            let _ = write!(out, "\n{}", " ".repeat(bullet.len()));
            column = bullet.len();
        } else if index > 0 {
            out.push(' ');
            column += 1;
        }
        out += word;
        column += length;
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &str = r#"{
        "title": "A run, of one row", "commit": "abc1234", "date": "2026-11-22",
        "command": "compare --rows short",
        "machine": {"processor": "P", "processors": 2, "kernel": "Linux 6", "c_library": "glibc 2",
                    "allocators": ["a"], "environment": []},
        "notes": ["3 rounds"],
        "results": [
            {"row": "latency-64", "unit": "us", "contender": "tonic-tcp", "allocator": "glibc",
             "median": 110.84, "rounds": [1.0], "p50_p99_p999_us": null, "cpu_us_per_call": 32.5},
            {"row": "latency-64", "unit": "us", "contender": "shm", "allocator": "mimalloc",
             "median": 7.4, "ratio": 0.0668},
            {"row": "latency-64", "unit": "us", "contender": "ruapc", "allocator": "glibc",
             "median": null, "failure": "no device"}
        ]
    }"#;

    #[test]
    fn a_run_becomes_tables_with_where_it_comes_from() {
        let run: Recorded = serde_json::from_str(RUN).unwrap();
        let text = document(&[run]);
        let lines = [
            "## A run, of one row",
            "compare --rows short",
            "- Commit abc1234 of 2026-11-22.",
            "- Machine: P, 2 processors, Linux 6, glibc 2, allocator: a.",
            "- 3 rounds.",
            "| row | unit | tonic-tcp | shm+mimalloc | ruapc |",
            "|---|---|--:|--:|--:|",
            "| `latency-64` | us | 111 | 7.4 (0.0668) | failed |",
            "| row | contender | CPU us/call |",
            "| `latency-64` | tonic-tcp | 32.5 |",
        ];
        for line in lines {
            assert!(text.lines().any(|l| l == line), "{line:?} is not in:\n{text}");
        }
        assert!(text.lines().all(|l| l.starts_with('|') || l.chars().count() <= WIDTH), "{text}");
    }

    #[test]
    fn headlines_need_their_runs_and_their_place() {
        assert!(between("", BEGIN, "").unwrap_err().to_string().contains("no place"));
        assert_eq!(between("a<b>END", "<b>", "").map_err(|_| ()), Err(()));
        let text = format!("a\n{BEGIN}\nold\n{END}\nb");
        let new = between(&text, BEGIN, "new\n").unwrap();
        assert_eq!(new, format!("a\n{BEGIN}\n\nnew\n\n{END}\nb"));
        let error = readme(&format!("{BEGIN}{END}"), &[]).unwrap_err();
        assert_eq!(error.to_string(), "no run 01-shared-memory");
    }

    #[test]
    fn three_digits_are_told() {
        let reported = [0.002, 0.0668, 9.0, 14.44, 110.84, 1363.4, 0.0].map(digits);
        assert_eq!(reported, ["0.002", "0.0668", "9", "14.4", "111", "1363", "0"]);
    }
}
