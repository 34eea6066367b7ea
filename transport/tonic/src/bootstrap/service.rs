//! The server's side of the Offer and the Probe.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::Extensions;
use prost::Message;
use smallvec::SmallVec;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};
use tonic_rdma_memory::{LogThrottle, PerProcess, throttled};
use tonic_rdma_proto::hello::{VERSION_MAX, VERSION_MIN};

use crate::bootstrap::connection::OfferConnection;
use crate::bootstrap::gateways::{Gateways, Indirect};
use crate::bootstrap::pb::bootstrap_server::Bootstrap;
use crate::bootstrap::pb::offer_response::Outcome;
use crate::bootstrap::pb::{
    self, OfferRequest, OfferResponse, ProbeRequest, ProbeResponse, fabric_offer,
};
use crate::bootstrap::stock_calls::StockCalls;
#[cfg(feature = "measure")]
use crate::bootstrap::tickets::BareTicket;
use crate::bootstrap::tickets::{Holder, Tickets};
use crate::connect_info::RdmaConnectInfo;
use crate::path::Path;
use crate::path::policy::Plaintext;
use crate::path::reason::{Reason, ReasonCode};

/// Maximum number of fabrics in a request.
pub(crate) const MAX_FABRICS: usize = 8;
/// Maximum length of an answer to an Offer, in bytes.
pub(crate) const MAX_ANSWER: usize = 8192;
/// Maximum length of the user agent's last word in an answer, in bytes.
pub(crate) const MAX_USER_AGENT: usize = 64;
/// Maximum length of a reason's details in an answer, in bytes.
const MAX_DETAIL: usize = 512;
/// Maximum size of an answer to a Probe, in bytes.
pub(crate) const MAX_PROBE: usize = 1 << 20;

/// Throttles the log lines about Offers through gateways, so that clients behind gateways cannot
/// fill the disk.
static REFUSED: LogThrottle = LogThrottle::new();

/// The state of a server's offer on one fabric.
#[derive(Debug, Clone)]
pub(crate) enum Offer {
    /// The offer is not known yet, because the devices are being opened.
    Starting,
    /// The fabric is available at these addresses.
    On(Arc<[Listening]>),
    /// The fabric is not available, for this reason.
    Off(Reason),
}

/// The state of a server's offers on all fabrics.
#[derive(Debug, Clone)]
pub(crate) enum Offering {
    /// One state for each fabric.
    ByFabric(Vec<(Path, Offer)>),
    /// No fabric is available, for this reason.
    Off(Reason),
}

impl Offering {
    /// Returns the initial state, in which the offer of each path is unknown.
    pub(crate) fn starting(paths: impl IntoIterator<Item = Path>) -> Self {
        Self::ByFabric(paths.into_iter().map(|path| (path, Offer::Starting)).collect())
    }

    /// Updates one fabric. Does nothing if the whole fast path is off.
    pub(crate) fn set(&mut self, path: Path, offer: Offer) {
        if let Self::ByFabric(fabrics) = self
            && let Some((_, old)) = fabrics.iter_mut().find(|(known, _)| *known == path)
        {
            *old = offer;
        }
    }

    fn get(&self, path: &str) -> Option<(Path, &Offer)> {
        match self {
            Self::ByFabric(fabrics) => fabrics
                .iter()
                .find(|(known, _)| known.as_str() == path)
                .map(|(path, offer)| (*path, offer)),
            Self::Off(_) => None,
        }
    }
}

/// An address at which a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Listening {
    /// An address of a device.
    Ip { addr: SocketAddr, device: String, transport: String },
    /// An abstract unix socket.
    Shm { boot_id: String, socket: String },
}

/// The server's implementation of `Bootstrap`.
#[derive(Debug, Clone)]
pub(crate) struct OfferService {
    offering: watch::Receiver<Offering>,
    tickets: Arc<Tickets>,
    gateways: Arc<Gateways>,
    stock_calls: Arc<StockCalls>,
    /// Whether Offers that arrived through a gateway get a ticket.
    through_gateways: bool,
    plaintext: Plaintext,
    /// Whether the server issues tickets for bare connections.
    measuring: bool,
}

