//! Arrow Flight over tonic-rdma: record batches are decoded where they landed.
//!
//! The message types are those of the arrow-flight crate. Its stubs name tonic's codec, which
//! copies each message; the stubs of this crate ([`flight_service_client`],
//! [`flight_service_server`]) name [`tonic_rdma::codec::ProstCodec`]. Everything else of
//! arrow-flight fits: services that implement its `FlightService` are served as they are, its
//! decoder reads what arrives, and a client or server of either kind talks to the other kind.
//!
//! docs/flight.md says what is copied when, and whom to trust.

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
