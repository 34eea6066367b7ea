//! What the transport reports: counters, metrics, spans.

pub mod metrics;
pub(crate) mod spans;
pub(crate) mod stats;