/// Marks a ticket that is not valid for any device, because the server or the Offer's connection
/// uses TLS, and the server has not allowed RDMA without encryption.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StaysOnHost;

impl OfferService {
    pub(crate) fn new(
        offering: watch::Receiver<Offering>,
        tickets: Arc<Tickets>,
        gateways: Arc<Gateways>,
        stock_calls: Arc<StockCalls>,
        through_gateways: bool,
        plaintext: Plaintext,
        measuring: bool,
    ) -> Self {
        Self { offering, tickets, gateways, stock_calls, through_gateways, plaintext, measuring }
    }

    /// The identity that calls on the fast path inherit from the Offer's TCP connection. Empty if
    /// the connection is a gateway's, because the gateway's identity is not its clients' identity.
    fn identity(
        &self,
        connection: Option<&OfferConnection>,
        judged: Result<(), Indirect>,
    ) -> Result<Extensions, Reason> {
        match judged {
            Ok(()) => Ok(connection.map(|c| c.extensions.clone()).unwrap_or_default()),
            Err(why) if self.through_gateways => {
                tracing::debug!(%why, "fast path offered without the client's address and certificate");
                Ok(Extensions::new())
            }
            Err(why) => {
                let reason = Reason::new(ReasonCode::ThroughGateway, why.to_string());
                let peer = connection.and_then(OfferConnection::peer);
                throttled!(in REFUSED, warn, ?peer, %reason, cure = reason.cure(), "Offer refused");
                Err(reason)
            }
        }
    }

    /// Waits until the state of each `wanted` fabric is known, and returns the states. The client's
    /// own deadline limits the wait.
    async fn decided(&self, wanted: &[&str]) -> Result<Vec<(Path, Offer)>, Reason> {
        let mut offering = self.offering.clone();
        let starting = |o: &Offering, path: &str| matches!(o.get(path), Some((_, Offer::Starting)));
        let decided = offering.wait_for(|o| !wanted.iter().any(|path| starting(o, path))).await;
        match decided.as_deref() {
            Ok(Offering::Off(reason)) => Err(reason.clone()),
            Ok(offering) => {
                let known = wanted.iter().filter_map(|path| offering.get(path));
                Ok(known.map(|(path, offer)| (path, offer.clone())).collect())
            }
            Err(_) => Err(Reason::new(ReasonCode::GoAway, "the server is shutting down")),
        }
    }

    async fn outcome(
        &self,
        request: &OfferRequest,
        wanted: &[&str],
        connection: Option<&OfferConnection>,
        local: Option<SocketAddr>,
    ) -> Result<pb::Grant, Reason> {
        let (min, max) = (request.version_min, request.version_max);
        if min > u32::from(VERSION_MAX) || max < u32::from(VERSION_MIN) || min > max {
            return Err(Reason::new(
                ReasonCode::VersionMismatch,
                format!(
                    "client speaks versions {min} to {max}, server {VERSION_MIN} to {VERSION_MAX}"
                ),
            ));
        }
        let judged = self.gateways.judge(connection, stated(request), Instant::now());
        let (mut fabrics, mut refusals) = (Vec::new(), Vec::new());
        let by_tls = connection.is_some_and(OfferConnection::is_by_tls);
        for (path, offer) in self.decided(wanted).await? {
            match offer {
                Offer::On(_) if self.plaintext.denies(path, by_tls) => {
                    refusals.push((path, Plaintext::denied_by_server()));
                }
                Offer::On(listening) => fabrics.extend(fabric_offer(path, &listening, local)),
                Offer::Off(reason) => refusals.push((path, reason)),
                Offer::Starting => {}
            }
        }
        if fabrics.is_empty() {
            let none = || {
                Reason::new(ReasonCode::HandshakeRejected, "no fabric is available on both sides")
            };
            return Err(crate::path::from_error::foremost(refusals, &[]).unwrap_or_else(none));
        }
        let mut identity = self.identity(connection, judged)?;
        let bare = request.bare && self.measuring;
        #[cfg(feature = "measure")]
        if bare {
            identity.insert(BareTicket);
        }
        if self.plaintext.denies(Path::Verbs, by_tls) {
            identity.insert(StaysOnHost);
        }
        let asker = connection.and_then(|c| c.asker.as_ref());
        if let Some(asker) = asker {
            identity.insert(asker.handshakes());
        }
        let holder = Holder {
            connection: asker.map(|asker| asker.number),
            network: connection.and_then(OfferConnection::peer).map(|peer| peer.ip().into()),
        };
        let ticket = self
            .tickets
            .issue(identity, holder, Instant::now())
            .map_err(|e| Reason::new(ReasonCode::HandshakeRejected, e.to_string()))?;
        Ok(pb::Grant {
            ticket: Bytes::copy_from_slice(&ticket.0),
            lifetime_ms: self.tickets.lifetime().as_millis().try_into().unwrap_or(u32::MAX),
            fabrics,
            refusals: refusals
                .into_iter()
                .map(|(path, reason)| refusal(&reason, path.as_str()))
                .collect(),
            bare,
            user_agent: String::new(),
        })
    }
}

