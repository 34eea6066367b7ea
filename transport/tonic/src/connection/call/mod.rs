//! The calls on a connection.
//!
//! | file | what |
//! |---|---|
//! | `client` | calls that this end makes |
//! | `server` | calls that the peer makes |
//! | `task_pool` | the tasks that a server's calls run in |
//! | `response` | sends the answer to a call |
//! | `stream` | a call's handle to its stream |
//! | `stream_io` | the state of a stream, as the connection keeps it |
//! | `streams` | the streams of a connection, and delivery to them |
//! | `send_body` | a body that is sent |
//! | `recv_body` | a body that is received |
//! | `headers` | converts http heads to and from header blocks |
//! | `header_cache` | decoded heads of requests that repeat |

pub(super) mod client;
mod header_cache;
pub(super) mod headers;
mod recv_body;
mod response;
mod send_body;
pub(super) mod server;
pub(super) mod stream;
pub(super) mod stream_io;
pub(super) mod streams;
mod task_pool;
