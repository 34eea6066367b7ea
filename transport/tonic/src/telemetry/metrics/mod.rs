//! Metrics of the transport through the [`metrics`](::metrics) facade, and [`tracing`] spans.
//!
//! [`ALL`] lists the metrics for programs, [`describe`] registers their descriptions with a
//! recorder, and [`Context::record_metrics`](crate::Context::record_metrics) records the metrics of
//! pools. The rest of this page comes from docs/metrics.md in the repository.
#![doc = include_str!("../../../docs/metrics.md")]

mod duration;
mod meter;
mod names;
mod pool;
mod record;

pub(crate) use ::metrics::Counter as RecorderCounter;
pub(crate) use duration::{CallTimer, Durations};
pub(crate) use meter::ConnectionMeter;
pub use names::{ALL, Metric, MetricKind as Kind};
pub(crate) use record::{calls, copied, payload};
pub(crate) use record::{fallback, handshake, reconnect, refused};

/// Registers the description and the unit of every metric with the installed recorder.
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
