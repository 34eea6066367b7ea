//! Calls on several threads, over one connection and over one connection per thread.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context as _, ensure};
use tokio::runtime::{Builder, Runtime};

use crate::client::{Channel, Client};
use crate::contender::{Contender, Transport};
use crate::measure::{Round, round};
use crate::service;
use crate::work::{Kind, Row, SMALL};

fn runtime(workers: usize) -> anyhow::Result<Runtime> {
    Ok(Builder::new_multi_thread().worker_threads(workers).enable_all().build()?)
}

/// A client and a server in this process, each with its own runtime.
#[derive(Debug)]
pub struct Threads {
    clients: Vec<(usize, Client)>,
    /// Dropped before the server.
    client: Runtime,
    _server: Runtime,
}

impl Threads {
    /// Creates both runtimes with `workers` threads, and a channel for each number of connections.
    ///
    /// # Errors
    /// Threads cannot be started, or there is no fast path.
    pub fn new(
        contender: Contender,
        workers: usize,
        connections: &[usize],
    ) -> anyhow::Result<Self> {
        let Transport::Ours(fabric) = contender.transport() else {
            anyhow::bail!("{contender} has one connection")
        };
        let (server, client) = (runtime(workers)?, runtime(workers)?);
        let (ready, address) = std::sync::mpsc::channel();
        let at = service::ListenAddr::Ip(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        server.spawn(async move {
            if let Err(error) =
                service::serve(contender, at, SMALL, None, |served| _ = ready.send(served.at)).await
            {
                eprintln!("the server: {error:#}");
            }
        });
        let address = address.recv().context("there is no server")?;
        let channel = |count| {
            let endpoint = tonic_rdma::Endpoint::from_shared(format!("http://{address}"));
            let endpoint =
                endpoint.map(|to| to.fabrics(fabric).require_rdma(true).connections(count));
            anyhow::Ok((count, client.block_on(endpoint?.connect())?))
        };
        let channels =
            connections.iter().map(|count| channel(*count)).collect::<Result<Vec<_>, _>>()?;
        let with_client = |(count, channel)| {
            (count, Client::with_channel(Channel::Ours(channel), contender.zero_copy()))
        };
        Ok(Self {
            clients: channels.into_iter().map(with_client).collect(),
            client,
            _server: server,
        })
    }

    /// The rate of small calls in thousands per second, by number of connections.
    ///
    /// # Errors
    /// A call fails.
    pub fn round(&self, in_flight: usize, calls: usize) -> anyhow::Result<Vec<(usize, f64)>> {
        let row = Row { kind: Kind::Rate { in_flight, connections: 1 }, calls };
        let rate = |(count, client): &(usize, Client)| {
            let client = client.clone();
            // Runs as a task, like typical callers, and not on the blocked thread.
            let round = self.client.spawn(async move { round(&[client], &row).await });
            let Round { figure, .. } = self.client.block_on(round)??;
            ensure!(figure > 0.0, "no calls");
            anyhow::Ok((*count, figure))
        };
        self.clients.iter().map(rate).collect()
    }
}
