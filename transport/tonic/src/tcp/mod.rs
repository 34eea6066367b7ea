//! Calls over TCP, by tonic's own transport.
//!
//! | file | what |
//! |---|---|
//! | `client` | state shared by a channel's calls over TCP |
//! | `connector` | the TCP connection, and its local address |
//! | `body` | bodies of calls over TCP, for the zero-copy codec and the counters |
//! | `named` | replies that fill a [buffer of the caller](crate::LandIn) |
//! | `retry` | calls that the server never saw are sent again |
//! | `reused_tasks` | the tasks of the HTTP/2 connection |

pub(crate) mod body;
pub(crate) mod client;
pub(crate) mod connector;
pub(crate) mod named;
pub(crate) mod retry;
pub(crate) mod reused_tasks;
