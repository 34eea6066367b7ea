//! Medians, ratios, tables, JSON, and bounds to check.

use std::str::FromStr;

use anyhow::{Context as _, ensure};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::allocator::Variant;
use crate::contender::Contender;
use crate::machine::Machine;
use crate::results::Origin;
use crate::sample::{Counted, Sample};
use crate::work::Row;

/// The median of `values`: the mean of the two middle values for an even count, NaN for no values.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

/// The results of all rounds of one contender for one row.
#[derive(Clone, Debug)]
pub struct Cell {
    /// The variant of the contender.
    pub variant: Variant,
    /// One sample per round.
    pub samples: Vec<Sample>,
    /// The counts, from separate rounds.
    pub counted: Counted,
    /// Whether the contender does not support the row.
    pub absent: bool,
    /// The first error, after which the contender runs no further rounds of this row.
    pub failure: Option<String>,
}

impl Cell {
    /// A cell without rounds.
    pub fn new(variant: Variant) -> Self {
        Self {
            variant,
            samples: Vec::new(),
            counted: Counted::default(),
            absent: false,
            failure: None,
        }
    }

    /// Whether there are figures and no failure.
    pub fn finished(&self) -> bool {
        self.failure.is_none() && !self.samples.is_empty()
    }

    fn of(&self, f: impl Fn(&Sample) -> f64) -> f64 {
        median(self.samples.iter().map(f))
    }

    /// The median figure.
    pub fn figure(&self) -> f64 {
        self.of(|s| s.round.figure)
    }

    /// Half of the interquartile range, relative to the median.
    fn spread(&self) -> f64 {
        let mut figures: Vec<f64> = self.samples.iter().map(|s| s.round.figure).collect();
        figures.sort_unstable_by(f64::total_cmp);
        let at = |share: f64| {
            figures.get((figures.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN)
        };
        (at(0.75) - at(0.25)) / 2.0 / self.figure()
    }

    /// The median over the rounds of the 50th, 99th or 99.9th percentile, by index, if available.
    pub fn percentile(&self, index: usize) -> Option<f64> {
        self.samples.first()?.round.percentiles?;
        Some(self.of(|s| s.round.percentiles.map_or(f64::NAN, |p| p[index])))
    }

    /// The median of [`Round::offered`](crate::measure::Round::offered), if the row has this
    /// figure.
    fn offered(&self) -> Option<f64> {
        self.samples.first()?.round.offered?;
        Some(self.of(|s| s.round.offered.unwrap_or(f64::NAN)))
    }

    fn per_call(&self, usage: impl Fn(&Sample) -> u64) -> f64 {
        self.of(|s| usage(s) as f64 / s.round.calls.max(1) as f64)
    }

    /// Processor time of both processes in seconds per gigabyte of payload, for rows with large
    /// payloads.
    pub fn cpu_per_gb(&self) -> Option<f64> {
        let bytes = |s: &Sample| s.round.bytes.max(1) as f64;
        let rate = self.of(|s| (s.client.cpu_ns + s.server.cpu_ns) as f64 / bytes(s));
        // Nanoseconds per byte equal seconds per gigabyte. Small calls carry almost no payload, so
        // this figure would mean nothing for them.
        let small = self.samples.first()?.round.bytes < 1024 * self.samples.first()?.round.calls;
        (!small).then_some(rate)
    }

    /// Page faults of both processes per call.
    pub fn page_faults(&self) -> f64 {
        self.per_call(|s| s.client.faults + s.server.faults)
    }

    fn instructions(&self) -> Option<f64> {
        self.samples.first()?.instructions?;
        Some(self.per_call(|s| s.instructions.unwrap_or_default()))
    }
}

/// The results of all contenders for one row.
#[derive(Clone, Debug)]
pub struct RowResult {
    /// The row that was measured.
    pub row: Row,
    /// The results of the variants, in the order of [`Variant::all`].
    pub cells: Vec<Cell>,
}

impl RowResult {
    fn cell(&self, variant: Variant) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.variant == variant)
    }

    /// The median of the ratios of `a`'s figure to `b`'s in the same round, because a slow phase of
    /// the machine affects both in the same way. Returns `None` if a variant has failed or has no
    /// rounds.
    pub fn ratio(&self, a: Variant, b: Variant) -> Option<f64> {
        let (a, b) = (self.cell(a)?, self.cell(b)?);
        if a.failure.is_some()
            || b.failure.is_some()
            || a.samples.is_empty()
            || b.samples.is_empty()
        {
            return None;
        }
        Some(median(a.samples.iter().zip(&b.samples).map(|(a, b)| a.round.figure / b.round.figure)))
    }
}

