//! Calls over TCP, by tonic's own transport.
//!
//! | file | what |
//! |---|---|
//! | `body` | bodies of calls over TCP, for the zero-copy codec and the counters |
//! | `retry` | calls that the server never saw are sent again |

pub(crate) mod body;
pub(crate) mod retry;
