//! RESULTS.md and the headline numbers match the recorded runs.

use std::process::Command;

#[test]
fn the_documents_are_up_to_date() {
    let out = Command::new(env!("CARGO_BIN_EXE_results")).arg("--check").output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}
