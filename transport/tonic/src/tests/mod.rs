//! Endpoint, Channel and Server together: over TCP with stock tonic at either end, and over the
//! simulated fabric.

#[cfg(feature = "shm")]
mod clean_end;
mod echo;
mod fallback;
mod fast;
mod flood;
mod gateway;
mod given_up;
mod interop;
mod layers;
mod limits;
mod logs;
#[cfg(feature = "shm")]
mod other_user;
mod reconnect_storm;
mod refused;
mod shards;
mod silence;
mod stacks;
mod tickets;
#[cfg(feature = "_tls-any")]
mod tls;
pub(crate) mod world;
