//! A connection for each call: connect, one call of 64 B, close.
//!
//! Server and client are in one thread, as in [`calls`](super::calls). Some programs connect for
//! each call. Such programs pay more for system calls than for instructions.

use bytes::Bytes;
use tonic_rdma::{FabricKind, Policy};

use super::calls::listen;
use super::meter::{Counts, measure};
use super::scenario::Scenario;
use crate::client::{Channel, Client, tonic_endpoint};
use crate::contender::{Contender, StubCodec};
use crate::measure::Calls as _;
use crate::service;

/// The scenarios of this module, for [`super::all`].
pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "connect-tonic-tcp",
        what: "connect, one call of 64 B, close: tonic",
        run: || count(Connector::Tonic, Start::Connect),
    },
    Scenario {
        name: "connect-shm",
        what: "connect, one call of 64 B, close: tonic-rdma over shared memory",
        run: || count(Connector::Shm, Start::Connect),
    },
    Scenario {
        name: "connect-lazy-tonic-tcp",
        what: "connect_lazy, one call of 64 B, close: tonic",
        run: || count(Connector::Tonic, Start::Lazy),
    },
    Scenario {
        name: "connect-lazy-shm",
        what: "connect_lazy, one call of 64 B, close: tonic-rdma, which could use shared memory",
        run: || count(Connector::Shm, Start::Lazy),
    },
];

/// The library that connects and serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Connector {
    Tonic,
    Shm,
}

/// How a channel is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    Connect,
    Lazy,
}

/// Number of counted connections. Before these, the warm-up makes the same number.
const TIMES: usize = 32;
/// Length of the request and of the reply in bytes.
const LENGTH: usize = 64;

fn count(connector: Connector, start: Start) -> anyhow::Result<Counts> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let uri = runtime.block_on(serve(connector))?;
    let run = || -> anyhow::Result<()> {
        for _ in 0..TIMES {
            runtime.block_on(once(connector, start, &uri))?;
        }
        Ok(())
    };
    run()?;
    let mut result = Ok(());
    let mut counts = measure(TIMES, || result = run());
    counts.insert("warm_up".to_owned(), TIMES as f64);
    result.map(|()| counts)
}

/// Starts a server and returns its address.
async fn serve(connector: Connector) -> anyhow::Result<String> {
    let routes = service::routes(Contender::ShmPlain, 1 << 20);
    let (incoming, uri) = listen().await?;
    match connector {
        Connector::Tonic => {
            let router = service::tonic_server().add_routes(routes);
            tokio::spawn(router.serve_with_incoming(incoming));
        }
        Connector::Shm => {
            let mut server = tonic_rdma::Server::builder().fabrics(Some(FabricKind::Shm));
            tokio::spawn(server.add_routes(routes).serve_with_incoming(incoming));
        }
    }
    Ok(uri)
}

/// Connects, makes one call, and closes.
async fn once(connector: Connector, start: Start, uri: &str) -> anyhow::Result<()> {
    let channel = match connector {
        Connector::Tonic => {
            let endpoint = tonic_endpoint(uri)?;
            Channel::Tonic(match start {
                Start::Connect => endpoint.connect().await?,
                Start::Lazy => endpoint.connect_lazy(),
            })
        }
        Connector::Shm => {
            let endpoint = tonic_rdma::Endpoint::from_shared(uri.to_owned())?;
            let endpoint = endpoint.fabrics(Some(FabricKind::Shm));
            Channel::Ours(match start {
                Start::Connect => endpoint.policy(Policy::Require).connect().await?,
                Start::Lazy => endpoint.connect_lazy(),
            })
        }
    };
    let mut client = Client::with_channel(channel, StubCodec::Tonic);
    client.unary(Bytes::from_static(&[0xa5; LENGTH]), LENGTH).await?;
    Ok(())
}