/// Creates an empty Markdown table with these column titles.
pub fn markdown(header: &[String]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Returns a table of the figures: the median of each variant, and the median of its ratios to the
/// first contender with the same allocator in the same round.
pub fn figures(results: &[RowResult]) -> Table {
    let mut header = vec!["row".to_owned(), "unit".to_owned()];
    let cells = results.first().map_or(&[][..], |r| &r.cells);
    let variants: Vec<Variant> = cells.iter().map(|cell| cell.variant).collect();
    header.extend(variants.iter().map(Variant::to_string));
    let mut table = markdown(&header);
    for result in results {
        let mut line = vec![result.row.name(), result.row.unit().to_owned()];
        for (index, cell) in result.cells.iter().enumerate() {
            let baseline = cell.variant.baseline(&variants);
            line.push(match &cell.failure {
                Some(_) => "failed".to_owned(),
                None if cell.absent || cell.samples.is_empty() => "-".to_owned(),
                None if baseline == index => {
                    format!("{:.1} ±{:.0}%", cell.figure(), cell.spread() * 100.0)
                }
                None => {
                    let ratio = result.ratio(cell.variant, variants[baseline]).unwrap_or(f64::NAN);
                    format!("{:.1} ±{:.0}% ({ratio:.2}x)", cell.figure(), cell.spread() * 100.0)
                }
            });
        }
        table.add_row(line);
    }
    table
}

/// Returns a table of the costs per call: CPU time of either side in microseconds, context
/// switches, page faults and system calls. The table also has percentiles of latencies, and the
/// rate of calls that start at given times.
pub fn costs(results: &[RowResult]) -> Table {
    let header = [
        "row",
        "contender",
        "client CPU us/call",
        "server CPU us/call",
        "CPU s/GB",
        "switches/call",
        "page faults/call",
        "instructions/call",
        "system calls/call",
        "copies",
        "p50 us",
        "p99 us",
        "p99.9 us",
        "offered kcall/s",
    ];
    let mut table = markdown(&header.map(str::to_owned));
    let or_dash = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |v| format!("{v:.2}"));
    for result in results {
        for cell in result.cells.iter().filter(|cell| !cell.samples.is_empty()) {
            table.add_row([
                result.row.name(),
                cell.variant.to_string(),
                format!("{:.2}", cell.per_call(|s| s.client.cpu_ns) / 1e3),
                format!("{:.2}", cell.per_call(|s| s.server.cpu_ns) / 1e3),
                or_dash(cell.cpu_per_gb()),
                format!("{:.3}", cell.per_call(|s| s.client.switches + s.server.switches)),
                format!("{:.3}", cell.page_faults()),
                cell.instructions().map_or_else(|| "-".to_owned(), |n| format!("{n:.0}")),
                or_dash(cell.counted.system_calls),
                or_dash(cell.counted.copies),
                or_dash(cell.percentile(0)),
                or_dash(cell.percentile(1)),
                or_dash(cell.percentile(2)),
                or_dash(cell.offered()),
            ]);
        }
    }
    table
}

/// Failures of the selected contenders, one per line.
pub fn failures(results: &[RowResult], is_included: impl Fn(Contender) -> bool) -> Vec<String> {
    let cells = results.iter().flat_map(|r| r.cells.iter().map(move |cell| (r, cell)));
    let cells = cells.filter(|(_, cell)| is_included(cell.variant.contender));
    let failed = cells.filter_map(|(r, cell)| Some((r, cell, cell.failure.as_ref()?)));
    failed.map(|(r, cell, why)| format!("{} {}: {why}", r.row.name(), cell.variant)).collect()
}

/// All results of one run of `compare`.
#[derive(Clone, Debug)]
pub struct Run {
    /// Title, commit and command line.
    pub origin: Origin,
    /// The machine on which `compare` ran.
    pub machine: Machine,
    /// Notes on the procedure.
    pub notes: Vec<String>,
    /// One result per row.
    pub results: Vec<RowResult>,
}

