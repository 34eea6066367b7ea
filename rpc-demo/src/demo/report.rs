//! Shows the results as a table, with a row for each path, a row for a plain copy, and the ratios
//! of the best path to the others.

use std::fmt;

use comfy_table::{Cell, CellAlignment, Table, presets};

/// One transfer, or one plain copy, of the tree.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Run {
    /// Bytes of the files.
    pub(super) bytes: u64,
    /// Duration of the transfer or copy.
    pub(super) seconds: f64,
    /// Processor time of both ends, in seconds.
    pub(super) cpu_seconds: f64,
    /// Bytes that processors copied, at both ends and between them.
    pub(super) copied_bytes: u64,
}

impl Run {
    /// Returns the throughput in 10^9 bytes per second.
    pub(super) fn rate(&self) -> f64 {
        self.figures().rate
    }

    fn figures(&self) -> Figures {
        let bytes = (self.bytes as f64).max(1.0);
        Figures {
            rate: bytes / self.seconds.max(1e-9) / 1e9,
            cpu: self.cpu_seconds / bytes * 1e9,
            copied: self.copied_bytes as f64 / bytes,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Figures {
    /// Throughput in 10^9 bytes per second.
    rate: f64,
    /// Processor seconds per 10^9 bytes.
    cpu: f64,
    /// Copied bytes per byte of the files.
    copied: f64,
}

impl Figures {
    /// The median of each figure; `None` if there are no runs.
    fn median(runs: &[Run]) -> Option<Figures> {
        let middle = |figure: fn(&Figures) -> f64| {
            let mut all: Vec<f64> = runs.iter().map(|run| figure(&run.figures())).collect();
            all.sort_by(f64::total_cmp);
            let (low, high) = (all.get(all.len().saturating_sub(1) / 2)?, all.get(all.len() / 2)?);
            Some((low + high) / 2.0)
        };
        Some(Figures {
            rate: middle(|f| f.rate)?,
            cpu: middle(|f| f.cpu)?,
            copied: middle(|f| f.copied)?,
        })
    }

    fn over(&self, other: &Figures) -> Figures {
        let factor = |ours: f64, theirs: f64| ours / theirs.max(1e-9);
        Figures {
            rate: factor(self.rate, other.rate),
            cpu: factor(self.cpu, other.cpu),
            copied: factor(self.copied, other.copied),
        }
    }
}

/// All runs of one path.
#[derive(Clone, Debug, Default)]
pub(super) struct Path {
    /// The path's name, as in `Channel::path`.
    pub(super) name: String,
    pub(super) put: Vec<Run>,
    pub(super) get: Vec<Run>,
}

impl Path {
    pub(super) fn new(name: &str) -> Path {
        Path { name: name.to_owned(), ..Path::default() }
    }

    pub(super) fn add(&mut self, put: Run, get: Run) {
        self.put.push(put);
        self.get.push(get);
    }
}

#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) plain: Vec<Run>,
    /// Runs over TCP.
    pub(super) tcp: Path,
    /// Runs over the best path, if the best path is not TCP.
    pub(super) best: Option<Path>,
}

/// The figures of put and of get.
type Both = (Option<Figures>, Option<Figures>);

fn both(path: &Path) -> Both {
    (Figures::median(&path.put), Figures::median(&path.get))
}

fn over((put, get): &Both, (other_put, other_get): &Both) -> Both {
    let over = |ours: &Option<Figures>, theirs: &Option<Figures>| {
        ours.as_ref().zip(theirs.as_ref()).map(|(ours, theirs)| ours.over(theirs))
    };
    (over(put, other_put), over(get, other_get))
}

/// Formats a figure with two decimals below 10, with one below 100, and with none from 100 on.
fn number(figure: f64) -> String {
    match figure {
        f if f < 9.995 => format!("{f:.2}"),
        f if f < 99.95 => format!("{f:.1}"),
        f => format!("{f:.0}"),
    }
}

fn row(name: String, (put, get): &Both) -> Vec<Cell> {
    let cell = |of: &Option<Figures>, figure: fn(&Figures) -> f64| {
        of.as_ref().map_or_else(String::new, |of| number(figure(of)))
    };
    let figures: [fn(&Figures) -> f64; 3] = [|f| f.rate, |f| f.cpu, |f| f.copied];
    let numbers = figures.into_iter().flat_map(|figure| [cell(put, figure), cell(get, figure)]);
    let numbers = numbers.map(|text| Cell::new(text).set_alignment(CellAlignment::Right));
    std::iter::once(Cell::new(name)).chain(numbers).collect()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_preset(presets::UTF8_BORDERS_ONLY);
        table.set_header([
            "Path",
            "GB/s:\nput",
            "\nget",
            "CPU s/GB:\nput",
            "\nget",
            "copied/byte:\nput",
            "\nget",
        ]);
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let copy = (Figures::median(&self.plain), Figures::median(&self.plain));
        let tcp = both(&self.tcp);
        table.add_row(row("tcp".to_owned(), &tcp));
        if let Some(best) = &self.best {
            table.add_row(row(best.name.clone(), &both(best)));
        }
        table.add_row(row("cp -r".to_owned(), &copy));
        let (name, ours) = match &self.best {
            Some(best) => {
                let ours = both(best);
                table.add_row(row(format!("{} : tcp", best.name), &over(&ours, &tcp)));
                (best.name.as_str(), ours)
            }
            None => ("tcp", tcp),
        };
        table.add_row(row(format!("{name} : cp -r"), &over(&ours, &copy)));
        write!(f, "{table}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(seconds: f64) -> Run {
        Run { bytes: 2_000_000_000, seconds, cpu_seconds: 3.0, copied_bytes: 6_000_000_000 }
    }

    fn path(name: &str, put: f64, get: f64) -> Path {
        let mut path = Path::new(name);
        path.add(run(put), run(get));
        path
    }

    fn report() -> Report {
        Report {
            plain: vec![run(1.0)],
            tcp: path("tcp", 4.0, 2.0),
            best: Some(path("shm", 1.0, 0.8)),
        }
    }

    /// The cells of a row.
    fn cells<'a>(table: &'a str, name: &str) -> Vec<&'a str> {
        let line = table
            .lines()
            .find(|line| line.trim_matches(['│', ' ']).starts_with(&format!("{name}  ")));
        let line = line.unwrap_or_else(|| panic!("no row '{name}' in\n{table}"));
        line.trim_matches(['│', ' ']).strip_prefix(name).unwrap().split_whitespace().collect()
    }

