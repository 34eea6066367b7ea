//! TLS on the TCP side protects the fast path.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::Request as HttpRequest;
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::rustls::pki_types::PrivatePkcs8KeyDer;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;
use tower::ServiceBuilder;

use crate::bootstrap::OFFER_PATH;
use crate::tests::support::echo::{Client, Echo};
use crate::tests::support::world::{Serving, World};
use crate::{
    Certificate, Channel, ClientTlsConfig, Context, Endpoint, Identity, Path, Policy, ReasonCode,
    Server, ServerTlsConfig, Side,
};

pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub(crate) fn root(&self) -> Certificate {
        Certificate::from_pem(self.0.pem())
    }

    /// TLS for programs that add it to their connections themselves.
    fn own_tls(&self, name: &str) -> (TlsAcceptor, TlsConnector) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        let cert = params.signed_by(&key, &self.0).unwrap();
        let private = PrivatePkcs8KeyDer::from(key.serialize_der()).into();
        let server = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![cert.der().clone()], private)
            .unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(self.0.der().clone()).unwrap();
        let client = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        (TlsAcceptor::from(Arc::new(server)), TlsConnector::from(Arc::new(client)))
    }

    pub(crate) fn identity(&self, name: &str) -> Identity {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        let cert = params.signed_by(&key, &self.0).unwrap();
        Identity::from_pem(cert.pem(), key.serialize_pem())
    }
}

/// A server that requires client certificates, and counts Offers.
async fn serve(world: &World, authority: &Authority) -> (Serving, Arc<AtomicUsize>) {
    let offers = Arc::new(AtomicUsize::new(0));
    let layer = {
        let offers = offers.clone();
        ServiceBuilder::new()
            .map_request(move |req: HttpRequest<tonic::body::Body>| {
                if req.uri().path() == OFFER_PATH {
                    offers.fetch_add(1, Ordering::Relaxed);
                }
                req
            })
            .into_inner()
    };
    let tls = ServerTlsConfig::new()
        .identity(authority.identity("localhost"))
        .client_ca_root(authority.root());
    let server = world.builder().tls_config(tls).unwrap().plaintext_rdma(true);
    let router = server.layer(layer).add_service(Echo);
    (Serving::start(router).await, offers)
}

fn endpoint(world: &World, serving: &Serving, tls: ClientTlsConfig) -> Endpoint {
    Endpoint::from_shared(format!("https://{}", serving.addr))
        .unwrap()
        .tls_config(tls.domain_name("localhost"))
        .unwrap()
        .plaintext_rdma(true)
        .context(world.client_context.clone())
}

#[tokio::test]
async fn a_good_certificate_gets_in_and_is_known_on_the_fast_path() {
    let (world, authority) = (World::new(), Authority::new());
    let (serving, offers) = serve(&world, &authority).await;
    let tls = || {
        ClientTlsConfig::new()
            .ca_certificate(authority.root())
            .identity(authority.identity("alice"))
    };
    let channel = endpoint(&world, &serving, tls()).connect().await.unwrap();
    assert_eq!(channel.path().path, Path::Sim, "{}", channel.path());
    assert_eq!(offers.load(Ordering::Relaxed), 1);
    let fast = Client::new(channel).who().await.unwrap();
    assert!(fast.starts_with("path=sim ") && fast.contains("remote=true local=true"), "{fast}");
    assert!(fast.ends_with("certs=1"), "{fast}");

    let channel = endpoint(&world, &serving, tls()).policy(Policy::Off).connect().await.unwrap();
    let tcp = Client::new(channel).who().await.unwrap();
    assert!(tcp.starts_with("path=tcp ") && tcp.ends_with("certs=1"), "{tcp}");
}

