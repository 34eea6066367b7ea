//! Generated code: what is committed, and what tonic-rdma-build's stubs do.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod committed;
mod connect;
