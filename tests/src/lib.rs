//! Conformance suite: what a tonic service may rely on, checked over every fabric.
//!
//! The semantic reference is tonic over TCP: each case passes with the stock client and the
//! stock server ([`Fabric::Stock`]) before it says anything about tonic-rdma.
//!
//! - [`fabric`]: the fabrics a case can run over, and which of them this process runs
//! - [`harness`]: a server and its clients over one fabric, with the same text for stock and
//!   tonic-rdma
//! - [`channel`]: one type for the channels of every fabric
//! - [`codec`]: the codec of the stubs at either end
//! - [`remote`]: a server in a process of its own
//! - [`paths`]: which path each call took
//! - [`service`]: the scripted service that the cases call
//! - [`script`]: builders for its scripts
//! - [`probe`]: events and gates by which a test and the handlers in the same process meet
//! - [`pattern`]: payload bytes that tell when something is lost, moved or repeated
//! - [`cases`]: the cases, one module per idea
//! - [`load`]: calls of every kind at once, checked and counted, for tests of faults
//! - [`offer`]: tickets for peers that a test makes up itself
//! - [`process_resources`], [`process`], [`server`]: what a process holds, processes of a test's own program,
//!   and one that serves
//! - [`runner`]: runs the cases as tests, with a limit on how long one may hang
//!
//! [`Fabric::Stock`]: fabric::Fabric::Stock

// The crate is test code: a failed unwrap is a failed test.
#![allow(clippy::unwrap_used)]

#[macro_use]
mod macros;

pub mod cases;
pub mod channel;
pub mod codec;
pub mod fabric;
pub mod harness;
pub mod load;
pub mod offer;
pub mod paths;
pub mod pattern;
pub mod probe;
pub mod process;
pub mod process_resources;
pub mod remote;
pub mod runner;
pub mod script;
pub mod server;
pub mod service;

/// The messages and stubs generated from `proto/conformance.proto`.
#[allow(missing_docs, unreachable_pub)]
pub mod pb {
    tonic::include_proto!("tonic_rdma.conformance.v1");
}

/// The Offer, for peers that a test makes up itself.
#[allow(missing_docs, unreachable_pub)]
pub mod bootstrap {
    tonic::include_proto!("tonic_rdma.v1");
}
