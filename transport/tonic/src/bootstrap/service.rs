//! The server's side of the Offer.

use super::{
    capture::Connection,
    pb::{
        self, OfferRequest, OfferResponse, bootstrap_server::Bootstrap, fabric_offer, offer_response::Outcome,
    },
    tickets::Tickets,
};
use crate::{
    connect_info::RdmaConnectInfo,
    path::Path,
    reason::{Reason, ReasonCode},
};
use bytes::Bytes;
use std::{net::SocketAddr, sync::Arc};
use tokio::{sync::watch, time::Instant};
use tonic::{Request, Response, Status};
use tonic_rdma_proto::hello::{VERSION_MAX, VERSION_MIN};

/// Whether a server has a fast path to offer.
#[derive(Debug, Clone)]
pub(crate) enum Offering {
    /// Not known yet: devices are being opened.
    Starting,
    /// On these addresses.
    On(Arc<[Listening]>),
    /// No, and why.
    Off(Reason),
}

/// One address that a server listens on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listening {
    pub(crate) path: Path,
    pub(crate) addr: SocketAddr,
    pub(crate) device: String,
    pub(crate) transport: String,
}

/// Answers Offers.
#[derive(Debug, Clone)]
pub(crate) struct OfferService {
    offering: watch::Receiver<Offering>,
    tickets: Arc<Tickets>,
}

impl OfferService {
    pub(crate) fn new(offering: watch::Receiver<Offering>, tickets: Arc<Tickets>) -> Self {
        Self { offering, tickets }
    }

    /// What is offered, once that is known. Clients wait no longer than their own limit.
    async fn decided(&self) -> Result<Arc<[Listening]>, Reason> {
        let mut offering = self.offering.clone();
        let decided = offering.wait_for(|o| !matches!(o, Offering::Starting)).await;
        match decided.as_deref() {
            Ok(Offering::On(listening)) => Ok(listening.clone()),
            Ok(Offering::Off(reason)) => Err(reason.clone()),
            Ok(Offering::Starting) | Err(_) => {
                Err(Reason::new(ReasonCode::GoAway, "the server is shutting down"))
            }
        }
    }

    async fn outcome(
        &self,
        request: &OfferRequest,
        connection: Connection,
        local: Option<SocketAddr>,
    ) -> Result<pb::Grant, Reason> {
        let (min, max) = (request.version_min, request.version_max);
        if min > u32::from(VERSION_MAX) || max < u32::from(VERSION_MIN) || min > max {
            return Err(Reason::new(
                ReasonCode::VersionMismatch,
                format!("client speaks versions {min} to {max}, server {VERSION_MIN} to {VERSION_MAX}"),
            ));
        }
        let listening = self.decided().await?;
        let known = |l: &&Listening| request.fabrics.iter().any(|f| f == l.path.as_str());
        let usable: Vec<&Listening> = listening.iter().filter(known).collect();
        if usable.is_empty() {
            return Err(Reason::new(ReasonCode::HandshakeRejected, "no fabric that both sides have"));
        }
        // The address that the client has reached already, if it will do; otherwise all there are.
        let near = |l: &&&Listening| local.is_some_and(|a| a.ip().to_canonical() == l.addr.ip());
        let offered = match usable.iter().find(near) {
            Some(near) => vec![*near],
            None => usable,
        };
        let ticket = self
            .tickets
            .issue(connection.0, Instant::now())
            .map_err(|e| Reason::new(ReasonCode::HandshakeRejected, e.to_string()))?;
        Ok(pb::Grant {
            ticket: Bytes::copy_from_slice(&ticket.0),
            lifetime_ms: self.tickets.lifetime().as_millis().try_into().unwrap_or(u32::MAX),
            fabrics: fabrics(&offered),
        })
    }
}

/// Groups addresses by fabric.
fn fabrics(offered: &[&Listening]) -> Vec<pb::FabricOffer> {
    let of = |path: Path| -> Vec<pb::Address> {
        let of_path = offered.iter().filter(|l| l.path == path);
        of_path
            .map(|l| pb::Address {
                ip: l.addr.ip().to_string(),
                port: l.addr.port().into(),
                device: l.device.clone(),
                transport: l.transport.clone(),
            })
            .collect()
    };
    let (verbs, sim) = (of(Path::Verbs), of(Path::Sim));
    let mut fabrics = Vec::new();
    if !verbs.is_empty() {
        fabrics.push(fabric_offer::Fabric::Verbs(pb::Verbs { addresses: verbs }));
    }
    if !sim.is_empty() {
        fabrics.push(fabric_offer::Fabric::Sim(pb::Sim { addresses: sim }));
    }
    fabrics.into_iter().map(|f| pb::FabricOffer { fabric: Some(f) }).collect()
}

