//! Listens for connect requests and accepts them: the server's side of a connection.

use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use rdma_sys::rdma_cm_event_type as kind;
use tonic_rdma_memory::Pool;

use crate::error::{ConnectError, ConnectStep, FabricError};
use crate::link_config::LinkConfig;
use crate::turn;
use crate::verbs::bring_up::PendingLink;
use crate::verbs::cm::hub::BACKLOG;
use crate::verbs::cm::{CmId, name};
use crate::verbs::connect::{LOCAL_PORTS, check_private_data};
use crate::verbs::connect_error::{is_end_of_connection, of_attempt, of_path_proof};
use crate::verbs::context::DeviceContext;
use crate::verbs::discovery::device_list::no_channel;
use crate::verbs::link::{LinkNotMade, VerbsLink};

/// A listener over verbs.
#[derive(Debug)]
pub struct VerbsListener {
    addr: SocketAddr,
    device: Arc<DeviceContext>,
    /// Listens until it is dropped.
    id: CmId,
}

impl VerbsListener {
    /// Listens on an address. With port 0, a free port is chosen. On iWARP the connection manager
    /// may choose a port that TCP uses. Another port is then tried.
    pub(super) fn new(
        device: &Arc<DeviceContext>,
        addr: SocketAddr,
    ) -> Result<VerbsListener, FabricError> {
        let tries = if addr.port() == 0 { LOCAL_PORTS } else { 1 };
        for _ in 1..tries {
            match Self::bind(device, addr) {
                Err(FabricError::AddressInUse { .. }) => {}
                other => return other,
            }
        }
        Self::bind(device, addr)
    }

    fn bind(device: &Arc<DeviceContext>, addr: SocketAddr) -> Result<VerbsListener, FabricError> {
        if device.is_removed() {
            return Err(device.removed_error());
        }
        let id = CmId::new().map_err(no_channel)?;
        let failed = |call, error: io::Error| match error.raw_os_error() {
            Some(libc::EADDRINUSE) => FabricError::AddressInUse { addr: addr.into() },
            Some(libc::ENODEV | libc::EADDRNOTAVAIL) => FabricError::NotOnRdma { addr: addr.ip() },
            _ => device.verb_error(call, error),
        };
        id.bind(addr).map_err(|e| failed("rdma_bind_addr", e))?;
        // A listener on all addresses is bound to no device, and rejects requests that come through
        // other devices.
        if id.verbs().is_some_and(|context| context != device.context()) {
            return Err(FabricError::NotOnRdma { addr: addr.ip() });
        }
        if !addr.ip().is_unspecified() && id.verbs().is_none() {
            return Err(FabricError::NotOnRdma { addr: addr.ip() });
        }
        id.listen(BACKLOG as i32).map_err(|e| failed("rdma_listen", e))?;
        let addr = id.local().unwrap_or(addr);
        Ok(VerbsListener { addr, device: device.clone(), id })
    }

    /// The address that the listener is bound to, with its port.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Waits for the next connect request.
    ///
    /// # Errors
    /// The device was removed, or the event channel failed.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn accept(&mut self) -> Result<VerbsIncoming, FabricError> {
        loop {
            // Peers may send requests without limit, even if each request is rejected (R20).
            turn::spend(1).await;
            let event = self.id.next_event().await;
            let event = event.map_err(|e| self.device.verb_error("rdma_get_cm_event", e))?;
            match (event.kind, event.request) {
                (kind::RDMA_CM_EVENT_CONNECT_REQUEST, Some(id)) => {
                    if let Some(incoming) = self.take(id.into(), event.private_data) {
                        return Ok(incoming);
                    }
                }
                (kind::RDMA_CM_EVENT_DEVICE_REMOVAL, _) => {
                    self.device.mark_removed();
                    return Err(self.device.removed_error());
                }
                (other, _) => {
                    tracing::debug!(addr = %self.addr, event = name(other), "listener event")
                }
            }
        }
    }

    /// Takes a connect request. Rejects a request that came through another device.
    fn take(&self, id: CmId, private_data: Vec<u8>) -> Option<VerbsIncoming> {
        let unknown = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        let peer = id.remote().unwrap_or(unknown);
        if id.verbs() != Some(self.device.context()) {
            tonic_rdma_memory::throttled!(warn, %peer, addr = %self.addr, "RDMA connect request turned away: it came through another device");
            // Ignore an error, because dropping the id also rejects the request.
            let _ = id.reject(&[]);
            return None;
        }
        let local = id.local().unwrap_or(self.addr);
        let device = self.device.clone();
        let (pending, refusal) = (Some(id), Vec::new());
        Some(VerbsIncoming {
            device,
            pending,
            private_data,
            refusal,
            peer,
            local,
            step: ConnectStep::Accept,
        })
    }
}

/// A connect request over verbs.
#[derive(Debug)]
pub struct VerbsIncoming {
    device: Arc<DeviceContext>,
    /// The id of the request, until `accept` or `reject` takes it. Otherwise `drop` rejects the
    /// request.
    pending: Option<CmId>,
    private_data: Vec<u8>,
    /// Private data that the peer gets if no link can be made.
    refusal: Vec<u8>,
    peer: SocketAddr,
    local: SocketAddr,
    step: ConnectStep,
}

