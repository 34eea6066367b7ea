//! Connects to a listener: the client's side of a connection.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rdma_sys::rdma_cm_event_type as kind;
use tokio::sync::oneshot;
use tonic_rdma_memory::Pool;

use crate::addr::Addr;
use crate::error::{ConnectError, ConnectStep, FabricError, Verb};
use crate::link::MAX_PRIVATE_DATA;
use crate::link_config::LinkConfig;
use crate::off_worker::run_on_thread;
use crate::reject_reason::RejectReason;
use crate::turn;
use crate::verbs::bring_up::PendingLink;
use crate::verbs::cm::hub::CmEvent;
use crate::verbs::cm::{CmId, name};
use crate::verbs::connect_error::{of_attempt, of_path_proof};
use crate::verbs::context::DeviceContext;
use crate::verbs::discovery::attributes::context_name;
use crate::verbs::discovery::device_list::no_channel;
use crate::verbs::link::VerbsLink;
use crate::verbs::queue_pair::path_mtu::UnknownMtu;

/// The number of local ports to try. An iWARP connection is a TCP connection of this host, but the
/// connection manager tracks its ports separately. So a port that the connection manager considers
/// free may belong to a socket, even to a socket in TIME_WAIT.
pub(super) const LOCAL_PORTS: usize = 8;

/// Maximum number of connect requests of one attempt. The requests are sent one after the other,
/// each with its own queue pair and local port.
const REQUESTS: usize = LOCAL_PORTS;

pub(super) fn check_private_data(data: &[u8]) -> Result<(), ConnectError> {
    match data.len() {
        len if len > MAX_PRIVATE_DATA => Err(ConnectError::PrivateDataTooLong { len }),
        _ => Ok(()),
    }
}

fn is_port_taken(error: &ConnectError) -> bool {
    matches!(error, ConnectError::Failed { step: ConnectStep::Connect, source, .. }
        if source.raw_os_error() == Some(libc::EADDRINUSE))
}

/// Whether the peer's connection manager still knows an earlier connection of a queue pair with
/// this number. The peer's program has not seen the request, so the next request may carry the same
/// private data.
fn is_stale(error: &ConnectError) -> bool {
    matches!(error, ConnectError::RejectedByManager { reason: RejectReason::STALE, .. })
}

/// The number of requests that may still be sent.
#[derive(Debug)]
struct Requests(usize);

impl Requests {
    /// Counts a failed request. Returns whether another request, with another queue pair and port,
    /// follows at once.
    fn follows(&mut self, error: &ConnectError) -> bool {
        self.0 = self.0.saturating_sub(1);
        self.0 > 0 && (is_port_taken(error) || is_stale(error))
    }
}

/// The address, the time limit and the current step of an attempt, for its errors.
struct ConnectAttempt {
    addr: SocketAddr,
    /// The address of this host to connect from. The route must leave through the device of this
    /// address.
    source: Option<IpAddr>,
    timeout: Duration,
    step: ConnectStep,
}

impl ConnectAttempt {
    fn timed_out(&self) -> ConnectError {
        ConnectError::Timeout { addr: self.addr.into(), step: self.step, after: self.timeout }
    }

    fn millis(&self) -> i32 {
        self.timeout.as_millis().clamp(1, i32::MAX as u128) as i32
    }

    /// The error for a failed call or an error event.
    fn failed(&self, source: io::Error) -> ConnectError {
        let addr = Addr::Ip(self.addr);
        match (self.step, source.raw_os_error()) {
            (_, Some(libc::ETIMEDOUT)) => self.timed_out(),
            (_, Some(libc::ECONNREFUSED)) => ConnectError::Refused { addr },
            (ConnectStep::ResolveAddress, Some(libc::ENODEV)) => ConnectError::NotOnRdma { addr },
            (ConnectStep::ResolveAddress | ConnectStep::ResolveRoute, _) => {
                ConnectError::NoRoute { addr, step: self.step, source: source.into() }
            }
            _ => ConnectError::Failed { addr, step: self.step, source: source.into() },
        }
    }

    fn channel_failed(source: io::Error) -> ConnectError {
        FabricError::Verb {
            verb: Verb::Call("rdma_get_cm_event"),
            device: "any device".to_owned(),
            source: source.into(),
        }
        .into()
    }

