//! The two processes of a contender. The processes end when [`Pair`] is dropped.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use tokio::io::{AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::allocator::Variant;
use crate::contender::Transport;
use crate::copies::{Copied, Copies};
use crate::cost::{SystemCalls, Usage};
use crate::instructions::Instructions;
use crate::measure::Round;
use crate::process::Process;
use crate::remote::RemoteServer;
use crate::role::{Role, Threads};
use crate::sample::{Counted, Sample};
use crate::server_figures::ServerFigures;
use crate::session::{ClientReply, ClientRequest};
use crate::work::{Row, WorkKind};

/// Number of calls before copies are counted. The first calls of a connection copy, until both ends
/// know the method's codec and the peer's abilities.
const LEARNING: usize = 32;

/// Options of a pair.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The address that servers bind.
    pub addr: IpAddr,
    /// Threads of clients and servers.
    pub threads: Threads,
    /// Time limit for a start or a round.
    pub limit: Duration,
    /// Number of connections to provide memory for, if more than the default.
    pub room: Option<usize>,
    /// Whether servers must answer [`Pair::server_figures`].
    pub server_figures: bool,
    /// The agent that starts the servers, if they are on another host.
    pub agent: Option<SocketAddr>,
    /// Path of the program in `benches/neighbours`, for contenders that run in it.
    pub neighbours: Option<PathBuf>,
}

#[derive(Debug)]
enum Server {
    Here(Box<LocalServer>),
    /// A server on another host.
    There(RemoteServer),
}

