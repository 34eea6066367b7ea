//! Records the library's log and metrics for the tests.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tonic_rdma::ReasonCode;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// The log of this process, and its metrics.
#[derive(Clone)]
pub struct Log {
    lines: Arc<Mutex<String>>,
    metrics: PrometheusHandle,
}

impl Log {
    /// Installs the recorders. Keeps the log lines that RUST_LOG selects, by default `info` and
    /// above, and prints them on standard error.
    pub fn install() -> Self {
        let metrics = PrometheusBuilder::new().install_recorder().unwrap();
        let log = Self { lines: Arc::default(), metrics };
        let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_ansi(false)
            .with_writer(log.clone())
            .init();
        log
    }

    /// Whether a line contains all of these words.
    pub fn contains(&self, words: &[&str]) -> bool {
        self.lines.lock().unwrap().lines().any(|line| words.iter().all(|word| line.contains(word)))
    }

    /// The number of fallbacks to TCP with this reason by clients of this process, from the
    /// metrics.
    pub fn fallbacks(&self, code: ReasonCode) -> u64 {
        let metrics = self.metrics.render();
        let reason = format!("reason=\"{}\"", code.as_str());
        let of_clients = |line: &&str| {
            line.starts_with("tonic_rdma_fallbacks_total{")
                && line.contains("role=\"client\"")
                && line.contains(&reason)
        };
        let count = |line: &str| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap();
        metrics.lines().filter(of_clients).map(count).sum()
    }

    /// Clears the log.
    pub fn clear(&self) {
        self.lines.lock().unwrap().clear();
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.lines.lock().unwrap().push_str(&String::from_utf8_lossy(bytes));
        io::stderr().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
