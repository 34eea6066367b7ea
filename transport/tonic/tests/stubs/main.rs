//! Generated code: the committed code, and the stubs from tonic-rdma-build.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod committed;
mod connect;
