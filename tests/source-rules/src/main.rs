//! Shows what breaks the rules of the source, or, with `--known`, the list of it for
//! `tests/known/mod.rs`.

use std::process::ExitCode;

use tonic_rdma_source_rules::{Findings, files};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let known = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--known"] => true,
        _ => {
            eprintln!("usage: tonic-rdma-source-rules [--known]");
            return ExitCode::from(2);
        }
    };
    let sources = files::read(&files::root()).map_err(|error| error.to_string());
    let found = match sources.and_then(|sources| Findings::of(&sources)) {
        Ok(found) => found,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    if known {
        print!("{}", found.known());
        return ExitCode::SUCCESS;
    }
    for (_, about, findings) in found.lists() {
        println!("{about} {} in all.", findings.len());
        for finding in findings {
            println!("    {}", finding.what);
        }
    }
    for line in &found.lint_is_off {
        println!("{line}");
    }
    ExitCode::SUCCESS
}
