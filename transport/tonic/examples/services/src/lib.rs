//! The services of the examples: the code that build.rs generates, and a handler of the simplest
//! one.

#![allow(missing_docs, unreachable_pub, reason = "most of it is generated")]

mod hello;

pub use hello::Hello;

/// `greeter.proto`, with tonic's own codec.
pub mod greeter {
    tonic::include_proto!("greeter");
}

/// `numbers.proto`, with tonic's own codec.
pub mod numbers {
    tonic::include_proto!("numbers");
}

/// `store.proto`, by tonic-rdma-build.
pub mod store {
    tonic::include_proto!("store");
}
