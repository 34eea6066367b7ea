//! The hosts of a run, and what all of its tasks share.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic_rdma::{Channel, Context, Endpoint, Server};
use tonic_rdma_fabric::sim::{SimDevice, SimNet};

use crate::oracle::Book;
use crate::plan::{Host, Plan};
use crate::service::Planned;
use crate::tcp_net::TcpNet;
use crate::wire_checker::WireChecker;

/// What all tasks of a run share.
pub(crate) struct World {
    pub(crate) plan: Arc<Plan>,
    pub(crate) started: Instant,
    pub(crate) checker: Arc<WireChecker>,
    book: Mutex<Book>,
    /// What readers hold on to, and until when.
    attic: Mutex<Vec<(Instant, Bytes)>>,
    channels: Mutex<Vec<Option<Channel>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    pub(crate) fn new(plan: Arc<Plan>, checker: Arc<WireChecker>) -> Arc<Self> {
        let started = Instant::now();
        Arc::new(World {
            book: Mutex::new(Book::new(plan.calls.len(), started)),
            attic: Mutex::default(),
            channels: Mutex::default(),
            plan,
            started,
            checker,
        })
    }

    pub(crate) fn book(&self) -> MutexGuard<'_, Book> {
        lock(&self.book)
    }

    pub(crate) fn wrong(&self, what: String) {
        self.checker.note(|| format!("WRONG {what}"));
        self.book().wrong(what);
    }

    pub(crate) fn check(&self, result: Result<(), String>) {
        if let Err(what) = result {
            self.wrong(what);
        }
    }

    /// Holds on to something that was read.
    pub(crate) fn keep(&self, bytes: Bytes, time: Duration) {
        if !time.is_zero() {
            lock(&self.attic).push((Instant::now() + time, bytes));
        }
    }

    /// Lets go of what was held for long enough, all the time.
    pub(crate) async fn housekeeping(&self) {
        loop {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let now = Instant::now();
            let old: Vec<_> = {
                let mut attic = lock(&self.attic);
                attic.extract_if(.., |(until, _)| *until <= now).collect()
            };
            drop(old);
        }
    }

    pub(crate) fn holds_nothing(&self) -> bool {
        lock(&self.attic).is_empty()
    }

    pub(crate) fn set_channels(&self, channels: Vec<Option<Channel>>) {
        let old = std::mem::replace(&mut *lock(&self.channels), channels);
        drop(old);
    }

    pub(crate) fn channel(&self, n: usize) -> Option<Channel> {
        lock(&self.channels).get(n).cloned().flatten()
    }

    pub(crate) fn drop_channel(&self, n: usize) {
        let old = lock(&self.channels).get_mut(n).and_then(Option::take);
        drop(old);
    }
}

/// The machines.
pub(crate) struct Hosts {
    pub(crate) net: SimNet,
    pub(crate) lan: TcpNet,
    pub(crate) devices: Vec<SimDevice>,
    pub(crate) contexts: Vec<Context>,
}

impl Hosts {
    pub(crate) fn new(plan: &Plan) -> Self {
        let net = SimNet::new(plan.net.clone());
        let devices: Vec<SimDevice> =
            (0..plan.pools.len()).map(|n| net.device(format!("sim{n}"), ip(n))).collect();
        let context = |(device, pool): (&SimDevice, &tonic_rdma::PoolConfig)| {
            Context::builder().pool(pool.clone()).sim(device.clone()).build()
        };
        let contexts = devices.iter().zip(&plan.pools).map(context).collect();
        Hosts { net, lan: TcpNet::new(plan.lan_latency), devices, contexts }
    }

    pub(crate) fn endpoint(&self, host: Host, server: Host) -> Endpoint {
        let uri = format!("http://{}", address(server));
        let endpoint =
            Endpoint::from_shared(uri).unwrap_or_else(|_| Endpoint::from_static("http://unused"));
        endpoint.context(self.contexts[host].clone())
    }

    /// A connector over the simulated TCP.
    pub(crate) async fn connect(
        &self,
        host: Host,
        server: Host,
        lazy: bool,
    ) -> Result<Channel, tonic_rdma::Error> {
        let lan = self.lan.clone();
        let connector = tower::service_fn(move |_: http::Uri| {
            let lan = lan.clone();
            async move { lan.connect(address(server)).await.map(hyper_util::rt::TokioIo::new) }
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

/// The TCP address of a server.
fn address(server: Host) -> SocketAddr {
    SocketAddr::new(ip(server), 50051)
}

/// A server that runs.
pub(crate) struct Serving {
    stop: Option<oneshot::Sender<()>>,
    pub(crate) task: JoinHandle<Result<(), tonic_rdma::Error>>,
}

impl Serving {
    /// Starts one, which takes over the host's address.
    pub(crate) fn start(world: &Arc<World>, hosts: &Hosts, host: Host) -> Self {
        let incoming = UnboundedReceiverStream::new(hosts.lan.listen(address(host)));
        let (stop, stopped) = oneshot::channel::<()>();
        let signal = async move {
            // It is told, or its owner is gone with the run.
            let _ = stopped.await;
        };
        // The simulated TCP tells no addresses.
        let router = Server::builder()
            .context(hosts.contexts[host].clone())
            .offer_through_gateways(true)
            .add_service(Planned(world.clone()));
        let task = tokio::spawn(router.serve_with_incoming_shutdown(incoming, signal));
        Serving { stop: Some(stop), task }
    }

    /// Asks it to end in good order.
    pub(crate) fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            // It may have ended already.
            let _ = stop.send(());
        }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.is_none()
    }
}
