//! Writes RESULTS.md and the headline numbers in README.md from the runs in benches/results, and
//! the measured part of docs/scale.md from the runs in benches/results/scale.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, ensure};
use benches::scale;
use clap::Parser;

#[derive(Parser, Debug)]
#[command(version, about, long_about = None)]
struct Args {
    /// The directory of README.md, RESULTS.md and results/; docs/ is next to it
    #[arg(long, value_name = "DIRECTORY", default_value = env!("CARGO_MANIFEST_DIR"))]
    benches: PathBuf,
    /// Write nothing, and fail if a document differs from what would be generated
    #[arg(long)]
    check: bool,
}

fn main() -> ExitCode {
    benches::exit::exit("results", run(&Args::parse()))
}

fn run(args: &Args) -> anyhow::Result<()> {
    let runs = benches::results::load(&args.benches.join("results"))?;
    let of_scale = scale::document::load(&args.benches.join("results/scale"))?;
    let (readme, scale) = (args.benches.join("README.md"), args.benches.join("../docs/scale.md"));
    let read = |path: &PathBuf| {
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
    };
    let documents = [
        (args.benches.join("RESULTS.md"), benches::results::document(&runs)),
        (readme.clone(), benches::results::readme(&read(&readme)?, &runs)?),
        (scale.clone(), scale::document::document(&read(&scale)?, &of_scale)?),
    ];
    for (path, wanted) in documents {
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
