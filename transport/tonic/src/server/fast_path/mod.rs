//! A server's fast path: its listeners, tickets and admitted connections.

pub(crate) mod admission;
#[cfg(feature = "measure")]
mod bare;
mod listeners;

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::Extensions;
use tokio::sync::{mpsc, watch};
use tonic_rdma_fabric::{
    Addr, AnyLink, Fabric, FabricError, Incoming, Link, Listener, ShmAddr, Transport,
};
use tonic_rdma_memory::{LogThrottle, Pool, throttled};
use tonic_rdma_proto::hello::HelloError;
use tonic_rdma_proto::{Accept, Hello, PeerSettings, Reject, Side};

use self::admission::{ConnectionLimits, redeem, reject_for};
use self::listeners::{ListenerKey, Listeners};
use crate::bootstrap::connection::Handshakes;
use crate::bootstrap::service::{Listening, Offer, Offering};
#[cfg(feature = "measure")]
use crate::bootstrap::tickets::BareTicket;
use crate::bootstrap::tickets::{Ticket, Tickets};
use crate::codec::Methods;
use crate::connect_info::{ConnectionPool, RdmaConnectInfo};
use crate::connection::{Accepted, ConnectionConfig};
use crate::context::{Context, ListenTarget};
use crate::executor::boxed;
use crate::path::Path;
use crate::path::policy::{FabricKind, Plaintext};
use crate::path::reason::{Reason, ReasonCode};
use crate::server::builder::ServerSettings;
use crate::server::stack::Layered;
use crate::telemetry::metrics;

/// Time limit for an accepted connection to be established.
pub(crate) const ACCEPT_LIMIT: Duration = Duration::from_secs(5);
/// Pause before the server tries to listen again while nothing changes on this host. An operator
/// has to fix the cause first.
const RETRY: Duration = Duration::from_secs(60);
/// Pause if the cause may go away by itself, for example if the process cannot make a thread or
/// allocate memory at the moment.
const RETRY_SOON: Duration = Duration::from_secs(5);
/// Pause after a listener has ended, so that repeated ends do not keep the server busy.
const PAUSE: Duration = Duration::from_millis(500);

/// State of one server's fast path.
pub(super) struct FastPath {
    pub(super) context: Context,
    pub(super) env_device: Option<String>,
    pub(super) env_type_of_service: Option<u8>,
    pub(super) fabrics: Vec<FabricKind>,
    pub(super) settings: ServerSettings,
    pub(super) tickets: Arc<Tickets>,
    pub(super) offering: watch::Sender<Offering>,
    pub(super) limits: ConnectionLimits,
    pub(super) drain: watch::Receiver<bool>,
    pub(super) methods: Arc<Methods>,
    pub(super) log: Logging,
    /// Every connection holds this sender through the `Arc` of the struct. Shutdown waits until the
    /// sender is dropped.
    pub(super) _alive: mpsc::Sender<Infallible>,
}

/// Throttles one server's log lines.
#[derive(Default)]
pub(super) struct Logging {
    /// Throttle for connections that are refused or cannot be established.
    refusals: LogThrottle,
    /// Throttle for connections that end.
    ends: LogThrottle,
    /// Throttle for listeners, which start and end with devices and addresses.
    listeners: LogThrottle,
}

impl FastPath {
    /// The paths to offer.
    pub(super) fn paths(&self) -> Vec<Path> {
        self.context.paths(&self.fabrics)
    }

