//! The client process of a contender: runs rounds on request, and reports their results.
//!
//! The process reads requests from stdin and writes replies to stdout. Each [`ClientRequest`] and
//! each [`ClientReply`] is one line of JSON. The process ends when stdin ends. A separate process
//! protects `compare` from contenders that crash or hang.

use std::future::Future;
use std::io::Write as _;
use std::time::Instant;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::measure::{self, Calls, Round};
use crate::open_loop;
use crate::work::{Row, WorkKind};

/// A request to the client process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClientRequest {
    /// Create the connections and streams of this row.
    Prepare(Row),
    /// Run the row once.
    Round(Row),
}

/// The reply to a request.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClientReply {
    /// The client has connected and prepared the row.
    Ready {
        /// A description of the path.
        path: String,
        /// Whether the contender supports the row.
        #[serde(rename = "runs")]
        supports: bool,
        /// Maximum size in bytes of the pool of its connections, if they have a pool.
        pool: Option<usize>,
    },
    /// The result of a round.
    Done(Round),
    /// The error message of a failure.
    Failed(String),
}

/// When a connection is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Before the first call.
    Connect,
    /// With the first call.
    Lazy,
}

/// Runs rounds.
pub trait RowRunner {
    /// Whether the runner supports this row.
    fn supports(&self, row: &Row) -> bool;
    /// A description of the path.
    fn path(&self) -> String;
    /// Maximum size in bytes of the pool of its connections, if they have a pool.
    fn pool(&self) -> Option<usize> {
        None
    }
    /// Creates the connections and streams of a row.
    fn prepare(&mut self, row: &Row) -> impl Future<Output = anyhow::Result<()>>;
    /// Runs a row once.
    fn round(&mut self, row: &Row) -> impl Future<Output = anyhow::Result<Round>>;
}

/// Makes calls over connections that it creates on demand.
pub struct CallRunner<C, F> {
    clients: Vec<C>,
    /// Open streams of the first connection.
    open: Vec<Box<dyn Send>>,
    connect: F,
}

impl<C, F> std::fmt::Debug for CallRunner<C, F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallRunner")
            .field("connections", &self.clients.len())
            .finish_non_exhaustive()
    }
}

impl<C: Calls, F: AsyncFn(Start) -> anyhow::Result<C>> CallRunner<C, F> {
    /// Creates the first connection.
    ///
    /// # Errors
    /// The connection fails.
    pub async fn new(connect: F) -> anyhow::Result<Self> {
        Ok(Self { clients: vec![connect(Start::Connect).await?], open: Vec::new(), connect })
    }
}

impl<C: Calls, F: AsyncFn(Start) -> anyhow::Result<C>> RowRunner for CallRunner<C, F> {
    fn supports(&self, row: &Row) -> bool {
        self.clients.iter().all(|client| client.supports(row))
    }

    /// The path of the first connection.
    fn path(&self) -> String {
        self.clients.first().map(Calls::path).unwrap_or_default()
    }

    fn pool(&self) -> Option<usize> {
        self.clients.first()?.pool()
    }

    async fn prepare(&mut self, row: &Row) -> anyhow::Result<()> {
        self.clients.truncate(row.connections());
        while self.clients.len() < row.connections() {
            self.clients.push((self.connect)(Start::Connect).await?);
        }
        self.open.truncate(row.streams());
        if let Some(client) = self.clients.first_mut() {
            while self.open.len() < row.streams() {
                self.open.push(client.open().await?);
            }
        }
        Ok(())
    }

    async fn round(&mut self, row: &Row) -> anyhow::Result<Round> {
        let lazy = match row.kind {
            WorkKind::Connect { lazy } => lazy,
            WorkKind::Open { percent } => {
                let client = self.clients.first().context("there is no connection")?;
                return open_loop::round(client, percent, row.calls).await;
            }
            _ => return measure::round(&self.clients, row).await,
        };
        // While another connection is open, a new one costs less.
        self.open.clear();
        self.clients.clear();
        let start = if lazy { Start::Lazy } else { Start::Connect };
        let mut times = Vec::with_capacity(row.calls);
        for _ in 0..row.calls {
            let begin = Instant::now();
            measure::only_call((self.connect)(start).await?).await?;
            times.push(begin.elapsed());
        }
        self.clients.push((self.connect)(Start::Connect).await?);
        Ok(measure::latencies(times))
    }
}

/// Reports that the client could not be started.
///
/// # Errors
/// Stdout cannot be written.
pub fn report_failure(error: &anyhow::Error) -> anyhow::Result<()> {
    reply(&ClientReply::Failed(format!("{error:#}")))
}

/// Handles requests until stdin ends.
///
/// # Errors
/// Stdin or stdout fails.
pub async fn run(mut runner: impl RowRunner) -> anyhow::Result<()> {
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = lines.next_line().await? {
        let done = match serde_json::from_str(&line)? {
            ClientRequest::Prepare(row) => {
                let supports = runner.supports(&row);
                let prepared = if supports { runner.prepare(&row).await } else { Ok(()) };
                prepared.map(|()| {
                    let (path, pool) = (runner.path(), runner.pool());
                    ClientReply::Ready { path, supports, pool }
                })
            }
            ClientRequest::Round(row) => runner.round(&row).await.map(ClientReply::Done),
        };
        reply(&done.unwrap_or_else(|error| ClientReply::Failed(format!("{error:#}"))))?;
    }
    Ok(())
}

/// Writes the reply in a single write, before the next request is read.
fn reply(reply: &ClientReply) -> anyhow::Result<()> {
    let mut text = serde_json::to_string(reply)?;
    text.push('\n');
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}
