//! The client's side of the Offer.

use std::fmt;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_core::Stream;
use http::uri::PathAndQuery;
use http::{HeaderValue, Uri};
use tonic::client::Grpc;
use tonic::metadata::MetadataMap;
use tonic::service::Interceptor;
use tonic::{Code, Extensions, Request, Response, Status};
use tonic_prost::ProstCodec;
use tonic_rdma_fabric::{Addr, BadShmAddr, Fabric, Transport};
use tonic_rdma_proto::hello::{VERSION_MAX, VERSION_MIN};

use crate::bootstrap::OFFER_PATH;
use crate::bootstrap::pb::{self, OfferRequest, OfferResponse, fabric_offer, offer_response};
use crate::bootstrap::service::{MAX_ANSWER, MAX_USER_AGENT};
use crate::bootstrap::tickets::{TICKET_LEN, Ticket};
use crate::path::Path;
use crate::path::policy::Plaintext;
use crate::path::reason::{MAX_DETAIL_TEXT, MAX_LOG_TEXT, PeerText, Reason, ReasonCode};
use crate::tcp::connector::TcpChannel;

/// Maximum number of places in an answer that are used. The number is larger than any host needs,
/// and small enough to pair all places with this host's devices.
const MAX_PLACES: usize = 64;

/// The transports that a server may state for an address.
const TRANSPORTS: [Transport; 3] = [Transport::InfiniBand, Transport::RoCE, Transport::IWarp];

type HookFuture = Pin<Box<dyn Future<Output = Result<Request<()>, Status>> + Send>>;

/// Adds metadata to the Offer, for example the credentials that the server's layers require of
/// every request.
#[derive(Clone)]
pub(crate) struct OfferHook(Arc<dyn Fn() -> HookFuture + Send + Sync>);

impl OfferHook {
    pub(crate) fn metadata<F, Fut>(hook: F) -> Self
    where
        F: Fn(MetadataMap) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<MetadataMap, Status>> + Send + 'static,
    {
        Self(Arc::new(move || {
            let metadata = hook(MetadataMap::new());
            Box::pin(
                async move { Ok(Request::from_parts(metadata.await?, Extensions::default(), ())) },
            )
        }))
    }

    pub(crate) fn interceptor<I>(interceptor: I) -> Self
    where
        I: Interceptor + Clone + Send + Sync + 'static,
    {
        Self(Arc::new(move || {
            let request = interceptor.clone().call(Request::new(()));
            Box::pin(std::future::ready(request))
        }))
    }

    /// Returns a request with the hook's metadata.
    pub(crate) async fn ask(&self) -> Result<Request<()>, Status> {
        (self.0)().await
    }
}

impl fmt::Debug for OfferHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OfferHook")
    }
}

/// A place to connect to: an address at which the server listens, with the address's device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OfferedPlace {
    pub(crate) path: Path,
    pub(crate) addr: Addr,
    /// The server's device. Empty if the server does not name the device.
    pub(crate) device: String,
    /// Whether the device speaks iWARP, if the server says so.
    pub(crate) iwarp: Option<bool>,
}

/// The server's answer to an Offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OfferAnswer {
    pub(crate) ticket: Ticket,
    /// Places to connect to, in order of preference of their paths.
    pub(crate) places: Vec<OfferedPlace>,
    /// Requested fabrics that are not available.
    pub(crate) refusals: Vec<(Path, Reason)>,
    /// The text that tonic appends to the user agent of a call over TCP, if the server has reported
    /// it.
    pub(crate) user_agent: Option<HeaderValue>,
    /// Whether the ticket is for a bare connection.
    #[cfg(feature = "measure")]
    pub(crate) bare: bool,
}

/// Asks the server at the other end of `tcp` for access to one of `paths`, in order of preference.
pub(crate) async fn offer(
    tcp: &TcpChannel,
    origin: Uri,
    hook: Option<&OfferHook>,
    paths: &[Path],
) -> Result<OfferAnswer, Reason> {
    ask(tcp, origin, hook, paths, false).await
}

