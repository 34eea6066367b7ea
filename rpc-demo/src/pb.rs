//! Messages and stubs generated from `proto/rpc_demo/v1/store.proto`.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, clippy::all)]

tonic::include_proto!("rpc_demo.v1");
