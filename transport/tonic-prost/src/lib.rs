//! In place of tonic's crate of this name, for stubs that dependencies have generated: the same
//! interface, with the codec of [tonic-rdma](https://docs.rs/tonic-rdma) behind it. Over tonic-rdma
//! those stubs do not copy `bytes` fields; over any other transport they work as before.
//!
//! ```toml
//! [patch.crates-io]
//! tonic-prost = { path = "tonic-rdma/transport/tonic-prost" } # or by git
//! ```
//!
//! Then `cargo update -p tonic-prost`, as an older `Cargo.lock` keeps tonic's. With
//! `TONIC_RDMA_TONIC_PROST=patched` in the environment the build of tonic-rdma fails where this is
//! not in effect.

pub use prost;
pub use tonic_rdma_codec::{ProstCodec, ProstDecoder, ProstEncoder};
