//! The gRPC service `tonic_rdma.v1.Bootstrap`. A client finds the fast path by calling the method
//! Offer over TCP. The method Probe serves a diagnosis.
//!
//! | file | what |
//! |---|---|
//! | `tickets` | the one-time tickets that a server has issued |
//! | `service` | the server's side of both calls |
//! | `limited` | the service, with limits on Offers: length, number, unread answers |
//! | `client` | the client's side of the Offer |
//! | `connection` | the Offer's TCP connection: identity, limits, signs of a gateway |
//! | `capture` | records the connection before the user's layers run |
//! | `gateways` | whether an Offer came directly or through an HTTP gateway |
//! | `stock_calls` | programs that use the fast path and also call over tonic's own channel |
//! | `generated` | generated from `proto/tonic_rdma/v1/bootstrap.proto` |

pub(crate) mod capture;
pub(crate) mod client;
pub(crate) mod connection;
pub(crate) mod gateways;
pub(crate) mod limited;
pub(crate) mod service;
pub(crate) mod stock_calls;
pub(crate) mod tickets;

/// The path of the Offer call.
pub(crate) const OFFER_PATH: &str = "/tonic_rdma.v1.Bootstrap/Offer";

/// Generated messages, client and server.
#[allow(missing_docs, unreachable_pub, dead_code, clippy::all)]
pub(crate) mod pb {
    include!("generated/tonic_rdma.v1.rs");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_is_that_of_the_generated_service() {
        assert_eq!(OFFER_PATH, format!("/{}/Offer", pb::bootstrap_server::SERVICE_NAME));
    }
}
