//! Plots a record as SVG: throughput by clients, and the cost of a call by connections.

use std::fs;
use std::path::Path;

use anyhow::Context as _;

use crate::plot::{Curve, PALETTE, lines};
use crate::scale::figure::{Figure, Row};
use crate::scale::record::Run;

/// Draws `scale-bulk.svg`, `scale-all.svg`, `scale-one.svg` and `scale-rest.svg`, each of them only
/// if a contender has at least two points.
///
/// # Errors
/// The directory cannot be written to.
pub fn all(run: &Run, directory: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let at = |name: &str| directory.join(name);
    let bulk = run.bulk.iter().map(|row| (row.contender.as_str(), row.clients));
    let bulk = curves(run, bulk, Row::Bulk, "rate");
    let title = "Clients with 8 requests of 1 MiB in flight each: MB/s of all, by clients";
    lines(&at("scale-bulk.svg"), title, &bulk, |x| x.to_string(), false)?;
    for (file, figure, title) in [
        ("scale-all.svg", "all-cpu", "64 calls that go round all connections: CPU us/call"),
        ("scale-one.svg", "one-cpu", "64 calls on one of the connections: CPU us/call"),
        ("scale-rest.svg", "rest-cpu", "A connection at rest: CPU us in a second"),
    ] {
        let rows = run.connections.iter().map(|row| (row.contender.as_str(), row.connections));
        let curves = curves(run, rows, Row::Connections, figure);
        let title = format!("{title}, by connections");
        lines(&at(file), &title, &curves, |x| x.to_string(), false)?;
    }
    Ok(())
}

/// The curves of all contenders with more than one point.
fn curves<'a>(
    run: &Run,
    rows: impl Iterator<Item = (&'a str, usize)>,
    row: fn(usize) -> Row,
    name: &str,
) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    for (contender, count) in rows {
        let index = curves.iter().position(|(who, ..)| who == contender).unwrap_or(curves.len());
        if index == curves.len() {
            curves.push((contender.to_owned(), PALETTE[index % PALETTE.len()], Vec::new()));
        }
        let figure = Figure::of(row(count), Some(name)).ok();
        let point = figure.and_then(|figure| figure.median(run, row(count), contender));
        curves[index].2.extend(point.map(|y| (count as f64, y)));
    }
    curves.retain(|(_, _, points)| points.len() > 1);
    curves
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scale::figure::tests::run;

    #[test]
    fn plots_show_who_finished() {
        let mut run = run();
        run.bulk[1].failure = Some("no".into());
        let dir = tempfile::tempdir().unwrap();
        all(&run, dir.path()).unwrap();
        let svg = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        assert!(svg("scale-bulk.svg").contains("shm") && !svg("scale-bulk.svg").contains("tonic"));
        for name in ["scale-all.svg", "scale-one.svg", "scale-rest.svg"] {
            assert!(svg(name).contains("shm") && svg(name).contains("tonic-tcp"), "{name}");
        }
        run.connections.clear();
        let dir = tempfile::tempdir().unwrap();
        all(&run, dir.path()).unwrap();
        assert!(!dir.path().join("scale-all.svg").exists());
    }
}
