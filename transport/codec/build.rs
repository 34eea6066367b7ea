//! Does nothing: cargo wants a build script where there is `links`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
