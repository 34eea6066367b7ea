//! Command line and main function of the processes that `compare` starts.

use std::ffi::OsString;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use rustix::process::{
    Resource, Rlimit, Signal, getrlimit, set_parent_process_death_signal, setrlimit,
};

use crate::client::Client;
use crate::contender::{Contender, Transport};
use crate::cpu;
use crate::memcpy::Memcpy;
use crate::raw::Raw;
use crate::server_figures::{self, Served};
use crate::service::{self, ListenAddr, MAX_REPLY};
use crate::session::{self, CallRunner};

/// Addresses and processors.
#[derive(Args, Clone, Debug)]
pub struct Placement {
    /// Address that servers bind; for RDMA an address of an RDMA device
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    pub addr: IpAddr,
    /// Processor of the clients [default: the first allowed processor]
    #[arg(long, value_name = "CPU")]
    pub client_cpu: Option<usize>,
    /// Processor of the servers [default: the second allowed processor, or the only one]
    #[arg(long, value_name = "CPU")]
    pub server_cpu: Option<usize>,
    /// Threads of each runtime, on any processor [default: one thread, on the processor above]
    #[arg(long, value_name = "THREADS", value_parser = clap::value_parser!(u32).range(1..))]
    pub workers: Option<u32>,
}

/// The threads of the processes.
#[derive(Clone, Copy, Debug)]
pub enum Threads {
    /// One thread for each process, on the processor of clients or of servers.
    Pinned {
        /// Processor of the clients.
        client: usize,
        /// Processor of the servers.
        server: usize,
    },
    /// A runtime with this number of threads for each process, on any processor.
    Free(u32),
}

impl fmt::Display for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pinned { client, server } => {
                write!(f, "clients on processor {client}, servers on {server}")
            }
            Self::Free(threads) => write!(f, "{threads} threads for each process"),
        }
    }
}

/// The role of a process.
#[derive(Args, Clone, Debug, Default)]
pub struct Role {
    /// Run the server of a contender
    #[arg(long, hide = true)]
    pub serve: Option<Contender>,
    /// Path of the server's unix socket
    #[arg(long, hide = true)]
    pub socket: Option<PathBuf>,
    /// Run the client of a contender
    #[arg(long, hide = true, conflicts_with = "serve")]
    pub client: Option<Contender>,
    /// The line that the server printed
    #[arg(long, hide = true, default_value = "")]
    pub server_addr: String,
    /// Number of connections to provide memory for
    #[arg(long, hide = true)]
    pub room: Option<usize>,
}

impl Placement {
    /// The threads of the processes.
    ///
    /// # Errors
    /// No processor is allowed.
    pub fn threads(&self) -> anyhow::Result<Threads> {
        if let Some(workers) = self.workers {
            return Ok(Threads::Free(workers));
        }
        let allowed = cpu::allowed()?;
        let first = *allowed.first().context("no processor is allowed")?;
        let second = allowed.get(1).copied().unwrap_or(first);
        Ok(Threads::Pinned {
            client: self.client_cpu.unwrap_or(first),
            server: self.server_cpu.unwrap_or(second),
        })
    }
}

impl Role {
    /// Command-line arguments for a process with this role and these threads.
    pub fn arguments(&self, addr: IpAddr, threads: Threads) -> Vec<OsString> {
        let mut arguments = vec![format!("--addr={addr}")];
        match threads {
            Threads::Pinned { client, server } => arguments
                .extend([format!("--client-cpu={client}"), format!("--server-cpu={server}")]),
            Threads::Free(workers) => arguments.push(format!("--workers={workers}")),
        }
        arguments.extend(self.serve.map(|contender| format!("--serve={contender}")));
        arguments.extend(self.client.map(|contender| format!("--client={contender}")));
        arguments.extend(self.room.map(|room| format!("--room={room}")));
        if self.client.is_some() {
            arguments.push(format!("--server-addr={}", self.server_addr));
        }
        let mut arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
        if let Some(socket) = &self.socket {
            arguments.extend(["--socket".into(), socket.into()]);
        }
        arguments
    }

    /// Whether a role is set.
    pub fn is_some(&self) -> bool {
        self.serve.is_some() || self.client.is_some()
    }

    /// Runs the role on its processor.
    ///
    /// # Errors
    /// The errors of [`runtime`](Self::runtime) and [`run`](Self::run).
    pub fn start(&self, placement: &Placement) -> anyhow::Result<()> {
        self.runtime(placement)?.block_on(self.run(placement))
    }

    /// Creates the runtime. Without `workers`, the runtime has a single thread, and this process is
    /// pinned to its processor.
    ///
    /// # Errors
    /// The processor is not allowed.
    pub fn runtime(&self, placement: &Placement) -> anyhow::Result<tokio::runtime::Runtime> {
        let mut runtime = match placement.threads()? {
            Threads::Pinned { client, server } => {
                cpu::pin(if self.serve.is_some() { server } else { client })?;
                tokio::runtime::Builder::new_current_thread()
            }
            Threads::Free(threads) => {
                let mut runtime = tokio::runtime::Builder::new_multi_thread();
                runtime.worker_threads(threads as usize);
                runtime
            }
        };
        // If `compare` ends, for example because of a signal, its processes also end.
        set_parent_process_death_signal(Some(Signal::KILL))
            .context("cannot follow the parent process")?;
        // Each connection needs a few descriptors, so the soft limit is raised to the hard limit.
        // If the hard limit is too low, connections fail, and `scale` reports the usage and the
        // limit with the error.
        let files = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files })
            .context("cannot have more descriptors")?;
        Ok(runtime.enable_all().build()?)
    }

    /// Runs the role, if one is set, for contenders of this crate.
    ///
    /// # Errors
    /// The server cannot listen, or the client cannot connect.
    pub async fn run(&self, placement: &Placement) -> anyhow::Result<()> {
        if let Some(contender) = self.serve {
            let ip = ListenAddr::Ip(SocketAddr::new(placement.addr, 0));
            let listen = self.socket.clone().map_or(ip, ListenAddr::Unix);
            let ready = |Served { at, meter }| {
                println!("{at}");
                tokio::spawn(async {
                    if let Err(error) = server_figures::answer(meter).await {
                        eprintln!("the server: {error:#}");
                    }
                });
            };
            return service::serve(contender, listen, MAX_REPLY, self.room, ready).await;
        }
        let Some(contender) = self.client else { return Ok(()) };
        match contender.transport() {
            Transport::Raw(kind) => {
                as_task(session::run(Raw::connect(kind, &self.server_addr).await?)).await
            }
            Transport::Copy(method) => as_task(session::run(Memcpy::new(method))).await,
            _ => {
                let (server_addr, room) = (self.server_addr.clone(), self.room);
                let connect =
                    async move |start| Client::connect(contender, &server_addr, room, start).await;
                as_task(session::run(CallRunner::new(connect).await?)).await
            }
        }
    }
}

/// Runs the session as a task, like typical callers. A future that is passed to `block_on` is
/// polled only after the runtime has polled for events again. This would cost several system calls
/// per call.
async fn as_task(
    session: impl Future<Output = anyhow::Result<()>> + Send + 'static,
) -> anyhow::Result<()> {
    tokio::spawn(session).await.context("the session has panicked")?
}
