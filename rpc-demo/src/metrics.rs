//! The metrics endpoint of a server, which serves the transport's metrics in Prometheus' format
//! over HTTP.

use std::net::SocketAddr;
use std::time::Duration;
use std::{future, io};

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::net::TcpListener;

use crate::failure::Failure;

/// Content type of Prometheus' text format.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Interval of histogram maintenance. The recorder keeps every sample of a histogram until the next
/// maintenance, even without scrapes.
const UPKEEP: Duration = Duration::from_secs(5);
/// Bucket boundaries of histograms whose values are counts.
const NUMBERS: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];
/// Bucket boundaries of histograms whose values are seconds. The boundaries begin at a few
/// microseconds, because calls over shared memory take microseconds.
const SECONDS: [f64; 20] = [
    5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25,
    0.5, 1.0, 2.5, 5.0, 10.0,
];

/// The process's recorder, and the listener for scrapes.
pub(crate) struct Metrics {
    pub(crate) addr: SocketAddr,
    listener: TcpListener,
    handle: PrometheusHandle,
}

impl Metrics {
    /// Binds the listener and installs the recorder.
    pub(crate) async fn start(addr: SocketAddr) -> Result<Metrics, Failure> {
        let cure = "name an address of this host and a free port with --metrics (port 0 takes any)";
        let cannot =
            |error: io::Error| Failure::new(format!("cannot offer metrics on {addr}"), error, cure);
        let listener = TcpListener::bind(addr).await.map_err(cannot)?;
        let addr = listener.local_addr().map_err(cannot)?;
        let handle = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)
            .and_then(|builder| builder.set_buckets(&NUMBERS))
            .and_then(PrometheusBuilder::install_recorder)
            .map_err(|error| Failure::new("cannot record metrics", error, ""))?;
        tonic_rdma::metrics::describe();
        Ok(Metrics { addr, listener, handle })
    }
}

/// Answers scrapes, and returns only if that fails. If `metrics` is `None`, it never returns.
pub(crate) async fn serve(metrics: Option<Metrics>) -> Failure {
    let Some(Metrics { listener, handle, .. }) = metrics else { return future::pending().await };
    let render = handle.clone();
    let fetch = move || async move {
        crate::net::context().record_metrics().await;
        ([(CONTENT_TYPE, TEXT)], render.render())
    };
    let upkeep = async {
        let mut every = tokio::time::interval(UPKEEP);
        loop {
            every.tick().await;
            handle.run_upkeep();
        }
    };
    let served = axum::serve(listener, Router::new().route("/metrics", get(fetch)));
    tokio::select! {
        served = served => Failure::new("metrics are not offered any more", served.err().unwrap_or(io::ErrorKind::Other.into()), ""),
        () = upkeep => Failure::new("metrics are not offered any more", "their upkeep ended", ""),
    }
}