#[derive(Serialize)]
struct Json<'a> {
    #[serde(flatten)]
    origin: &'a Origin,
    machine: &'a Machine,
    notes: &'a [String],
    results: Vec<JsonCell>,
}

#[derive(Serialize)]
struct JsonCell {
    row: String,
    unit: &'static str,
    contender: String,
    /// The allocator, or null if the allocator makes no difference.
    allocator: Option<String>,
    median: Option<f64>,
    /// Median of the ratios to the first contender with the same allocator in the same round.
    ratio: Option<f64>,
    rounds: Vec<f64>,
    p50_p99_p999_us: Option<[f64; 3]>,
    offered_kcalls_per_s: Option<f64>,
    cpu_us_per_call: Option<f64>,
    client_cpu_us_per_call: Option<f64>,
    server_cpu_us_per_call: Option<f64>,
    cpu_s_per_gb: Option<f64>,
    switches_per_call: Option<f64>,
    page_faults_per_call: Option<f64>,
    instructions_per_call: Option<f64>,
    system_calls_per_call: Option<f64>,
    copies: Option<f64>,
    failure: Option<String>,
}

/// The run as JSON. Figures that were not measured are null.
///
/// # Errors
/// A figure cannot be represented in JSON.
pub fn json(run: &Run) -> anyhow::Result<String> {
    let of = |result: &RowResult, cell: &Cell| {
        let some = |value: f64| (!cell.samples.is_empty()).then_some(value);
        let variants: Vec<Variant> = result.cells.iter().map(|cell| cell.variant).collect();
        let baseline = variants[cell.variant.baseline(&variants)];
        let ratio =
            (baseline != cell.variant).then(|| result.ratio(cell.variant, baseline)).flatten();
        let percentiles = [0, 1, 2].map(|index| cell.percentile(index));
        JsonCell {
            row: result.row.name(),
            unit: result.row.unit(),
            contender: cell.variant.contender.to_string(),
            allocator: cell
                .variant
                .contender
                .allocates()
                .then(|| cell.variant.allocator.to_string()),
            median: some(cell.figure()),
            ratio,
            rounds: cell.samples.iter().map(|s| s.round.figure).collect(),
            p50_p99_p999_us: match percentiles {
                [Some(p50), Some(p99), Some(p999)] => Some([p50, p99, p999]),
                _ => None,
            },
            offered_kcalls_per_s: cell.offered(),
            cpu_us_per_call: some(cell.per_call(|s| s.client.cpu_ns + s.server.cpu_ns) / 1e3),
            client_cpu_us_per_call: some(cell.per_call(|s| s.client.cpu_ns) / 1e3),
            server_cpu_us_per_call: some(cell.per_call(|s| s.server.cpu_ns) / 1e3),
            cpu_s_per_gb: cell.cpu_per_gb(),
            switches_per_call: some(cell.per_call(|s| s.client.switches + s.server.switches)),
            page_faults_per_call: some(cell.page_faults()),
            instructions_per_call: cell.instructions(),
            system_calls_per_call: cell.counted.system_calls,
            copies: cell.counted.copies,
            failure: cell.failure.clone(),
        }
    };
    let cells = run.results.iter().flat_map(|r| r.cells.iter().map(move |cell| of(r, cell)));
    Ok(serde_json::to_string_pretty(&Json {
        origin: &run.origin,
        machine: &run.machine,
        notes: &run.notes,
        results: cells.collect(),
    })?)
}

/// A bound on a ratio, such as `latency-64:shm/tonic-tcp<=0.35`, or with an allocator
/// `up-1MiB-x8:shm-plain+mimalloc/tonic-tcp+mimalloc>=3`. Alternatively a bound on the copies of a
/// byte, such as `up-1MiB-x8:verbs-kept:copies<=0.01`.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    row: String,
    what: What,
    at_most: bool,
    limit: f64,
}

/// The quantity that is bounded.
#[derive(Clone, Debug, PartialEq)]
enum What {
    /// The median of the ratios of the first variant's figure to the second variant's in the same
    /// round.
    Ratio(Variant, Variant),
    Copies(Variant),
}