#[derive(Debug)]
struct LocalServer {
    process: Process,
    questions: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Server {
    async fn usage(&mut self) -> anyhow::Result<Usage> {
        match self {
            Self::Here(server) => Usage::of(server.process.id()),
            Self::There(server) => server.usage().await,
        }
    }

    /// The server's process ID, if it runs on this host.
    fn id(&self) -> Option<u32> {
        match self {
            Self::Here(server) => Some(server.process.id()),
            Self::There(_) => None,
        }
    }
}

/// A server process, a client process, and the connection between them.
#[derive(Debug)]
pub struct Pair {
    requests: ChildStdin,
    replies: Lines<BufReader<ChildStdout>>,
    client: Process,
    server: Server,
    path: String,
    pool: Option<usize>,
    limit: Duration,
    instructions: Option<[Instructions; 2]>,
    _dir: Option<tempfile::TempDir>,
}

impl Pair {
    /// Starts both processes with additional environment variables, and waits until the client has
    /// connected.
    ///
    /// # Errors
    /// A process did not start, connect or report in time.
    pub async fn start(
        variant: Variant,
        setup: &Setup,
        environment: &[(&'static str, PathBuf)],
    ) -> anyhow::Result<Self> {
        let Variant { contender, allocator } = variant;
        let dir = match contender.transport() {
            Transport::Tonic { unix: true } => {
                Some(tempfile::tempdir().context("no directory for a unix socket")?)
            }
            _ => None,
        };
        let program = match (contender.is_neighbour(), &setup.neighbours) {
            (false, _) => allocator.program(&std::env::current_exe()?, false)?,
            (true, Some(program)) => allocator.program(program, true)?,
            (true, None) => bail!("the path of the program that {contender} runs in is missing"),
        };
        let spawn = |role: Role, stdin: Stdio| {
            let mut command = Command::new(&program);
            command.args(role.arguments(setup.addr, setup.threads));
            command.envs(allocator.environment().iter().copied()).envs(environment.iter().cloned());
            Process::start(command, stdin)
        };
        let room = setup.room;
        let late = "the server did not start in time";
        let (server, server_addr) = if let Some(agent) = setup.agent {
            let started = timeout(setup.limit, RemoteServer::start(agent, variant, room)).await;
            let (server, addr) = started.context(late)??;
            (Server::There(server), addr)
        } else {
            let socket = dir.as_ref().map(|dir| dir.path().join("s"));
            let role = Role { serve: Some(contender), socket, room, ..Role::default() };
            let questions = if setup.server_figures { Stdio::piped() } else { Stdio::null() };
            let mut process = spawn(role, questions)?;
            let mut answers = process.lines()?;
            let addr = timeout(setup.limit, answers.next_line()).await.context(late)??;
            let Some(addr) = addr else {
                bail!("the server did not start: {}", process.reason_of_end().await?);
            };
            let questions = process.stdin();
            let server = LocalServer { process, questions, answers };
            (Server::Here(Box::new(server)), addr)
        };
        let role = Role { client: Some(contender), server_addr, room, ..Role::default() };
        let mut client = spawn(role, Stdio::piped())?;
        let mut pair = Self {
            requests: client.stdin().context("no pipe to the client process")?,
            replies: client.lines()?,
            client,
            server,
            path: String::new(),
            pool: None,
            limit: setup.limit,
            instructions: None,
            _dir: dir,
        };
        // Any row will do, because the client answers once it has connected.
        let ClientReply::Ready { path, pool, .. } =
            pair.request(ClientRequest::Prepare(Row { kind: WorkKind::Latency, calls: 1 })).await?
        else {
            bail!("the client did not report that it is ready");
        };
        pair.path = path;
        pair.pool = pool;
        Ok(pair)
    }

    /// A description of the path.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Maximum size in bytes of a process's pool, if the processes have pools.
    pub fn pool(&self) -> Option<usize> {
        self.pool
    }

    /// Statistics of the server's memory. `None` if its transport keeps no statistics.
    ///
    /// # Errors
    /// The server does not answer, or was started without [`Setup::server_figures`].
    pub async fn server_figures(&mut self) -> anyhow::Result<Option<ServerFigures>> {
        let unasked = "the server was not to be asked";
        let Server::Here(server) = &mut self.server else { bail!(unasked) };
        let LocalServer { process, questions, answers, .. } = server.as_mut();
        let questions = questions.as_mut().context(unasked)?;
        // If the server has ended, reading the answer fails below.
        let _ = questions.write_all(b"\n").await;
        let answer = timeout(self.limit, answers.next_line()).await;
        let answer = answer.context("the server does not answer")??;
        let Some(answer) = answer else {
            bail!("the server process ended: {}", process.reason_of_end().await?);
        };
        serde_json::from_str(&answer).with_context(|| format!("the server said: {answer}"))
    }

    /// The process ids of client and server.
    ///
    /// # Errors
    /// The server is on another host.
    pub fn processes(&self) -> anyhow::Result<(u32, u32)> {
        let server = self.server.id().context("the server is on another host")?;
        Ok((self.client.id(), server))
    }

    /// Starts counting instructions.
    ///
    /// # Errors
    /// Instructions cannot be counted on this machine.
    pub fn count_instructions(&mut self) -> anyhow::Result<()> {
        let (client, server) = self.processes()?;
        self.instructions = Some([Instructions::of(client)?, Instructions::of(server)?]);
        Ok(())
    }

    async fn request(&mut self, request: ClientRequest) -> anyhow::Result<ClientReply> {
        let mut line = serde_json::to_string(&request)?;
        line.push('\n');
        // If the client has ended, the reason that is read below explains why.
        let _ = self.requests.write_all(line.as_bytes()).await;
        let reply = timeout(self.limit, self.replies.next_line()).await;
        let reply =
            reply.with_context(|| format!("no answer within {} s", self.limit.as_secs()))??;
        let Some(reply) = reply else {
            bail!("the client process ended: {}", self.client.reason_of_end().await?);
        };
        match serde_json::from_str(&reply).with_context(|| format!("the client said: {reply}"))? {
            ClientReply::Failed(why) => {
                if let Server::Here(server) = &mut self.server
                    && server.process.has_ended()?
                {
                    let ended = server.process.reason_of_end().await?;
                    bail!("{why}; the server process ended: {ended}");
                }
                bail!("{why}")
            }
            reply => Ok(reply),
        }
    }

    /// Prepares a row: creates its connections and streams. Returns false if the contender does not
    /// support the row.
    ///
    /// # Errors
    /// A connection or stream fails, or the path changes.
    pub async fn prepare(&mut self, row: &Row) -> anyhow::Result<bool> {
        let ClientReply::Ready { supports, path, .. } =
            self.request(ClientRequest::Prepare(*row)).await?
        else {
            bail!("the client did not report that it is ready");
        };
        ensure!(path == self.path, "the path changed: {path}");
        Ok(supports)
    }

    /// Runs a prepared row once, without the warm-up and the cost measurement of
    /// [`sample`](Self::sample).
    ///
    /// # Errors
    /// The errors of [`sample`](Self::sample).
    pub async fn round(&mut self, row: &Row) -> anyhow::Result<Round> {
        let ClientReply::Done(round) = self.request(ClientRequest::Round(*row)).await? else {
            bail!("the client did not report what it measured");
        };
        Ok(round)
    }

    fn instructions(&mut self) -> anyhow::Result<Option<u64>> {
        let Some([client, server]) = &mut self.instructions else { return Ok(None) };
        Ok(Some(client.read()? + server.read()?))
    }

    /// Runs a row once, after a warm-up with a tenth of its calls, because memory may have been
    /// returned to the system since the last row. Returns `None` if the contender does not support
    /// the row.
    ///
    /// # Errors
    /// A call fails, a time limit expires, a process ends, or the path changes.
    pub async fn sample(&mut self, row: &Row) -> anyhow::Result<Option<Sample>> {
        if !self.prepare(row).await? {
            return Ok(None);
        }
        self.round(&row.tenth()).await?;
        let before =
            (Usage::of(self.client.id())?, self.server.usage().await?, self.instructions()?);
        let round = self.round(row).await?;
        let client = Usage::of(self.client.id())? - before.0;
        let server = self.server.usage().await? - before.1;
        let instructions = self.instructions()?.zip(before.2).map(|(after, before)| after - before);
        Ok(Some(Sample { round, client, server, instructions }))
    }

    /// Counts the copies and system calls of a tenth of a row's calls, after a warm-up of at least
    /// 32 calls. The pair must have been started with [`Copies::environment`].
    ///
    /// # Errors
    /// The errors of [`sample`](Self::sample). A missing strace is not an error.
    pub async fn count(&mut self, row: &Row, copies: &Copies) -> anyhow::Result<Option<Counted>> {
        let row = row.tenth();
        if !self.prepare(&row).await? {
            return Ok(None);
        }
        for _ in 0..LEARNING.div_ceil(row.calls.max(1)) {
            self.round(&row).await?;
        }
        let before = copies.read()?;
        let round = self.round(&row).await?;
        let Copied { memory, kernel } = copies.read()? - before;
        let copies = matches!(row.kind, WorkKind::Bulk { .. } | WorkKind::Stream { .. })
            .then(|| (memory + kernel) as f64 / round.bytes.max(1) as f64);
        Ok(Some(Counted { copies, system_calls: self.system_calls(&row).await? }))
    }

    async fn system_calls(&mut self, row: &Row) -> anyhow::Result<Option<f64>> {
        let counters = self
            .processes()
            .and_then(|(client, server)| Ok((SystemCalls::of(server)?, SystemCalls::of(client)?)));
        let Ok((server, client)) = counters else { return Ok(None) };
        let round = self.round(row).await?;
        Ok(Some((client.sum()? + server.sum()?) as f64 / round.calls as f64))
    }
}
