//! The client process of a contender: runs the rounds that it is told to, and says what they gave.
//!
//! It reads a line for each thing to do on its standard input, and answers each with a line on its
//! standard output, both JSON: a [`ClientRequest`], and a [`ClientReply`]. It ends with its input.
//! So a contender that crashes or hangs takes nobody along.

use std::future::Future;
use std::io::Write as _;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::measure::{self, Calls, Round};
use crate::work::Row;

/// What a client is told.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClientRequest {
    /// Have as many connections, and open streams, as this row wants.
    Prepare(Row),
    /// Run it once.
    Round(Row),
}

/// What it answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClientReply {
    /// Connected: the path in words, and whether this contender does what the row does.
    Ready {
        /// The path.
        path: String,
        /// Whether there is such a row.
        #[serde(rename = "runs")]
        supports: bool,
        /// Bytes that the pool of its connections may have, if they have one.
        pool: Option<usize>,
    },
    /// A round is over.
    Done(Round),
    /// It failed, and why.
    Failed(String),
}

/// What runs rounds.
pub trait RowRunner {
    /// Whether it has a counterpart of this row.
    fn supports(&self, row: &Row) -> bool;
    /// The path in words.
    fn path(&self) -> String;
    /// Bytes that the pool of its connections may have, if they have one.
    fn pool(&self) -> Option<usize> {
        None
    }
    /// Makes as many connections, and opens as many streams, as a row wants.
    fn prepare(&mut self, row: &Row) -> impl Future<Output = anyhow::Result<()>>;
    /// Runs a row once.
    fn round(&mut self, row: &Row) -> impl Future<Output = anyhow::Result<Round>>;
}

/// Calls over connections that are made when rows want them.
pub struct CallRunner<C, F> {
    clients: Vec<C>,
    /// Streams that are open on the first of them.
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

impl<C: Calls, F: AsyncFn() -> anyhow::Result<C>> CallRunner<C, F> {
    /// Makes the first connection.
    ///
    /// # Errors
    /// When the connection cannot be made.
    pub async fn new(connect: F) -> anyhow::Result<Self> {
        Ok(Self { clients: vec![connect().await?], open: Vec::new(), connect })
    }
}

impl<C: Calls, F: AsyncFn() -> anyhow::Result<C>> RowRunner for CallRunner<C, F> {
    fn supports(&self, row: &Row) -> bool {
        self.clients.iter().all(|client| client.supports(row))
    }

    /// Those of the first connection.
    fn path(&self) -> String {
        self.clients.first().map(Calls::path).unwrap_or_default()
    }

    fn pool(&self) -> Option<usize> {
        self.clients.first()?.pool()
    }

    async fn prepare(&mut self, row: &Row) -> anyhow::Result<()> {
        self.clients.truncate(row.connections());
        while self.clients.len() < row.connections() {
            self.clients.push((self.connect)().await?);
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
        measure::round(&self.clients, row).await
    }
}

/// Says why there is nobody to be told anything.
///
/// # Errors
/// Output is broken.
pub fn report_failure(error: &anyhow::Error) -> anyhow::Result<()> {
    reply(&ClientReply::Failed(format!("{error:#}")))
}

/// Does what it is told, until there is nothing more.
///
/// # Errors
/// Input or output is broken.
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

/// One write, before the next line is read.
fn reply(reply: &ClientReply) -> anyhow::Result<()> {
    let mut text = serde_json::to_string(reply)?;
    text.push('\n');
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}
