//! Endpoint, Channel and Server together: over TCP with stock tonic at either end, and over the
//! simulated fabric.

mod admission;
mod failure;
mod layers;
mod path;
pub(crate) mod support;
