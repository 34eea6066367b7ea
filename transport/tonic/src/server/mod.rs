//! The server: builder and router with the names of [`tonic::transport::Server`].
//!
//! | file | what |
//! |---|---|
//! | `builder` | the builder, and its methods that concern both paths |
//! | `tcp` | builder methods of the TCP side |
//! | `settings` | what the builder has collected |
//! | `router` | services, and the ways to serve them |
//! | `serve` | both paths side by side, from start to shutdown |
//! | `fast_path` | where the server listens, tickets, and the connections they let in |
//! | `listeners` | the listeners of one path |
//! | `incoming` | TCP connections: limits, and an end without losses |
//! | `stack` | what stands around the layered service on the fast path |

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
