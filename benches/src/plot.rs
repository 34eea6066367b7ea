//! Plots results as SVG.

use std::fs;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context as _, anyhow};
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use crate::allocator::Variant;
use crate::report::{Cell, RowResult};
use crate::work::{Direction, Row, WorkKind, bytes};

const SIZE: (u32, u32) = (760, 380);
const FONT: &str = "sans-serif";
/// Colours of curves and bars, in order.
pub(crate) const PALETTE: [RGBColor; 10] = [
    RGBColor(0x4e, 0x79, 0xa7),
    RGBColor(0x76, 0xb7, 0xb2),
    RGBColor(0xb0, 0x7a, 0xa1),
    RGBColor(0xf2, 0x8e, 0x2b),
    RGBColor(0xe1, 0x57, 0x59),
    RGBColor(0x59, 0xa1, 0x4f),
    RGBColor(0xed, 0xc9, 0x48),
    RGBColor(0x9c, 0x75, 0x5f),
    RGBColor(0xff, 0x9d, 0xa7),
    RGBColor(0x79, 0x70, 0x6e),
];

/// A curve: name, colour, and points.
pub(crate) type Curve = (String, RGBColor, Vec<(f64, f64)>);

/// Draws `latency.svg`, `beside.svg`, `rate.svg`, `up.svg`, `down.svg` and `cpu.svg`. Rows that did
/// not run and contenders that failed are left out. Each contender is drawn with its first
/// allocator.
///
/// # Errors
/// The directory cannot be written to.
pub fn all(results: &[RowResult], directory: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let at = |name: &str| directory.join(name);
    let find =
        |wanted: fn(&WorkKind) -> bool| results.iter().find(|result| wanted(&result.row.kind));
    if let Some(result) = find(|kind| matches!(kind, WorkKind::Latency)) {
        let title = "64 B there and back: latency in us, p50 / p99";
        bars(&at("latency.svg"), title, result, |cell| Some((cell.figure(), cell.percentile(1))))?;
    }
    if let Some(result) = find(|kind| matches!(kind, WorkKind::LatencyUnderLoad { .. })) {
        let title = "64 B beside a transfer of 64 MiB: latency in us, p50 / p99";
        bars(&at("beside.svg"), title, result, |cell| Some((cell.figure(), cell.percentile(1))))?;
    }
    let big = |kind: &WorkKind| {
        matches!(kind, WorkKind::Bulk { size: 0x10_0000, in_flight: 8, direction: Direction::Up })
    };
    if let Some(result) = results.iter().find(|result| big(&result.row.kind)) {
        let title = "1 MiB requests, 8 in flight: CPU seconds per GB, both processes";
        bars(&at("cpu.svg"), title, result, |cell| Some((cell.cpu_per_gb()?, None)))?;
    }
    let rate = curves(results, |row| match row.kind {
        WorkKind::Rate { in_flight, connections: 1 } => Some(in_flight as f64),
        _ => None,
    });
    let title = "64 B there and back: thousands of calls per second, by calls in flight";
    lines(&at("rate.svg"), title, &rate, |x| format!("{x}"), false)?;
    for (name, wanted) in [("up.svg", Direction::Up), ("down.svg", Direction::Down)] {
        let curves = curves(results, |row| match row.kind {
            WorkKind::Bulk { size, direction, in_flight: 8 } if direction == wanted => {
                Some(size as f64)
            }
            _ => None,
        });
        let what = if wanted == Direction::Up { "Requests" } else { "Replies" };
        let title = format!("{what}, 8 in flight: MB/s, by size");
        lines(&at(name), &title, &curves, |x| bytes(x as usize), true)?;
    }
    Ok(())
}

/// The number of cells with the first allocator or without an allocator. Cells with other
/// allocators follow them.
fn n_drawn(cells: &[Cell]) -> usize {
    let mut contenders: Vec<_> = cells.iter().map(|cell| cell.variant.contender).collect();
    contenders.sort_unstable_by_key(|contender| *contender as usize);
    contenders.dedup();
    contenders.len()
}

/// For each contender, the figures of the rows for which `x` returns an abscissa.
fn curves(results: &[RowResult], x: impl Fn(&Row) -> Option<f64>) -> Vec<Curve> {
    let cells = results.first().map_or(&[][..], |result| &result.cells);
    let curve = |(index, cell): (usize, &Cell)| -> Curve {
        let point = |result: &RowResult| {
            let cell = result.cells.get(index).filter(|cell| cell.finished())?;
            Some((x(&result.row)?, cell.figure()))
        };
        let points = results.iter().filter_map(point).collect();
        (cell.variant.to_string(), PALETTE[index % PALETTE.len()], points)
    };
    let n_drawn = n_drawn(cells);
    cells
        .iter()
        .enumerate()
        .take(n_drawn)
        .map(curve)
        .filter(|(_, _, points)| points.len() > 1)
        .collect()
}

