//! Metrics of the transport through the [`metrics`](::metrics) facade, and [`tracing`] spans.
//!
//! [`ALL`] lists the metrics for programs, [`describe`] registers their descriptions with a
//! recorder, and [`Context::record_metrics`](crate::Context::record_metrics) records the metrics of
//! pools. The rest of this page comes from docs/metrics.md in the repository.
#![doc = include_str!("../../../docs/metrics.md")]

mod duration;
mod meter;
mod names;
mod record;

use ::metrics::{counter, gauge};
use tonic_rdma_memory::PoolStats;

use crate::Context;
use crate::telemetry::metrics::names::{POOL_BYTES, POOL_REGISTRATIONS, POOL_WAITS};

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

impl Context {
    /// Records the metrics of this context's pools with the [`metrics`](::metrics) facade:
    /// `tonic_rdma_pool_bytes`, `tonic_rdma_pool_registrations_total` and
    /// `tonic_rdma_pool_waits_total` ([list of metrics](crate::metrics)). Call this method before
    /// each scrape, or periodically.
    ///
    /// Contexts that share a device also share the device's series, so record only one of these
    /// contexts.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, some metrics are not recorded. The method can be called again.
    pub async fn record_metrics(&self) {
        for (device, stats) in self.pool_stats().await {
            for (state, bytes) in states(&stats) {
                gauge!(POOL_BYTES, "device" => device.clone(), "state" => state).set(bytes as f64);
            }
            counter!(POOL_REGISTRATIONS, "device" => device.clone()).absolute(stats.registrations);
            counter!(POOL_WAITS, "device" => device).absolute(stats.waits);
        }
    }
}

/// Splits the registered bytes by their current use.
fn states(stats: &PoolStats) -> [(&'static str, usize); 7] {
    let landed = stats.granted + stats.filled;
    // The values are read one by one while they change, so the difference must not underflow.
    let leased = stats.leased.saturating_sub(landed);
    let free = stats.registered.saturating_sub(stats.send + stats.control + landed + leased);
    [
        ("send", stats.send),
        ("control", stats.control),
        ("granted", stats.granted),
        ("filled", stats.filled),
        ("leased", leased),
        ("free", free),
        ("application", stats.application),
    ]
}

#[cfg(test)]
mod tests {
    use tonic_rdma_memory::{HeapRegistrar, Pool, PoolConfig};

    use super::*;

    #[tokio::test]
    async fn states_add_up_to_what_is_registered() {
        let pool = Pool::new(PoolConfig::default(), std::sync::Arc::new(HeapRegistrar::default()))
            .unwrap();
        let control = pool.control(100 << 10).unwrap();
        let buffer = pool.alloc(5000).await.unwrap();
        let mut landing = pool.landing();
        let granted = landing.alloc(64 << 10, 1).unwrap().unwrap();
        let filled = landing.alloc(64 << 10, 1).unwrap().unwrap().filled(1000);
        let of = |stats: &PoolStats, wanted| {
            states(stats)
                .into_iter()
                .find_map(|(state, bytes)| (state == wanted).then_some(bytes))
                .unwrap()
        };
        let stats = pool.stats();
        for state in ["send", "control", "granted", "filled", "leased"] {
            assert!(of(&stats, state) > 0, "{state} in {stats:?}");
        }
        let own = pool.register(vec![0; 777].into()).unwrap();
        assert_eq!(of(&pool.stats(), "application"), 777, "apart from the pool's own memory");
        drop(own);
        assert_eq!(states(&stats).iter().map(|(_, bytes)| bytes).sum::<usize>(), stats.registered);
        drop((control, buffer, granted, filled, landing));
        let stats = pool.stats();
        assert_eq!(states(&stats).iter().map(|(_, bytes)| bytes).sum::<usize>(), stats.registered);
        assert_eq!(of(&stats, "free"), stats.registered);
    }
}
