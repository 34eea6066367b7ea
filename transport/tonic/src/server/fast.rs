//! The fast path of a server: listeners, tickets, and the connections they let in.

use super::{
    Settings,
    stack::{self, Layered},
};
use crate::{
    bootstrap::{
        service::{Listening, Offering},
        tickets::{Ticket, Tickets},
    },
    codec::Methods,
    connect_info::{ConnectionPool, RdmaConnectInfo},
    context::Context,
    link::{LinkOptions, serve_link},
    path::Path,
    reason::{Reason, ReasonCode},
};
use http::Extensions;
use std::{convert::Infallible, future::Future, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::Instant,
};
use tonic_rdma_fabric::{AnyLink, Fabric, FabricError, Incoming, Link, Listener, Transport};
use tonic_rdma_memory::Pool;
use tonic_rdma_proto::{Accept, Hello, Reject, Settings as PeerSettings, hello::HelloError};

/// A connection that is accepted stands within this, or is given up.
const ACCEPT_LIMIT: Duration = Duration::from_secs(5);
/// Pause before listening is tried again: somebody has to mend something first.
const RETRY: Duration = Duration::from_secs(60);

/// What the fast path of one server shares.
pub(super) struct FastPath {
    pub(super) context: Context,
    pub(super) env_device: Option<String>,
    pub(super) settings: Settings,
    pub(super) tickets: Arc<Tickets>,
    pub(super) offering: watch::Sender<Offering>,
    pub(super) drain: watch::Receiver<bool>,
    pub(super) methods: Arc<Methods>,
    /// Held by every connection, through the `Arc` of this: the server waits for its other end.
    pub(super) _alive: mpsc::Sender<Infallible>,
}

/// A listener with what its connections need.
struct Place {
    listener: Listener,
    pool: Pool,
    listening: Listening,
}

impl FastPath {
    /// Opens devices and listens where the TCP side is bound, or wherever there is RDMA.
    async fn listen(&self, bound: Option<SocketAddr>) -> Result<Vec<Place>, Reason> {
        let ip = bound.map(|a| a.ip().to_canonical()).filter(|ip| !ip.is_unspecified());
        let port = bound.map_or(0, |a| a.port());
        let mut places = Vec::new();
        let mut failed = None;
        for (fabric, addr, pool) in self.context.local(ip, self.env_device.as_deref()).await? {
            let transport = fabric.info().map_or(Transport::Unknown, |info| info.transport);
            match listen_near(&fabric, SocketAddr::new(addr, port), transport) {
                Ok(listener) => {
                    let listening = Listening {
                        path: path_of(fabric.provider()),
                        addr: listener.local_addr().ip().unwrap_or(SocketAddr::new(addr, port)),
                        device: fabric.name().to_owned(),
                        transport: transport.to_string(),
                    };
                    places.push(Place { listener, pool, listening });
                }
                Err(error) => {
                    tracing::warn!(device = fabric.name(), %addr, %error, "cannot listen on RDMA address");
                    failed = Some(crate::cause::fabric(error));
                }
            }
        }
        if places.is_empty() {
            let none = || Reason::new(ReasonCode::NotOnRdmaDevice, "no local address lies on an RDMA device");
            return Err(failed.unwrap_or_else(none));
        }
        Ok(places)
    }

    /// Listens for the first time, and tells.
    pub(super) async fn start(&self, bound: Option<SocketAddr>) -> Result<Started, Reason> {
        match self.listen(bound).await {
            Ok(places) => {
                let listening: Vec<Listening> = places.iter().map(|p| p.listening.clone()).collect();
                for l in &listening {
                    tracing::info!(path = %l.path, device = %l.device, transport = %l.transport, addr = %l.addr,
                        "fast path offered");
                }
                self.offering.send_replace(Offering::On(listening.into()));
                Ok(Started(places))
            }
            Err(reason) => {
                self.offering.send_replace(Offering::Off(reason.clone()));
                Err(reason)
            }
        }
    }

    /// Serves until dropped: accepts, and listens anew when listening was not possible or ended.
    pub(super) async fn run(self, bound: Option<SocketAddr>, started: Option<Started>, layered: Layered) {
        let this = Arc::new(self);
        let mut said = None;
        let mut next = match started {
            Some(started) => Ok(started),
            None => this.start(bound).await,
        };
        loop {
            let reason = match next {
                Ok(Started(places)) => {
                    said = None;
                    let reason = this.accept_all(places, layered.clone()).await;
                    this.offering.send_replace(Offering::Off(reason.clone()));
                    reason
                }
                Err(reason) => reason,
            };
            if said == Some(reason.code()) {
                tracing::debug!(%reason, "fast path still not offered");
            } else {
                said = Some(reason.code());
                tracing::warn!(path = "tcp", code = reason.code().as_str(), %reason, cure = reason.cure(),
                    "fast path not offered: clients stay on TCP");
            }
            tokio::time::sleep(RETRY).await;
            next = this.start(bound).await;
        }
    }