/// Asks for a ticket for a bare connection. A server that serves no bare connections gives a ticket
/// for calls.
#[cfg(all(feature = "diagnose", feature = "measure"))]
pub(crate) async fn offer_bare(
    tcp: &TcpChannel,
    origin: Uri,
    hook: Option<&OfferHook>,
    paths: &[Path],
) -> Result<OfferAnswer, Reason> {
    ask(tcp, origin, hook, paths, true).await
}

async fn ask(
    tcp: &TcpChannel,
    origin: Uri,
    hook: Option<&OfferHook>,
    paths: &[Path],
    bare: bool,
) -> Result<OfferAnswer, Reason> {
    let mut request = Request::new(());
    if let Some(hook) = hook {
        request = hook.ask().await.map_err(|status| {
            let detail = format!("the offer hook failed: {}", describe(&status));
            Reason::new(ReasonCode::HandshakeRejected, detail)
        })?;
    }
    match call(tcp, origin, request, paths, bare).await {
        Ok(response) => {
            // Ask `TcpChannel::denies` only after the answer, because the connection that carried
            // the answer is known only now.
            let denies = |path: Path| tcp.denies(path);
            let this_end = |reason| match paths.iter().any(|path| denies(*path)) {
                true => Plaintext::and_by_client(reason),
                false => reason,
            };
            let mut offered = read(response.into_inner(), paths).map_err(this_end)?;
            offered.deny(denies);
            Ok(offered)
        }
        Err(status) => Err(refused(&status)),
    }
}

async fn call(
    tcp: &TcpChannel,
    origin: Uri,
    request: Request<()>,
    paths: &[Path],
    bare: bool,
) -> Result<Response<OfferResponse>, Status> {
    let mut grpc =
        Grpc::with_origin(tcp.channel.clone(), origin).max_decoding_message_size(MAX_ANSWER);
    let gone = |error: tonic::transport::Error| Status::from_error(error.into());
    grpc.ready().await.map_err(gone)?;
    let fabrics = paths.iter().map(|path| path.as_str().to_owned()).collect();
    let local_addr = tcp.local_addr.clone();
    let message = move || OfferRequest {
        version_min: VERSION_MIN.into(),
        version_max: VERSION_MAX.into(),
        fabrics,
        client: local_addr.get().map(|end| pb::TcpAddress {
            ip: end.ip().to_canonical().to_string(),
            port: end.port().into(),
        }),
        bare,
    };
    let request = request.map(|()| LazyMessage(Some(message)));
    // Use a client-streaming call, because a unary call's message is built before the connection is
    // chosen.
    grpc.client_streaming(request, PathAndQuery::from_static(OFFER_PATH), ProstCodec::default())
        .await
}

/// A stream of one message. The message is built when the connection that carries the call polls
/// the stream. The local address is not certain earlier, because tonic's channel replaces a lost
/// connection.
struct LazyMessage<F>(Option<F>);

impl<F> Unpin for LazyMessage<F> {}

impl<M, F: FnOnce() -> M> Stream for LazyMessage<F> {
    type Item = M;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<M>> {
        Poll::Ready(self.0.take().map(|make| make()))
    }
}

fn describe(status: &Status) -> String {
    format!("{:?}: {}", status.code(), PeerText(status.message(), MAX_DETAIL_TEXT))
}

/// Prefixes, in lower case, of the texts with which gRPC servers report an unknown service. tonic
/// sends an empty text, and other servers name the service.
const UNKNOWN_SERVICE: [&str; 6] = [
    "method not found",
    "method is unimplemented",
    "service is unimplemented",
    "unimplemented",
    "unknown method",
    "unknown service",
];

/// Whether a server reported that it does not have the Offer's service.
fn is_unknown_service(status: &Status) -> bool {
    let message = status.message().to_ascii_lowercase();
    status.code() == Code::Unimplemented
        && (message.is_empty()
            || message.contains("tonic_rdma.v1.bootstrap")
            || UNKNOWN_SERVICE.iter().any(|begin| message.starts_with(begin)))
}

