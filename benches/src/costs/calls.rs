//! Whole calls, with client and server in one thread.
//!
//! Calls to the service without a transport ([`TransportKind::Nothing`]) show the costs of tonic's
//! stubs, codec and routes. The costs of a call over a transport minus the costs of such a call are
//! the transport's part.

use std::io;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use hyper_util::rt::TokioIo;
use tokio::io::DuplexStream;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_stream::StreamExt as _;
use tonic::transport::server::TcpIncoming;
use tonic_rdma::sim::{SimConfig, SimNet};
use tonic_rdma::{Context, FabricKind, Policy};
use tower::service_fn;

use super::meter::{Counts, measure};
use super::scenario::Scenario;
use crate::client::{Channel, Client, tonic_endpoint};
use crate::contender::{Contender, StubCodec};
use crate::measure::{Calls as _, Timed, Work, run_concurrently};
use crate::service;

/// The scenarios of this module, for [`super::all`].
pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "call-64-nothing",
        what: "64 B and back, answered in place: tonic's stub, codec and routes",
        run: || small(TransportKind::Nothing, 1),
    },
    Scenario {
        name: "call-64-tonic-duplex",
        what: "64 B and back, tonic over a pipe in memory",
        run: || small(TransportKind::TonicDuplex, 1),
    },
    Scenario {
        name: "call-64-tonic-tcp",
        what: "64 B and back, tonic over TCP",
        run: || small(TransportKind::TonicTcp, 1),
    },
    Scenario {
        name: "call-64-tcp",
        what: "64 B and back, tonic-rdma over TCP",
        run: || small(TransportKind::Tcp, 1),
    },
    Scenario {
        name: "call-64-sim",
        what: "64 B and back, tonic-rdma over the simulated fabric",
        run: || small(TransportKind::Sim, 1),
    },
    Scenario {
        name: "call-64-shm",
        what: "64 B and back, tonic-rdma over shared memory",
        run: || small(TransportKind::Shm, 1),
    },
    Scenario {
        name: "call-64-sim-codec",
        what: "64 B and back, tonic-rdma over the simulated fabric, with the zero-copy codec",
        run: || count(TransportKind::Sim, true, SMALL),
    },
    Scenario {
        name: "call-64-x64-tonic-duplex",
        what: "one of 64 calls in flight, tonic over a pipe in memory",
        run: || small(TransportKind::TonicDuplex, 64),
    },
    Scenario {
        name: "call-64-x64-sim",
        what: "one of 64 calls in flight, tonic-rdma over the simulated fabric",
        run: || small(TransportKind::Sim, 64),
    },
    Scenario {
        name: "call-64-x64-shm",
        what: "one of 64 calls in flight, tonic-rdma over shared memory",
        run: || small(TransportKind::Shm, 64),
    },
    Scenario {
        name: "call-1MiB-up-tonic-duplex",
        what: "1 MiB up, tonic over a pipe in memory",
        run: || count(TransportKind::TonicDuplex, false, UP),
    },
    Scenario {
        name: "call-1MiB-up-sim",
        what: "1 MiB up from pinned memory, zero-copy codec, simulated fabric",
        run: || count(TransportKind::Sim, true, UP),
    },
    Scenario {
        name: "call-1MiB-up-sim-plain",
        what: "1 MiB up, tonic's codec, simulated fabric",
        run: || count(TransportKind::Sim, false, UP),
    },
    Scenario {
        name: "call-1MiB-down-sim",
        what: "1 MiB down from pinned memory, zero-copy codec, simulated fabric",
        run: || count(TransportKind::Sim, true, DOWN),
    },
];

/// The transport of the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportKind {
    /// The service is called in place.
    Nothing,
    /// tonic over [`tokio::io::duplex`].
    TonicDuplex,
    /// tonic over TCP.
    TonicTcp,
    /// tonic-rdma, restricted to TCP.
    Tcp,
    /// tonic-rdma over the simulated fabric.
    Sim,
    /// tonic-rdma over shared memory.
    Shm,
}

/// Size and number of calls.
#[derive(Clone, Copy, Debug)]
struct Load {
    request: usize,
    reply: usize,
    in_flight: usize,
    times: usize,
}

const SMALL: Load = Load { request: 64, reply: 64, in_flight: 1, times: 512 };
const UP: Load = Load { request: 1 << 20, reply: 0, in_flight: 1, times: 16 };
const DOWN: Load = Load { request: 0, reply: 1 << 20, in_flight: 1, times: 16 };
/// Capacity of the pipe in memory, in bytes.
const PIPE_CAPACITY: usize = 256 << 10;

