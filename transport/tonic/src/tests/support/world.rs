//! Two hosts on a simulated network, and servers on them.

use std::future::Future;
use std::net::SocketAddr;

use http::{Request, Response};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::body::Body;
use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;
use tonic_rdma_fabric::sim::{SimConfig, SimDevice, SimNet};
use tower::{Layer, Service};

use crate::tests::support::echo::Echo;
use crate::{Channel, Context, Endpoint, Error, Path, PoolConfig, Router, Server};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

pub(crate) struct World {
    pub(crate) server: SimDevice,
    pub(crate) client: SimDevice,
    pub(crate) net: SimNet,
    pub(crate) server_context: Context,
    pub(crate) client_context: Context,
}

impl World {
    pub(crate) fn new() -> Self {
        let net = SimNet::new(SimConfig::default());
        let server = net.device("sim-server", [10, 0, 0, 1].into());
        let client = net.device("sim-client", [10, 0, 0, 2].into());
        Self {
            server_context: context(&server),
            client_context: context(&client),
            server,
            client,
            net,
        }
    }

    /// The context of an additional host.
    pub(crate) fn another(&self) -> Context {
        context(&self.net.device("sim-other", [10, 0, 0, 3].into()))
    }

    /// A server builder with the fast path on the simulated network.
    pub(crate) fn builder(&self) -> Server {
        Server::builder().context(self.server_context.clone())
    }

    /// Serves [`Echo`] with [`builder`](Self::builder).
    pub(crate) async fn serve(&self) -> Serving {
        Serving::start(self.builder().add_service(Echo)).await
    }

    pub(crate) fn endpoint(&self, serving: &Serving) -> Endpoint {
        endpoint(serving.addr).context(self.client_context.clone())
    }

    pub(crate) async fn connect(&self, serving: &Serving) -> Channel {
        let channel = self.endpoint(serving).connect().await.unwrap();
        assert_eq!(channel.path().path, Path::Sim, "{}", channel.path());
        channel
    }
}

fn context(device: &SimDevice) -> Context {
    Context::builder().pool(PoolConfig::default().total(8 << 20)).sim(device.clone()).build()
}

pub(crate) fn endpoint(addr: SocketAddr) -> Endpoint {
    Endpoint::from_shared(format!("http://{addr}")).unwrap()
}

/// A server that runs until it is stopped or dropped.
pub(crate) struct Serving {
    pub(crate) addr: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<Result<(), Error>>,
}

impl Serving {
    pub(crate) async fn start<L, B>(router: Router<L>) -> Self
    where
        L: Layer<Routes> + Send + 'static,
        L::Service: Service<Request<Body>, Response = Response<B>> + Clone + Send + 'static,
        <L::Service as Service<Request<Body>>>::Future: Send,
        <L::Service as Service<Request<Body>>>::Error: Into<BoxError> + Send,
        B: http_body::Body<Data = bytes::Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        Self::with(|incoming, signal| router.serve_with_incoming_shutdown(incoming, signal)).await
    }

    pub(crate) async fn with<F>(
        serve: impl FnOnce(TcpIncoming, Box<dyn Future<Output = ()> + Send + Unpin>) -> F,
    ) -> Self
    where
        F: Future<Output = Result<(), Error>> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let signal = Box::new(Box::pin(async move {
            // The sender was dropped without a signal, so continue to serve.
            if stopped.await.is_err() {
                std::future::pending().await
            }
        }));
        let task = tokio::spawn(serve(TcpIncoming::from(listener), signal));
        Self { addr, stop: Some(stop), task }
    }

    /// Starts a graceful shutdown.
    pub(crate) fn stop(&mut self) {
        let _ = self.stop.take().unwrap().send(());
    }

    pub(crate) async fn ended(mut self) -> Result<(), Error> {
        (&mut self.task).await.unwrap()
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.task.is_finished()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A stock tonic server.
pub(crate) async fn stock() -> Serving {
    let router = tonic::transport::Server::builder().add_service(Echo);
    Serving::with(|incoming, signal| async move {
        router.serve_with_incoming_shutdown::<_, _, _, _, Body>(incoming, signal).await
    })
    .await
}