/// Beginnings of the texts with which tonic's client reports that an answer is not gRPC: it has no
/// status, a wrong content type, or no content.
const NOT_GRPC: [&str; 4] =
    ["grpc-status header missing", "protocol error", "Missing response message", "Unexpected EOF"];

/// Whether the server refused this client access. The server may do so in plain HTTP, without a
/// gRPC message. tonic's client then makes a message that ends with the HTTP status.
fn is_refused_to_client(status: &Status) -> bool {
    matches!(status.code(), Code::Unauthenticated | Code::PermissionDenied)
        || ["status: 401 Unauthorized", "status: 403 Forbidden"]
            .iter()
            .any(|end| status.message().ends_with(end))
}

/// Returns the reason for an Offer whose call failed with `status`.
fn refused(status: &Status) -> Reason {
    // A status with a source was created locally, so the server did not answer.
    let unanswered = std::error::Error::source(status).is_some();
    match status.code() {
        _ if is_unknown_service(status) => Reason::new(
            ReasonCode::PeerNotCapable,
            "the Offer (tonic_rdma.v1.Bootstrap/Offer) was answered as an unknown method",
        ),
        _ if is_refused_to_client(status) => Reason::from_peer(
            ReasonCode::HandshakeRejected,
            format!(
                "the server's layers refused the Offer ({}); give it credentials with Endpoint::offer_metadata",
                describe(status)
            ),
        ),
        _ if NOT_GRPC.iter().any(|text| status.message().starts_with(text)) => Reason::from_peer(
            ReasonCode::OfferIntercepted,
            format!("the answer to the Offer is not gRPC ({})", describe(status)),
        ),
        Code::Unimplemented => Reason::from_peer(
            ReasonCode::OfferIntercepted,
            format!("a layer or a proxy answered the Offer ({})", describe(status)),
        ),
        Code::DeadlineExceeded | Code::Cancelled => Reason::from_peer(
            ReasonCode::HandshakeTimeout,
            format!("the Offer failed: {}", describe(status)),
        ),
        Code::ResourceExhausted if !unanswered => Reason::from_peer(
            ReasonCode::LimitReached,
            format!("the Offer failed: {}", describe(status)),
        ),
        _ if unanswered => Reason::new(
            ReasonCode::PeerUnreachable,
            format!("the Offer failed: {}", describe(status)),
        ),
        _ => Reason::from_peer(
            ReasonCode::HandshakeRejected,
            format!("the Offer failed: {}", describe(status)),
        ),
    }
}

/// Checks the server's answer, which is untrusted.
fn read(response: OfferResponse, paths: &[Path]) -> Result<OfferAnswer, Reason> {
    let grant = match response.outcome {
        Some(offer_response::Outcome::Grant(grant)) => grant,
        Some(offer_response::Outcome::Refusal(refusal)) => return Err(refusal_reason(&refusal)),
        None => return Err(malformed("it holds neither a grant nor a refusal")),
    };
    let (min, max) = (response.version_min, response.version_max);
    if min > u32::from(VERSION_MAX) || max < u32::from(VERSION_MIN) {
        return Err(Reason::new(
            ReasonCode::VersionMismatch,
            format!("server speaks versions {min} to {max}, client {VERSION_MIN} to {VERSION_MAX}"),
        ));
    }
    let ticket: [u8; TICKET_LEN] = grant
        .ticket
        .as_ref()
        .try_into()
        .map_err(|_| malformed(&format!("ticket of {} bytes", grant.ticket.len())))?;
    let mut offered = OfferAnswer {
        ticket: Ticket(ticket),
        places: Vec::new(),
        refusals: Vec::new(),
        user_agent: tonics_user_agent(&grant.user_agent),
        #[cfg(feature = "measure")]
        bare: grant.bare,
    };
    for fabric in grant.fabrics {
        match fabric.fabric {
            Some(fabric_offer::Fabric::Verbs(verbs)) => {
                offered.addresses(Path::Verbs, &verbs.addresses)?
            }
            #[cfg(feature = "test-util")]
            Some(fabric_offer::Fabric::Sim(sim)) => offered.addresses(Path::Sim, &sim.addresses)?,
            #[cfg(not(feature = "test-util"))]
            Some(fabric_offer::Fabric::Sim(_)) => {}
            Some(fabric_offer::Fabric::Shm(shm)) => offered.shm(shm)?,
            None => {}
        }
    }
    for refusal in &grant.refusals {
        if let Some(path) = paths.iter().find(|path| path.as_str() == refusal.fabric) {
            offered.refusals.push((*path, refusal_reason(refusal)));
        }
    }
    // Keep only requested paths, in the client's order.
    offered.places.retain(|place| paths.contains(&place.path));
    offered.places.sort_by_key(|place| paths.iter().position(|path| *path == place.path));
    if offered.places.is_empty() && offered.refusals.is_empty() {
        return Err(malformed("it offers no address"));
    }
    Ok(offered)
}

