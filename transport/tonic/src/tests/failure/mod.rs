//! Peers and calls that end early, and the effect on other calls.

mod cancelled_call;
#[cfg(feature = "shm")]
mod graceful_end;
mod reconnect_storm;
mod refused_stream;
mod silence;
