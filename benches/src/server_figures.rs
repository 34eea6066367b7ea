//! What a server process says of itself while it serves: the figures of its pools, and what it has
//! copied.
//!
//! It answers each line on its standard input with a line on its standard output, in JSON. So the
//! question reaches it whatever state the transport is in, and is none of the calls that are
//! measured.

use std::io::Write as _;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tonic_rdma::{Context, ServerStats};

/// Sums over the server's pools and connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerFigures {
    /// Registrations of memory since the process began.
    pub registrations: u64,
    /// Bytes that are mapped and registered now.
    pub registered: usize,
    /// Payload bytes that were copied because landing memory was scarce, since the process began.
    pub pressure: u64,
}

/// Where a server's figures are.
#[derive(Clone, Debug)]
pub struct Meter {
    context: Context,
    stats: ServerStats,
}

/// A server that clients can connect to.
#[derive(Clone, Debug)]
pub struct Served {
    /// Its address, or the path of its socket.
    pub at: String,
    /// None where the transport is not tonic-rdma's.
    pub meter: Option<Meter>,
}

impl Meter {
    /// Of a server with this context.
    pub fn new(context: Context, stats: ServerStats) -> Self {
        Self { context, stats }
    }

    /// The figures now.
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

/// Answers until the input ends.
///
/// # Errors
/// Input or output is broken.
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
