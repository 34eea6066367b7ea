//! The driver: one protocol connection over one fabric link, and calls on it.
//!
//! | file | what |
//! |---|---|
//! | `options` | sizes of a connection, taken from the pool |
//! | `shared` | the state behind one lock: protocol, link, landing memory, streams |
//! | `flush` | protocol to link: SENDs, WRITEs, staging |
//! | `sends` | SEND slots and staging blocks in flight |
//! | `window` | how much of WRITEs is under way |
//! | `delay` | a time that is let pass before something is done |
//! | `patience` | whether a message may land in parts |
//! | `share` | giving landing memory back to connections that wait |
//! | `stamps` | when messages came |
//! | `events` | link to protocol to streams |
//! | `drive` | the task that polls the link, keeps the timers and ends the connection |
//! | `stream` | what a call holds of a stream |
//! | `unread` | what of a received body nobody has read |
//! | `incoming` | a received body |
//! | `outgoing` | a body being sent |
//! | `headers` | http heads to and from header blocks |
//! | `heads` | heads of requests that come again |
//! | `client` | calls out |
//! | `server` | calls in |
//! | `runners` | the tasks that a server's calls run in |
//!
//! A caller works on the connection itself, under its lock, and posts what results: a call costs no
//! hop through another task on the way out. Only the driver polls the completion queue (R6).

mod beside;
mod client;
mod copies;
mod delay;
mod drive;
mod events;
mod flush;
mod headers;
mod heads;
mod incoming;
mod options;
mod outgoing;
mod patience;
mod runners;
mod sends;
mod server;
mod share;
mod shared;
mod stamps;
mod stream;
#[cfg(test)]
mod tests;
mod turns;
mod unread;
mod window;

pub(crate) use client::{Call, CallError, FastClient};
pub(crate) use headers::Origin;
pub(crate) use options::LinkOptions;
pub(crate) use server::{Accepted, serve_link};