impl VerbsIncoming {
    /// The peer's private data, which is untrusted. InfiniBand and RoCE pad this data with zeros to
    /// 56 bytes.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// This end's address.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// See [`Incoming::refuse_with`](crate::Incoming::refuse_with).
    pub fn refuse_with(&mut self, private_data: &[u8]) {
        self.refusal = private_data.to_vec();
    }

    /// See [`Incoming::accept`](crate::Incoming::accept).
    ///
    /// # Errors
    /// Memory or a queue pair cannot be allocated, and the request is rejected. Or the connection
    /// failed, or the peer did not complete it in time, or the device was removed.
    pub async fn accept(
        self,
        config: &LinkConfig,
        pool: &Pool,
        private_data: &[u8],
        timeout: Duration,
    ) -> Result<VerbsLink, ConnectError> {
        let device = self.device.clone();
        let accepted = self.attempt(config, pool, private_data, timeout).await;
        accepted.map_err(|error| of_attempt(error, &device.name, device.is_removed()))
    }

    async fn attempt(
        mut self,
        config: &LinkConfig,
        pool: &Pool,
        private_data: &[u8],
        timeout: Duration,
    ) -> Result<VerbsLink, ConnectError> {
        let (peer, step) = (self.peer, self.step);
        let gone = || ConnectError::PeerGone { addr: peer.into(), step };
        check_private_data(private_data)?;
        let Some(id) = self.pending.take() else {
            return Err(gone());
        };
        if let Err(error) = id.set_ack_timeout(config.ack_exponent()) {
            tracing::trace!(%error, "the ACK timeout cannot be set: iWARP has none");
        }
        if let Some(tos) = config.type_of_service {
            id.set_type_of_service(tos)
                .map_err(|e| self.device.verb_error("rdma_set_option", e))?;
        }
        let link = VerbsLink::new_off_worker(&self.device, id, config, pool, self.peer).await;
        let link = match link {
            Ok(link) => link,
            Err(LinkNotMade { id, error }) => {
                self.pending = id;
                let refusal = std::mem::take(&mut self.refusal);
                self.turn_away(&refusal);
                return Err(error);
            }
        };
        let accepted = link.accept_off_worker(private_data.to_vec(), config.ack_retries).await;
        let accepted = accepted.map_err(|source| match is_end_of_connection(&source) {
            true => gone(),
            false => self.device.verb_error("rdma_accept", source).into(),
        })?;
        let mut pending = PendingLink::new(accepted, pool);
        let proven = async {
            let link = pending.link_mut();
            self.wait_for_peer(link).await?;
            self.step = ConnectStep::LongPacket;
            link.established();
            let proven = link.prove_path().await;
            proven.map_err(|error| of_path_proof(peer.into(), error))
        };
        match tokio::time::timeout(timeout, proven).await {
            Ok(outcome) => outcome?,
            Err(_) => {
                let step = self.step;
                return Err(ConnectError::Timeout { addr: peer.into(), step, after: timeout });
            }
        }
        Ok(pending.into_link())
    }

    /// Waits for the peer's first message.
    async fn wait_for_peer(&mut self, link: &mut VerbsLink) -> Result<(), ConnectError> {
        let peer = self.peer;
        loop {
            turn::spend(1).await;
            // Events are polled first, because an event may announce the end of the connection.
            let event = poll_fn(|cx| match link.id().poll_next_event(cx) {
                Poll::Ready(event) => {
                    Poll::Ready(event.map(Some).map_err(|e| ("rdma_get_cm_event", e)))
                }
                Poll::Pending => link
                    .poll_first_message(cx)
                    .map(|proof| proof.map(|()| None).map_err(|e| ("ibv_poll_cq", e))),
            });
            let event = event.await.map_err(|(call, e)| self.device.verb_error(call, e))?;
            let Some(event) = event else {
                return Ok(());
            };
            match event.kind {
                kind::RDMA_CM_EVENT_ESTABLISHED => self.step = ConnectStep::LongPacket,
                kind::RDMA_CM_EVENT_DEVICE_REMOVAL => {
                    self.device.mark_removed();
                    return Err(self.device.removed_error().into());
                }
                kind::RDMA_CM_EVENT_DISCONNECTED
                | kind::RDMA_CM_EVENT_CONNECT_ERROR
                | kind::RDMA_CM_EVENT_REJECTED
                | kind::RDMA_CM_EVENT_UNREACHABLE => {
                    return Err(ConnectError::PeerGone {
                        addr: peer.into(),
                        step: ConnectStep::Accept,
                    });
                }
                other => tracing::debug!(%peer, event = name(other), "connection event"),
            }
        }
    }

    /// Rejects the request.
    pub fn reject(mut self, private_data: &[u8]) {
        self.turn_away(private_data);
    }

    fn turn_away(&mut self, private_data: &[u8]) {
        if let Some(id) = self.pending.take()
            && let Err(error) = id.reject(private_data)
        {
            tracing::debug!(peer = %self.peer, %error, "rdma_reject");
        }
    }
}

impl Drop for VerbsIncoming {
    fn drop(&mut self) {
        self.turn_away(&[]);
    }
}