/// Parses tonic's user agent, as the server has seen it in the Offer. `None` if the text does not
/// have tonic's form.
fn tonics_user_agent(seen: &str) -> Option<HeaderValue> {
    let is_tonics = seen.starts_with("tonic/") && seen.len() <= MAX_USER_AGENT;
    let is_word = seen.bytes().all(|byte| byte.is_ascii_graphic());
    (is_tonics && is_word).then(|| HeaderValue::from_str(seen).ok()).flatten()
}

impl OfferAnswer {
    /// Removes the places that this end must not use because their paths are not encrypted, and
    /// reports these paths as refused.
    fn deny(&mut self, denies: impl Fn(Path) -> bool) {
        for (_, reason) in self.refusals.iter_mut().filter(|(path, _)| denies(*path)) {
            *reason = Plaintext::and_by_client(reason.clone());
        }
        for place in self.places.extract_if(.., |place| denies(place.path)) {
            if !self.refusals.iter().any(|(path, _)| *path == place.path) {
                self.refusals.push((place.path, Plaintext::denied_by_client()));
            }
        }
    }

    fn addresses(&mut self, path: Path, addresses: &[pb::Address]) -> Result<(), Reason> {
        let room = MAX_PLACES.saturating_sub(self.places.len());
        for address in addresses.iter().take(room) {
            let (addr, device) = (Addr::Ip(socket_addr(address)?), address.device.clone());
            let known = |name: &Transport| name.to_string() == address.transport;
            let iwarp = TRANSPORTS.iter().find(|name| known(name)).map(|name| name.is_iwarp());
            self.places.push(OfferedPlace { path, addr, device, iwarp });
        }
        Ok(())
    }

    fn shm(&mut self, shm: pb::Shm) -> Result<(), Reason> {
        match Fabric::boot_id() {
            Ok(own) if own == shm.boot_id => {
                let addr = shm.socket.parse().map_err(|e: BadShmAddr| malformed(&e.to_string()))?;
                let (path, addr) = (Path::Shm, Addr::Shm(addr));
                self.places.push(OfferedPlace { path, addr, device: String::new(), iwarp: None });
            }
            Ok(_) => self.refusals.push((
                Path::Shm,
                Reason::new(ReasonCode::OtherHost, "the server runs on another host"),
            )),
            Err(error) => self.refusals.push((Path::Shm, crate::path::from_error::fabric(error))),
        }
        Ok(())
    }
}

fn socket_addr(address: &pb::Address) -> Result<SocketAddr, Reason> {
    let shown = PeerText(&address.ip, MAX_LOG_TEXT);
    let bad = || malformed(&format!("address `{shown}` port {}", address.port));
    let ip: IpAddr = address.ip.parse().map_err(|_| bad())?;
    let port = u16::try_from(address.port).map_err(|_| bad())?;
    if port == 0 || ip.is_unspecified() {
        return Err(bad());
    }
    Ok(SocketAddr::new(ip, port))
}

fn malformed(what: &str) -> Reason {
    Reason::new(
        ReasonCode::HandshakeRejected,
        format!("the answer to the Offer makes no sense: {what}"),
    )
}

