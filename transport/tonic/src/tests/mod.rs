//! Endpoint, Channel and Server together: over TCP with stock tonic at either end, and over the
//! simulated fabric.

mod echo;
mod fallback;
mod fast;
mod flood;
mod gateway;
mod given_up;
mod herd;
mod interop;
mod lanes;
mod layers;
mod limits;
mod logs;
mod refused;
mod silence;
mod stacks;
mod tickets;
#[cfg(feature = "_tls-any")]
mod tls;
pub(crate) mod world;