    #[test]
    fn two_paths_and_a_copy_are_compared() {
        let table = report().to_string();
        assert_eq!(cells(&table, "tcp"), ["0.50", "1.00", "1.50", "1.50", "3.00", "3.00"]);
        assert_eq!(cells(&table, "shm"), ["2.00", "2.50", "1.50", "1.50", "3.00", "3.00"]);
        assert_eq!(cells(&table, "shm : tcp"), ["4.00", "2.50", "1.00", "1.00", "1.00", "1.00"]);
        assert_eq!(cells(&table, "shm : cp -r")[..2], ["1.00", "1.25"]);
        assert!(table.lines().all(|line| line.chars().count() <= 79), "{table}");
        // The longest name of a path, and extreme figures.
        let mut wide = Report { best: Some(path("verbs", 0.000_01, 4000.0)), ..report() };
        wide.plain.clear();
        let table = wide.to_string();
        assert!(table.lines().all(|line| line.chars().count() <= 79), "{table}");
    }

    #[test]
    fn where_tcp_is_the_best_there_is_no_factor() {
        let table = Report { best: None, ..report() }.to_string();
        assert!(!table.contains(": tcp"), "{table}");
        assert_eq!(cells(&table, "tcp : cp -r")[..2], ["0.25", "0.50"]);
    }

    #[test]
    fn of_several_rounds_the_median_counts() {
        let runs: Vec<Run> = [9.0, 1.0, 2.0].map(run).into();
        assert_eq!(Figures::median(&runs).unwrap().rate, 1.0);
        assert_eq!(Figures::median(&runs[1..]).unwrap().rate, 1.5);
        assert_eq!(Figures::median(&[]), None);
    }

    #[test]
    fn numbers_are_short() {
        let shown = [0.0, 0.004, 1.0, 9.994, 9.996, 99.94, 123.4].map(number);
        assert_eq!(shown, ["0.00", "0.00", "1.00", "9.99", "10.0", "99.9", "123"]);
    }
}
