//! Finds out which tonic-prost this program has: tonic's, or the replacement in
//! transport/tonic-prost.

use std::env;

/// Set by the replacement, to the version of tonic-rdma that it belongs to.
const OF: &str = "DEP_TONIC_PROST_OF_TONIC_RDMA";
/// A user sets this to `patched` to make the build fail if tonic-prost is tonic's.
const WANTED: &str = "TONIC_RDMA_TONIC_PROST";

const PATCH: &str = "in the Cargo.toml of the workspace write [patch.crates-io] tonic-prost = { path or git of tonic-rdma's transport/tonic-prost }, and run: cargo update -p tonic-prost";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={WANTED}");
    let ours = env!("CARGO_PKG_VERSION");
    let of = env::var(OF).ok();
    match env::var(WANTED).as_deref() {
        Err(env::VarError::NotPresent) => {}
        Ok("patched") if of.is_some() => {}
        Ok("patched") => println!(
            "cargo::error={WANTED}=patched, but the tonic-prost of this program is tonic's, with which stubs copy: {PATCH}"
        ),
        other => println!("cargo::error={WANTED}: {other:?}; it takes patched, or is not set"),
    }
    if let Some(of) = of.filter(|of| of != ours) {
        println!(
            "cargo::error=tonic-prost is patched by that of tonic-rdma {of}, and this is tonic-rdma {ours}: take both from one release; {PATCH}"
        );
    }
}
