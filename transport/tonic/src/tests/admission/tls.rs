//! TLS on the TCP side protects the fast path.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::Request as HttpRequest;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tower::ServiceBuilder;

use crate::bootstrap::OFFER_PATH;
use crate::tests::support::echo::{Client, Echo};
use crate::tests::support::world::{Serving, World};
use crate::{Certificate, ClientTlsConfig, Endpoint, Identity, Path, Policy, ServerTlsConfig};

/// A certificate authority.
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
    let router = world.builder().tls_config(tls).unwrap().layer(layer).add_service(Echo);
    (Serving::start(router).await, offers)
}

fn endpoint(world: &World, serving: &Serving, tls: ClientTlsConfig) -> Endpoint {
    Endpoint::from_shared(format!("https://{}", serving.addr))
        .unwrap()
        .tls_config(tls.domain_name("localhost"))
        .unwrap()
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
        // With TLS 1.3 a client learns of the refusal at its first read.
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