#[tokio::test]
async fn a_refused_certificate_gets_no_ticket() {
    let (world, authority, stranger) = (World::new(), Authority::new(), Authority::new());
    let (serving, offers) = serve(&world, &authority).await;
    let trusting = || ClientTlsConfig::new().ca_certificate(authority.root());
    for tls in [trusting(), trusting().identity(stranger.identity("mallory"))] {
        // With TLS 1.3 a client notices the refusal at its first read.
        match endpoint(&world, &serving, tls).connect().await {
            Err(_) => {}
            Ok(channel) => {
                assert_eq!(channel.path().path, Path::Tcp);
                Client::new(channel.clone()).say("hello").await.unwrap_err();
                assert_eq!(channel.stats().calls_fast, 0);
            }
        }
    }
    assert_eq!(offers.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_server_that_is_not_trusted_is_not_asked() {
    let (world, authority, stranger) = (World::new(), Authority::new(), Authority::new());
    let (serving, offers) = serve(&world, &authority).await;
    let tls = ClientTlsConfig::new()
        .ca_certificate(stranger.root())
        .identity(authority.identity("alice"));
    endpoint(&world, &serving, tls).connect().await.unwrap_err();
    assert_eq!(offers.load(Ordering::Relaxed), 0);
}

/// Each combination of the server's and the client's consent.
const AGREED: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];

/// Calls go over a device if both ends have agreed, and otherwise over TCP with the reason.
async fn check_path(channel: Channel, server: bool, client: bool) {
    let info = channel.path();
    Client::new(channel).say("hello").await.unwrap();
    if server && client {
        return assert_eq!(info.path, Path::Sim, "{info}");
    }
    assert_eq!(info.path, Path::Tcp);
    let reason = info.reason.unwrap();
    assert_eq!(reason.code(), ReasonCode::NotEncrypted, "{reason}");
    // The reason names the end that has to agree, or both.
    assert_eq!(reason.side(), if server { Side::Local } else { Side::Peer }, "{reason}");
    assert_eq!(reason.detail().contains("Server::plaintext_rdma"), !server, "{reason}");
    assert_eq!(reason.detail().contains("Endpoint::plaintext_rdma"), !client, "{reason}");
}

#[tokio::test]
async fn after_tls_calls_go_over_a_device_only_if_both_programs_say_so() {
    let (world, authority) = (World::new(), Authority::new());
    for (server, client) in AGREED {
        let tls = ServerTlsConfig::new().identity(authority.identity("localhost"));
        let mut builder = world.builder().tls_config(tls).unwrap().plaintext_rdma(server);
        let serving = Serving::start(builder.add_service(Echo)).await;
        let tls = ClientTlsConfig::new().ca_certificate(authority.root());
        let endpoint = endpoint(&world, &serving, tls).plaintext_rdma(client);
        check_path(endpoint.connect().await.unwrap(), server, client).await;
        match endpoint.require_rdma(true).connect().await {
            Ok(_) => assert!(server && client),
            Err(error) => {
                assert_eq!(
                    crate::Reason::of(&error).unwrap().code(),
                    ReasonCode::NotEncrypted,
                    "{error}"
                )
            }
        }
    }
}

#[tokio::test]
async fn a_server_that_requires_the_fast_path_does_not_start_on_tls_without_consent() {
    let (world, authority) = (World::new(), Authority::new());
    for agreed in [false, true] {
        let tls = ServerTlsConfig::new().identity(authority.identity("localhost"));
        let mut builder = world.builder().tls_config(tls).unwrap().policy(Policy::Require);
        builder = builder.plaintext_rdma(agreed);
        let router = builder.add_service(Echo);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stop = async {
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
        };
        let served = router.serve_with_incoming_shutdown(TcpIncoming::from(listener), stop).await;
        match served {
            Ok(()) => assert!(agreed),
            Err(error) => {
                let code = crate::Reason::of(&error).unwrap().code();
                assert_eq!((code, agreed), (ReasonCode::NotEncrypted, false), "{error}");
            }
        }
    }
}

#[tokio::test]
async fn shared_memory_needs_no_consent() {
    let authority = Authority::new();
    let context = || Context::builder().device("no-such-device").build();
    let tls = ServerTlsConfig::new().identity(authority.identity("localhost"));
    let mut server = Server::builder().context(context()).tls_config(tls).unwrap();
    let serving = Serving::start(server.add_service(Echo)).await;
    let tls = ClientTlsConfig::new().ca_certificate(authority.root()).domain_name("localhost");
    let endpoint = Endpoint::from_shared(format!("https://{}", serving.addr)).unwrap();
    let endpoint = endpoint.tls_config(tls).unwrap().context(context());
    let channel = endpoint.connect().await.unwrap();
    assert_eq!(channel.path().path, Path::Shm, "{}", channel.path());
    Client::new(channel).all_kinds().await;
}

/// Both ends recognise TLS that the program itself adds to its connections, by the type of stream.
#[tokio::test]
async fn tls_of_the_programs_own_needs_consent_as_well() {
    let (world, authority) = (World::new(), Authority::new());
    let (acceptor, connector) = authority.own_tls("localhost");
    for (server, client) in AGREED {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (accepted, incoming) = mpsc::channel(1);
        let acceptor = acceptor.clone();
        tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let _ = accepted.send(acceptor.accept(tcp).await).await;
            }
        });
        let router = world.builder().plaintext_rdma(server).add_service(Echo);
        let _serving = tokio::spawn(router.serve_with_incoming(ReceiverStream::new(incoming)));
        let connector = connector.clone();
        let connect = tower::service_fn(move |_: http::Uri| {
            let connector = connector.clone();
            async move {
                let tcp = TcpStream::connect(addr).await?;
                let name = "localhost".try_into().unwrap();
                Ok::<_, std::io::Error>(TokioIo::new(connector.connect(name, tcp).await?))
            }
        });
        let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
        let endpoint = endpoint.context(world.client_context.clone()).plaintext_rdma(client);
        let channel = endpoint.connect_with_connector(connect).await.unwrap();
        check_path(channel, server, client).await;
    }
}