#[tonic::async_trait]
impl Bootstrap for OfferService {
    async fn offer(&self, request: Request<OfferRequest>) -> Result<Response<OfferResponse>, Status> {
        if request.extensions().get::<RdmaConnectInfo>().is_some() {
            return Err(Status::failed_precondition("the Offer is answered over TCP only"));
        }
        let local = request.local_addr();
        let peer = request.remote_addr();
        // Absent when a layer made the request anew: calls on the fast path then carry no address
        // and no certificate of the client.
        let connection = request.extensions().get::<Connection>().cloned().unwrap_or_default();
        let outcome = match self.outcome(request.get_ref(), connection, local).await {
            Ok(grant) => {
                tracing::debug!(peer = ?peer, "fast path offered");
                Outcome::Grant(grant)
            }
            Err(reason) => {
                tracing::debug!(peer = ?peer, %reason, "fast path not offered");
                Outcome::Refusal(pb::Refusal {
                    code: reason.code().as_str().to_owned(),
                    detail: reason.detail().to_owned(),
                })
            }
        };
        Ok(Response::new(OfferResponse {
            version_min: VERSION_MIN.into(),
            version_max: VERSION_MAX.into(),
            outcome: Some(outcome),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::tickets::{CAPACITY, LIFETIME, TICKET_LEN};
    use tonic::transport::server::TcpConnectInfo;

    fn listening(ip: [u8; 4]) -> Listening {
        Listening { path: Path::Sim, addr: (ip, 7).into(), device: "sim0".into(), transport: "sim".into() }
    }

    fn service(offering: Offering) -> (OfferService, watch::Sender<Offering>) {
        let (tx, rx) = watch::channel(offering);
        (OfferService::new(rx, Arc::new(Tickets::new(CAPACITY, LIFETIME))), tx)
    }

    fn request() -> OfferRequest {
        OfferRequest {
            version_min: VERSION_MIN.into(),
            version_max: VERSION_MAX.into(),
            fabrics: vec!["future".into(), "sim".into()],
        }
    }

    async fn ask(service: &OfferService, request: OfferRequest, local: Option<[u8; 4]>) -> Outcome {
        let mut request = Request::new(request);
        request
            .extensions_mut()
            .insert(TcpConnectInfo { local_addr: local.map(|ip| (ip, 50051).into()), remote_addr: None });
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
    async fn offers_the_address_the_client_has_reached_or_else_all() {
        let on = Offering::On([listening([10, 0, 0, 1]), listening([10, 0, 1, 1])].into());
        let (service, _tx) = service(on);
        let near = granted(ask(&service, request(), Some([10, 0, 1, 1])).await);
        assert_eq!(near, ["10.0.1.1:7 sim0"]);
        for elsewhere in [Some([192, 168, 0, 1]), None] {
            let all = granted(ask(&service, request(), elsewhere).await);
            assert_eq!(all, ["10.0.0.1:7 sim0", "10.0.1.1:7 sim0"]);
        }
    }

    #[tokio::test]
    async fn refuses_with_its_own_reason() {
        let (service, _tx) = service(Offering::Off(Reason::new(ReasonCode::Memlock, "needed 2, limit 1")));
        assert_eq!(refused(ask(&service, request(), None).await), "memlock: needed 2, limit 1");
    }

    #[tokio::test]
    async fn refuses_strange_versions_and_fabrics() {
        let (service, _tx) = service(Offering::On([listening([10, 0, 0, 1])].into()));
        for (version_min, version_max) in [(99, 120), (0, 0), (2, 1)] {
            let request = OfferRequest { version_min, version_max, ..request() };
            let refusal = refused(ask(&service, request, None).await);
            assert!(refusal.starts_with("version-mismatch: client speaks versions"), "{refusal}");
        }
        let request = OfferRequest { fabrics: vec!["pigeon".into()], ..request() };
        let refusal = refused(ask(&service, request, None).await);
        assert_eq!(refusal, "handshake-rejected: no fabric that both sides have");
    }

    #[tokio::test]
    async fn waits_while_the_server_starts() {
        let (service, tx) = service(Offering::Starting);
        let asked = tokio::spawn(async move { ask(&service, request(), None).await });
        tokio::task::yield_now().await;
        assert!(!asked.is_finished());
        tx.send_replace(Offering::On([listening([10, 0, 0, 1])].into()));
        granted(asked.await.unwrap());
    }

    #[tokio::test]
    async fn an_offer_over_the_fast_path_is_refused() {
        let (service, _tx) = service(Offering::Starting);
        let mut request = Request::new(request());
        request.extensions_mut().insert(RdmaConnectInfo {
            path: Path::Sim,
            device: None,
            local_addr: None,
            remote_addr: None,
        });
        let status = service.offer(request).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::FailedPrecondition);
    }
}