fn refusal_reason(refusal: &pb::Refusal) -> Reason {
    match ReasonCode::from_name(&refusal.code) {
        Some(code) => {
            Reason::from_peer(code, PeerText(&refusal.detail, MAX_DETAIL_TEXT).to_string())
        }
        // The code belongs to a later protocol version.
        None => Reason::from_peer(
            ReasonCode::HandshakeRejected,
            format!(
                "{}: {}",
                PeerText(&refusal.code, MAX_LOG_TEXT),
                PeerText(&refusal.detail, MAX_DETAIL_TEXT)
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::reason::Side;

    fn grant() -> pb::Grant {
        pb::Grant {
            ticket: vec![1; TICKET_LEN].into(),
            lifetime_ms: 10_000,
            fabrics: vec![pb::FabricOffer {
                fabric: Some(fabric_offer::Fabric::Verbs(pb::Verbs {
                    addresses: vec![pb::Address {
                        ip: "10.0.0.1".into(),
                        port: 50051,
                        device: "mlx5_0".into(),
                        transport: "RoCE".into(),
                    }],
                })),
            }],
            refusals: vec![],
            bare: false,
            user_agent: "tonic/0.14.9".into(),
        }
    }

    #[test]
    fn only_what_tonic_says_of_itself_is_taken_as_user_agent() {
        let read = |user_agent: &str| {
            let grant = pb::Grant { user_agent: user_agent.into(), ..grant() };
            read(response(grant), &[Path::Verbs]).unwrap().user_agent
        };
        assert_eq!(read("tonic/0.14.9").unwrap(), "tonic/0.14.9");
        let long = format!("tonic/{}", "9".repeat(100));
        for other in ["", "curl/8", "tonic/1 x", "tonic/1\r\nx: y", "tonic/\u{e9}", &long] {
            assert_eq!(read(other), None, "{other:?}");
        }
    }

    fn response(grant: pb::Grant) -> OfferResponse {
        OfferResponse {
            version_min: VERSION_MIN.into(),
            version_max: VERSION_MAX.into(),
            outcome: Some(offer_response::Outcome::Grant(grant)),
        }
    }

    #[test]
    fn reads_a_grant() {
        let offered = read(response(grant()), &[Path::Verbs]).unwrap();
        assert_eq!(offered.ticket, Ticket([1; TICKET_LEN]));
        let addr = Addr::Ip("10.0.0.1:50051".parse().unwrap());
        let (path, device, iwarp) = (Path::Verbs, "mlx5_0".to_owned(), Some(false));
        assert_eq!(offered.places, [OfferedPlace { path, addr, device, iwarp }]);
    }

    #[test]
    fn the_order_is_the_clients_and_shm_is_for_one_host() {
        let with_shm = |boot_id: &str| {
            let shm = pb::Shm { boot_id: boot_id.to_owned(), socket: "s".into() };
            let mut grant = grant();
            grant.fabrics.push(pb::FabricOffer { fabric: Some(fabric_offer::Fabric::Shm(shm)) });
            grant
        };
        let own = Fabric::boot_id().unwrap();
        for order in [[Path::Shm, Path::Verbs], [Path::Verbs, Path::Shm]] {
            let offered = read(response(with_shm(&own)), &order).unwrap();
            assert_eq!(offered.places.iter().map(|at| at.path).collect::<Vec<_>>(), order);
        }
        let offered = read(response(with_shm("elsewhere")), &[Path::Shm, Path::Verbs]).unwrap();
        assert_eq!(offered.places.len(), 1);
        assert_eq!(offered.refusals[0].1.code(), ReasonCode::OtherHost);
    }

    #[test]
    fn a_server_that_names_very_many_places_is_not_taken_at_its_word() {
        let mut grant = grant();
        let Some(fabric_offer::Fabric::Verbs(verbs)) = &mut grant.fabrics[0].fabric else {
            panic!()
        };
        verbs.addresses = vec![verbs.addresses[0].clone(); 200_000];
        grant.fabrics.push(grant.fabrics[0].clone());
        let offered = read(response(grant), &[Path::Verbs]).unwrap();
        assert_eq!(offered.places.len(), MAX_PLACES);
    }

    #[test]
    fn a_refusal_of_one_fabric_is_kept() {
        let refusal = pb::Refusal {
            code: "memlock".into(),
            detail: "needed 2".into(),
            fabric: "verbs".into(),
        };
        let grant = pb::Grant { fabrics: vec![], refusals: vec![refusal], ..grant() };
        let offered = read(response(grant), &[Path::Verbs]).unwrap();
        assert_eq!(offered.places, []);
        assert_eq!(offered.refusals[0].1.to_string(), "peer: memlock: needed 2");
    }

    #[test]
    fn nonsense_is_named() {
        let fails = |change: &dyn Fn(&mut pb::Grant)| {
            let mut grant = grant();
            change(&mut grant);
            read(response(grant), &[Path::Verbs]).unwrap_err().to_string()
        };
        assert!(fails(&|g| g.ticket = vec![1; 15].into()).contains("ticket of 15 bytes"));
        assert!(fails(&|g| g.fabrics.clear()).contains("no address"));
        let with_address = |ip: &'static str, port| {
            move |g: &mut pb::Grant| {
                let address = pb::Address { ip: ip.into(), port, ..Default::default() };
                let verbs = pb::Verbs { addresses: vec![address] };
                g.fabrics[0].fabric = Some(fabric_offer::Fabric::Verbs(verbs));
            }
        };
        for (ip, port) in [("10.0.0", 1), ("10.0.0.1", 0), ("10.0.0.1", 70_000), ("0.0.0.0", 1)] {
            let e = fails(&with_address(ip, port));
            assert!(e.contains(&format!("address `{ip}` port {port}")), "{e}");
        }
        let empty = OfferResponse { outcome: None, ..response(grant()) };
        assert!(read(empty, &[Path::Verbs]).unwrap_err().to_string().contains("neither"));
        // A fabric that was not requested is ignored.
        assert!(read(response(grant()), &[Path::Sim]).is_err());
    }

    #[test]
    fn a_server_of_the_future_is_a_version_mismatch() {
        let response = OfferResponse { version_min: 7, version_max: 9, ..response(grant()) };
        let reason = read(response, &[Path::Verbs]).unwrap_err();
        assert_eq!(reason.code(), ReasonCode::VersionMismatch);
        assert!(reason.detail().contains("7 to 9"));
    }

    #[test]
    fn refusals_are_the_peers() {
        let refusal = |code: &str| pb::Refusal {
            code: code.into(),
            detail: "why".into(),
            ..Default::default()
        };
        assert_eq!(refusal_reason(&refusal("memlock")).to_string(), "peer: memlock: why");
        let unknown = refusal_reason(&refusal("phase-of-moon")).to_string();
        assert_eq!(unknown, "peer: handshake-rejected: phase-of-moon: why");
    }

    #[test]
    fn statuses_become_reasons() {
        let code = |status| refused(&status).code();
        for text in [
            "",
            "Method not found!",
            "unknown service tonic_rdma.v1.Bootstrap",
            "The server does not implement the method /tonic_rdma.v1.Bootstrap/Offer",
            "Service is unimplemented.",
        ] {
            assert_eq!(code(Status::unimplemented(text)), ReasonCode::PeerNotCapable, "{text}");
        }
        let of_a_layer = refused(&Status::unimplemented("not for your tenant"));
        assert_eq!(
            (of_a_layer.code(), of_a_layer.side()),
            (ReasonCode::OfferIntercepted, Side::Peer)
        );
        assert!(of_a_layer.detail().contains("not for your tenant"));
        assert_eq!(code(Status::unauthenticated("who?")), ReasonCode::HandshakeRejected);
        assert_eq!(code(Status::cancelled("Timeout expired")), ReasonCode::HandshakeTimeout);
        assert_eq!(code(Status::unavailable("down")), ReasonCode::HandshakeRejected);
        assert_eq!(code(Status::resource_exhausted("many")), ReasonCode::LimitReached);
        let mut lost = Status::unavailable("connection refused");
        lost.set_source(Arc::new(std::io::Error::from(std::io::ErrorKind::ConnectionRefused)));
        assert_eq!(code(lost), ReasonCode::PeerUnreachable);
    }
}
