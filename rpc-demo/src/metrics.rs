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
/// Interval of histogram maintenance. The recorder keeps every sample of a histogram until then,
/// even without scrapes.
const UPKEEP: Duration = Duration::from_secs(5);
/// Bucket boundaries of histograms.
const COMPLETIONS: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];
const SECONDS: [f64; 8] = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0];

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
        let full = |name: &str| Matcher::Full(name.to_owned());
        let handle = PrometheusBuilder::new()
            .set_buckets_for_metric(full("tonic_rdma_completions_per_poll"), &COMPLETIONS)
            .and_then(|builder| {
                builder.set_buckets_for_metric(full("tonic_rdma_handshake_seconds"), &SECONDS)
            })
            .and_then(PrometheusBuilder::install_recorder)
            .map_err(|error| Failure::new("cannot record metrics", error, ""))?;
        tonic_rdma::metrics::describe();
        Ok(Metrics { addr, listener, handle })
    }
}

/// Answers scrapes. Never returns if there are no metrics.
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
