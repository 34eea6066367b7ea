//! A zero-copy RDMA transport for tonic: Endpoint, Channel and Server that fall back to TCP.

mod channel;
mod connect_info;
mod counting;
mod endpoint;
mod error;
mod executor;
mod grpc_timeout;
mod path;
mod policy;
mod reason;
mod server;
mod stats;

pub use channel::{Channel, ResponseFuture};
pub use connect_info::{RdmaConnectInfo, connect_info};
pub use endpoint::Endpoint;
pub use error::{EnvironmentError, Error, RdmaRequired};
pub use path::{Path, PathInfo};
pub use policy::{EnvError, Policy, UnknownPolicy};
pub use reason::{Reason, ReasonCode, Side};
pub use server::{Router, Server};
pub use stats::TransportStats;

#[doc(no_inline)]
pub use tonic::transport::Uri;
#[cfg(feature = "_tls-any")]
#[doc(no_inline)]
pub use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};
