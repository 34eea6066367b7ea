//! Stubs for tonic-rdma, generated in `build.rs`.
//!
//! tonic-prost-build does the work, and this crate changes three of its choices. The stubs use
//! `tonic_rdma::codec::ProstCodec`, which does not copy `bytes` fields. These fields have the type
//! `Bytes`. The clients' `connect` makes a `tonic_rdma::Channel`, whereas the `connect` of
//! tonic-prost-build makes a channel that uses only TCP. [`Builder`] has the methods of
//! [`tonic_prost_build::Builder`], which set all other choices.
//!
//! ```no_run
//! fn main() -> std::io::Result<()> {
//!     tonic_rdma_build::compile_protos("proto/service.proto")
//! }
//! ```
//!
//! The generated code uses the crates `tonic`, `prost` and `tonic_rdma`, so a package that includes
//! it must depend on them.

mod builder;

use std::io;
use std::path::Path;

pub use builder::Builder;

/// The codec of generated stubs, unless [`Builder::codec_path`] names another.
const CODEC: &str = "tonic_rdma::codec::ProstCodec";

/// A builder with the defaults of this crate.
pub fn configure() -> Builder {
    Builder::from(tonic_prost_build::configure())
}

/// Generates the stubs of one `.proto` file into `OUT_DIR`. The file may import files from its own
/// folder.
///
/// # Errors
/// Protoc is missing or refuses the file. [`compile_fds`] needs no protoc.
pub fn compile_protos(proto: impl AsRef<Path>) -> io::Result<()> {
    let proto = proto.as_ref();
    // As in tonic-prost-build, an empty parent is the current folder.
    let folder = match proto.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    configure().compile_protos(&[proto], &[folder])
}

/// Generates the stubs of descriptors into `OUT_DIR`. Descriptors come for example from protox,
/// which compiles `.proto` files without protoc.
///
/// # Errors
/// The code cannot be generated or written.
pub fn compile_fds(fds: prost_types::FileDescriptorSet) -> io::Result<()> {
    configure().compile_fds(fds)
}
