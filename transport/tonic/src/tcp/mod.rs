//! Calls over TCP, through tonic's own transport.
//!
//! | file | what |
//! |---|---|
//! | `client` | state that a channel's calls over TCP share |
//! | `connector` | the TCP connection, and its local address |
//! | `body` | bodies of calls over TCP, for the zero-copy codec and the counters |
//! | `named` | replies that fill a [caller's buffer](crate::LandIn) |
//! | `retry` | sends calls again that the server never saw |
//! | `reused_tasks` | the tasks of the HTTP/2 connection |

pub(crate) mod body;
pub(crate) mod client;
pub(crate) mod connector;
pub(crate) mod named;
pub(crate) mod retry;
pub(crate) mod reused_tasks;
