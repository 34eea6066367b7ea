//! Counts the costs of calls in instructions, allocations, control messages and doorbells, and
//! compares them with the record.

use std::alloc::System;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, ensure};
use benches::costs;
use benches::costs::callgrind::{Callgrind, toolchain};
use benches::costs::record::{Line, Record, Verdict, table};
use benches::costs::scenario::Scenario;
use benches::cpu;
use clap::Parser;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

#[derive(Parser, Debug)]
#[command(version, about, long_about = None)]
struct Args {
    /// Only scenarios whose names contain this text
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Fail if a count exceeds the record by more than 5 %, is not recorded, or is recorded and was
    /// not counted
    #[arg(long)]
    check: bool,
    /// Write the counts to the record
    #[arg(long, conflicts_with = "check")]
    record: bool,
    /// The file of recorded counts
    #[arg(long, value_name = "FILE", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/costs.toml"))]
    file: PathBuf,
    /// Print the functions in which this scenario's instructions are executed, and count nothing
    /// else
    #[arg(long, value_name = "SCENARIO")]
    profile: Option<String>,
    /// In a profile, include the callees of each function
    #[arg(long, requires = "profile")]
    inclusive: bool,
    /// Run this scenario, without counting its instructions
    #[arg(long, value_name = "SCENARIO", hide = true)]
    run: Option<String>,
}

fn main() -> ExitCode {
    benches::exit::exit("costs", run(&Args::parse()))
}

fn named(name: &str) -> anyhow::Result<Scenario> {
    let scenario = costs::all().into_iter().find(|scenario| scenario.name == name);
    scenario.with_context(|| {
        let names: Vec<_> = costs::all().iter().map(|scenario| scenario.name).collect();
        format!("there is no scenario {name}; there are {}", names.join(", "))
    })
}

fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(name) = &args.run {
        // Busy polling over shared memory depends on the processors of both ends, so both ends get
        // the same processor.
        cpu::pin(*cpu::allowed()?.first().context("no processor is allowed")?)?;
        let counts = (named(name)?.run)()?;
        println!("{}", serde_json::to_string(&counts)?);
        return Ok(());
    }
    let callgrind = Callgrind::new()?;
    if let Some(name) = &args.profile {
        print!("{}", callgrind.annotate(&named(name)?, args.inclusive)?);
        return Ok(());
    }
    let is_selected = |name: &str| name.contains(&args.only);
    let scenarios: Vec<_> =
        costs::all().into_iter().filter(|scenario| is_selected(scenario.name)).collect();
    ensure!(!scenarios.is_empty(), "no scenario's name contains {}", args.only);
    let now = Record { toolchain: toolchain()?, costs: count(&callgrind, scenarios)? };
    let mut recorded = match Record::read(&args.file) {
        Err(_) if args.record => Record::default(),
        other => other?,
    };
    let lines = recorded.compare(&now, is_selected);
    println!("{}", table(&lines));
    transport_part(&now);
    if args.record {
        recorded.costs.retain(|name, _| !is_selected(name));
        recorded.costs.extend(now.costs);
        recorded.toolchain = now.toolchain;
        return recorded.write(&args.file);
    }
    if recorded.toolchain != now.toolchain {
        println!("recorded with: {}\ncounted with:  {}", recorded.toolchain, now.toolchain);
    }
    if lines.iter().any(|line| line.verdict == Verdict::Less) {
        println!("some counts are lower than recorded: record them with make costs-record");
    }
    let violations: Vec<_> = lines.iter().filter_map(Line::violation).collect();
    if args.check && !violations.is_empty() {
        let list = violations.join("\n    ");
        anyhow::bail!(
            "counts beyond the record:\n    {list}\nIf the cost is meant, record it in the same commit: make costs-record"
        );
    }
    Ok(())
}

/// Counts scenarios in parallel, one per processor. A worker's child processes run on its
/// processor.
fn count(
    callgrind: &Callgrind,
    scenarios: Vec<Scenario>,
) -> anyhow::Result<std::collections::BTreeMap<String, costs::meter::Counts>> {
    let waiting = Mutex::new(scenarios);
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let work = |processor| -> anyhow::Result<Vec<_>> {
        cpu::pin(processor)?;
        let mut done = Vec::new();
        while let Some(scenario) = next() {
            done.push((scenario.name.to_owned(), callgrind.count(&scenario)?));
        }
        Ok(done)
    };
    let processors = cpu::allowed()?;
    std::thread::scope(|scope| {
        let start = |processor: &usize| {
            let processor = *processor;
            scope.spawn(move || work(processor))
        };
        let workers: Vec<_> = processors.iter().map(start).collect();
        let mut all = std::collections::BTreeMap::new();
        for worker in workers {
            all.extend(worker.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??);
        }
        Ok(all)
    })
}

/// Prints how many instructions of a call of 64 B belong to each transport: the total minus the
/// total of a call that is answered in place.
fn transport_part(now: &Record) {
    let instructions = |name: &str| now.costs.get(name)?.get("instructions").copied();
    let Some(nothing) = instructions("call-64-nothing") else { return };
    let part = |name: &str| Some(instructions(name)? - nothing);
    for (tonic, ours) in [
        ("call-64-tonic-tcp", "call-64-sim"),
        ("call-64-tonic-duplex", "call-64-sim"),
        ("call-64-tonic-tcp", "call-64-shm"),
        ("call-64-x64-tonic-duplex", "call-64-x64-sim"),
    ] {
        if let Some((theirs, own)) = part(tonic).zip(part(ours)) {
            println!(
                "transport part: {tonic} {theirs:.0}, {ours} {own:.0} instructions, {:.2} times less",
                theirs / own
            );
        }
    }
}
