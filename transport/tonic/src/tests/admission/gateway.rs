//! Offers that do not come directly from their client, but through HTTP gateways, address
//! translation, and transports without addresses.
//!
//! The gateway of these tests speaks HTTP/2 on both sides and lets guests call everything but
//! `Who`. The server takes the gateway for an administrator, by its address and certificate, and
//! lets only administrators call `Who`.

use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{HeaderName, HeaderValue, Request as HttpRequest, Response as HttpResponse};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf, copy_bidirectional};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixListener};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::body::Body;
use tonic::service::InterceptorLayer;
use tonic::transport::server::{Connected, TcpConnectInfo};
use tonic::{Code, Request, Status};
use tower::{Service, ServiceExt};

use crate::bootstrap::gateways::MISMATCHES;
use crate::bootstrap::pb::offer_response::Outcome;
use crate::tcp::connector::TcpChannel;
use crate::tests::admission::tickets::Hand;
use crate::tests::support::echo::{Client, Echo};
use crate::tests::support::world::{Serving, World, endpoint};
use crate::{Channel, Endpoint, Path, Reason, ReasonCode, Server, Side};

const GATEWAY: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 77));
const ADMIN_METHOD: &str = "/test.Echo/Who";

type Answer =
    Pin<Box<dyn Future<Output = Result<HttpResponse<Body>, tonic::transport::Error>> + Send>>;

/// Forwards calls over its own connection to the server.
#[derive(Clone)]
struct Gateway {
    server: tonic::transport::Channel,
    adds: Option<(HeaderName, HeaderValue)>,
}

impl Service<HttpRequest<Body>> for Gateway {
    type Response = HttpResponse<Body>;
    type Error = tonic::transport::Error;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut req: HttpRequest<Body>) -> Answer {
        if req.uri().path() == ADMIN_METHOD {
            let denied = Status::permission_denied("guests may not").into_http();
            return Box::pin(std::future::ready(Ok(denied)));
        }
        req.headers_mut().extend(self.adds.clone());
        Box::pin(self.server.clone().oneshot(req))
    }
}

struct Running {
    addr: SocketAddr,
    /// The gateway's local address on the connection to the server.
    end: SocketAddr,
    task: JoinHandle<()>,
}

