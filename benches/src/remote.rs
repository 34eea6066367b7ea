//! Starts servers on another host through an agent, to measure contenders between two hosts.
//!
//! A client of an agent sends lines and gets an answer to each. The first line is a `StartServer`,
//! and its answer is the server's output or a failure. The answer to each further line is the
//! server's [`Usage`]. The server ends when the connection ends.

use std::net::{IpAddr, SocketAddr};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;

use crate::allocator::Variant;
use crate::cost::Usage;
use crate::process::Process;
use crate::role::{Role, Threads};

/// Pause before an agent that does not answer is tried again.
const AGAIN: Duration = Duration::from_millis(100);

#[derive(Debug, Serialize, Deserialize)]
struct StartServer {
    variant: String,
    room: Option<usize>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Answer<T> {
    Is(T),
    Failed(String),
}

/// Starts a server for each client that connects to `at`, until the process ends. The servers bind
/// the IP address of `at`, and run with `threads`. Anyone who can reach the port can start servers,
/// so use the agent only in test networks.
///
/// # Errors
/// The agent cannot listen on the address.
pub async fn agent(at: SocketAddr, threads: Threads) -> anyhow::Result<()> {
    let listener = TcpListener::bind(at).await.with_context(|| format!("cannot listen at {at}"))?;
    loop {
        let (connection, _) = listener.accept().await?;
        tokio::spawn(async move {
            if let Err(error) = serve(connection, at.ip(), threads).await {
                eprintln!("agent: {error:#}");
            }
        });
    }
}

async fn serve(connection: TcpStream, addr: IpAddr, threads: Threads) -> anyhow::Result<()> {
    connection.set_nodelay(true)?;
    let (read, mut write) = connection.into_split();
    let mut lines = BufReader::new(read).lines();
    let Some(first) = lines.next_line().await? else { return Ok(()) };
    let started = start(&first, addr, threads).await;
    let (mut child, at) = match started {
        Ok(started) => started,
        Err(error) => {
            return say(&mut write, &Answer::<String>::Failed(format!("{error:#}"))).await;
        }
    };
    say(&mut write, &Answer::Is(at)).await?;
    while lines.next_line().await?.is_some() {
        let usage =
            Usage::of(child.id()).map_or_else(|e| Answer::Failed(format!("{e:#}")), Answer::Is);
        say(&mut write, &usage).await?;
    }
    child.kill().await
}

async fn start(request: &str, addr: IpAddr, threads: Threads) -> anyhow::Result<(Process, String)> {
    let StartServer { variant, room } = serde_json::from_str(request)?;
    let Variant { contender, allocator } = variant.parse().map_err(anyhow::Error::msg)?;
    ensure!(!contender.is_neighbour(), "{contender} cannot run on two hosts");
    let role = Role { serve: Some(contender), room, ..Role::default() };
    let program = allocator.program(&std::env::current_exe()?, false)?;
    let mut command = Command::new(&program);
    command.args(role.arguments(addr, threads)).envs(allocator.environment().iter().copied());
    let mut child = Process::start(command, Stdio::null())?;
    match child.lines()?.next_line().await? {
        Some(at) => Ok((child, at)),
        None => bail!("the server did not start: {}", child.reason_of_end().await?),
    }
}

async fn say<T: Serialize>(write: &mut OwnedWriteHalf, answer: &T) -> anyhow::Result<()> {
    let mut line = serde_json::to_string(answer)?;
    line.push('\n');
    Ok(write.write_all(line.as_bytes()).await?)
}

/// A server that an agent has started. The server ends on drop.
#[derive(Debug)]
pub struct RemoteServer {
    lines: Lines<BufReader<OwnedReadHalf>>,
    write: OwnedWriteHalf,
}

impl RemoteServer {
    /// Makes the agent start a server, and returns the server's output.
    ///
    /// Waits until the agent answers.
    ///
    /// # Errors
    /// The server did not start.
    pub async fn start(
        agent: SocketAddr,
        variant: Variant,
        room: Option<usize>,
    ) -> anyhow::Result<(Self, String)> {
        // The agent's host may be starting. The caller limits the wait.
        let connection = loop {
            match TcpStream::connect(agent).await {
                Ok(connection) => break connection,
                Err(_) => tokio::time::sleep(AGAIN).await,
            }
        };
        connection.set_nodelay(true)?;
        let (read, write) = connection.into_split();
        let mut server = Self { lines: BufReader::new(read).lines(), write };
        let at = server.ask(&StartServer { variant: variant.to_string(), room }).await?;
        Ok((server, at))
    }

    /// Returns the processor time, context switches and page faults of the server's process so far.
    ///
    /// # Errors
    /// The server or its agent has ended.
    pub async fn usage(&mut self) -> anyhow::Result<Usage> {
        self.ask(&()).await
    }

    async fn ask<T: DeserializeOwned>(&mut self, question: &impl Serialize) -> anyhow::Result<T> {
        say(&mut self.write, question).await?;
        let answer = self.lines.next_line().await?.context("the agent is gone")?;
        match serde_json::from_str(&answer).with_context(|| format!("the agent said: {answer}"))? {
            Answer::Is(answer) => Ok(answer),
            Answer::Failed(why) => bail!("{why}"),
        }
    }
}
