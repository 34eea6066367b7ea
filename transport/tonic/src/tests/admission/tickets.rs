//! A listener of the fast path admits one connection for each valid ticket.

use std::net::SocketAddr;
use std::time::Duration;

use tonic::{Response, Status};
use tonic_rdma_fabric::{ConnectError, Connected, bare};
use tonic_rdma_memory::Pool;
use tonic_rdma_proto::hello::{VERSION_MAX, VERSION_MIN};
use tonic_rdma_proto::{Accept, Hello, Reject};

use crate::bootstrap::pb::bootstrap_client::BootstrapClient;
use crate::bootstrap::pb::offer_response::Outcome;
use crate::bootstrap::pb::{self, OfferRequest, OfferResponse, fabric_offer};
use crate::bootstrap::tickets::CAPACITY;
use crate::connection::ConnectionConfig;
use crate::tests::support::echo::Echo;
use crate::tests::support::logs::Logs;
use crate::tests::support::world::{Serving, World, endpoint};

const LIMIT: Duration = Duration::from_secs(10);

/// A client that performs the steps one by one.
pub(crate) struct Hand<'a> {
    world: &'a World,
    bootstrap: BootstrapClient<tonic::transport::Channel>,
    /// The local address that the client states.
    pub(crate) states: Option<SocketAddr>,
    /// Whether the client asks for tickets for bare connections.
    pub(crate) bare: bool,
}

impl<'a> Hand<'a> {
    pub(crate) async fn new(world: &'a World, serving: &Serving) -> Self {
        Self::to(world, serving.addr).await
    }

    pub(crate) async fn to(world: &'a World, addr: SocketAddr) -> Self {
        let tcp = endpoint(addr).connect_tcp().await.unwrap();
        let (states, bootstrap) = (tcp.local_addr.get(), BootstrapClient::new(tcp.channel));
        Self { world, states, bare: false, bootstrap }
    }

    pub(crate) async fn ask(&mut self) -> Outcome {
        self.offer(self.request(&["sim"])).await.unwrap().outcome.unwrap()
    }

    /// A request for an Offer that names `fabrics`.
    pub(crate) fn request(&self, fabrics: &[&str]) -> OfferRequest {
        let client = self
            .states
            .map(|at| pb::TcpAddress { ip: at.ip().to_string(), port: at.port().into() });
        OfferRequest {
            version_min: VERSION_MIN.into(),
            version_max: VERSION_MAX.into(),
            fabrics: fabrics.iter().map(|fabric| (*fabric).to_owned()).collect(),
            client,
            bare: self.bare,
        }
    }

    pub(crate) async fn offer(&mut self, request: OfferRequest) -> Result<OfferResponse, Status> {
        self.bootstrap.offer(request).await.map(Response::into_inner)
    }

    /// Returns a ticket, and the address to use it at.
    pub(crate) async fn ticket(&mut self) -> ([u8; 16], SocketAddr) {
        let Outcome::Grant(grant) = self.ask().await else { panic!("refused") };
        let Some(fabric_offer::Fabric::Sim(sim)) = &grant.fabrics[0].fabric else {
            panic!("no sim")
        };
        let address = &sim.addresses[0];
        let addr = SocketAddr::new(address.ip.parse().unwrap(), address.port.try_into().unwrap());
        (grant.ticket.as_ref().try_into().unwrap(), addr)
    }

    async fn send(&self, addr: SocketAddr, private_data: &[u8]) -> Result<Vec<u8>, Reject> {
        Ok(self.connect(addr, private_data).await?.0.private_data)
    }

    /// Connects, and returns the connection and its pool.
    pub(crate) async fn connect(
        &self,
        addr: SocketAddr,
        private_data: &[u8],
    ) -> Result<(Connected, Pool), Reject> {
        let (fabric, pool) = self
            .world
            .client_context
            .toward(crate::Path::Sim, &addr.into(), None, None, LIMIT)
            .await
            .unwrap();
        let link = match self.bare {
            true => bare::config(),
            false => ConnectionConfig::for_pool(&pool, true, None).link,
        };
        match fabric.connect(&addr.into(), &link, &pool, private_data, LIMIT).await {
            Ok(connected) => Ok((connected, pool)),
            Err(ConnectError::Rejected { private_data, .. }) => {
                Err(Reject::decode(&private_data).unwrap())
            }
            Err(other) => panic!("{other}"),
        }
    }

    pub(crate) async fn enter(&self, addr: SocketAddr, ticket: [u8; 16]) -> Result<Accept, Reject> {
        let hello = Hello::new(ticket, tonic_rdma_proto::Config::default().settings());
        let answer = self.send(addr, &hello.encode()).await?;
        Ok(Accept::decode(&answer).unwrap())
    }
}

