//! Runs seeds of the simulation.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use tonic_rdma_sim::runner::{Until, replay, seeds};
use tonic_rdma_sim::{Options, Report, Theme, run};

/// Client, server, protocol and memory over a simulated network and clock, driven by a seed.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run many seeds
    Seeds {
        /// First seed
        #[arg(long, default_value_t = 0)]
        from: u64,
        /// Number of seeds
        #[arg(long, default_value_t = 2_000)]
        count: u64,
        /// Run every seed with this theme instead of the one that it draws
        #[arg(long, value_parser = theme)]
        theme: Option<Theme>,
        /// Stop after this many failed seeds
        #[arg(long, default_value_t = 5)]
        failures: u64,
    },
    /// Run seeds for a given time, starting at a random one
    Soak {
        /// Duration in minutes
        #[arg(long, default_value_t = 5.0)]
        minutes: f64,
        /// First seed, instead of a random one
        #[arg(long)]
        from: Option<u64>,
    },
    /// Run one seed twice, and check that both runs are identical
    Replay {
        /// Seed to run
        seed: u64,
        /// Theme to run it with, instead of the one that it draws
        #[arg(long, value_parser = theme)]
        theme: Option<Theme>,
        /// Print every event on the fabric, and the log that RUST_LOG selects
        #[arg(long)]
        trace: bool,
    },
}

fn theme(name: &str) -> Result<Theme, String> {
    let known = Theme::all();
    known.iter().copied().find(|theme| format!("{theme:?}").eq_ignore_ascii_case(name)).ok_or_else(
        || {
            let names: Vec<String> =
                known.iter().map(|theme| format!("{theme:?}").to_lowercase()).collect();
            format!("no such theme; there are {}", names.join(", "))
        },
    )
}

fn print_failure(report: &Report, options: &Options) {
    println!("seed {} ({:?}) failed:", report.seed, report.theme);
    for wrong in &report.wrong {
        println!("    {wrong}");
    }
    println!("{}\n", replay(report.seed, options));
}

fn run_seeds(first: u64, until: Until, options: &Options, failures: u64) -> ExitCode {
    let failed = std::sync::atomic::AtomicBool::new(false);
    let figures = seeds(first, until, options, failures, |report| {
        failed.store(true, std::sync::atomic::Ordering::SeqCst);
        print_failure(report, options);
    });
    println!("{figures}");
    println!("first seed       {first}");
    if failed.into_inner() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn main() -> ExitCode {
    if !cfg!(tokio_unstable) {
        eprintln!(
            "built without tokio_unstable, a run cannot be repeated: start it with tests/sim/run"
        );
        return ExitCode::FAILURE;
    }
    match Args::parse().command {
        Command::Seeds { from, count, theme, failures } => {
            run_seeds(from, Until::Count(count), &Options { theme, ..Options::default() }, failures)
        }
        Command::Soak { minutes, from } => {
            let first = from.unwrap_or_else(|| rand::random::<u64>() >> 16);
            let time = Duration::try_from_secs_f64(minutes * 60.0).unwrap_or_default();
            run_seeds(first, Until::Time(time), &Options::default(), 1)
        }
        Command::Replay { seed, theme, trace } => {
            let options = Options { theme, trace, ..Options::default() };
            if trace {
                let filter = tracing_subscriber::EnvFilter::from_default_env();
                tracing_subscriber::fmt()
                    .with_env_filter(filter)
                    .with_writer(std::io::stderr)
                    .init();
            }
            let report = run(seed, &options);
            for line in &report.trace {
                println!("{line}");
            }
            let again = run(seed, &Options { trace: false, ..options.clone() });
            if again.hash != report.hash {
                println!(
                    "seed {seed}: two runs differ, {:016x} and {:016x}",
                    report.hash, again.hash
                );
                return ExitCode::FAILURE;
            }
            if !report.wrong.is_empty() {
                print_failure(&report, &options);
                return ExitCode::FAILURE;
            }
            println!(
                "seed {seed} ({:?}): well, {} events, {:016x} twice",
                report.theme, report.events, report.hash
            );
            ExitCode::SUCCESS
        }
    }
}
