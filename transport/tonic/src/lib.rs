//! A transport for tonic that carries gRPC calls over RDMA, and over TCP where RDMA cannot be had.
//!
//! A service that runs on tonic changes its imports:
//!
//! ```
//! use tonic_rdma::{Channel, Endpoint, Server}; // was: tonic::transport::...
//! ```
//!
//! and keeps its code:
//!
//! ```no_run
//! # use tonic_rdma::{Endpoint, Server};
//! # use tonic::service::Routes;
//! # async fn serve(routes: Routes) -> Result<(), Box<dyn std::error::Error>> {
//! Server::builder().add_routes(routes).serve("[::]:50051".parse()?).await?;
//! # Ok(()) }
//! # async fn call() -> Result<(), Box<dyn std::error::Error>> {
//! let channel = Endpoint::from_static("http://10.0.0.1:50051").connect().await?;
//! // let client = GreeterClient::new(channel.clone());
//! println!("calls go by {}", channel.path());
//! # Ok(()) }
//! ```
//!
//! (The `connect` of a generated stub makes a channel of tonic's own, which is TCP only: use its
//! `new`.)
//!
//! # How the path is found
//!
//! The TCP connection comes first and stays. Over it the channel asks the server for its fast path
//! (`tonic_rdma.v1.Bootstrap/Offer`), and gets an address and a ticket that is good for one
//! connection. Whoever TLS, an interceptor or a layer keeps out of the TCP port gets no ticket, and
//! nobody enters by the RDMA port without one. The client has to be at the other end of that TCP
//! connection itself: [behind a gateway](ReasonCode::ThroughGateway) calls stay on TCP. On TCP it
//! is plain gRPC: stock clients and servers work with either end.
//!
//! | | until the fast path is up | where it cannot be had | when it is lost |
//! |---|---|---|---|
//! | [`Endpoint::connect`] | waits, [one second](Endpoint::fast_path_timeout) at most | TCP | TCP, and back when it is up again |
//! | [`Endpoint::connect_lazy`] | TCP | TCP | TCP, and back when it is up again |
//! | with [`Endpoint::require_rdma`] | waits | an error with the [`Reason`] | UNAVAILABLE until it is up again |
//!
//! A call that was in flight on a lost connection ends with UNAVAILABLE. One of which nothing was
//! transmitted goes over TCP without the caller noticing.
//!
//! # Why TCP
//!
//! Never silently: each decision for TCP has a [`ReasonCode`], is logged once, with its cure, and
//! can be asked for with [`Channel::path`]. A handler learns by [`connect_info`] which path a
//! request came by.
//!
//! # Environment
//!
//! | variable | values | effect |
//! |---|---|---|
//! | `TONIC_RDMA` | `auto`, `off`, `require` | in place of the [`Policy`] set in code |
//! | | `shm`, `verbs` | these [fabrics](FabricKind) and no others, best first; with commas, also beside a policy |
//! | `TONIC_RDMA_DEVICE` | a device's name, as `rdma link` shows it | no other device is used |
//!
//! Both are read whenever an endpoint connects and when a server starts. A bad value is an error
//! that names variable, value and what is allowed; an empty one counts as not set.
//! [`check_environment`] looks beforehand.
//!
//! # Map
//!
//! | module | what |
//! |---|---|
//! | [`codec`] | protobuf without copying |
//! | [`metrics`], `spans` | counters, gauges and histograms for a recorder; spans of connections and calls |
//! | [`mod@diagnose`] | what is in the way of RDMA, and how to mend it |
//!
//! # Features
//!
//! | feature | what |
//! |---|---|
//! | `verbs` (default) | RDMA through rdma-core, which is loaded at run time; building needs cmake and libclang |
//! | `serde` | what [`diagnose()`] finds out can be serialized |
//! | `tls-ring`, `tls-aws-lc` | TLS on the TCP side, as tonic's features of these names |
//! | `tls-native-roots`, `tls-webpki-roots` | root certificates, as tonic's features of these names |

#![forbid(unsafe_code)]

mod bootstrap;
mod boxed_body;
mod channel;
pub mod codec;
mod connect_info;
mod connection;
mod context;
pub mod diagnose;
mod endpoint;
mod error;
mod executor;
mod fifo;
mod grpc_timeout;
mod path;
mod server;
mod tcp;
mod telemetry;
#[cfg(test)]
mod tests;

pub use channel::{Change, Channel, ResponseFuture};
pub use connect_info::{RdmaConnectInfo, connect_info, pool};
pub use context::{Context, ContextBuilder};
#[doc(inline)]
pub use diagnose::{Diagnosis, diagnose};
pub use endpoint::Endpoint;
pub use error::{EnvironmentError, Error, RdmaRequired};
pub use path::policy::{EnvError, FabricKind, Policy, UnknownPolicy, check_environment};
pub use path::reason::{Reason, ReasonCode, Side};
pub use path::{Path, PathInfo};
pub use server::{Router, Server};
pub use telemetry::metrics;
pub use telemetry::stats::{Copied, ServerStats, TransportStats};
#[doc(no_inline)]
pub use tonic::transport::Uri;
#[cfg(feature = "_tls-any")]
#[doc(no_inline)]
pub use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};
pub use tonic_rdma_fabric::ShmAccess;
/// The simulated fabric, for tests of programs that use this crate: see
/// [`ContextBuilder::sim`].
#[doc(no_inline)]
pub use tonic_rdma_fabric::sim;
pub use tonic_rdma_memory::{HugePages, PinnedBuf, Pool, PoolConfig, PoolStats};

/// The snippets of the documents are compiled and run with those of the code.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../../README.md")]
    mod readme {}
    #[doc = include_str!("../../../docs/guide.md")]
    mod guide {}
    #[doc = include_str!("../../../docs/zero-copy.md")]
    mod zero_copy {}
}
