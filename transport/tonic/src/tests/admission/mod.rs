//! Admission to the fast path, and its limits.

mod bare;
mod documented;
#[cfg(feature = "shm")]
mod endless_measurement;
mod flood;
mod gateway;
mod log_lines;
mod offer_bytes;
mod offers;
mod tickets;
#[cfg(feature = "_tls-any")]
mod tls;