    /// Updates `listeners`. Over shared memory, there is one listener. On RDMA, if the TCP side's
    /// address belongs to a device, one listener listens at that address. Otherwise a listener
    /// listens at each address of each device. Existing listeners that are still needed stay, and
    /// all others are closed.
    ///
    /// # Errors
    ///
    /// The reason why no listener exists.
    async fn listen(
        &self,
        path: Path,
        bound: Option<SocketAddr>,
        listeners: &mut Listeners,
    ) -> Result<(), Reason> {
        if self.settings.plaintext.denies(path, false) {
            // Check for a device first, so that a host without a device gets the missing device as
            // the reason.
            self.context.check(path, self.env_device.as_deref()).await?;
            return Err(Plaintext::denied_by_server());
        }
        let ip = bound.map(|a| a.ip().to_canonical()).filter(|ip| !ip.is_unspecified());
        let port = bound.map_or(0, |a| a.port());
        let targets = match self.context.local(path, ip, self.env_device.as_deref()).await {
            Ok(targets) => targets,
            Err(reason) => {
                listeners.keep(&[]);
                return Err(reason);
            }
        };
        let keys: Vec<_> =
            targets.iter().map(|target| ListenerKey::of(&target.fabric, target.addr)).collect();
        listeners.keep(&keys);
        let mut failed = None;
        for (ListenTarget { fabric, addr, pool }, key) in targets.into_iter().zip(keys) {
            if listeners.has(&key) {
                continue;
            }
            let transport = fabric.info().map_or(Transport::Unknown, |info| info.transport);
            let listener = match addr {
                Some(addr) => listen_near(&fabric, SocketAddr::new(addr, port), transport),
                None => fabric.listen(&ShmAddr::unique().into()),
            };
            match listener.and_then(|l| Ok((listening(&l, &fabric, transport)?, l))) {
                Ok((listening, listener)) => {
                    match &listening {
                        Listening::Ip { addr, device, transport } => {
                            throttled!(in self.log.listeners, info, %path, device, transport, %addr, "fast path offered");
                        }
                        Listening::Shm { socket, .. } => {
                            throttled!(in self.log.listeners, info, %path, socket, "fast path offered")
                        }
                    }
                    listeners.add(key, listening, listener, pool);
                }
                Err(error) => {
                    throttled!(in self.log.listeners, warn, device = fabric.name(), ?addr, %error, "cannot listen");
                    failed = Some(crate::path::from_error::fabric(error));
                }
            }
        }
        if listeners.is_empty() {
            let none = || {
                Reason::new(ReasonCode::NotOnRdmaDevice, "no local address lies on an RDMA device")
            };
            return Err(failed.unwrap_or_else(none));
        }
        Ok(())
    }

    /// Listens for the first time, and announces the result.
    pub(super) async fn start(
        &self,
        path: Path,
        bound: Option<SocketAddr>,
    ) -> Result<Listeners, Reason> {
        let mut listeners = Listeners::default();
        let listening = self.listen(path, bound, &mut listeners).await;
        self.announce(path, listening.as_ref().map(|()| &listeners));
        listening.map(|()| listeners)
    }

    fn announce(&self, path: Path, listening: Result<&Listeners, &Reason>) {
        let offer = match listening {
            Ok(listeners) => Offer::On(listeners.listening()),
            Err(reason) => Offer::Off(reason.clone()),
        };
        self.offering.send_modify(|offering| offering.set(path, offer));
    }

    /// Serves one path until dropped. Accepts connections. Listens again after a listener has
    /// ended, after devices or addresses have changed, and periodically while no listener exists.
    pub(super) async fn run(
        self: Arc<Self>,
        path: Path,
        bound: Option<SocketAddr>,
        started: Option<Listeners>,
        layered: Layered,
    ) {
        let mut changes = self.context.changes(path);
        let fast = self.clone();
        let accept = move |incoming, pool| fast.take(path, incoming, pool, layered.clone());
        let mut logged = None;
        let mut listeners = started.unwrap_or_default();
        let mut outcome = match listeners.is_empty() {
            true => self.listen(path, bound, &mut listeners).await,
            false => Ok(()),
        };
        loop {
            self.announce(path, outcome.as_ref().map(|()| &listeners));
            if let Err(reason) = &outcome {
                metrics::fallback(Side::Server, reason);
            }
            match &outcome {
                Ok(()) => logged = None,
                Err(reason) if logged == Some(reason.code()) => {
                    tracing::debug!(%path, %reason, "the fast path is still not offered");
                }
                Err(reason) => {
                    logged = Some(reason.code());
                    throttled!(in self.log.listeners, warn, %path, code = reason.code().as_str(), %reason, cure = reason.cure(),
                        "the fast path is not offered: clients use TCP");
                }
            }
            let retry = match &outcome {
                Err(reason) if reason.code().is_transient() => RETRY_SOON,
                _ => RETRY,
            };
            tokio::select! {
                reason = listeners.accept(accept.clone()) => {
                    throttled!(in self.log.listeners, warn, %path, %reason, "a listener has ended");
                    tokio::time::sleep(PAUSE).await;
                }
                () = changes.next() => {}
                () = tokio::time::sleep(retry), if outcome.is_err() => {}
            }
            changes.seen();
            outcome = self.listen(path, bound, &mut listeners).await;
        }
    }

