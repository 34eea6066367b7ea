//! Serves both paths, from start to shutdown.

use std::convert::Infallible;
use std::future::{Future, pending};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use futures_core::Stream;
use http::{Request, Response};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tonic::body::Body;
use tonic::transport::server::Connected;
use tonic_rdma_memory::throttled;
use tonic_rdma_proto::Side;
use tower::{Layer, Service};

use crate::bootstrap::capture::Capture;
use crate::bootstrap::gateways::Gateways;
use crate::bootstrap::limited::LimitedOffers;
use crate::bootstrap::service::{OfferService, Offering};
use crate::bootstrap::stock_calls::StockCalls;
use crate::bootstrap::tickets::Tickets;
use crate::codec::Methods;
use crate::error::{BoxError, Cause, Error};
use crate::executor::boxed;
use crate::path::policy::{EnvSettings, Policy};
use crate::path::reason::{Reason, ReasonCode};
use crate::server::builder::Server;
use crate::server::fast_path::admission::{ConnectionLimits, FixedLimits};
use crate::server::fast_path::{FastPath, Logging};
use crate::server::incoming::Accepting;
use crate::server::observer::Registry;
use crate::server::stack::Layered;
use crate::tcp::body::TcpCalls;
use crate::telemetry::metrics;
use crate::telemetry::spans::Calls;

/// Default maximum number of concurrent TCP connections.
pub(super) const MAX_TCP_CONNECTIONS: usize = 16 * 1024;

/// Serves the program's services, to which `with_offer` adds the Offer, on the TCP connections of
/// `incoming` and on the fast path. Returns when `incoming` ends.
pub(super) async fn serve<L, S, I, IO, IE, ResBody>(
    server: Server<L>,
    with_offer: impl FnOnce(LimitedOffers) -> S,
    incoming: I,
    bound: Option<SocketAddr>,
) -> Result<(), Error>
where
    I: Stream<Item = Result<IO, IE>>,
    IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    IE: Into<BoxError>,
    L: Layer<S>,
    L::Service: Service<Request<Body>, Response = Response<ResBody>> + Clone + Send + 'static,
    <<L as Layer<S>>::Service as Service<Request<Body>>>::Future: Send,
    <<L as Layer<S>>::Service as Service<Request<Body>>>::Error: Into<BoxError> + Send,
    ResBody: http_body::Body<Data = Bytes> + Send + 'static,
    ResBody::Error: Into<BoxError>,
{
    let started = start(server, with_offer, bound).await?;
    let Started { tcp, service, most_tcp, gateways, running } = started;
    let (open, mut all_closed) = mpsc::channel::<Infallible>(1);
    let incoming = Accepting::new(incoming, pending(), || (), most_tcp, gateways, open);
    tcp.serve_with_incoming(service, incoming).await?;
    // The stream has ended, but its connections are still served. Clients keep the fast path as
    // long as they are connected, and can recover a lost fast path.
    tokio::spawn(boxed(async move {
        all_closed.recv().await;
        drop(running);
    }));
    Ok(())
}

/// Like [`serve`], but shuts down gracefully when `signal` completes or `incoming` ends. The two
/// functions are separate, so that a program compiles tonic's server only for the kind of end that
/// the program uses.
pub(super) async fn serve_until<L, S, I, IO, IE, F, ResBody>(
    server: Server<L>,
    with_offer: impl FnOnce(LimitedOffers) -> S,
    incoming: I,
    bound: Option<SocketAddr>,
    signal: F,
) -> Result<(), Error>
where
    F: Future<Output = ()>,
    I: Stream<Item = Result<IO, IE>>,
    IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    IE: Into<BoxError>,
    L: Layer<S>,
    L::Service: Service<Request<Body>, Response = Response<ResBody>> + Clone + Send + 'static,
    <<L as Layer<S>>::Service as Service<Request<Body>>>::Future: Send,
    <<L as Layer<S>>::Service as Service<Request<Body>>>::Error: Into<BoxError> + Send,
    ResBody: http_body::Body<Data = Bytes> + Send + 'static,
    ResBody::Error: Into<BoxError>,
{
    let started = start(server, with_offer, bound).await?;
    let Started { tcp, service, most_tcp, gateways, running } = started;
    let Running { mut tasks, offering, drain, registry: _registry, mut all_gone } = running;
    let end = || {
        offering.send_replace(Offering::Off(Reason::new(
            ReasonCode::GoAway,
            "the server is shutting down",
        )));
        drain.send_replace(true);
    };
    let (open, _) = mpsc::channel::<Infallible>(1);
    // tonic also shuts down gracefully when the stream of connections ends.
    let incoming = Accepting::new(incoming, signal, end, most_tcp, gateways, open);
    tcp.serve_with_incoming_shutdown(service, incoming, pending()).await?;
    // The listeners close with their tasks, so only draining connections are left.
    tasks.0.shutdown().await;
    all_gone.recv().await;
    Ok(())
}

/// A server that is ready to serve. Unless its fast path is off, the fast path's tasks already run.
struct Started<S> {
    tcp: tonic::transport::Server,
    /// The service of the TCP side.
    service: Capture<TcpCalls<Calls<S>>>,
    most_tcp: usize,
    gateways: Arc<Gateways>,
    running: Running,
}

/// The fast path of a server. Dropping this struct ends the fast path.
struct Running {
    tasks: Tasks,
    offering: watch::Sender<Offering>,
    drain: watch::Sender<bool>,
    registry: Arc<Registry>,
    /// Ends once every fast-path connection is gone.
    all_gone: mpsc::Receiver<Infallible>,
}

