//! An Offer names several places, some of which belong to another server, because private networks
//! use the same addresses.

use std::net::SocketAddr;

use bytes::{BufMut, BytesMut};
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use prost::Message;
use tonic::body::Body;
use tonic_rdma_fabric::Addr;
use tower::util::BoxCloneService;
use tower::{Service, ServiceExt, service_fn};

use crate::bootstrap::OFFER_PATH;
use crate::bootstrap::client::offer;
use crate::bootstrap::pb::{self, fabric_offer, offer_response};
use crate::tests::support::echo::{Client, Echo};
use crate::tests::support::world::{Serving, World, endpoint};
use crate::{Path, ReasonCode, Server};

/// Makes the answers to a service's Offers name additional places.
#[derive(Clone)]
enum Named {
    Before(pb::Address),
    Behind(pb::Address),
}

impl Named {
    fn around<S>(self, inner: S) -> BoxCloneService<Request<Body>, Response<Body>, S::Error>
    where
        S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
        S::Future: Send,
        S::Error: Send,
    {
        BoxCloneService::new(service_fn(move |request: Request<Body>| {
            let (inner, named) = (inner.clone(), self.clone());
            async move {
                let is_offer = request.uri().path() == OFFER_PATH;
                let response = inner.oneshot(request).await?;
                if is_offer { Ok(named.edit(response).await) } else { Ok(response) }
            }
        }))
    }

    async fn edit(&self, response: Response<Body>) -> Response<Body> {
        let (head, body) = response.into_parts();
        let body = body.collect().await.unwrap();
        let trailers = body.trailers().cloned();
        let mut answer = pb::OfferResponse::decode(body.to_bytes().slice(5..)).unwrap();
        let Some(offer_response::Outcome::Grant(grant)) = &mut answer.outcome else {
            panic!("no grant");
        };
        for offered in &mut grant.fabrics {
            if let Some(fabric_offer::Fabric::Sim(sim)) = &mut offered.fabric {
                match self {
                    Named::Before(place) => sim.addresses.insert(0, place.clone()),
                    Named::Behind(place) => sim.addresses.push(place.clone()),
                }
            }
        }
        let mut message = BytesMut::new();
        message.put_u8(0);
        message.put_u32(answer.encoded_len() as u32);
        answer.encode(&mut message).unwrap();
        let body = Full::new(message.freeze()).with_trailers(async { trailers.map(Ok) });
        Response::from_parts(head, Body::new(body))
    }
}

/// Where a server listens on the simulated network.
async fn place_of(server: SocketAddr) -> pb::Address {
    let tcp = endpoint(server).connect_tcp().await.unwrap();
    let origin = format!("http://{server}").parse().unwrap();
    let offered = offer(&tcp, origin, None, &[Path::Sim]).await.unwrap();
    let Addr::Ip(place) = &offered.places[0].addr else { panic!("{offered:?}") };
    pb::Address { ip: place.ip().to_string(), port: place.port().into(), ..Default::default() }
}

async fn serve(server: Server, named: Named) -> Serving {
    let layer = tower::layer::layer_fn(move |service| named.clone().around(service));
    Serving::start(server.layer(layer).add_service(Echo)).await
}

#[tokio::test]
async fn a_place_of_another_server_is_passed_by() {
    let world = World::new();
    let other = Serving::start(Server::builder().context(world.another()).add_service(Echo)).await;
    let place = place_of(other.addr).await;
    let serving = serve(world.builder(), Named::Before(place)).await;
    let channel = world.connect(&serving).await;
    Client::new(channel.clone()).all_kinds().await;
    assert_eq!(channel.stats().calls_tcp, 0);
}

#[tokio::test]
async fn the_servers_own_reason_is_told() {
    let world = World::new();
    let other = Serving::start(Server::builder().context(world.another()).add_service(Echo)).await;
    let place = place_of(other.addr).await;
    for named in [Named::Before(place.clone()), Named::Behind(place)] {
        let serving = serve(world.builder().max_connections(0), named).await;
        let channel = world.endpoint(&serving).connect().await.unwrap();
        let reason = channel.path().reason.unwrap();
        assert_eq!(reason.code(), ReasonCode::LimitReached, "{reason}");
        Client::new(channel).all_kinds().await;
    }
}
