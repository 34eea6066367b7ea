//! Measures the costs of many clients, connections and streams, and their effect on the cost of a
//! call.

use std::process::ExitCode;

use anyhow::{Context as _, ensure};
use benches::machine::Machine;
use benches::results::Origin;
use benches::scale::args::{Args, Part};
use benches::scale::record::Run;
use benches::scale::{bulk, connections, plots, streams, tables};
use clap::Parser;

fn main() -> ExitCode {
    benches::exit::exit("scale", run(&Args::parse()))
}

fn run(args: &Args) -> anyhow::Result<()> {
    if args.role.is_some() {
        return args.role.start(&args.placement);
    }
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(scale(args))
}

async fn scale(args: &Args) -> anyhow::Result<()> {
    let run = measure(args).await?;
    for table in tables::all(&run) {
        println!("{}:\n\n{}\n", table.heading, table.aligned());
    }
    for note in &run.notes {
        println!("{note}");
    }
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_string_pretty(&run)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(directory) = &args.plots {
        plots::all(&run, directory)?;
    }
    let mut broken = Vec::new();
    for bound in &args.assert {
        match bound.check(&run) {
            Ok(kept) => println!("{kept}"),
            Err(error) => broken.push(error.to_string()),
        }
    }
    let failures = run.failures();
    for failure in &failures {
        println!("failed: {failure}");
    }
    ensure!(broken.is_empty(), "{}", broken.join("\n"));
    ensure!(failures.is_empty(), "{} rows failed", failures.len());
    Ok(())
}

async fn measure(args: &Args) -> anyhow::Result<Run> {
    let machine = Machine::here(&[args.allocator])?;
    let threads = args.placement.threads()?;
    let seconds = |time: std::time::Duration| time.as_secs_f64();
    let mut notes =
        vec![machine.to_string(), format!("{threads}; {} rounds, medians", args.rounds)];
    if args.measures(Part::Bulk) {
        let (time, before) = (seconds(args.seconds), seconds(args.warm_up));
        notes.push(format!("bulk: {time} s each round, after {before} s that do not count"));
    }
    if args.measures(Part::Connections) {
        let (time, before) = (seconds(args.rest), seconds(args.settle));
        notes.push(format!("rest: {time} s, after {before} s that do not count"));
    }
    let before = load();
    let (mut bulk, mut connections, mut streams) = (Vec::new(), Vec::new(), Vec::new());
    if args.measures(Part::Bulk) {
        bulk = bulk::measure(args).await?;
    }
    if args.measures(Part::Connections) {
        connections = connections::measure(args).await?;
    }
    if args.measures(Part::Streams) {
        streams = streams::measure(args).await?;
    }
    notes.push(format!(
        "load of the machine in 1, 5 and 15 minutes: {before} before, {} after",
        load()
    ));
    Ok(Run { origin: Origin::here(&args.title), machine, notes, bulk, connections, streams })
}

/// Returns the load averages. Before a run, these averages show the load of other programs.
fn load() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split_whitespace().take(3).collect::<Vec<_>>().join(" ")
}