impl FromStr for Bound {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let form = "a bound has the form ROW:CONTENDER/CONTENDER<=NUMBER, or \
                    ROW:CONTENDER:copies<=NUMBER, or either with >=";
        let (row, rest) = text.split_once(':').context(form)?;
        let (at_most, (bounded, limit)) = match (rest.split_once("<="), rest.split_once(">=")) {
            (Some(parts), _) => (true, parts),
            (None, Some(parts)) => (false, parts),
            (None, None) => anyhow::bail!(form),
        };
        let variant = |name: &str| name.parse().map_err(|e| anyhow::anyhow!("{name}: {e}"));
        let what = match (bounded.split_once('/'), bounded.strip_suffix(":copies")) {
            (Some((a, b)), None) => What::Ratio(variant(a)?, variant(b)?),
            (None, Some(name)) => What::Copies(variant(name)?),
            _ => anyhow::bail!(form),
        };
        let limit = limit.parse().with_context(|| format!("{limit} is not a number"))?;
        Ok(Self { row: row.to_owned(), what, at_most, limit })
    }
}

impl Bound {
    /// Fails if the figure violates the bound, or was not measured.
    ///
    /// # Errors
    /// The error states the bound and the actual figure.
    pub fn check(&self, results: &[RowResult]) -> anyhow::Result<()> {
        let Self { row, what, at_most, limit } = self;
        let result = results.iter().find(|r| r.row.name() == *row);
        let result = result.with_context(|| format!("there is no row {row} in this run"))?;
        let (figure, found) = match what {
            What::Ratio(a, b) => {
                let ratio = result.ratio(*a, *b);
                let ratio =
                    ratio.with_context(|| format!("{row}: {a} and {b} did not both finish"))?;
                (ratio, format!("{a} is {ratio:.2} times {b}"))
            }
            What::Copies(of) => {
                let cell = result.cells.iter().find(|cell| cell.variant == *of);
                let copies = cell.and_then(|cell| cell.counted.copies);
                let copies = copies.with_context(|| {
                    format!("{row}: the copies of {of} were not counted, as --counts does")
                })?;
                (copies, format!("{of} copies each byte {copies:.4} times"))
            }
        };
        let kept = if *at_most { figure <= *limit } else { figure >= *limit };
        let sign = if *at_most { "at most" } else { "at least" };
        ensure!(kept, "{row}: {found}, {sign} {limit} wanted");
        println!("{row}: {found}, {sign} {limit} wanted: kept");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocator::Allocator;
    use crate::cost::Usage;
    use crate::measure::Round;
    use crate::results;
    use crate::work;

    #[test]
    fn medians() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median([]).is_nan());
    }

    fn result(pairs: &[(f64, f64)]) -> RowResult {
        let cell = |contender: Contender, figures: Vec<f64>| {
            let sample = |figure| Sample {
                round: Round { figure, ..Round::default() },
                client: Usage::default(),
                server: Usage::default(),
                instructions: None,
            };
            Cell {
                samples: figures.into_iter().map(sample).collect(),
                ..Cell::new(contender.into())
            }
        };
        RowResult {
            row: work::short()[0],
            cells: vec![
                cell(Contender::TonicTcp, pairs.iter().map(|p| p.0).collect()),
                cell(Contender::Shm, pairs.iter().map(|p| p.1).collect()),
            ],
        }
    }

    #[test]
    fn the_ratio_pairs_rounds_and_bounds_hold_it() {
        // The machine is ten times slower in the last round: no ratio changes.
        let mut results = vec![result(&[(10.0, 20.0), (12.0, 24.0), (1.0, 2.0)])];
        assert_eq!(results[0].ratio(Contender::Shm.into(), Contender::TonicTcp.into()), Some(2.0));
        let check =
            |text: &str, results: &[RowResult]| text.parse::<Bound>().unwrap().check(results);
        check("latency-64:shm/tonic-tcp<=2.0", &results).unwrap();
        check("latency-64:shm/tonic-tcp>=2.0", &results).unwrap();
        let error = check("latency-64:shm/tonic-tcp<=1.9", &results).unwrap_err().to_string();
        assert_eq!(error, "latency-64: shm is 2.00 times tonic-tcp, at most 1.9 wanted");
        assert!(check("latency-65:shm/tonic-tcp<=2", &results).is_err());
        results[0].cells[1].failure = Some("no".into());
        assert!(
            check("latency-64:shm/tonic-tcp<=2.0", &results).is_err(),
            "a failure keeps no bound"
        );
    }

    #[test]
    fn each_is_set_against_the_first_with_its_allocator() {
        let mut with_both = result(&[(10.0, 30.0)]);
        for mut cell in result(&[(20.0, 40.0)]).cells {
            cell.variant.allocator = Allocator::Mimalloc;
            with_both.cells.push(cell);
        }
        let results = [with_both];
        let table = figures(&results).to_string();
        let line = table.lines().find(|line| line.contains("latency-64")).unwrap();
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        assert_eq!(
            cells[3..7],
            ["10.0 ±0%", "30.0 ±0% (3.00x)", "20.0 ±0%", "40.0 ±0% (2.00x)"],
            "{table}"
        );
        let check = |text: &str| text.parse::<Bound>().unwrap().check(&results);
        check("latency-64:shm+mimalloc/tonic-tcp+mimalloc<=2").unwrap();
        let error = check("latency-64:shm/tonic-tcp<=2").unwrap_err().to_string();
        assert_eq!(error, "latency-64: shm is 3.00 times tonic-tcp, at most 2 wanted");
        let error = check("latency-64:shm:copies<=0.5").unwrap_err().to_string();
        assert_eq!(error, "latency-64: the copies of shm were not counted, as --counts does");
        let mut counted = results.clone();
        counted[0].cells.iter_mut().for_each(|cell| cell.counted.copies = Some(0.75));
        let check = |text: &str| text.parse::<Bound>().unwrap().check(&counted);
        check("latency-64:shm:copies>=0.75").unwrap();
        let error = check("latency-64:shm:copies<=0.5").unwrap_err().to_string();
        assert_eq!(error, "latency-64: shm copies each byte 0.7500 times, at most 0.5 wanted");
        let (origin, machine) = (Origin::here(""), Machine::here(&[]).unwrap());
        let run = Run { origin, machine, notes: vec![], results: results.into() };
        let json: serde_json::Value = serde_json::from_str(&json(&run).unwrap()).unwrap();
        assert_eq!(
            (&json["results"][3]["contender"], &json["results"][3]["allocator"]),
            (&"shm".into(), &"mimalloc".into())
        );
    }

    #[test]
    fn a_bad_bound_says_what_is_wrong() {
        for bad in [
            "",
            "a:b<=1",
            "latency-64:shm/tonic-tcp=1",
            "latency-64:shm<=1",
            "x:shm/tcp<=y",
            "latency-64:shm:pages<=1",
            "latency-64:shm/tonic-tcp:copies<=1",
            "latency-64:nobody:copies<=1",
        ] {
            assert!(bad.parse::<Bound>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_failure_is_shown_as_one() {
        let mut result = result(&[(10.0, 20.0), (12.0, 24.0)]);
        result.cells[1].failure = Some("the server was gone".into());
        let results = vec![result];
        let table = figures(&results).to_string();
        assert!(table.contains("| failed |"), "{table}");
        assert_eq!(failures(&results, |_| true), ["latency-64 shm: the server was gone"]);
        assert!(failures(&results, |contender| contender != Contender::Shm).is_empty());
        let run = Run {
            origin: Origin::here("A title"),
            machine: Machine::here(&[]).unwrap(),
            notes: vec![],
            results,
        };
        let text = json(&run).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_ne!(json["machine"]["processor"], "");
        let recorded = serde_json::from_str(&text).unwrap();
        let document = results::document(&[recorded]);
        assert!(
            document.contains("\n## A title\n") && document.contains("| failed |"),
            "{document}"
        );
        assert_eq!(json["results"][1]["failure"], "the server was gone");
        assert_eq!(json["results"][0]["failure"], serde_json::Value::Null);
        assert_eq!(json["results"][0]["median"], 11.0);
    }

    #[test]
    fn plots_show_who_finished() {
        let mut result = result(&[(10.0, 20.0)]);
        result
            .cells
            .push(Cell { failure: Some("no".into()), ..Cell::new(Contender::Verbs.into()) });
        let dir = tempfile::tempdir().unwrap();
        crate::plot::all(&[result], dir.path()).unwrap();
        let svg = std::fs::read_to_string(dir.path().join("latency.svg")).unwrap();
        assert!(
            svg.contains("tonic-tcp") && svg.contains("shm") && !svg.contains("verbs"),
            "{svg}"
        );
        assert!(!dir.path().join("up.svg").exists());
    }
}
