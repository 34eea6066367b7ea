//! The recorded counts, and their comparison with the current ones.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::Context as _;
use comfy_table::{CellAlignment, Table, presets};
use serde::{Deserialize, Serialize};

use super::meter::Counts;

/// Allowed relative growth of a count.
pub const MARGIN: f64 = 0.05;
/// Counts are rounded to hundredths, so smaller differences are ignored.
const RESOLUTION: f64 = 0.011;

const HEAD: &str = "\
# What one repetition of each scenario costs: instructions, system calls, allocations and their
# bytes, and on the simulated fabric SENDs, WRITEs, doorbells and completions of both ends together.
#
# `make test-costs` fails when a count grows by over 5 %. A change that is worth its cost records
# the new counts in the same commit: make costs-record. See benches/README.md, also for what to do
# when the toolchain is another one.

";

/// All recorded counts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The toolchain with which the costs were counted.
    pub toolchain: String,
    /// Counts by scenario.
    pub costs: BTreeMap<String, Counts>,
}

/// Comparison of a count with its record.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// The count is within the margin.
    Same,
    /// The count is less by more than the margin, so it should be recorded.
    Less,
    /// The count is more than allowed.
    More,
    /// The count is not in the record.
    New,
    /// The record has a count that this run lacks.
    Gone,
}

/// One count and its record.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// The name of the scenario.
    pub scenario: String,
    /// The name of the count.
    pub count: String,
    /// Recorded value.
    pub recorded: Option<f64>,
    /// Current value.
    pub now: Option<f64>,
    /// Result of the comparison.
    pub verdict: Verdict,
}

impl Record {
    /// Reads the record.
    ///
    /// # Errors
    /// The file is missing or invalid.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text =
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("{} makes no sense", path.display()))
    }

    /// Writes the record.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let mut rounded = self.clone();
        for counts in rounded.costs.values_mut() {
            for count in counts.values_mut() {
                *count = (*count * 100.0).round() / 100.0;
            }
        }
        let text = format!("{HEAD}{}", toml::to_string(&rounded)?);
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Compares the current counts with this record, for scenarios that `is_selected` accepts.
    pub fn compare(&self, now: &Record, is_selected: impl Fn(&str) -> bool) -> Vec<Line> {
        let scenarios = self.costs.keys().chain(now.costs.keys()).filter(|name| is_selected(name));
        let scenarios: BTreeSet<&String> = scenarios.collect();
        let mut lines = Vec::new();
        for scenario in scenarios {
            let (then, now) = (self.costs.get(scenario), now.costs.get(scenario));
            let names = [then, now].into_iter().flatten().flat_map(|counts| counts.keys());
            let names: BTreeSet<&String> = names.collect();
            for count in names {
                let recorded = then.and_then(|counts| counts.get(count)).copied();
                let now = now.and_then(|counts| counts.get(count)).copied();
                let verdict = verdict(recorded, now);
                lines.push(Line {
                    scenario: scenario.clone(),
                    count: count.clone(),
                    recorded,
                    now,
                    verdict,
                });
            }
        }
        lines
    }
}

fn verdict(recorded: Option<f64>, now: Option<f64>) -> Verdict {
    match (recorded, now) {
        (Some(recorded), Some(now)) if now > recorded * (1.0 + MARGIN) + RESOLUTION => {
            Verdict::More
        }
        (Some(recorded), Some(now)) if now < recorded * (1.0 - MARGIN) - RESOLUTION => {
            Verdict::Less
        }
        (Some(_), Some(_)) => Verdict::Same,
        (None, _) => Verdict::New,
        (_, None) => Verdict::Gone,
    }
}

impl Line {
    /// A description of the violation, if there is one.
    pub fn violation(&self) -> Option<String> {
        let Self { scenario, count, recorded, now, verdict } = self;
        let number = |value: &Option<f64>| value.map_or_else(String::new, format_count);
        match verdict {
            Verdict::Same | Verdict::Less => None,
            Verdict::More => Some(format!(
                "{scenario}: {} {count}, recorded are {}",
                number(now),
                number(recorded)
            )),
            Verdict::New => Some(format!("{scenario}: {count} is not recorded")),
            Verdict::Gone => Some(format!("{scenario}: {count} is recorded, and was not counted")),
        }
    }

