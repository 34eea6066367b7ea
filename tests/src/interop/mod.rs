//! gRPC's interoperability tests, by the names and with the numbers of [their description], which
//! the implementations of all languages have in common.
//!
//! [their description]: https://github.com/grpc/grpc/blob/master/doc/interop-test-descriptions.md

pub mod cases;
pub mod server;

/// The messages and stubs generated from `proto/testing.proto`.
#[allow(missing_docs, unreachable_pub)]
pub mod pb {
    tonic::include_proto!("grpc.testing");
}

/// Metadata that a server sends back, as initial and as trailing metadata.
const ECHO_INITIAL: &str = "x-grpc-test-echo-initial";
const ECHO_TRAILING: &str = "x-grpc-test-echo-trailing-bin";
