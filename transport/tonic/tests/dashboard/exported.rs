//! The metrics that an exporter for Prometheus has exported.

use std::collections::{BTreeMap, BTreeSet};

/// Labels that Prometheus adds to each series that it scrapes.
pub(crate) const TARGET: [&str; 2] = ["instance", "job"];

pub(crate) type Series = BTreeMap<String, String>;

/// The metrics of a scrape.
#[derive(Debug, Default)]
pub(crate) struct Exported {
    series: BTreeMap<String, Vec<Series>>,
    /// The metrics that only grow. Those are counters, and the parts of histograms.
    growing: BTreeSet<String>,
}

impl Exported {
    /// Parses Prometheus' text format.
    pub(crate) fn parse(text: &str) -> Exported {
        let mut exported = Exported::default();
        for line in text.lines().filter(|line| !line.is_empty()) {
            if let Some(comment) = line.strip_prefix("# TYPE ") {
                let (name, kind) = comment.split_once(' ').unwrap();
                let growing: &[&str] = match kind {
                    "counter" => &[""],
                    "histogram" => &["_bucket", "_count", "_sum"],
                    "gauge" => &[],
                    other => panic!("{name} is a {other}"),
                };
                exported.growing.extend(growing.iter().map(|end| format!("{name}{end}")));
            } else if !line.starts_with('#') {
                let (series, _) = line.rsplit_once(' ').unwrap();
                let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
                let labels = labels.strip_suffix('}').unwrap();
                let labels = labels.split(',').filter(|label| !label.is_empty()).map(|label| {
                    let (label, value) = label.split_once("=\"").unwrap();
                    (label.to_owned(), value.strip_suffix('"').unwrap().to_owned())
                });
                exported.series.entry(name.to_owned()).or_default().push(labels.collect());
            }
        }
        exported
    }

    /// The series of a metric.
    pub(crate) fn series(&self, name: &str) -> Result<&[Series], String> {
        self.series.get(name).map(Vec::as_slice).ok_or(format!("nobody exports {name}"))
    }

    pub(crate) fn grows(&self, name: &str) -> bool {
        self.growing.contains(name)
    }
}
