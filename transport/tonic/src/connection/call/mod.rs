//! Calls of a connection.
//!
//! | file | what |
//! |---|---|
//! | `client` | calls out |
//! | `server` | calls in |
//! | `task_pool` | the tasks that a server's calls run in |
//! | `stream` | a call's handle of its stream |
//! | `send_body` | a body that is sent |
//! | `recv_body` | a body that is received |
//! | `headers` | http heads to and from header blocks |
//! | `header_cache` | heads of requests that repeat |

pub(in crate::connection) mod client;
mod header_cache;
pub(in crate::connection) mod headers;
mod recv_body;
mod send_body;
pub(in crate::connection) mod server;
pub(in crate::connection) mod stream;
mod task_pool;