#[tokio::test]
async fn a_ticket_is_good_once() {
    let logs = Logs::capture();
    let world = World::new();
    let serving = world.serve().await;
    let mut hand = Hand::new(&world, &serving).await;
    let (ticket, addr) = hand.ticket().await;
    assert_eq!(hand.enter(addr, ticket).await.unwrap().version, VERSION_MAX);
    assert_eq!(hand.enter(addr, ticket).await.unwrap_err(), Reject::Ticket);
    let lines = logs.lines_with("fast path refused");
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(
        lines[0].contains("ticket already used") && lines[0].contains("peer=10.0.0.2:"),
        "{lines:?}"
    );
}

#[tokio::test]
async fn a_wrong_ticket_is_refused_and_logged() {
    let logs = Logs::capture();
    let world = World::new();
    let serving = world.serve().await;
    let mut hand = Hand::new(&world, &serving).await;
    let (ticket, addr) = hand.ticket().await;
    let mut wrong = ticket;
    wrong[15] ^= 1;
    assert_eq!(hand.enter(addr, wrong).await.unwrap_err(), Reject::Ticket);
    assert_eq!(hand.enter(addr, [0; 16]).await.unwrap_err(), Reject::Ticket);
    assert_eq!(logs.lines_with("wrong ticket").len(), 2);
    // The valid ticket is not affected.
    hand.enter(addr, ticket).await.unwrap();
}

#[tokio::test]
async fn an_expired_ticket_is_refused_and_logged() {
    let logs = Logs::capture();
    let world = World::new();
    let mut server = world.builder().fixed_limits(|limits| limits.ticket_lifetime = Duration::ZERO);
    let serving = Serving::start(server.add_service(Echo)).await;
    let mut hand = Hand::new(&world, &serving).await;
    let (ticket, addr) = hand.ticket().await;
    assert_eq!(hand.enter(addr, ticket).await.unwrap_err(), Reject::Ticket);
    assert_eq!(logs.lines_with("ticket expired").len(), 1);
}

#[tokio::test]
async fn no_more_tickets_than_the_limit() {
    let logs = Logs::capture();
    let world = World::new();
    let mut server = world.builder().fixed_limits(|limits| limits.tickets = 2);
    let serving = Serving::start(server.add_service(Echo)).await;
    let mut hand = Hand::new(&world, &serving).await;
    let (first, addr) = hand.ticket().await;
    let (second, _) = hand.ticket().await;
    let (third, _) = hand.ticket().await;
    assert_eq!(hand.enter(addr, first).await.unwrap_err(), Reject::TicketWithdrawn);
    assert_eq!(logs.lines_with("ticket withdrawn: its TCP connection held the most").len(), 1);
    for ticket in [second, third] {
        hand.enter(addr, ticket).await.unwrap();
    }
}

/// A client takes all tickets. It has the same address as the other clients, like all clients of
/// one host.
#[tokio::test]
async fn all_tickets_in_one_hand_keep_nobody_else_out() {
    let world = World::new();
    // No ticket expires while a busy machine issues them.
    const HOUR: Duration = Duration::from_secs(3600);
    let mut server = world.builder().fixed_limits(|limits| limits.ticket_lifetime = HOUR);
    let serving = Serving::start(server.add_service(Echo)).await;
    let mut hoarder = Hand::new(&world, &serving).await;
    let mut first = None;
    for _ in 0..CAPACITY {
        let (ticket, addr) = hoarder.ticket().await;
        first.get_or_insert((addr, ticket));
    }
    // A client keeps its ticket if all others are taken between its Offer and its connection.
    let mut slow = Hand::new(&world, &serving).await;
    let (ticket, addr) = slow.ticket().await;
    for _ in 0..100 {
        hoarder.ticket().await;
    }
    slow.enter(addr, ticket).await.unwrap();
    world.connect(&serving).await;
    let (addr, oldest) = first.unwrap();
    assert_eq!(hoarder.enter(addr, oldest).await.unwrap_err(), Reject::TicketWithdrawn);
}

#[tokio::test]
async fn strangers_on_the_rdma_port_are_refused_by_name() {
    let logs = Logs::capture();
    let world = World::new();
    let serving = world.serve().await;
    let mut hand = Hand::new(&world, &serving).await;
    let (ticket, addr) = hand.ticket().await;
    assert_eq!(hand.send(addr, b"GET / HTTP/1.1").await.unwrap_err(), Reject::Malformed);
    assert_eq!(hand.send(addr, b"").await.unwrap_err(), Reject::Malformed);
    let mut future = Hello::new(ticket, tonic_rdma_proto::Config::default().settings());
    (future.version_min, future.version_max) = (9, 12);
    let past = Hello { version_min: 1, version_max: 1, ..future };
    for hello in [future, past] {
        let rejected = hand.send(addr, &hello.encode()).await.unwrap_err();
        assert!(
            matches!(rejected, Reject::Version { min: VERSION_MIN, max: VERSION_MAX }),
            "{rejected}"
        );
    }
    assert_eq!(logs.lines_with("another protocol").len(), 2);
    assert_eq!(logs.lines_with("protocol versions 9 to 12").len(), 1);
    assert_eq!(logs.lines_with("protocol versions 1 to 1").len(), 1);
    // None of them spent the ticket, and the server still runs.
    hand.enter(addr, ticket).await.unwrap();
}