/// The address that the client states as its end of the TCP connection.
fn stated(request: &OfferRequest) -> Option<SocketAddr> {
    let client = request.client.as_ref()?;
    Some(SocketAddr::new(client.ip.parse().ok()?, client.port.try_into().ok()?))
}

/// The fabrics that a request names, without duplicates.
///
/// # Errors
///
/// The request names more than [`MAX_FABRICS`] fabrics.
fn named(fabrics: &[String]) -> Result<SmallVec<[&str; MAX_FABRICS]>, Status> {
    let mut named = SmallVec::new();
    for fabric in fabrics {
        if named.contains(&fabric.as_str()) {
            continue;
        }
        if named.len() == MAX_FABRICS {
            let text = format!("an Offer names at most {MAX_FABRICS} fabrics");
            return Err(Status::invalid_argument(text));
        }
        named.push(fabric.as_str());
    }
    Ok(named)
}

/// Shortens an answer that is longer than [`MAX_ANSWER`] by removing the last addresses of the
/// fabric that has the most addresses. The nearest address is the first address of its fabric, and
/// stays.
fn fit(response: &mut OfferResponse) {
    while response.encoded_len() > MAX_ANSWER {
        let Some(Outcome::Grant(grant)) = &mut response.outcome else { return };
        let lists = grant.fabrics.iter_mut().filter_map(|offer| match &mut offer.fabric {
            Some(fabric_offer::Fabric::Verbs(verbs)) => Some(&mut verbs.addresses),
            Some(fabric_offer::Fabric::Sim(sim)) => Some(&mut sim.addresses),
            Some(fabric_offer::Fabric::Shm(_)) | None => None,
        });
        let longest = lists.max_by_key(|addresses| addresses.len());
        let Some(address) = longest.and_then(Vec::pop) else { return };
        tracing::debug!(?address, "the answer to an Offer has no room for an address");
    }
}

/// Returns the last word of the user agent. The client cannot know this word, because tonic adds
/// the word to requests and does not reveal it.
fn last_word_of_user_agent(metadata: &MetadataMap) -> String {
    let agent = metadata.get("user-agent").and_then(|agent| agent.to_str().ok());
    let word = agent.and_then(|agent| agent.split(' ').next_back());
    word.filter(|word| word.len() <= MAX_USER_AGENT).unwrap_or_default().to_owned()
}

