//! Peers and calls that end early, and the effect on other calls.

mod cancelled_call;
mod dead_peer_timeout;
#[cfg(feature = "shm")]
mod graceful_end;
mod reconnect_storm;
mod refused_stream;
