//! One protocol connection over one fabric link, and the calls on it.
//!
//! | module | contents |
//! |---|---|
//! | `config` | the sizes of a connection, derived from the pool |
//! | `shared` | a connection behind its lock |
//! | `state` | the parts of a connection, and the operations that need several of them |
//! | `lifecycle` | whether the connection takes calls, and otherwise why not |
//! | `copy_scheduler` | decides when payload is copied, and when copies pause |
//! | `driver` | the task that polls the link, keeps the timers and ends the connection |
//! | `send` | from protocol to link: SENDs, WRITEs, staging |
//! | `receive` | landing memory: grants, waits and returns, and delivery to readers |
//! | `call` | the calls of both ends: streams, bodies, headers |
//! | `usage` | counters and metrics |
//! | `frame_trace` | logs every message and frame |
//!
//! A caller's task works on the connection directly, under the connection's lock, and posts the
//! resulting messages. So an outgoing call does not pass through another task. Callers' tasks do
//! not poll the completion queue (R6).

mod call;
mod config;
mod copy_scheduler;
mod driver;
mod frame_trace;
mod lifecycle;
mod receive;
mod send;
mod shared;
mod state;
#[cfg(test)]
mod tests;
pub(crate) mod usage;

pub(crate) use call::client::{Call, CallError, FastClient, Piped};
pub(crate) use call::headers::Origin;
pub(crate) use call::server::{Accepted, View, serve_connection};
pub(crate) use config::{ConnectionConfig, KeepAliveSettings};