    /// Checks a connect request, and serves the connection in its own task.
    fn take(self: &Arc<Self>, path: Path, mut incoming: Incoming, pool: Pool, layered: Layered) {
        let this = self.clone();
        let Ok(place) = self.limits.waiting.clone().try_acquire_owned() else {
            return self.refuse(incoming, Reject::Handshakes, &Reject::Handshakes.to_string());
        };
        tokio::spawn(boxed(async move {
            let peer = incoming.peer_addr();
            let (hello, mut extensions) = match this.admit(path, &incoming) {
                Ok(admitted) => admitted,
                Err((reject, why)) => return this.refuse(incoming, reject, &why),
            };
            let own = extensions.remove::<Handshakes>();
            let Some(handshake) = this.limits.turn(place, own).await else {
                let why = Reject::Handshakes.to_string();
                return this.refuse(incoming, Reject::Handshakes, &why);
            };
            let Ok(_place) = this.limits.connections.clone().try_acquire_owned() else {
                return this.refuse(
                    incoming,
                    Reject::Connections,
                    &Reject::Connections.to_string(),
                );
            };
            #[cfg(feature = "measure")]
            if extensions.get::<BareTicket>().is_some() {
                return this.serve_bare(incoming, pool, &hello, handshake).await;
            }
            let (grows, env_tos) = (incoming.grows(), this.env_type_of_service);
            let mut options = this.context.configure(Side::Server, &pool, grows, env_tos);
            if let Some(max) = this.settings.max_concurrent_streams {
                options.proto.max_streams = max.max(1);
            }
            options.headers(this.settings.max_header_size);
            options.keep_alive(this.settings.keep_alive);
            options.copy_on_delivery(this.settings.copy_on_delivery);
            options.land_in(&this.settings.allocators);
            // Check for room before the connection is accepted, so that a refused client gets the
            // reason.
            let need = incoming.control_bytes(&options.link);
            let room = pool.may_land().and_then(|()| pool.control(need).map(drop));
            if let Err(error) = room {
                return this.refuse(incoming, reject_for(&error), &error.to_string());
            }
            let accept =
                Accept { version: hello.version(), settings: options.proto.settings() }.encode();
            incoming.refuse_with(&Reject::Resources.encode());
            let accepted = incoming.accept(&options.link, &pool, &accept, ACCEPT_LIMIT).await;
            drop(handshake);
            match accepted {
                Ok(link) => {
                    this.serve(link, pool, hello.settings, options, layered, extensions).await
                }
                Err(error) => {
                    // Return the memory at once, because there may be no other connection that
                    // would return it.
                    pool.trim_now();
                    let reason = crate::path::from_error::connect(error);
                    throttled!(in this.log.refusals, warn, %peer, %reason, "fast path not established");
                }
            }
        }));
    }

    fn refuse(&self, incoming: Incoming, reject: Reject, why: &str) {
        let (peer, counters) = (incoming.peer_addr(), self.settings.stats.tcp());
        counters.connections_refused.add(1);
        metrics::refused(reject);
        throttled!(in self.log.refusals, warn, %peer, why, "fast path refused");
        incoming.reject(&reject.encode());
    }

    /// Admits a request with a valid hello and ticket. Otherwise returns the rejection and its
    /// cause.
    fn admit(
        &self,
        path: Path,
        incoming: &Incoming,
    ) -> Result<(Hello, Extensions), (Reject, String)> {
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
        let connection = redeem(&self.tickets, Ticket(hello.ticket), path)?;
        Ok((hello, connection))
    }

