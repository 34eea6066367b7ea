//! The server: builder and router with the names of [`tonic::transport::Server`].
//!
//! | file | what |
//! |---|---|
//! | `builder` | the builder, and its methods that apply to both paths |
//! | `tcp` | builder methods of the TCP side |
//! | `settings` | the builder's settings |
//! | `router` | services, and the ways to serve them |
//! | `serve` | serves both paths, from start to shutdown |
//! | `fast_path` | listeners, tickets, and the connections that they admit |
//! | `listeners` | the listeners of one path |
//! | `incoming` | TCP connections: limits, and a shutdown that loses no calls |
//! | `stack` | the limits around the layered service on the fast path |

mod builder;
mod fast_path;
mod incoming;
mod listeners;
mod router;
mod serve;
mod settings;
mod stack;
mod tcp;

pub use builder::Server;
pub use router::Router;
pub(crate) use settings::{DESCRIPTORS, MAX_CONNECTIONS};
