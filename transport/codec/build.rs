//! Does nothing, but cargo requires a build script for `links`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
