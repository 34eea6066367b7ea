//! Peers and calls that end early, and what becomes of the others.

mod cancelled_call;
mod dead_peer_timeout;
#[cfg(feature = "shm")]
mod graceful_end;
mod reconnect_storm;
mod refused_stream;