impl Running {
    /// Starts a gateway that connects to the server with `endpoint` and adds a header.
    async fn start(endpoint: &Endpoint, adds: Option<(&'static str, &'static str)>) -> Self {
        let TcpChannel { channel, local_addr, .. } =
            endpoint.clone().local_address(Some(GATEWAY)).connect_tcp().await.unwrap();
        let adds =
            adds.map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)));
        let gateway = Gateway { server: channel, adds };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let incoming = tonic::transport::server::TcpIncoming::from(listener);
        let task = tokio::spawn(async move {
            tonic::transport::Server::builder()
                .serve_with_incoming(gateway, incoming)
                .await
                .unwrap();
        });
        Self { addr, end: local_addr.get().unwrap(), task }
    }

    async fn before(serving: &Serving) -> Self {
        Self::start(&endpoint(serving.addr), None).await
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Recognises the gateway by its address or its certificate.
fn check(request: Request<()>) -> Result<Request<()>, Status> {
    let by_address = request.remote_addr().is_some_and(|addr| addr.ip() == GATEWAY);
    #[cfg(feature = "_tls-any")]
    let by_certificate = request.peer_certs().is_some();
    #[cfg(not(feature = "_tls-any"))]
    let by_certificate = false;
    match request.metadata().get("wants").is_none() || by_address || by_certificate {
        true => Ok(request),
        false => Err(Status::permission_denied("administrators only")),
    }
}

/// Marks calls to `Who` for the interceptor, which does not see the path.
fn mark(mut req: HttpRequest<Body>) -> HttpRequest<Body> {
    req.headers_mut().remove("wants");
    if req.uri().path() == ADMIN_METHOD {
        req.headers_mut().insert("wants", HeaderValue::from_static("admin"));
    }
    req
}

async fn serve(server: Server) -> Serving {
    let layers = tower::ServiceBuilder::new()
        .map_request(mark)
        .layer(InterceptorLayer::new(check))
        .into_inner();
    Serving::start(server.layer(layers).add_service(Echo)).await
}

/// A guest that connects to the gateway and can reach the server's fabric.
async fn guest(world: &World, gateway: &Running) -> Channel {
    endpoint(gateway.addr).context(world.client_context.clone()).connect().await.unwrap()
}

fn through_gateway(channel: &Channel) -> Reason {
    let reason = channel.path().reason.unwrap();
    assert_eq!(
        (reason.code(), reason.side()),
        (ReasonCode::ThroughGateway, Side::Peer),
        "{reason}"
    );
    assert!(reason.cure().contains("Server::offer_through_gateways"));
    reason
}

/// Calls `Who`, which must fail, and `Say`, which must succeed.
async fn is_no_administrator(channel: Channel) {
    let mut client = Client::new(channel);
    assert_eq!(client.who().await.unwrap_err().code(), Code::PermissionDenied);
    assert_eq!(client.say("hello").await.unwrap(), "hello");
}

async fn refused(hand: &mut Hand<'_>) -> String {
    let Outcome::Refusal(refusal) = hand.ask().await else { panic!("granted") };
    assert_eq!(refusal.code, "through-gateway", "{refusal:?}");
    refusal.detail
}

#[tokio::test]
async fn a_guest_behind_a_gateway_does_not_get_its_address() {
    let world = World::new();
    let serving = serve(world.builder()).await;
    let gateway = Running::before(&serving).await;
    let channel = guest(&world, &gateway).await;
    let reason = through_gateway(&channel);
    // The answer does not reveal which address to state.
    assert!(!reason.detail().contains(&GATEWAY.to_string()), "{reason}");
    assert!(!reason.detail().contains(&gateway.end.port().to_string()), "{reason}");
    is_no_administrator(channel.clone()).await;
    assert_eq!(channel.stats().calls_fast, 0);
    // An administrator that connects directly is also an administrator on the fast path.
    let admin = world.endpoint(&serving).local_address(Some(GATEWAY)).connect().await.unwrap();
    assert_eq!(admin.path().path, Path::Sim, "{}", admin.path());
    let who = Client::new(admin).who().await.unwrap();
    assert!(who.starts_with("path=sim "), "{who}");
}

#[cfg(feature = "_tls-any")]
#[tokio::test]
async fn a_guest_behind_a_gateway_does_not_get_its_certificate() {
    use crate::tests::admission::tls::Authority;
    use crate::{ClientTlsConfig, ServerTlsConfig};
    for opted_in in [false, true] {
        let (world, authority) = (World::new(), Authority::new());
        let tls = ServerTlsConfig::new()
            .identity(authority.identity("localhost"))
            .client_ca_root(authority.root());
        let server = world.builder().tls_config(tls).unwrap().plaintext_rdma(true);
        let server = server.offer_through_gateways(opted_in);
        let serving = serve(server).await;
        let tls = ClientTlsConfig::new()
            .ca_certificate(authority.root())
            .identity(authority.identity("gateway"))
            .domain_name("localhost");
        let server = Endpoint::from_shared(format!("https://{}", serving.addr)).unwrap();
        let gateway = Running::start(&server.tls_config(tls).unwrap(), None).await;
        let channel = guest(&world, &gateway).await;
        match opted_in {
            false => drop(through_gateway(&channel)),
            true => assert_eq!(channel.path().path, Path::Sim, "{}", channel.path()),
        }
        is_no_administrator(channel).await;
    }
}

#[tokio::test]
async fn a_server_that_opts_in_knows_nothing_of_a_gateways_clients() {
    let world = World::new();
    let serving = serve(world.builder().offer_through_gateways(true)).await;
    let gateway = Running::before(&serving).await;
    let channel = guest(&world, &gateway).await;
    assert_eq!(channel.path().path, Path::Sim, "{}", channel.path());
    is_no_administrator(channel.clone()).await;
    assert_eq!(channel.stats().calls_tcp, 0);
    // Direct connections are not affected.
    let admin = world.endpoint(&serving).local_address(Some(GATEWAY)).connect().await.unwrap();
    let who = Client::new(admin).who().await.unwrap();
    assert!(who.starts_with("path=sim ") && who.contains("remote=true local=true"), "{who}");
}

#[tokio::test]
async fn a_gateways_headers_give_it_away_even_if_its_client_states_its_end() {
    let world = World::new();
    let serving = serve(world.builder()).await;
    for header in
        [("forwarded", "for=192.0.2.60"), ("x-forwarded-for", "192.0.2.60"), ("via", "2.0 a")]
    {
        let gateway = Running::start(&endpoint(serving.addr), Some(header)).await;
        let mut hand = Hand::to(&world, gateway.addr).await;
        hand.states = Some(gateway.end);
        let detail = refused(&mut hand).await;
        assert!(detail.contains(header.0), "{detail}");
    }
}

#[tokio::test]
async fn a_guess_costs_a_connection_of_the_gateway_and_guesses_run_out() {
    let world = World::new();
    let serving = serve(world.builder()).await;
    for _ in 0..MISMATCHES {
        let gateway = Running::before(&serving).await;
        let mut hand = Hand::to(&world, gateway.addr).await;
        hand.states = Some(SocketAddr::new(GATEWAY, gateway.end.port() ^ 1));
        let wrong = refused(&mut hand).await;
        assert!(wrong.contains("the server sees another"), "{wrong}");
        // The statement is now correct, but too late.
        hand.states = Some(gateway.end);
        let late = refused(&mut hand).await;
        // The same applies to other clients of this gateway.
        let mut other = Hand::to(&world, gateway.addr).await;
        other.states = Some(gateway.end);
        assert_eq!(refused(&mut other).await, late);
    }
    // The guess is correct, on a connection without earlier guesses.
    let gateway = Running::before(&serving).await;
    let mut lucky = Hand::to(&world, gateway.addr).await;
    lucky.states = Some(gateway.end);
    let answer = refused(&mut lucky).await;
    assert!(answer.contains("too many Offers"), "{answer}");
    // The answer does not reveal that the guess was correct.
    let gateway = Running::before(&serving).await;
    let mut unlucky = Hand::to(&world, gateway.addr).await;
    unlucky.states = Some(SocketAddr::new(GATEWAY, gateway.end.port() ^ 1));
    assert_eq!(refused(&mut unlucky).await, answer);
    // Other addresses are not affected.
    world.connect(&serving).await;
}

#[tokio::test]
async fn who_states_nothing_gets_nothing() {
    let world = World::new();
    let serving = world.serve().await;
    let mut hand = Hand::new(&world, &serving).await;
    let own = hand.states.take();
    let detail = refused(&mut hand).await;
    assert!(detail.contains("did not state"), "{detail}");
    hand.states = own;
    refused(&mut hand).await;
    Hand::new(&world, &serving).await.ticket().await;
}

#[tokio::test]
async fn the_doctor_says_what_is_in_between() {
    let world = World::new();
    let serving = serve(world.builder()).await;
    let gateway = Running::before(&serving).await;
    let peer = endpoint(gateway.addr).context(world.client_context.clone());
    let diagnosis = crate::diagnose().peer(peer).await.unwrap();
    assert!(!diagnosis.rdma);
    let finding = &diagnosis.findings[0];
    assert_eq!((finding.code, finding.blocks), (ReasonCode::ThroughGateway, true), "{finding:?}");
    assert!(finding.what.contains("an HTTP gateway or a translation"), "{finding:?}");
    assert!(finding.cures[0].what.contains("the server's own address"), "{finding:?}");
    let peer = diagnosis.peer.unwrap();
    assert_eq!(peer.path, Some(Path::Tcp), "{}", peer.path_detail);
    let offer = peer.steps.iter().find(|step| step.name == "Offer").unwrap();
    assert_eq!(offer.reason.as_ref().unwrap().code(), ReasonCode::ThroughGateway);
}

/// Accepts connections. For each, opens a connection to `to` from the gateway's address, as address
/// translation does. With `tell`, sends the client's address on that connection first.
async fn translate(to: SocketAddr, tell: bool) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        loop {
            let (mut near, peer) = listener.accept().await.unwrap();
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind((GATEWAY, 0).into()).unwrap();
            let mut far = socket.connect(to).await.unwrap();
            if tell {
                far.write_all(format!("{peer:>32}").as_bytes()).await.unwrap();
            }
            tokio::spawn(async move { copy_bidirectional(&mut near, &mut far).await.map(drop) });
        }
    });
    (addr, task)
}

