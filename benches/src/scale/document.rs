//! The measured part of docs/scale.md, from the runs in benches/results/scale.

use std::path::Path;

use anyhow::Context as _;

use crate::results::{between, provenance, read};
use crate::scale::record::Run;
use crate::scale::tables;

/// Start marker of the measured part. The end marker is the same as in benches/README.md.
const BEGIN: &str = "<!-- Generated from benches/results/scale/ by the program results: begin -->";

/// Reads the runs in `folder`, ordered by file name.
///
/// # Errors
/// A file cannot be read, or is not a run of `scale`.
pub fn load(folder: &Path) -> anyhow::Result<Vec<Run>> {
    Ok(read(folder)?.into_iter().map(|(_, run)| run).collect())
}

/// Inserts the tables of `runs` into the text of docs/scale.md.
///
/// # Errors
/// A marker is missing.
pub fn document(text: &str, runs: &[Run]) -> anyhow::Result<String> {
    let parts: Vec<String> = runs.iter().map(part).collect();
    between(text, BEGIN, &parts.join("\n")).context("docs/scale.md and its tables")
}

fn part(run: &Run) -> String {
    let mut out = format!("### {}\n\n", run.origin.title);
    out += &provenance(&run.origin, &run.machine, &run.notes);
    for table in tables::all(run) {
        out += &format!("\n{}:\n\n{}", table.heading, table.markdown());
    }
    let failures = run.failures();
    if !failures.is_empty() {
        out += "\nWhat failed:\n\n";
        for failure in failures {
            out += &crate::results::wrapped("- ", &failure);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scale::figure::tests::run;

    #[test]
    fn a_run_becomes_tables_with_where_it_comes_from() {
        let text = format!("# Scale\n\n{BEGIN}\nold\n<!-- Generated: end -->\n\nmore\n");
        let mut run = run();
        run.bulk[3].failure = Some("no".into());
        let text = document(&text, &[run]).unwrap();
        for line in [
            "### A run of scale",
            "scale --bulk 1,2",
            "- Commit abc1234 of 2026-11-24.",
            "- Machine: P, 2 processors, Linux 6, glibc 2, allocator: a.",
            "- 2 rounds.",
            "Clients that put messages of 1 MiB, 8 in flight each:",
            "| shm | 2 | failed |  |  |  |  |  |  |  |  |",
            "- bulk-2 shm: no",
            "more",
        ] {
            assert!(text.lines().any(|l| l == line), "{line:?} is not in:\n{text}");
        }
        assert!(!text.contains("old"));
        assert!(document("", &[]).is_err());
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let text = serde_json::to_string_pretty(&run()).unwrap();
        std::fs::write(dir.path().join("a.json"), &text).unwrap();
        let runs = load(dir.path()).unwrap();
        assert_eq!(serde_json::to_string_pretty(&runs[0]).unwrap(), text);
    }
}