fn small(transport: TransportKind, in_flight: usize) -> anyhow::Result<Counts> {
    count(transport, false, Load { in_flight, ..SMALL })
}

fn count(transport: TransportKind, zero_copy: bool, load: Load) -> anyhow::Result<Counts> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let net = SimNet::new(SimConfig::default());
    let client = runtime.block_on(connect(transport, zero_copy, &net))?;
    let payload = runtime.block_on(client.payload(load.request));
    let run =
        |times| -> anyhow::Result<()> { calls(&runtime, &client, payload.clone(), load, times) };
    // Warm-up: fills tables, opens windows, and lets the connection learn methods and codecs.
    run(load.times)?;
    let before = net.stats();
    let mut result = Ok(());
    let mut counts = measure(load.times, || result = run(load.times));
    result?;
    counts.insert("warm_up".to_owned(), load.times as f64);
    if transport == TransportKind::Sim {
        let after = net.stats();
        let mut add = |name: &str, count: u64| {
            counts.insert(name.to_owned(), count as f64 / load.times as f64)
        };
        add("sends", after.sends - before.sends);
        add("writes", after.writes - before.writes);
        add("doorbells", after.doorbells - before.doorbells);
        add("completions", after.completions - before.completions);
        ensure!(after.receiver_not_ready == 0, "a SEND found no RECV");
    }
    Ok(counts)
}

fn calls(
    runtime: &Runtime,
    client: &Client,
    payload: Bytes,
    load: Load,
    times: usize,
) -> anyhow::Result<()> {
    let work = Work { payload, reply: load.reply, calls: times };
    let client = std::slice::from_ref(client);
    runtime.block_on(run_concurrently(client, work, load.in_flight, Timed::All))?;
    Ok(())
}

async fn connect(
    transport: TransportKind,
    zero_copy: bool,
    net: &SimNet,
) -> anyhow::Result<Client> {
    let contender = if zero_copy { Contender::Shm } else { Contender::ShmPlain };
    let routes = service::routes(contender, 1 << 20);
    let channel = match transport {
        TransportKind::Nothing => Channel::InPlace(routes.prepare()),
        TransportKind::TonicDuplex => {
            let (near, far) = tokio::io::duplex(PIPE_CAPACITY);
            let incoming =
                tokio_stream::once(Ok::<_, io::Error>(far)).chain(tokio_stream::pending());
            tokio::spawn(service::tonic_server().add_routes(routes).serve_with_incoming(incoming));
            let near = Mutex::new(Some(near));
            let connector = service_fn(move |_| {
                let near = near.lock().ok().and_then(|mut near| near.take());
                async move {
                    let near: DuplexStream =
                        near.ok_or_else(|| io::Error::other("it connects once"))?;
                    Ok::<_, io::Error>(TokioIo::new(near))
                }
            });
            let endpoint = tonic_endpoint("http://pipe.invalid")?;
            Channel::Tonic(endpoint.connect_with_connector(connector).await?)
        }
        TransportKind::TonicTcp => {
            let (incoming, uri) = listen().await?;
            tokio::spawn(service::tonic_server().add_routes(routes).serve_with_incoming(incoming));
            Channel::Tonic(tonic_endpoint(uri)?.connect().await?)
        }
        TransportKind::Tcp | TransportKind::Sim | TransportKind::Shm => {
            let (incoming, uri) = listen().await?;
            let (mut server, mut endpoint) =
                (tonic_rdma::Server::builder(), tonic_rdma::Endpoint::from_shared(uri)?);
            let host = |n: u8| {
                let device = net.device(format!("sim{n}"), [10, 0, 0, n].into());
                Context::builder().sim(device).build()
            };
            if transport == TransportKind::Sim {
                (server, endpoint) = (server.context(host(1)), endpoint.context(host(2)));
            }
            let (policy, fabric) = match transport {
                TransportKind::Tcp => (Policy::Off, None),
                _ => (Policy::Require, Some(FabricKind::Shm)),
            };
            let router = server.policy(policy).fabrics(fabric).add_routes(routes);
            tokio::spawn(router.serve_with_incoming(incoming));
            let endpoint =
                endpoint.policy(policy).fabrics(fabric).fast_path_timeout(Duration::from_secs(60));
            Channel::Ours(endpoint.connect().await.context("cannot connect")?)
        }
    };
    let codec = if zero_copy { StubCodec::ZeroCopy } else { StubCodec::Tonic };
    Ok(Client::with_channel(channel, codec))
}

pub(super) async fn listen() -> anyhow::Result<(TcpIncoming, String)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let uri = format!("http://{}", listener.local_addr()?);
    Ok((TcpIncoming::from(listener).with_nodelay(Some(true)), uri))
}