#[tokio::test]
async fn a_translated_source_address_means_tcp() {
    let world = World::new();
    let serving = world.serve().await;
    let (addr, task) = translate(serving.addr, false).await;
    let channel = endpoint(addr).context(world.client_context.clone()).connect().await.unwrap();
    let reason = through_gateway(&channel);
    assert!(reason.detail().contains("end of the TCP connection is 127.0.0.1:"), "{reason}");
    assert!(!reason.detail().contains(&GATEWAY.to_string()), "{reason}");
    Client::new(channel).all_kinds().await;
    task.abort();
}

/// A connection on which the client's address was sent first, as with the PROXY protocol.
struct Told(TcpStream, SocketAddr);

impl Connected for Told {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        TcpConnectInfo { local_addr: self.0.local_addr().ok(), remote_addr: Some(self.1) }
    }
}

impl AsyncRead for Told {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Told {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

#[tokio::test]
async fn a_balancer_that_tells_the_clients_address_is_none_in_between() {
    let world = World::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (addr, translating) = translate(listener.local_addr().unwrap(), true).await;
    let (accepted, incoming) = tokio::sync::mpsc::channel(1);
    let accepting = tokio::spawn(async move {
        loop {
            let (mut io, _) = listener.accept().await.unwrap();
            let mut ahead = [0; 32];
            io.read_exact(&mut ahead).await.unwrap();
            let client = str::from_utf8(&ahead).unwrap().trim().parse().unwrap();
            accepted.send(Ok::<_, std::io::Error>(Told(io, client))).await.unwrap();
        }
    });
    let router = world.builder().add_service(Echo);
    let serving = tokio::spawn(router.serve_with_incoming(ReceiverStream::new(incoming)));
    let channel = endpoint(addr).context(world.client_context.clone()).connect().await.unwrap();
    assert_eq!(channel.path().path, Path::Sim, "{}", channel.path());
    for task in [translating, accepting] {
        task.abort();
    }
    serving.abort();
}

#[tokio::test]
async fn a_connector_of_the_users_own_states_its_end_if_it_makes_tcp_streams() {
    let world = World::new();
    let serving = world.serve().await;
    let addr = serving.addr;
    let connector = || {
        tower::service_fn(move |_: http::Uri| async move {
            TcpStream::connect(addr).await.map(TokioIo::new)
        })
    };
    let endpoint = world.endpoint(&serving);
    for channel in [
        endpoint.connect_with_connector(connector()).await.unwrap(),
        endpoint.connect_with_connector_lazy(connector()),
        Channel::connect(Unpinned(connector()), endpoint.clone()).await.unwrap(),
        Channel::new(connector(), endpoint.clone()),
    ] {
        let mut channel = channel;
        Client::new(channel.clone()).say("hello").await.unwrap();
        while channel.path().path != Path::Sim {
            let reason = channel.path().reason.unwrap();
            assert_eq!(reason.code(), ReasonCode::Pending, "{reason}");
            channel.path_changed().await;
        }
    }
    // A stream of another type does not reveal its address.
    let wrapped = tower::service_fn(move |_: http::Uri| async move {
        let io = TcpStream::connect(addr).await?;
        Ok::<_, std::io::Error>(TokioIo::new(tokio::io::BufStream::new(io)))
    });
    let channel = endpoint.connect_with_connector(wrapped).await.unwrap();
    let reason = through_gateway(&channel);
    assert!(reason.detail().contains("did not state"), "{reason}");
}

/// A connector whose futures are [`Unpin`].
struct Unpinned<C>(C);

impl<C: Service<http::Uri, Future: Send + 'static>> Service<http::Uri> for Unpinned<C> {
    type Response = C::Response;
    type Error = C::Error;
    type Future = Pin<Box<dyn Future<Output = Result<C::Response, C::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), C::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, uri: http::Uri) -> Self::Future {
        Box::pin(self.0.call(uri))
    }
}

