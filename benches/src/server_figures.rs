//! Statistics of a server process: its pools, and the bytes that it has copied.
//!
//! The server process answers each line on stdin with a line of JSON on stdout. This exchange works
//! in any state of the transport, and adds no calls to the measured calls.

use std::io::Write as _;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tonic_rdma::{Context, ServerStats};

/// Sums over the server's pools and connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerFigures {
    /// Memory registrations since the process started.
    pub registrations: u64,
    /// Bytes that are currently mapped and registered.
    pub registered: usize,
    /// Payload bytes that were copied because landing memory was scarce, since the process started.
    pub pressure: u64,
}

/// The sources of a server's statistics.
#[derive(Clone, Debug)]
pub struct Meter {
    context: Context,
    stats: ServerStats,
}

/// A server that clients can connect to.
#[derive(Clone, Debug)]
pub struct Served {
    /// The server's address, or the path of its socket.
    pub at: String,
    /// Reads the server's statistics. `None` if the transport is not tonic-rdma's.
    pub meter: Option<Meter>,
}

impl Meter {
    /// Creates a meter that reads the statistics of a server with this context.
    pub fn new(context: Context, stats: ServerStats) -> Self {
        Self { context, stats }
    }

    /// Reads the current statistics.
    pub async fn read(&self) -> ServerFigures {
        let mut figures = ServerFigures {
            pressure: self.stats.get().copied_fast.pressure,
            ..ServerFigures::default()
        };
        for (_, pool) in self.context.pool_stats().await {
            figures.registrations += pool.registrations;
            figures.registered += pool.registered;
        }
        figures
    }
}

/// Answers requests until stdin ends.
///
/// # Errors
/// Stdin or stdout fails.
pub async fn answer(meter: Option<Meter>) -> anyhow::Result<()> {
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while lines.next_line().await.context("cannot read questions")?.is_some() {
        let figures = match &meter {
            Some(meter) => Some(meter.read().await),
            None => None,
        };
        let mut text = serde_json::to_string(&figures)?;
        text.push('\n');
        std::io::stdout().write_all(text.as_bytes()).context("cannot answer")?;
    }
    Ok(())
}
