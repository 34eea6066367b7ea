//! Shows what breaks the rules of the source, in all files or only below one path. With `--known`
//! or `--wording` it prints the content of the file in `tests/known/` instead.

use std::process::ExitCode;

use tonic_rdma_source_rules::{Findings, files, wording};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let below = match &arguments[..] {
        [] => "",
        [only] if only == "--known" || only == "--wording" || !only.starts_with('-') => only,
        _ => {
            eprintln!("usage: tonic-rdma-source-rules [--known | --wording | PATH]");
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
    match below {
        "--known" => print!("{}", found.known()),
        "--wording" => print!("{}", wording::write_list(&found.wording_counts())),
        below => show(&found, below),
    }
    ExitCode::SUCCESS
}

/// Prints the findings in files whose path begins with `below`.
fn show(found: &Findings, below: &str) {
    let wordings = ("", "Wordings to avoid.", &found.wordings[..]);
    for (_, about, findings) in found.lists().into_iter().chain([wordings]) {
        let findings: Vec<_> = findings.iter().filter(|f| f.path.starts_with(below)).collect();
        println!("{about} {} in all.", findings.len());
        for finding in findings {
            println!("    {}", finding.what);
        }
    }
    for line in &found.lint_is_off {
        println!("{line}");
    }
}