/// Returns the first `most` bytes of `text`, or fewer bytes if a character would be cut.
fn beginning(text: &str, most: usize) -> &str {
    let end = (0..=most.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

fn refusal(reason: &Reason, fabric: &str) -> pb::Refusal {
    let detail = reason.detail();
    pb::Refusal {
        code: reason.code().as_str().to_owned(),
        detail: beginning(detail, MAX_DETAIL).to_owned(),
        fabric: fabric.to_owned(),
    }
}

/// Describes one fabric with all its addresses. The address that the client has already reached
/// over TCP comes first.
fn fabric_offer(
    path: Path,
    listening: &[Listening],
    reached: Option<SocketAddr>,
) -> Option<pb::FabricOffer> {
    let mut addresses = Vec::new();
    let mut near = None;
    let mut shm = None;
    for place in listening {
        match place {
            Listening::Ip { addr, device, transport } => {
                if reached.is_some_and(|reached| reached.ip().to_canonical() == addr.ip()) {
                    near = near.or(Some(addresses.len()));
                }
                addresses.push(pb::Address {
                    ip: addr.ip().to_string(),
                    port: addr.port().into(),
                    device: device.clone(),
                    transport: transport.clone(),
                });
            }
            Listening::Shm { boot_id, socket } => {
                shm = Some(pb::Shm { boot_id: boot_id.clone(), socket: socket.clone() });
            }
        }
    }
    if let Some(near) = near {
        addresses[..=near].rotate_right(1);
    }
    let fabric = match (path, shm) {
        (Path::Shm, Some(shm)) => fabric_offer::Fabric::Shm(shm),
        (Path::Verbs, _) if !addresses.is_empty() => {
            fabric_offer::Fabric::Verbs(pb::Verbs { addresses })
        }
        #[cfg(feature = "test-util")]
        (Path::Sim, _) if !addresses.is_empty() => fabric_offer::Fabric::Sim(pb::Sim { addresses }),
        _ => return None,
    };
    Some(pb::FabricOffer { fabric: Some(fabric) })
}

#[tonic::async_trait]
impl Bootstrap for OfferService {
    async fn offer(
        &self,
        request: Request<OfferRequest>,
    ) -> Result<Response<OfferResponse>, Status> {
        if request.extensions().get::<RdmaConnectInfo>().is_some() {
            return Err(Status::failed_precondition("the Offer is answered over TCP only"));
        }
        let local = request.local_addr();
        let peer = request.remote_addr();
        // The connection is absent if a layer rebuilt the request.
        let connection = request.extensions().get::<OfferConnection>();
        let wanted = named(&request.get_ref().fabrics)?;
        let outcome = self.outcome(request.get_ref(), &wanted, connection, local).await;
        if let Some(peer) = connection.and_then(OfferConnection::peer) {
            self.gateways.answered(peer, outcome.as_ref().err());
        }
        let outcome = match outcome {
            Ok(grant) => {
                tracing::debug!(peer = ?peer, "fast path offered");
                let user_agent = last_word_of_user_agent(request.metadata());
                Outcome::Grant(pb::Grant { user_agent, ..grant })
            }
            Err(reason) => {
                tracing::debug!(peer = ?peer, %reason, "fast path not offered");
                Outcome::Refusal(refusal(&reason, ""))
            }
        };
        // Remember the host only if the server accepts no Offers through gateways, because many
        // programs share a gateway's address.
        if let Outcome::Grant(_) = outcome
            && !self.through_gateways
            && let Some(peer) = connection.and_then(OfferConnection::peer)
        {
            self.stock_calls.has_ticket(peer.ip());
        }
        let mut response = OfferResponse {
            version_min: VERSION_MIN.into(),
            version_max: VERSION_MAX.into(),
            outcome: Some(outcome),
        };
        fit(&mut response);
        Ok(Response::new(response))
    }

    async fn probe(
        &self,
        request: Request<ProbeRequest>,
    ) -> Result<Response<ProbeResponse>, Status> {
        let wanted = request.get_ref().answer_bytes as usize;
        if wanted > MAX_PROBE {
            return Err(Status::invalid_argument(format!(
                "{wanted} bytes requested, at most {MAX_PROBE} are allowed"
            )));
        }
        // All answers share one block of zeros.
        static ZEROS: PerProcess<Bytes> = PerProcess::new(|| vec![0; MAX_PROBE].into());
        Ok(Response::new(ProbeResponse { payload: ZEROS.slice(..wanted) }))
    }
}

#[cfg(test)]
mod tests {
    use tonic::transport::server::TcpConnectInfo;

    use super::*;
    use crate::bootstrap::tickets::{CAPACITY, LIFETIME, TICKET_LEN, Ticket};

    fn listening(ip: [u8; 4]) -> Listening {
        Listening::Ip { addr: (ip, 7).into(), device: "sim0".into(), transport: "sim".into() }
    }

    fn on(listening: &[Listening]) -> Offering {
        Offering::ByFabric(vec![(Path::Sim, Offer::On(listening.into()))])
    }

    const PEER: &str = "10.0.0.9";

    fn service(offering: Offering) -> (OfferService, watch::Sender<Offering>) {
        let (tx, rx) = watch::channel(offering);
        let tickets = Arc::new(Tickets::new(CAPACITY, LIFETIME));
        let gateways: Arc<Gateways> = Arc::default();
        let stock_calls = Arc::new(StockCalls::new(gateways.clone()));
        let plaintext = Plaintext::default();
        (OfferService::new(rx, tickets, gateways, stock_calls, false, plaintext, false), tx)
    }

    fn request() -> OfferRequest {
        OfferRequest {
            version_min: VERSION_MIN.into(),
            version_max: VERSION_MAX.into(),
            fabrics: vec!["future".into(), "sim".into()],
            client: Some(pb::TcpAddress { ip: PEER.into(), port: 7 }),
            bare: false,
        }
    }

    async fn ask(service: &OfferService, request: OfferRequest, local: Option<[u8; 4]>) -> Outcome {
        let mut request = Request::new(request);
        let info = TcpConnectInfo {
            local_addr: local.map(|ip| (ip, 50051).into()),
            remote_addr: Some((PEER.parse::<std::net::IpAddr>().unwrap(), 7).into()),
        };
        let connection = OfferConnection::of(info.clone());
        let _known = service.gateways.accepted(&connection);
        request.extensions_mut().insert(info);
        request.extensions_mut().insert(connection);
        service.offer(request).await.unwrap().into_inner().outcome.unwrap()
    }

    fn granted(outcome: Outcome) -> Vec<String> {
        let Outcome::Grant(grant) = outcome else { panic!("{outcome:?}") };
        assert_eq!(grant.ticket.len(), TICKET_LEN);
        assert_eq!(grant.lifetime_ms, 10_000);
        let Some(fabric_offer::Fabric::Sim(sim)) = &grant.fabrics[0].fabric else { panic!() };
        sim.addresses.iter().map(|a| format!("{}:{} {}", a.ip, a.port, a.device)).collect()
    }

    fn refused(outcome: Outcome) -> String {
        let Outcome::Refusal(refusal) = outcome else { panic!("{outcome:?}") };
        format!("{}: {}", refusal.code, refusal.detail)
    }

    #[tokio::test]
    async fn offers_all_addresses_and_first_the_one_that_the_client_has_reached() {
        let places = [[10, 0, 0, 1], [10, 0, 1, 1], [10, 0, 2, 1]];
        let (service, _tx) = service(on(&places.map(listening)));
        let near = granted(ask(&service, request(), Some([10, 0, 1, 1])).await);
        assert_eq!(near, ["10.0.1.1:7 sim0", "10.0.0.1:7 sim0", "10.0.2.1:7 sim0"]);
        for elsewhere in [Some([192, 168, 0, 1]), None] {
            let all = granted(ask(&service, request(), elsewhere).await);
            assert_eq!(all, ["10.0.0.1:7 sim0", "10.0.1.1:7 sim0", "10.0.2.1:7 sim0"]);
        }
    }

    #[tokio::test]
    async fn no_answer_is_longer_than_the_limit() {
        let (device, transport) = ("d".repeat(64), "InfiniBand".to_owned());
        let many: Vec<_> = (0..2000_u16)
            .map(|n| {
                let addr =
                    ([0x2001, 0xdb8, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, n], 50051).into();
                Listening::Ip { addr, device: device.clone(), transport: transport.clone() }
            })
            .chain([listening([10, 0, 1, 1])])
            .collect();
        let long = Reason::new(ReasonCode::NoRoute, "\u{1f980}".repeat(10_000));
        let fabrics = vec![(Path::Sim, Offer::On(many.into())), (Path::Verbs, Offer::Off(long))];
        let (service, tx) = service(Offering::ByFabric(fabrics));
        let request = || OfferRequest { fabrics: vec!["sim".into(), "verbs".into()], ..request() };
        let outcome = ask(&service, request(), Some([10, 0, 1, 1])).await;
        let Outcome::Grant(grant) = &outcome else { panic!("{outcome:?}") };
        assert_eq!(grant.refusals[0].detail, "\u{1f980}".repeat(MAX_DETAIL / 4));
        // The answer is full, and contains the nearest address.
        let length = answer(outcome.clone()).encoded_len();
        assert!((MAX_ANSWER - 200..=MAX_ANSWER).contains(&length), "{length} bytes");
        assert_eq!(granted(outcome)[0], "10.0.1.1:7 sim0");
        tx.send_modify(|o| {
            o.set(Path::Sim, Offer::Off(Reason::new(ReasonCode::NoRoute, "y".repeat(9000))))
        });
        let outcome = ask(&service, request(), None).await;
        assert_eq!(refused(outcome).len(), "no-route: ".len() + MAX_DETAIL);
    }

    fn answer(outcome: Outcome) -> OfferResponse {
        OfferResponse {
            version_min: VERSION_MIN.into(),
            version_max: VERSION_MAX.into(),
            outcome: Some(outcome),
        }
    }

    #[tokio::test]
    async fn refuses_with_its_own_reason() {
        let (service, _tx) =
            service(Offering::Off(Reason::new(ReasonCode::Memlock, "needed 2, limit 1")));
        assert_eq!(refused(ask(&service, request(), None).await), "memlock: needed 2, limit 1");
    }

    #[tokio::test]
    async fn says_of_each_fabric_what_becomes_of_it() {
        let shm = Listening::Shm { boot_id: "b".into(), socket: "s".into() };
        let reason = Reason::new(ReasonCode::Memlock, "needed 2, limit 1");
        let (service, tx) = service(Offering::ByFabric(vec![
            (Path::Shm, Offer::On([shm].into())),
            (Path::Verbs, Offer::Off(reason)),
        ]));
        let wants = |fabrics: &[&str]| OfferRequest {
            fabrics: fabrics.iter().map(|f| (*f).to_owned()).collect(),
            ..request()
        };
        let Outcome::Grant(grant) = ask(&service, wants(&["verbs", "shm"]), None).await else {
            panic!()
        };
        let Some(fabric_offer::Fabric::Shm(shm)) = &grant.fabrics[0].fabric else { panic!() };
        assert_eq!((grant.fabrics.len(), &*shm.boot_id, &*shm.socket), (1, "b", "s"));
        let told = &grant.refusals[0];
        assert_eq!((grant.refusals.len(), &*told.fabric, &*told.code), (1, "verbs", "memlock"));
        assert_eq!(
            refused(ask(&service, wants(&["verbs"]), None).await),
            "memlock: needed 2, limit 1"
        );
        // Only clients that asked for a starting fabric wait for it.
        tx.send_modify(|o| o.set(Path::Verbs, Offer::Starting));
        let Outcome::Grant(_) = ask(&service, wants(&["shm"]), None).await else { panic!() };
    }

    #[tokio::test]
    async fn after_tls_shared_memory_alone_is_offered_unless_the_program_agrees() {
        let shm = Listening::Shm { boot_id: "b".into(), socket: "s".into() };
        for (tls, agreed) in [(true, false), (true, true), (false, false)] {
            let (mut service, _tx) = service(Offering::ByFabric(vec![
                (Path::Shm, Offer::On([shm.clone()].into())),
                (Path::Sim, Offer::On([listening([10, 0, 0, 1])].into())),
            ]));
            service.plaintext = Plaintext { tls, agreed };
            let both = OfferRequest { fabrics: vec!["sim".into(), "shm".into()], ..request() };
            let Outcome::Grant(grant) = ask(&service, both, None).await else { panic!("refused") };
            let ticket = Ticket(grant.ticket.as_ref().try_into().unwrap());
            let identity = service.tickets.redeem(&ticket, Instant::now()).unwrap();
            let denied = tls && !agreed;
            assert_eq!(grant.fabrics.len(), if denied { 1 } else { 2 });
            assert_eq!(identity.get::<StaysOnHost>().is_some(), denied);
            let told: Vec<_> = grant.refusals.iter().map(|r| (&*r.fabric, &*r.code)).collect();
            assert_eq!(told, [("sim", "not-encrypted")][..usize::from(denied)]);
            let alone = ask(&service, request(), None).await;
            match denied {
                true => assert!(refused(alone).contains("Server::plaintext_rdma is not set")),
                false => drop(granted(alone)),
            }
        }
    }

    #[tokio::test]
    async fn refuses_strange_versions_and_fabrics() {
        let (service, _tx) = service(on(&[listening([10, 0, 0, 1])]));
        for (version_min, version_max) in [(99, 120), (0, 0), (2, 1)] {
            let request = OfferRequest { version_min, version_max, ..request() };
            let refusal = refused(ask(&service, request, None).await);
            assert!(refusal.starts_with("version-mismatch: client speaks versions"), "{refusal}");
        }
        let request = OfferRequest { fabrics: vec!["pigeon".into()], ..request() };
        let refusal = refused(ask(&service, request, None).await);
        assert_eq!(refusal, "handshake-rejected: no fabric is available on both sides");
    }

    #[tokio::test]
    async fn refuses_who_states_no_address_or_none_that_is_one() {
        let (service, _tx) = service(on(&[listening([10, 0, 0, 1])]));
        let bad = [("10.0.0", 7), (PEER, 65543), ("", 7)];
        let bad = bad.map(|(ip, port)| Some(pb::TcpAddress { ip: ip.into(), port }));
        for client in bad.into_iter().chain([None]) {
            let refusal = refused(ask(&service, OfferRequest { client, ..request() }, None).await);
            assert!(refusal.starts_with("through-gateway: the client did not state"), "{refusal}");
        }
        // The server reports its own defect first.
        let off = Offering::Off(Reason::new(ReasonCode::Memlock, "needed 2, limit 1"));
        let (service, _tx) = self::service(off);
        let silent = OfferRequest { client: None, ..request() };
        assert_eq!(refused(ask(&service, silent, None).await), "memlock: needed 2, limit 1");
    }

    #[tokio::test]
    async fn waits_while_the_server_starts() {
        let (service, tx) = service(Offering::starting([Path::Sim]));
        let asked = tokio::spawn(async move { ask(&service, request(), None).await });
        tokio::task::yield_now().await;
        assert!(!asked.is_finished());
        tx.send_modify(|o| o.set(Path::Sim, Offer::On([listening([10, 0, 0, 1])].into())));
        granted(asked.await.unwrap());
    }

    #[tokio::test]
    async fn a_probe_is_answered_with_what_it_asks_for_up_to_a_limit() {
        let (service, _tx) = service(Offering::starting([Path::Verbs]));
        let probe = async |answer_bytes: u32| {
            service.probe(Request::new(ProbeRequest { payload: Bytes::new(), answer_bytes })).await
        };
        for bytes in [0, 1, MAX_PROBE as u32] {
            assert_eq!(probe(bytes).await.unwrap().get_ref().payload.len(), bytes as usize);
        }
        for bytes in [MAX_PROBE as u32 + 1, u32::MAX] {
            let status = probe(bytes).await.unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert!(status.message().contains("at most 1048576"), "{}", status.message());
        }
    }

    #[tokio::test]
    async fn an_offer_over_the_fast_path_is_refused() {
        let (service, _tx) = service(Offering::starting([Path::Sim]));
        let mut request = Request::new(request());
        request.extensions_mut().insert(RdmaConnectInfo {
            path: Path::Sim,
            device: None,
            local_addr: None,
            remote_addr: None,
            peer_pid: None,
            pool: Default::default(),
        });
        let status = service.offer(request).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::FailedPrecondition);
    }
}
