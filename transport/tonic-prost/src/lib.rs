//! A replacement for tonic's crate of this name, for stubs that dependencies have generated. The
//! replacement has the same interface, with the codec of [tonic-rdma](https://docs.rs/tonic-rdma).
//! Over tonic-rdma those stubs do not copy `bytes` fields. Over any other transport they work as
//! before.
//!
//! ```toml
//! [patch.crates-io]
//! tonic-prost = { path = "tonic-rdma/transport/tonic-prost" } # or by git
//! ```
//!
//! Then run `cargo update -p tonic-prost`, because an older `Cargo.lock` keeps tonic's crate. With
//! `TONIC_RDMA_TONIC_PROST=patched` in the environment, the build of tonic-rdma fails if this crate
//! is not used.

pub use prost;
pub use tonic_rdma_codec::{ProstCodec, ProstDecoder, ProstEncoder};
