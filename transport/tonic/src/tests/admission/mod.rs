//! Admission to the fast path, and its limits.

mod flood;
mod gateway;
mod tickets;
#[cfg(feature = "_tls-any")]
mod tls;