    /// Waits for the event `wanted`. Returns an error if another event means that `wanted` will not
    /// come.
    async fn expect_event(&self, id: &CmId, wanted: kind::Type) -> Result<CmEvent, ConnectError> {
        loop {
            turn::spend(1).await;
            let event = id.next_event().await.map_err(Self::channel_failed)?;
            if event.kind == wanted {
                return Ok(event);
            }
            if let Some(error) = self.ends_by(&event) {
                return Err(error);
            }
            tracing::debug!(addr = %self.addr, event = name(event.kind), "connection event");
        }
    }

    /// Returns the error if an event ends the attempt.
    fn ends_by(&self, event: &CmEvent) -> Option<ConnectError> {
        let addr = Addr::Ip(self.addr);
        Some(match event.kind {
            kind::RDMA_CM_EVENT_REJECTED => self.rejected(event),
            // The connect request was not answered within the kernel's time limit.
            kind::RDMA_CM_EVENT_UNREACHABLE => match event.status.saturating_abs() {
                0 | libc::ETIMEDOUT => self.timed_out(),
                _ => self.failed(event.error()),
            },
            kind::RDMA_CM_EVENT_ADDR_ERROR
            | kind::RDMA_CM_EVENT_ROUTE_ERROR
            | kind::RDMA_CM_EVENT_CONNECT_ERROR => self.failed(event.error()),
            kind::RDMA_CM_EVENT_DISCONNECTED => ConnectError::PeerGone { addr, step: self.step },
            kind::RDMA_CM_EVENT_DEVICE_REMOVAL => {
                FabricError::DeviceRemoved { device: "of the route".to_owned() }.into()
            }
            _ => return None,
        })
    }

    /// Turns a rejection into an error. The event's status is a reject reason on InfiniBand and
    /// RoCE, and a negative errno on iWARP. If a program rejects over iWARP, the errno is
    /// ECONNRESET on some devices and ECONNREFUSED on others. A port without a listener gives the
    /// same errors, but sends no private data.
    fn rejected(&self, event: &CmEvent) -> ConnectError {
        let (addr, private_data) = (Addr::Ip(self.addr), event.private_data.clone());
        match RejectReason::new(event.status) {
            RejectReason::NO_SERVICE => ConnectError::Refused { addr },
            RejectReason::CONSUMER => ConnectError::Rejected { addr, private_data },
            reason if event.status > 0 => ConnectError::RejectedByManager { addr, reason },
            _ if !private_data.is_empty() => ConnectError::Rejected { addr, private_data },
            _ => match event.status.saturating_abs() {
                0 | libc::ECONNRESET => ConnectError::Rejected { addr, private_data },
                _ => self.failed(event.error()),
            },
        }
    }

    /// Resolves the address to a device.
    async fn resolve(&mut self) -> Result<CmId, ConnectError> {
        self.step = ConnectStep::ResolveAddress;
        let id = CmId::new().map_err(no_channel)?;
        // Binding to the address also binds the id to the device, so the kernel then looks for
        // routes through that device only.
        if let Some(source) = self.source {
            id.bind(SocketAddr::new(source, 0)).map_err(|e| self.failed(e))?;
        }
        id.resolve_addr(self.addr, self.millis()).map_err(|e| self.failed(e))?;
        self.expect_event(&id, kind::RDMA_CM_EVENT_ADDR_RESOLVED).await?;
        Ok(id)
    }

