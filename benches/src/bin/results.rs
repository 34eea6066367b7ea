//! Writes RESULTS.md and the headline numbers in README.md from the runs in benches/results.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, ensure};
use clap::Parser;

#[derive(Parser, Debug)]
#[command(version, about, long_about = None)]
struct Args {
    /// Where README.md, RESULTS.md and results/ are
    #[arg(long, value_name = "DIRECTORY", default_value = env!("CARGO_MANIFEST_DIR"))]
    benches: PathBuf,
    /// Write nothing; fail when a document is not what the runs make it
    #[arg(long)]
    check: bool,
}

fn main() -> ExitCode {
    benches::exit::exit("results", run(&Args::parse()))
}

fn run(args: &Args) -> anyhow::Result<()> {
    let runs = benches::results::load(&args.benches.join("results"))?;
    let (readme, results) = (args.benches.join("README.md"), args.benches.join("RESULTS.md"));
    let cannot_read = || format!("cannot read {}", readme.display());
    let text =
        benches::results::readme(&fs::read_to_string(&readme).with_context(cannot_read)?, &runs)?;
    for (path, wanted) in [(readme, text), (results, benches::results::document(&runs))] {
        if fs::read_to_string(&path).is_ok_and(|is| is == wanted) {
            continue;
        }
        ensure!(
            !args.check,
            "{} is out of date: cargo run -p benches --bin results",
            path.display()
        );
        fs::write(&path, wanted).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
