//! A zero-copy RDMA transport for tonic: Endpoint, Channel and Server that fall back to TCP.

mod bootstrap;
mod cause;
mod channel;
mod connect_info;
mod context;
mod counting;
mod endpoint;
mod error;
mod executor;
mod grpc_timeout;
mod link;
mod path;
mod policy;
mod reason;
mod server;
mod stats;
#[cfg(test)]
mod tests;

pub use channel::{Change, Channel, ResponseFuture};
pub use connect_info::{RdmaConnectInfo, connect_info};
pub use context::{Context, ContextBuilder};
pub use endpoint::Endpoint;
pub use error::{EnvironmentError, Error, RdmaRequired};
pub use path::{Path, PathInfo};
pub use policy::{EnvError, Policy, UnknownPolicy};
pub use reason::{Reason, ReasonCode, Side};
pub use server::{Router, Server};
pub use stats::TransportStats;

pub use tonic_rdma_fabric::sim;
pub use tonic_rdma_memory::{HugePages, PinnedBuf, Pool, PoolConfig, PoolStats};

#[doc(no_inline)]
pub use tonic::transport::Uri;
#[cfg(feature = "_tls-any")]
#[doc(no_inline)]
pub use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};