    async fn serve(
        &self,
        link: AnyLink,
        pool: Pool,
        peer: PeerSettings,
        options: ConnectionConfig,
        layered: Layered,
        mut extensions: Extensions,
    ) {
        let ends = link.peer().clone();
        tracing::debug!(peer = %ends, "fast path open");
        // Lend this client only memory that no other process borrows.
        let pool = pool.for_peer();
        extensions.insert(RdmaConnectInfo {
            path: Path::of(&ends),
            device: (Path::of(&ends) != Path::Shm).then(|| ends.device.as_str().into()),
            local_addr: ends.local.ip(),
            remote_addr: ends.remote.ip(),
            peer_pid: Path::process(&ends),
            pool: ConnectionPool(Some(pool.clone())),
        });
        let own = self.settings.stats.connection();
        own.counters.connections.add(1);
        let age = self.settings.max_connection_age;
        let grace = age
            .zip(self.settings.max_connection_age_grace)
            .map(|(age, grace)| age.saturating_add(grace));
        let (old, too_old) = (sleep_for(&link, age), sleep_for(&link, grace));
        let (counters, methods) = (own.counters.clone(), self.methods.clone());
        let mut accepted = Accepted::new(link, pool, peer, options, counters, methods);
        accepted.extensions = extensions;
        accepted.drain = Box::pin(either(draining(self.drain.clone()), old));
        let _listed = self.settings.registry.add(accepted.view());
        let serving = layered.serve(&self.settings, accepted);
        tokio::select! {
            reason = serving => match reason.code() {
                ReasonCode::LinkLost => {
                    own.counters.connections_lost.add(1);
                    throttled!(in self.log.ends, info, peer = %ends, %reason, "fast path lost");
                }
                _ => tracing::debug!(peer = %ends, %reason, "fast path closed"),
            },
            () = too_old => tracing::debug!(peer = %ends, "fast path closed: too old"),
        }
    }
}

/// Listens on `addr`, or on a free port if the port of `addr` is taken or shared with TCP (iWARP).
fn listen_near(
    fabric: &Fabric,
    addr: SocketAddr,
    transport: Transport,
) -> Result<Listener, FabricError> {
    let free = Addr::Ip(SocketAddr::new(addr.ip(), 0));
    if transport == Transport::IWarp {
        return fabric.listen(&free);
    }
    match fabric.listen(&Addr::Ip(addr)) {
        Err(FabricError::AddressInUse { .. }) => fabric.listen(&free),
        other => other,
    }
}

/// Describes a listener for the answers to Offers.
fn listening(
    listener: &Listener,
    fabric: &Fabric,
    transport: Transport,
) -> Result<Listening, FabricError> {
    Ok(match listener.local_addr() {
        Addr::Shm(addr) => {
            Listening::Shm { boot_id: Fabric::boot_id()?, socket: addr.name().to_owned() }
        }
        Addr::Ip(addr) => Listening::Ip {
            addr,
            device: fabric.name().to_owned(),
            transport: transport.to_string(),
        },
        addr => return Err(FabricError::WrongAddress { provider: fabric.provider(), addr }),
    })
}

/// Waits for a graceful shutdown of the server. Never returns if the server is dropped.
async fn draining(mut drain: watch::Receiver<bool>) {
    if drain.wait_for(|drain| *drain).await.is_err() {
        std::future::pending().await
    }
}

/// Sleeps on the link's clock; forever if `time` is `None`.
fn sleep_for(link: &AnyLink, time: Option<Duration>) -> impl Future<Output = ()> + use<> {
    let timer = time.map(|time| (link.timer(), time));
    async {
        match timer {
            Some((mut timer, time)) => timer.wait(time).await,
            None => std::future::pending().await,
        }
    }
}

async fn either(a: impl Future<Output = ()>, b: impl Future<Output = ()>) {
    tokio::select! {
        () = a => {}
        () = b => {}
    }
}