    async fn connect(
        &mut self,
        device: &Arc<DeviceContext>,
        config: &LinkConfig,
        pool: &Pool,
        private_data: &[u8],
        answered: &AtomicBool,
    ) -> Result<(VerbsLink, Vec<u8>), ConnectError> {
        let id = self.resolve().await?;
        let addr = Addr::Ip(self.addr);
        match id.verbs() {
            None => return Err(ConnectError::NotOnRdma { addr }),
            Some(context) if context != device.context() => {
                // SAFETY: the id keeps the context open.
                let routed = unsafe { context_name(context) };
                return Err(ConnectError::OtherDevice {
                    addr,
                    wanted: device.name.clone(),
                    routed,
                });
            }
            Some(_) => {}
        }
        if let Err(error) = id.set_ack_timeout(config.ack_exponent()) {
            tracing::trace!(%error, "the ACK timeout cannot be set: iWARP has none");
        }
        if let Some(tos) = config.type_of_service {
            id.set_type_of_service(tos).map_err(|e| device.verb_error("rdma_set_option", e))?;
        }
        self.step = ConnectStep::ResolveRoute;
        id.resolve_route(self.millis()).map_err(|e| self.failed(e))?;
        self.expect_event(&id, kind::RDMA_CM_EVENT_ROUTE_RESOLVED).await?;

        self.step = ConnectStep::Connect;
        let link = VerbsLink::new_off_worker(device, id, config, pool, self.addr).await;
        let pending = PendingLink::new(link.map_err(|failed| failed.error)?, pool);
        let pending = match device.is_iwarp() {
            true => self.request_on_thread(pending, config, private_data.to_vec()).await?,
            false => {
                let requested = pending.link().request(private_data, config.ack_retries);
                requested.map_err(|e| self.failed(e))?;
                pending
            }
        };
        let answer = self.expect_event(pending.link().id(), pending.link().answer()).await;
        let mut answer = answer?.private_data;
        answered.store(true, Relaxed);
        let named = pending.link().named_mtu(&answer).map_err(|UnknownMtu(code)| {
            ConnectError::UnknownPathMtu { addr: addr.clone(), code }
        })?;
        let completed = pending.into_link().complete_off_worker(named).await;
        let mut pending = PendingLink::new(completed.map_err(|e| self.failed(e))?, pool);
        answer.truncate(MAX_PRIVATE_DATA);
        pending.link_mut().established();
        self.step = ConnectStep::LongPacket;
        let proven = pending.link_mut().prove_path().await;
        proven.map_err(|error| of_path_proof(addr, error))?;
        Ok((pending.into_link(), answer))
    }

    /// Sends the connect request from a separate thread, because Soft-iWARP connects TCP inside the
    /// call, which may take minutes if nobody answers. The thread owns the link until the call
    /// returns, so that giving up frees nothing that the call uses (R10).
    async fn request_on_thread(
        &self,
        pending: PendingLink,
        config: &LinkConfig,
        private_data: Vec<u8>,
    ) -> Result<PendingLink, ConnectError> {
        let (done, outcome) = oneshot::channel();
        let retries = config.ack_retries;
        let request = move || {
            let requested = pending.link().request(&private_data, retries);
            let _ = done.send(requested.map(|()| pending));
        };
        run_on_thread("rdma-connect", request).map_err(|e| self.failed(e))?;
        match outcome.await {
            Ok(requested) => requested.map_err(|error| self.failed(error)),
            Err(_) => Err(self.failed(io::Error::other("the connecting thread died"))),
        }
    }
}

/// Finds the device through which the route to an address leaves, and returns an id that is bound
/// to that device.
pub(super) async fn resolve(
    addr: SocketAddr,
    source: Option<IpAddr>,
    timeout: Duration,
) -> Result<CmId, ConnectError> {
    let mut attempt = ConnectAttempt { addr, source, timeout, step: ConnectStep::ResolveAddress };
    let resolved = tokio::time::timeout(timeout, attempt.resolve()).await;
    let mut id = resolved.unwrap_or_else(|_| Err(attempt.timed_out()))?;
    // The id gets a separate channel, because the current runtime may end before the device is
    // closed.
    id.set_apart().map_err(no_channel)?;
    match id.verbs() {
        Some(_) => Ok(id),
        None => Err(ConnectError::NotOnRdma { addr: addr.into() }),
    }
}

