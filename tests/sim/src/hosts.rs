//! The hosts of a run: devices, pools, TCP, and the servers that run on them.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic_rdma::{Channel, Context, Endpoint, Server};
use tonic_rdma_fabric::sim::{SimDevice, SimNet};

use crate::named;
use crate::plan::{Host, Plan};
use crate::service::Planned;
use crate::tcp_net::TcpNet;
use crate::world::World;

/// The hosts, and the networks between them.
pub(crate) struct Hosts {
    pub(crate) net: SimNet,
    pub(crate) tcp_net: TcpNet,
    pub(crate) devices: Vec<SimDevice>,
    pub(crate) contexts: Vec<Context>,
}

impl Hosts {
    pub(crate) fn new(plan: &Plan) -> Self {
        let net = SimNet::new(plan.net.clone());
        let devices: Vec<SimDevice> =
            (0..plan.pools.len()).map(|n| net.device(format!("sim{n}"), ip(n))).collect();
        let context = |(device, pool): (&SimDevice, &tonic_rdma::PoolConfig)| {
            Context::builder().pool(pool.clone()).borrowing(true).sim(device.clone()).build()
        };
        let contexts = devices.iter().zip(&plan.pools).map(context).collect();
        Hosts { net, tcp_net: TcpNet::new(plan.tcp_latency), devices, contexts }
    }

    pub(crate) fn endpoint(&self, host: Host, server: Host) -> Endpoint {
        let uri = format!("http://{}", address(server));
        let endpoint =
            Endpoint::from_shared(uri).unwrap_or_else(|_| Endpoint::from_static("http://unused"));
        endpoint.context(self.contexts[host].clone())
    }

    /// Connects a channel over the simulated TCP.
    pub(crate) async fn connect(
        &self,
        host: Host,
        server: Host,
        lazy: bool,
    ) -> Result<Channel, tonic_rdma::Error> {
        let tcp_net = self.tcp_net.clone();
        let connector = tower::service_fn(move |_: http::Uri| {
            let tcp_net = tcp_net.clone();
            async move { tcp_net.connect(address(server)).await.map(hyper_util::rt::TokioIo::new) }
        });
        let endpoint = self.endpoint(host, server);
        if lazy {
            return Ok(endpoint.connect_with_connector_lazy(connector));
        }
        endpoint.connect_with_connector(connector).await
    }
}

fn ip(host: Host) -> IpAddr {
    [10, 0, 0, host as u8 + 1].into()
}

fn address(server: Host) -> SocketAddr {
    SocketAddr::new(ip(server), 50051)
}

/// A server with its shutdown signal and its task.
pub(crate) struct RunningServer {
    stop: Option<oneshot::Sender<()>>,
    pub(crate) task: JoinHandle<Result<(), tonic_rdma::Error>>,
}

impl RunningServer {
    /// Starts a server, which takes over the host's address.
    pub(crate) fn start(world: &Arc<World>, hosts: &Hosts, host: Host) -> Self {
        let incoming = UnboundedReceiverStream::new(hosts.tcp_net.listen(address(host)));
        let (stop, stopped) = oneshot::channel::<()>();
        let signal = async move {
            // An error means that the owner was dropped with the run.
            let _ = stopped.await;
        };
        // The simulated TCP reports no addresses, so the server takes every client for one behind a
        // gateway.
        let mut server =
            Server::builder().context(hosts.contexts[host].clone()).offer_through_gateways(true);
        if world.plan.buffers_at_servers() {
            for method in named::METHODS {
                let world = world.clone();
                server = server.land_in(method, move |request| named::for_request(&world, request));
            }
        }
        let router = server.add_service(Planned(world.clone()));
        let task = tokio::spawn(router.serve_with_incoming_shutdown(incoming, signal));
        RunningServer { stop: Some(stop), task }
    }

    /// Starts a graceful shutdown.
    pub(crate) fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            // The server may have ended already.
            let _ = stop.send(());
        }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.is_none()
    }
}
