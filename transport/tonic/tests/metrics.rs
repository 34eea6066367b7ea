//! The guide to metrics lists exactly the code's metrics.

use tonic_rdma::metrics::{ALL, Kind};

const GUIDE: &str = include_str!("../../../docs/metrics.md");

/// The cells of each row of the first table, without backticks.
fn rows() -> Vec<Vec<String>> {
    let rows = GUIDE.lines().skip_while(|line| !line.starts_with("| name |")).skip(2);
    let rows = rows.take_while(|line| line.starts_with('|'));
    rows.map(|row| {
        row.trim_matches('|')
            .split('|')
            .map(|cell| cell.replace('`', "").trim().to_owned())
            .collect()
    })
    .collect()
}

#[test]
fn the_guide_lists_every_metric_in_its_order() {
    let listed: Vec<[String; 4]> = rows()
        .into_iter()
        .map(|row| std::array::from_fn(|column| row.get(column).cloned().unwrap_or_default()))
        .collect();
    let known: Vec<[String; 4]> = ALL
        .iter()
        .map(|metric| {
            let kind = match metric.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
                Kind::Histogram => "histogram",
            };
            let unit = metric.unit.map_or("", |unit| unit.as_str());
            [metric.name.into(), kind.into(), unit.into(), metric.labels.join(", ")]
        })
        .collect();
    assert_eq!(listed, known);
}

#[test]
fn names_follow_the_conventions() {
    for metric in ALL {
        // OpenTelemetry's conventions name the durations of calls.
        let prefixes = ["tonic_rdma_", "rpc_client_call_", "rpc_server_call_"];
        assert!(prefixes.iter().any(|own| metric.name.starts_with(own)), "{metric:?}");
        assert_eq!(metric.name.ends_with("_total"), metric.kind == Kind::Counter, "{metric:?}");
        if let Some(unit) = metric.unit.map(|unit| unit.as_str()).filter(|unit| *unit != "count") {
            assert!(metric.name.trim_end_matches("_total").ends_with(unit), "{metric:?}");
        }
        for label in metric.labels {
            assert!(GUIDE.contains(&format!("\n| `{label}` |")), "label {label} is not explained");
        }
    }
}