async fn start<L, S, ResBody>(
    server: Server<L>,
    with_offer: impl FnOnce(LimitedOffers) -> S,
    bound: Option<SocketAddr>,
) -> Result<Started<L::Service>, Error>
where
    L: Layer<S>,
    L::Service: Service<Request<Body>, Response = Response<ResBody>> + Clone + Send + 'static,
    <<L as Layer<S>>::Service as Service<Request<Body>>>::Future: Send,
    <<L as Layer<S>>::Service as Service<Request<Body>>>::Error: Into<BoxError> + Send,
    ResBody: http_body::Body<Data = Bytes> + Send + 'static,
    ResBody::Error: Into<BoxError>,
{
    let env = EnvSettings::read()?;
    let Server { tcp, layers, shared: settings } = server;
    let policy = env.policy(settings.policy);
    let FixedLimits { tickets, ticket_lifetime, .. } = settings.fixed_limits;
    let tickets = Arc::new(Tickets::new(tickets, ticket_lifetime));
    let most_tcp = settings.max_tcp_connections.unwrap_or(MAX_TCP_CONNECTIONS);
    let context = settings.context.clone().unwrap_or_default();
    let fabrics = env.fabrics(settings.fabrics.as_deref(), policy);
    let off = match policy {
        Policy::Off => Some("switched off at the server"),
        _ if context.paths(&fabrics).is_empty() => match policy {
            Policy::RequireVerbs => Some("RDMA is not among the fabrics that are allowed"),
            _ => Some("the server allows no fabric"),
        },
        _ => None,
    };
    if let Some(why) = off
        && policy.is_required()
    {
        return Err(Cause::required(Reason::new(ReasonCode::Policy, why)).into());
    }
    let offering = watch::Sender::new(match off {
        Some(why) => Offering::Off(Reason::new(ReasonCode::Policy, why)),
        None => Offering::starting(context.paths(&fabrics)),
    });
    let gateways: Arc<Gateways> = Arc::default();
    let registry = settings.registry.clone();
    registry.add_server(&gateways);
    let stock_calls = Arc::new(StockCalls::new(gateways.clone()));
    let offers = OfferService::new(
        offering.subscribe(),
        tickets.clone(),
        gateways.clone(),
        stock_calls.clone(),
        settings.offer_through_gateways,
        settings.plaintext,
        settings.measuring,
    );
    let offer = LimitedOffers::new(offers);
    // Both paths share one service, so layers with state see every call.
    let layered = layers.service(with_offer(offer));

    let methods: Arc<Methods> = Arc::default();
    let stats = settings.stats.clone();
    let allocators = settings.allocators.clone();
    let (drain, draining) = watch::channel(false);
    let (alive, all_gone) = mpsc::channel::<Infallible>(1);
    let mut tasks = Tasks(JoinSet::new());
    match off {
        Some(why) => {
            metrics::fallback(Side::Server, &Reason::new(ReasonCode::Policy, why));
            throttled!(info, path = "tcp", why, "clients stay on TCP");
            // Drop the sender, because `serve_until` returns only after every clone of it is
            // dropped.
            drop(alive);
        }
        None => {
            let fast = FastPath {
                context,
                env_device: env.device,
                env_type_of_service: env.type_of_service,
                fabrics,
                limits: ConnectionLimits::new(settings.max_connections, settings.fixed_limits),
                settings,
                tickets,
                offering: offering.clone(),
                drain: draining,
                methods: methods.clone(),
                log: Logging::default(),
                _alive: alive,
            };
            tasks.start(fast, policy, bound, Layered::new(layered.clone())).await?;
        }
    }

    let calls = TcpCalls::new(Calls(layered), methods, stats.tcp().clone(), allocators);
    let service = Capture::new(calls, stock_calls);
    let running = Running { tasks, offering, drain, registry, all_gone };
    Ok(Started { tcp, service, most_tcp, gateways, running })
}

/// One task for each path. Dropping this struct aborts the tasks.
struct Tasks(JoinSet<()>);

impl Tasks {
    /// Starts a task for each path. The future is boxed, so that it is compiled in this crate and
    /// not in each program.
    fn start(
        &mut self,
        fast: FastPath,
        policy: Policy,
        bound: Option<SocketAddr>,
        layered: Layered,
    ) -> Pin<Box<dyn Future<Output = Result<(), Error>> + Send + '_>> {
        Box::pin(self.start_paths(fast, policy, bound, layered))
    }

    async fn start_paths(
        &mut self,
        fast: FastPath,
        policy: Policy,
        bound: Option<SocketAddr>,
        layered: Layered,
    ) -> Result<(), Error> {
        let paths = fast.paths();
        let fast = Arc::new(fast);
        // A server that requires the fast path waits for one of its paths. Other servers start at
        // once.
        let (mut wanted, mut failed) = (policy.is_required(), None);
        for path in &paths {
            let started = match wanted {
                true => fast.start(*path, bound).await.map_err(|reason| failed = Some(reason)).ok(),
                false => None,
            };
            wanted &= started.is_none();
            self.0.spawn(boxed(fast.clone().run(*path, bound, started, layered.clone())));
        }
        match failed {
            Some(reason) if wanted => Err(Cause::required(reason).into()),
            _ => Ok(()),
        }
    }
}
