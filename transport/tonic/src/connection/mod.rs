//! One protocol connection over one fabric link, and the calls on it.
//!
//! | room | what |
//! |---|---|
//! | `config` | sizes of a connection, taken from the pool |
//! | `shared` | a connection behind its lock |
//! | `state` | the parts of a connection, and what takes several of them |
//! | `lifecycle` | whether it takes calls, and why not |
//! | `copy_scheduler` | decides when payload is copied, and when copies pause |
//! | `driver` | the task that polls the link, keeps the timers and ends the connection |
//! | `send` | protocol to link: SENDs, WRITEs, staging |
//! | `receive` | landing memory: granted, waited for, given back; delivery to readers |
//! | `call` | calls out and in: streams, bodies, headers |
//! | `tasks` | the tasks that a connection wakes, and the work that they are charged for |
//! | `usage` | what the connection counts and reports |
//! | `frame_trace` | what goes over the wire, in the log |
//! | `delay` | a delay before an action, once |
//!
//! A caller works on the connection itself, under its lock, and posts what results: a call costs no
//! hop through another task on the way out. Only the driver polls the completion queue (R6).

mod call;
mod config;
mod copy_scheduler;
mod delay;
mod driver;
mod frame_trace;
mod lifecycle;
mod receive;
mod send;
mod shared;
mod state;
mod tasks;
#[cfg(test)]
mod tests;
mod usage;

pub(crate) use call::client::{Call, CallError, FastClient, Piped};
pub(crate) use call::headers::Origin;
pub(crate) use call::server::{Accepted, serve_connection};
pub(crate) use config::{ConnectionConfig, KeepAliveSettings};
