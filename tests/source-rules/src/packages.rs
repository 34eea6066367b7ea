//! Finds the source of a package in Cargo.lock, for tests that compare code with that source.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder `src` of the package, in the version of Cargo.lock.
///
/// # Panics
/// If cargo knows no such package.
#[must_use]
pub fn source_of(package: &str) -> PathBuf {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let metadata = Command::new(cargo)
        .args(["metadata", "--format-version=1", "--locked"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(metadata.status.success(), "{}", String::from_utf8_lossy(&metadata.stderr));
    let metadata: serde_json::Value =
        serde_json::from_slice(&metadata.stdout).expect("cargo metadata prints JSON");
    let manifest = metadata["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|found| found["name"] == package)
        .and_then(|found| found["manifest_path"].as_str());
    let manifest = manifest.unwrap_or_else(|| panic!("{package} is not in Cargo.lock"));
    Path::new(manifest).with_file_name("src")
}