    /// The count, and its difference from the record.
    fn with_difference(&self) -> String {
        match (self.recorded, self.now) {
            (_, None) => "-".to_owned(),
            (Some(then), Some(now))
                if then > 0.0 && (now - then).abs() > RESOLUTION.max(then * 0.0005) =>
            {
                format!("{} ({:+.1} %)", format_count(now), (now / then - 1.0) * 100.0)
            }
            (_, Some(now)) => format_count(now),
        }
    }
}

/// Formats a count: without decimals if it is whole or at least 1,000, otherwise with two.
fn format_count(value: f64) -> String {
    if value.fract().abs() < 0.005 || value >= 1000.0 {
        format!("{value:.0}")
    } else {
        format!("{value:.2}")
    }
}

/// Column order of the table. Other counts follow.
const COLUMNS: [&str; 8] = [
    "instructions",
    "system_calls",
    "allocations",
    "allocated_bytes",
    "sends",
    "writes",
    "doorbells",
    "completions",
];

/// A table of all counts, with their differences from the record.
pub fn table(lines: &[Line]) -> Table {
    let others =
        lines.iter().map(|line| line.count.as_str()).filter(|count| !COLUMNS.contains(count));
    let others: BTreeSet<&str> = others.collect();
    let columns: Vec<&str> = COLUMNS.into_iter().chain(others).collect();
    let mut table = Table::new();
    let header =
        std::iter::once("scenario".to_owned()).chain(columns.iter().map(|c| c.replace('_', " ")));
    table.load_preset(presets::ASCII_MARKDOWN).set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for lines in lines.chunk_by(|a, b| a.scenario == b.scenario) {
        let cell = |column: &&str| {
            let line = lines.iter().find(|line| line.count == **column);
            line.map_or_else(String::new, Line::with_difference)
        };
        let name = lines.first().map_or_else(String::new, |line| line.scenario.clone());
        table.add_row(std::iter::once(name).chain(columns.iter().map(cell)));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(costs: &[(&str, &str, f64)]) -> Record {
        let mut record = Record { toolchain: "x".into(), ..Record::default() };
        for (scenario, count, value) in costs {
            record.costs.entry((*scenario).into()).or_default().insert((*count).into(), *value);
        }
        record
    }

    fn violations(then: &Record, now: &Record) -> Vec<String> {
        then.compare(now, |_| true).iter().filter_map(Line::violation).collect()
    }

    #[test]
    fn growth_is_allowed_up_to_the_margin() {
        let then = record(&[
            ("call", "instructions", 1000.0),
            ("call", "sends", 2.0),
            ("call", "writes", 0.0),
        ]);
        let now = record(&[
            ("call", "instructions", 1050.0),
            ("call", "sends", 2.1),
            ("call", "writes", 0.0),
        ]);
        assert_eq!(violations(&then, &now), Vec::<String>::new());
        let now = record(&[
            ("call", "instructions", 1051.0),
            ("call", "sends", 2.2),
            ("call", "writes", 0.1),
        ]);
        assert_eq!(
            violations(&then, &now),
            [
                "call: 1051 instructions, recorded are 1000",
                "call: 2.20 sends, recorded are 2",
                "call: 0.10 writes, recorded are 0",
            ]
        );
    }

    #[test]
    fn what_is_missing_on_either_side_is_told() {
        let then = record(&[("a", "instructions", 10.0)]);
        let now = record(&[("b", "instructions", 10.0)]);
        assert_eq!(
            violations(&then, &now),
            ["a: instructions is recorded, and was not counted", "b: instructions is not recorded"]
        );
        assert!(then.compare(&now, |name| name == "c").is_empty());
    }

    #[test]
    fn less_is_no_complaint_but_told_apart() {
        let then = record(&[("a", "instructions", 1000.0)]);
        let lines = then.compare(&record(&[("a", "instructions", 900.0)]), |_| true);
        assert_eq!(lines[0].verdict, Verdict::Less);
        assert_eq!(lines[0].violation(), None);
        assert!(table(&lines).to_string().contains("-10.0 %"));
    }

    #[test]
    fn a_record_survives_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("costs.toml");
        let record = record(&[
            ("a", "instructions", 1000.0),
            ("a", "sends", 2.004),
            ("b-c", "writes", 0.25),
        ]);
        record.write(&path).unwrap();
        let read = Record::read(&path).unwrap();
        assert_eq!(read.costs["a"]["sends"], 2.0);
        assert_eq!(read.costs["b-c"]["writes"], 0.25);
        std::fs::write(&path, "[costs.a]\ninstructions = \"many\"").unwrap();
        assert!(Record::read(&path).unwrap_err().to_string().contains("makes no sense"));
    }
}