#[tokio::test]
async fn unix_sockets_have_no_addresses_to_compare() {
    let dir = tempfile::tempdir().unwrap();
    for opted_in in [false, true] {
        let world = World::new();
        let path = dir.path().join(format!("{opted_in}.sock"));
        let incoming = UnixListenerStream::new(UnixListener::bind(&path).unwrap());
        let router = world.builder().offer_through_gateways(opted_in).add_service(Echo);
        let serving = tokio::spawn(router.serve_with_incoming(incoming));
        let endpoint = Endpoint::from_shared(format!("unix://{}", path.display())).unwrap();
        let channel = endpoint.context(world.client_context.clone()).connect().await.unwrap();
        match opted_in {
            false => assert!(through_gateway(&channel).detail().contains("no TCP address")),
            true => assert_eq!(channel.path().path, Path::Sim, "{}", channel.path()),
        }
        Client::new(channel).all_kinds().await;
        serving.abort();
    }
}

#[tokio::test]
async fn a_layer_that_makes_requests_anew_hides_their_connection() {
    for opted_in in [false, true] {
        let world = World::new();
        let anew = |req: HttpRequest<Body>| {
            let (parts, body) = req.into_parts();
            let mut req = HttpRequest::new(body);
            *req.method_mut() = parts.method;
            *req.uri_mut() = parts.uri;
            *req.headers_mut() = parts.headers;
            req
        };
        let layer = tower::ServiceBuilder::new().map_request(anew).into_inner();
        let server = world.builder().offer_through_gateways(opted_in);
        let serving = Serving::start(server.layer(layer).add_service(Echo)).await;
        let channel = world.endpoint(&serving).connect().await.unwrap();
        match opted_in {
            false => assert!(through_gateway(&channel).detail().contains("one of its layers")),
            true => assert_eq!(channel.path().path, Path::Sim, "{}", channel.path()),
        }
        Client::new(channel).all_kinds().await;
    }
}
