//! Who gets in by the fast path, and how many.

mod flood;
mod gateway;
mod tickets;
#[cfg(feature = "_tls-any")]
mod tls;