    /// Accepts on all places until one of them dies, and says why.
    async fn accept_all(self: &Arc<Self>, places: Vec<Place>, layered: Layered) -> Reason {
        let mut accepting = JoinSet::new();
        for mut place in places {
            let this = self.clone();
            let layered = layered.clone();
            accepting.spawn(async move {
                loop {
                    match place.listener.accept().await {
                        Ok(incoming) => this.take(incoming, place.pool.clone(), layered.clone()),
                        Err(error) => return crate::cause::fabric(error),
                    }
                }
            });
        }
        drop(layered);
        let first = accepting.join_next().await.and_then(Result::ok);
        first.unwrap_or_else(|| Reason::new(ReasonCode::LinkLost, "the RDMA listener ended"))
    }

    /// Looks at a connect request, and serves the connection in a task of its own.
    fn take(self: &Arc<Self>, incoming: Incoming, pool: Pool, layered: Layered) {
        let this = self.clone();
        tokio::spawn(async move {
            let peer = incoming.peer_addr();
            let (hello, extensions) = match this.admit(&incoming) {
                Ok(admitted) => admitted,
                Err((reject, why)) => {
                    tracing::warn!(%peer, why, "RDMA connection refused");
                    return incoming.reject(&reject.encode());
                }
            };
            let mut options = LinkOptions::for_pool(&pool);
            if let Some(max) = this.settings.max_concurrent_streams {
                options.proto.max_streams = max.max(1);
            }
            // Tried here, so that the client is told.
            if let Err(error) = pool.control(options.link.control_bytes()) {
                tracing::warn!(%peer, %error, "RDMA connection refused");
                return incoming.reject(&Reject::Resources.encode());
            }
            let accept = Accept { version: hello.version(), settings: options.proto.settings() }.encode();
            match incoming.accept(&options.link, &pool, &accept, ACCEPT_LIMIT).await {
                Ok(link) => this.serve(link, pool, hello.settings, options, layered, extensions).await,
                Err(error) => {
                    let reason = crate::cause::connect(error);
                    tracing::warn!(%peer, %reason, "RDMA connection did not come about");
                }
            }
        });
    }

    /// Whether the bearer of this private data may come in.
    fn admit(&self, incoming: &Incoming) -> Result<(Hello, Extensions), (Reject, String)> {
        let hello = Hello::decode(incoming.private_data()).map_err(|error| {
            let reject = match error {
                HelloError::Version { min, max } => Reject::Version { min, max },
                _ => Reject::Malformed,
            };
            (reject, error.to_string())
        })?;
        if *self.drain.borrow() {
            return Err((Reject::ShuttingDown, "shutting down".into()));
        }
        let connection = self
            .tickets
            .redeem(&Ticket(hello.ticket), Instant::now())
            .map_err(|refused| (Reject::Ticket, refused.to_string()))?;
        Ok((hello, connection))
    }

    async fn serve(
        &self,
        link: AnyLink,
        pool: Pool,
        peer: PeerSettings,
        options: LinkOptions,
        layered: Layered,
        mut extensions: Extensions,
    ) {
        let ends = link.peer().clone();
        tracing::debug!(peer = %ends, "fast path open");
        extensions.insert(RdmaConnectInfo {
            path: path_of(ends.provider),
            device: Some(ends.device.clone()),
            local_addr: ends.local.ip(),
            remote_addr: ends.remote.ip(),
        });
        extensions.insert(ConnectionPool(pool.clone()));
        let own = self.settings.stats.connection();
        let service = stack::of_connection(layered, &self.settings);
        let age = self.settings.max_connection_age;
        let drain = either(draining(self.drain.clone()), sleep_for(age));
        let serving = serve_link(
            link,
            pool,
            peer,
            &options,
            own.counters.clone(),
            self.methods.clone(),
            service,
            extensions,
            drain,
        );
        let grace = age.zip(self.settings.max_connection_age_grace).map(|(age, grace)| age + grace);
        tokio::select! {
            reason = serving => tracing::debug!(peer = %ends, %reason, "fast path closed"),
            () = sleep_for(grace) => tracing::debug!(peer = %ends, "fast path closed: too old"),
        }
    }
}

/// Listeners that are up and not yet accepting.
pub(super) struct Started(Vec<Place>);

/// On `addr`, or on a free port where that one is taken or is one of TCP's.
fn listen_near(fabric: &Fabric, addr: SocketAddr, transport: Transport) -> Result<Listener, FabricError> {
    let free = SocketAddr::new(addr.ip(), 0).into();
    if transport == Transport::IWarp {
        return fabric.listen(&free);
    }
    match fabric.listen(&addr.into()) {
        Err(FabricError::AddressInUse { .. }) => fabric.listen(&free),
        other => other,
    }
}

fn path_of(provider: &str) -> Path {
    if provider == "sim" { Path::Sim } else { Path::Verbs }
}

/// Resolves when the server shuts down in good order; never when it is dropped.
async fn draining(mut drain: watch::Receiver<bool>) {
    if drain.wait_for(|drain| *drain).await.is_err() {
        std::future::pending().await
    }
}

async fn sleep_for(time: Option<Duration>) {
    match time {
        Some(time) => tokio::time::sleep(time).await,
        None => std::future::pending().await,
    }
}

async fn either(a: impl Future<Output = ()>, b: impl Future<Output = ()>) {
    tokio::select! {
        () = a => {}
        () = b => {}
    }
}
