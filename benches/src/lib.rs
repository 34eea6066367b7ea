//! Benchmarks and side-by-side comparisons.
//!
//! `ratio` compares tonic-rdma with stock tonic over TCP in one run; figures of different runs say
//! little on a shared machine.
//!
//! - [`service`]: what is called, and the servers that both contenders run
//! - [`measure`]: one round of latency or throughput over a client
//! - [`summary`]: medians and ratios

pub mod measure;
pub mod service;
pub mod summary;

/// The messages and stubs generated from `proto/bench.proto`.
#[allow(missing_docs, unreachable_pub)]
pub mod pb {
    tonic::include_proto!("tonic_rdma.bench.v1");
}