/// Draws curves over a logarithmic x axis. With `log`, the y axis is logarithmic as well. Draws
/// nothing if there are no points.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn lines(
    path: &Path,
    title: &str,
    curves: &[Curve],
    x: impl Fn(f64) -> String,
    log: bool,
) -> anyhow::Result<()> {
    let points = || curves.iter().flat_map(|(_, _, points)| points);
    let Some(top) = points().map(|(_, y)| *y).max_by(f64::total_cmp) else { return Ok(()) };
    let low = points().map(|(_, y)| *y).min_by(f64::total_cmp).unwrap_or(top);
    let left = points().map(|(x, _)| *x).min_by(f64::total_cmp).unwrap_or(1.0);
    let right = points().map(|(x, _)| *x).max_by(f64::total_cmp).unwrap_or(2.0);
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    let xs = (left..right).log_scale().base(2.0);
    match log {
        true => draw_curves(&root, title, curves, x, xs, (low * 0.7..top * 1.5).log_scale()),
        false => draw_curves(&root, title, curves, x, xs, 0.0..top * 1.1),
    }
    .map_err(|error| anyhow!("cannot draw {}: {error}", path.display()))
}

/// Result of a drawing function.
type DrawResult = Result<(), Box<dyn std::error::Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn draw_curves<X, Y>(
    root: &Area<'_>,
    title: &str,
    curves: &[Curve],
    x: impl Fn(f64) -> String,
    xs: X,
    ys: Y,
) -> DrawResult
where
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(root)
        .caption(title, (FONT, 20))
        .margin(10)
        .margin_right(130)
        .x_label_area_size(28)
        .y_label_area_size(60)
        .build_cartesian_2d(xs, ys)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_label_formatter(&|value| x(*value))
        .y_label_formatter(&|value| format!("{value:.0}"))
        .label_style((FONT, 14))
        .draw()?;
    for (index, (contender, colour, points)) in curves.iter().enumerate() {
        chart.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?;
        chart.draw_series(points.iter().map(|point| Circle::new(*point, 3, colour.filled())))?;
        // The legend is to the right of the curves.
        let y = 50 + 18 * i32::try_from(index)?;
        let left = i32::try_from(SIZE.0)? - 125;
        root.draw(&Rectangle::new([(left, y), (left + 12, y + 10)], colour.filled()))?;
        root.draw(&Text::new(contender.clone(), (left + 18, y), (FONT, 14)))?;
    }
    root.present()?;
    Ok(())
}

/// A bar: variant, colour, value, and a second value to which a line is drawn.
type Bar = (Variant, RGBColor, (f64, Option<f64>));

/// Draws a bar for each contender, and a line above it. Long lines are cut off.
fn bars(
    path: &Path,
    title: &str,
    result: &RowResult,
    value: impl Fn(&Cell) -> Option<(f64, Option<f64>)>,
) -> anyhow::Result<()> {
    let n_drawn = n_drawn(&result.cells);
    let cells = result.cells.iter().enumerate().take(n_drawn).filter(|(_, cell)| cell.finished());
    let bars: Vec<Bar> = cells
        .filter_map(|(index, cell)| {
            Some((cell.variant, PALETTE[index % PALETTE.len()], value(cell)?))
        })
        .collect();
    if bars.is_empty() {
        return Ok(());
    }
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    draw_bars(&root, title, &bars)
        .map_err(|error| anyhow!("cannot draw {}: {error}", path.display()))
}

fn draw_bars(root: &Area<'_>, title: &str, bars: &[Bar]) -> DrawResult {
    root.fill(&WHITE)?;
    let top = bars.iter().map(|(_, _, (value, _))| *value).fold(0.0, f64::max) * 1.6;
    let range: Range<f64> = 0.0..bars.len() as f64;
    let mut chart = ChartBuilder::on(root)
        .caption(title, (FONT, 20))
        .margin(10)
        .x_label_area_size(28)
        .y_label_area_size(60)
        .build_cartesian_2d(range.clone(), 0.0..top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .y_label_formatter(&|value| {
            if top < 10.0 { format!("{value:.1}") } else { format!("{value:.0}") }
        })
        .light_line_style(TRANSPARENT)
        .label_style((FONT, 14))
        .draw()?;
    let centred = plotters::style::text_anchor::Pos::new(
        plotters::style::text_anchor::HPos::Center,
        plotters::style::text_anchor::VPos::Bottom,
    );
    for (index, (contender, colour, (value, line))) in bars.iter().enumerate() {
        let (left, middle) = (index as f64, index as f64 + 0.5);
        chart.draw_series([Rectangle::new(
            [(left + 0.2, 0.0), (left + 0.8, *value)],
            colour.filled(),
        )])?;
        let text =
            |value: f64| if value < 10.0 { format!("{value:.2}") } else { format!("{value:.0}") };
        let (mut over, mut figure) = (*value, text(*value));
        if let Some(line) = line {
            over = line.min(top * 0.92);
            figure = format!("{figure} / {}", text(*line));
            chart.draw_series([PathElement::new(vec![(middle, *value), (middle, over)], BLACK)])?;
            chart.draw_series([PathElement::new(
                vec![(left + 0.4, over), (left + 0.6, over)],
                BLACK,
            )])?;
        }
        let style = (FONT, 14).into_text_style(root).pos(centred);
        chart.draw_series([Text::new(figure, (middle, over + top * 0.01), style.clone())])?;
        let (x, _) = chart.backend_coord(&(middle, 0.0));
        root.draw(&Text::new(contender.to_string(), (x, i32::try_from(SIZE.1)? - 14), style))?;
    }
    root.present()?;
    Ok(())
}
