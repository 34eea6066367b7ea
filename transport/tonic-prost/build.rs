//! Tells the build script of tonic-rdma that this stands in place of tonic's crate, and whose codec
//! it has.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::metadata=of_tonic_rdma=0.1.0");
}
