//! The server, with the names of [`tonic::transport::server`]: builder, router, and descriptions of
//! a request's connection.
//!
//! A request over the fast path has the connect info of the TCP connection over which its client
//! asked for the fast path. So [`TcpConnectInfo`] and similar types are in the extensions on both
//! paths. [`connect_info`](crate::connect_info()) returns the path of a request.

// | file | what |
// |---|---|
// | `builder` | the builder, and its methods that apply to both paths |
// | `tcp` | builder methods of the TCP side |
// | `router` | services, and the ways to serve them |
// | `direct` | serves one service without a router |
// | `offer_route` | adds the Offer to a service without a router |
// | `serve` | serves both paths, from start to shutdown |
// | `fast_path` | listeners, tickets and admitted connections, for calls or for measurements without calls |
// | `observer` | shows connections to an operator |
// | `incoming` | TCP connections: limits, and a shutdown that loses no calls |
// | `stack` | the limits around the layered service on the fast path |

mod builder;
mod direct;
pub(crate) mod fast_path;
mod incoming;
mod observer;
mod offer_route;
mod router;
mod serve;
mod stack;
mod tcp;

pub use builder::Server;
#[cfg(feature = "diagnose")]
pub(crate) use fast_path::admission::{DESCRIPTORS, MAX_CONNECTIONS};
pub use observer::ServerObserver;
pub use offer_route::{OfferRoute, OfferRouteFuture, is_offer};
pub use router::Router;
#[cfg(unix)]
#[doc(no_inline)]
pub use tonic::transport::server::UdsConnectInfo;
#[doc(no_inline)]
pub use tonic::transport::server::{Connected, TcpConnectInfo, TcpIncoming};
#[cfg(feature = "_tls-any")]
#[cfg_attr(docsrs, doc(cfg(any(feature = "tls-ring", feature = "tls-aws-lc"))))]
#[doc(no_inline)]
pub use tonic::transport::server::{ServerTlsConfig, TlsConnectInfo};
