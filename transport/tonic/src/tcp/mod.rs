//! Calls over TCP, by tonic's own transport.
//!
//! | file | what |
//! |---|---|
//! | `client` | state shared by a channel's calls over TCP |
//! | `connector` | the TCP connection, and its local address |
//! | `body` | bodies of calls over TCP, for the zero-copy codec and the counters |
//! | `retry` | transparent retry of calls that the server has not processed |

pub(crate) mod body;
pub(crate) mod client;
pub(crate) mod connector;
pub(crate) mod retry;
