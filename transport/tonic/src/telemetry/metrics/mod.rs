//! What the transport tells through the [`metrics`](::metrics) facade, and by [`tracing`] spans.
//!
//! [`ALL`] is the list of metrics for programs, [`describe`] hands it to a recorder, and
//! [`Context::record_metrics`](crate::Context::record_metrics) records what belongs to pools. What
//! follows is also docs/metrics.md of the repository.
#![doc = include_str!("../../../../../docs/metrics.md")]

mod meter;
mod names;
mod pool;
pub(in crate::telemetry) mod record;

pub(crate) use meter::ConnectionMeter;
pub use names::{ALL, Kind, Metric};
pub(crate) use record::{fallback, handshake, reconnect, refused, role};

/// Hands the description and the unit of every metric to the recorder that is installed.
pub fn describe() {
    ::metrics::with_recorder(|recorder| {
        for Metric { name, kind, unit, help, .. } in ALL {
            let (name, help) = ((*name).into(), (*help).into());
            match kind {
                Kind::Counter => recorder.describe_counter(name, *unit, help),
                Kind::Gauge => recorder.describe_gauge(name, *unit, help),
                Kind::Histogram => recorder.describe_histogram(name, *unit, help),
            }
        }
    });
}
