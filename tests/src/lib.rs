//! Conformance and fault tests: what a tonic service may rely on, checked over every fabric.
//!
//! The semantic reference is tonic over TCP: a case counts only if it passes with the stock client
//! and the stock server ([`Fabric::Stock`]).
//!
//! The cases are in `conformance/`, tests of reported problems with hosts in `hosts/`, and the
//! fault tests in `faults/` and `tests/`. This library has the parts that they share:
//!
//! - [`harness`]: a server and its clients over one fabric, with the same code for stock tonic and
//!   tonic-rdma, and servers in other processes
//! - [`fabric`]: the fabrics that a case can run over, and the selection for this process
//! - [`channel`]: one type for the channels of all fabrics
//! - [`codec`]: the codec of the stubs at either end
//! - [`paths`]: the path that each call took
//! - [`probe`]: events and gates that synchronise a test with the handlers of its service
//! - [`service`]: the scripted service that the cases call, its scripts, and payload patterns
//! - [`interop`]: gRPC's interoperability cases, client and server
//! - [`load`]: concurrent calls of every kind, checked and counted, for fault tests
//! - [`offer`], [`wire`]: tickets and frames for peers that a test implements itself
//! - [`process`], [`process_resources`], [`server_process`]: child processes of a test, their
//!   system resources, and a child that serves
//!
//! [`Fabric::Stock`]: fabric::Fabric::Stock

// The crate is test code: a failed unwrap is a failed test.
#![allow(clippy::unwrap_used)]

pub mod channel;
pub mod codec;
pub mod fabric;
pub mod harness;
pub mod interop;
pub mod load;
pub mod offer;
pub mod paths;
pub mod probe;
pub mod process;
pub mod process_resources;
pub mod server_process;
pub mod service;
pub mod wire;

/// The messages and stubs generated from `proto/conformance.proto`.
#[allow(missing_docs, unreachable_pub)]
pub mod pb {
    tonic::include_proto!("tonic_rdma.conformance.v1");
}

/// The messages of Offer, for peers that a test implements itself.
#[allow(missing_docs, unreachable_pub)]
pub mod bootstrap {
    tonic::include_proto!("tonic_rdma.v1");
}
