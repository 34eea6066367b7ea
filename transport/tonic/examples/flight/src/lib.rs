//! Arrow Flight over tonic-rdma: record batches are decoded where they landed.
//!
//! The message types come from the arrow-flight crate. The stubs of arrow-flight use tonic's codec,
//! which copies each message. The stubs of this crate ([`flight_service_client`],
//! [`flight_service_server`]) use [`tonic_rdma::codec::ProstCodec`]. Everything else of
//! arrow-flight works unchanged: a service that implements arrow-flight's `FlightService` can be
//! served, arrow-flight's decoder reads received messages, and clients and servers of both kinds
//! interoperate.
//!
//! docs/flight.md says what is copied when, and which peers to trust.

pub mod decode;
pub mod encode;
mod service;
pub mod tables;

/// The generated stubs.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
mod stubs {
    include!(concat!(env!("OUT_DIR"), "/arrow.flight.protocol.FlightService.rs"));
}

/// Compiles the snippets of the document as doctests.
#[cfg(doctest)]
#[doc = include_str!("../../../../../docs/flight.md")]
mod document {}

pub use stubs::{flight_service_client, flight_service_server};