pub(super) async fn connect(
    device: &Arc<DeviceContext>,
    addr: SocketAddr,
    config: &LinkConfig,
    pool: &Pool,
    private_data: &[u8],
    timeout: Duration,
    answered: &AtomicBool,
) -> Result<(VerbsLink, Vec<u8>), ConnectError> {
    check_private_data(private_data)?;
    if device.is_removed() {
        return Err(device.removed_error().into());
    }
    let (source, step) = (config.source, ConnectStep::ResolveAddress);
    let mut attempt = ConnectAttempt { addr, source, timeout, step };
    let mut requests = Requests(REQUESTS);
    let connected = async {
        loop {
            match attempt.connect(device, config, pool, private_data, answered).await {
                Err(error) if requests.follows(&error) => {
                    tracing::debug!(%error, "another queue pair and another local port are tried");
                }
                other => return other,
            }
        }
    };
    let connected = tokio::time::timeout(timeout, connected).await;
    let connected = connected.unwrap_or_else(|_| Err(attempt.timed_out()));
    connected.map_err(|error| of_attempt(error, &device.name, device.is_removed()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt() -> ConnectAttempt {
        let addr = ([10, 0, 0, 1], 7).into();
        let (timeout, step) = (Duration::from_secs(1), ConnectStep::Connect);
        ConnectAttempt { addr, source: None, timeout, step }
    }

    fn event(kind: kind::Type, status: i32, private_data: &[u8]) -> CmEvent {
        CmEvent { kind, status, private_data: private_data.to_vec(), request: None }
    }

    fn rejected(status: i32, private_data: &[u8]) -> ConnectError {
        let event = event(kind::RDMA_CM_EVENT_REJECTED, status, private_data);
        attempt().ends_by(&event).expect("the attempt is over")
    }

    #[test]
    fn the_reject_reason_of_the_connection_manager_reaches_the_error() {
        for status in (1..=33).filter(|status| ![8, 28].contains(status)) {
            // The connection manager adds data of its own to some rejections.
            let ConnectError::RejectedByManager { reason, .. } = rejected(status, &[1; 56]) else {
                panic!("{status}: {}", rejected(status, &[]));
            };
            assert_eq!(reason, RejectReason::new(status));
            let text = rejected(status, &[]).to_string();
            assert!(text.contains(reason.name().unwrap()) && text.ends_with(reason.cure()));
        }
        assert!(matches!(rejected(8, &[]), ConnectError::Refused { .. }));
        for data in [&[][..], b"why"] {
            let ConnectError::Rejected { private_data, .. } = rejected(28, data) else { panic!() };
            assert_eq!(private_data, data);
        }
    }

    #[test]
    fn a_rejection_over_iwarp_is_the_programs_if_it_has_said_something() {
        for errno in [libc::ECONNRESET, libc::ECONNREFUSED, libc::EPROTO] {
            let rejected = rejected(-errno, b"why");
            assert!(matches!(rejected, ConnectError::Rejected { .. }), "{errno}: {rejected}");
        }
        assert!(matches!(rejected(-libc::ECONNRESET, &[]), ConnectError::Rejected { .. }));
        assert!(matches!(rejected(-libc::ECONNREFUSED, &[]), ConnectError::Refused { .. }));
        assert!(matches!(rejected(-libc::ETIMEDOUT, &[]), ConnectError::Timeout { .. }));
        let failed = rejected(-libc::EPROTO, &[]);
        assert!(matches!(failed, ConnectError::Failed { .. }), "{failed}");
    }

    #[test]
    fn other_events_end_an_attempt_or_do_not() {
        let ends = |kind, status| attempt().ends_by(&event(kind, status, &[]));
        let unreachable = kind::RDMA_CM_EVENT_UNREACHABLE;
        for status in [0, -libc::ETIMEDOUT] {
            assert!(matches!(ends(unreachable, status), Some(ConnectError::Timeout { .. })));
        }
        let failed = ends(kind::RDMA_CM_EVENT_CONNECT_ERROR, -libc::EIO);
        assert!(matches!(failed, Some(ConnectError::Failed { .. })), "{failed:?}");
        let gone = ends(kind::RDMA_CM_EVENT_DISCONNECTED, 0);
        assert!(matches!(gone, Some(ConnectError::PeerGone { .. })), "{gone:?}");
        assert!(ends(kind::RDMA_CM_EVENT_ADDR_CHANGE, 0).is_none());
    }

    #[test]
    fn stale_connections_and_taken_ports_are_tried_again_and_not_for_ever() {
        let taken = attempt().failed(io::Error::from_raw_os_error(libc::EADDRINUSE));
        for again in [rejected(10, &[]), taken] {
            let mut requests = Requests(REQUESTS);
            let mut sent = 1;
            while requests.follows(&again) {
                sent += 1;
            }
            assert_eq!(sent, REQUESTS, "{again}");
        }
        for answer in [rejected(4, &[]), rejected(3, &[]), rejected(28, &[]), rejected(8, &[])] {
            assert!(!Requests(REQUESTS).follows(&answer), "{answer}");
        }
    }
}
