//! gRPC's interoperability tests, with the names and numbers of [their description], which all
//! languages' implementations share.
//!
//! [their description]: https://github.com/grpc/grpc/blob/master/doc/interop-test-descriptions.md

pub mod cases;
pub mod server;

/// The messages and stubs generated from `proto/testing.proto`.
#[allow(missing_docs, unreachable_pub)]
pub mod pb {
    tonic::include_proto!("grpc.testing");
}

/// Metadata that a server echoes, as initial and as trailing metadata.
const ECHO_INITIAL: &str = "x-grpc-test-echo-initial";
const ECHO_TRAILING: &str = "x-grpc-test-echo-trailing-bin";
