//! Checks a server: its offer, how long each step takes, and which path a channel takes.

use std::time::Instant;

use http::Uri;
use tonic_rdma_fabric::Link;
use tonic_rdma_proto::{Accept, Hello};

use crate::bootstrap::client::{OfferedPlace, offer};
use crate::channel::rails::{self, Rail};
use crate::connection::ConnectionConfig;
use crate::diagnose::measure::{self, BareWay};
use crate::diagnose::peer_report::{Offered, Peer, Refused, Step};
use crate::diagnose::request::{DiagnosisRequest, LIMIT, limited};
use crate::endpoint::Endpoint;
use crate::path::from_error;
use crate::path::policy::Policy;
use crate::path::reason::{Reason, ReasonCode};
use crate::tcp::connector::TcpChannel;

/// Maximum number of offered addresses to try.
const PLACES: usize = 8;

/// Performs the steps of a channel one by one, and then connects a channel.
pub(super) async fn run(request: &DiagnosisRequest, endpoint: &Endpoint) -> Peer {
    let mut peer = Peer {
        uri: endpoint.uri().to_string(),
        steps: Vec::new(),
        offered: Vec::new(),
        refused: Vec::new(),
        path: None,
        path_detail: String::new(),
        path_mtu: None,
        reason: None,
        error: None,
        tcp: None,
        fast: None,
        bare: None,
        not_bare: None,
        rates: Vec::new(),
        not_measured: None,
        fast_failed: None,
    };
    let began = Instant::now();
    let connected = match tokio::time::timeout(LIMIT, endpoint.connect_tcp()).await {
        Ok(Ok(tcp)) => Ok(tcp),
        Ok(Err(error)) => Err(deepest(&error)),
        Err(_) => Err(format!("no TCP connection after {} ms", LIMIT.as_millis())),
    };
    let tcp = match connected {
        Ok(tcp) => tcp,
        Err(error) => {
            let reason = Reason::new(ReasonCode::NoRoute, error.clone());
            peer.steps.push(step("TCP connection".to_owned(), began, Err(reason), String::new()));
            peer.error = Some(error);
            return peer;
        }
    };
    peer.steps.push(step("TCP connection".to_owned(), began, Ok(()), String::new()));
    let origin = endpoint.shared.origin.clone().unwrap_or_else(|| endpoint.uri().clone());
    if request.policy() != Policy::Off {
        walk(request, endpoint, &tcp, &origin, &mut peer).await;
    }
    // The channel's own path is the result, whatever the steps showed.
    match endpoint.clone().policy(Policy::Auto).connect().await {
        Ok(channel) => {
            let path = channel.path();
            peer.path = Some(path.path);
            peer.path_detail = path.to_string();
            peer.path_mtu = path.path_mtu;
            peer.reason = path.reason.clone();
            let bare = match path.path.is_fast() {
                true => BareWay::open(request, endpoint, &tcp, &origin, path.path).await,
                false => Err(None),
            };
            let bare = bare.map_err(|why| peer.not_bare = why).ok();
            measure::run(endpoint, tcp.channel, channel, origin, bare, &mut peer).await;
        }
        Err(error) => {
            peer.reason = Reason::of(&error).cloned();
            match &peer.reason {
                // The environment requires a fast path.
                Some(reason) => {
                    peer.path_detail = format!("none: a fast path is required ({reason})")
                }
                None => peer.error = Some(deepest(&error)),
            }
            peer.not_measured = Some("there is no channel to measure".to_owned());
        }
    }
    peer
}

/// Makes an Offer, and then connects to each address that the server names, up to [`PLACES`]
/// addresses.
async fn walk(
    request: &DiagnosisRequest,
    endpoint: &Endpoint,
    tcp: &TcpChannel,
    origin: &Uri,
    peer: &mut Peer,
) {
    let paths = request.context.paths(&request.fabrics());
    let hook = endpoint.shared.hook.as_ref();
    let began = Instant::now();
    let asked = limited(offer(tcp, origin.clone(), hook, &paths)).await;
    let detail =
        asked.as_ref().map_or(String::new(), |offered| format!("places: {}", offered.places.len()));
    peer.steps.push(step(
        "Offer".to_owned(),
        began,
        asked.as_ref().map(drop).map_err(Clone::clone),
        detail,
    ));
    let Ok(offered) = asked else { return };
    peer.refused
        .extend(offered.refusals.into_iter().map(|(path, reason)| Refused { path, reason }));
    for OfferedPlace { path, addr, .. } in &offered.places {
        peer.offered.push(Offered { path: *path, place: addr.to_string(), addr: addr.ip() });
    }
    let mut ticket = Some(offered.ticket.0);
    let device = request.env.device.as_deref();
    let rails = rails::find(&request.context, device, &offered.places, 0).await;
    // Try one rail to each place. A channel also tries further rails.
    let mut tried = Vec::new();
    for rail in rails {
        if tried.contains(&rail.addr) || tried.len() == PLACES {
            continue;
        }
        tried.push(rail.addr.clone());
        // A ticket is valid for one connection.
        let fresh = match ticket.take() {
            Some(ticket) => ticket,
            None => match limited(offer(tcp, origin.clone(), hook, &paths)).await {
                Ok(offered) => offered.ticket.0,
                Err(_) => return,
            },
        };
        connect(request, &rail, fresh, peer).await;
    }
}

/// Makes one connection as a channel does, and closes it.
async fn connect(request: &DiagnosisRequest, rail: &Rail, ticket: [u8; 16], peer: &mut Peer) {
    let Rail { path, addr, source, .. } = rail;
    let began = Instant::now();
    let way =
        limited(request.context.toward(*path, addr, *source, request.env.device.as_deref(), LIMIT))
            .await;
    let from = source.map_or(String::new(), |source| format!(" from {source}"));
    let detail = way
        .as_ref()
        .map_or(String::new(), |(fabric, _)| format!("by device {}{from}", fabric.name()));
    let name = format!("{path}: device and pool for {addr}");
    peer.steps.push(step(name, began, way.as_ref().map(drop).map_err(Clone::clone), detail));
    let Ok((fabric, pool)) = way else { return };

    let began = Instant::now();
    let mut options = ConnectionConfig::for_pool(&pool, fabric.grows(), None);
    options.link.source = *source;
    let hello = Hello::new(ticket, options.proto.settings()).encode();
    let connected = async {
        let connected = fabric
            .connect(addr, &options.link, &pool, &hello, LIMIT)
            .await
            .map_err(from_error::connect)?;
        let understood = Accept::decode(&connected.private_data).map_err(|error| {
            Reason::from_peer(
                ReasonCode::HandshakeRejected,
                format!("bad answer from {addr}: {error}"),
            )
        });
        let mut link = connected.link;
        link.disconnect();
        understood.map(drop)
    };
    let connected = limited(connected).await;
    peer.steps.push(step(format!("{path}: connection to {addr}"), began, connected, String::new()));
}

fn step(name: String, began: Instant, done: Result<(), Reason>, detail: String) -> Step {
    let micros = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
    Step { name, micros, reason: done.err(), detail }
}

/// The innermost source of an error, which is the most specific.
fn deepest(error: &dyn std::error::Error) -> String {
    let mut deepest = error;
    while let Some(source) = deepest.source() {
        deepest = source;
    }
    deepest.to_string()
}
