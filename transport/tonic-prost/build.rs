//! Tells tonic-rdma's build script that this crate replaces tonic's, and which version's codec it
//! has.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::metadata=of_tonic_rdma=0.1.0");
}
