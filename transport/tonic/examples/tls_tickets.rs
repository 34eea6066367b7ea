//! TLS protects the fast path: a client that fails the TLS handshake gets no ticket, and no client
//! connects without one.
//!
//! The server requires client certificates. The client with a certificate completes the handshake,
//! requests the Offer over the TLS connection, and presents its ticket when it connects over the
//! fast path. The client without a certificate is refused. The fast path here is shared memory.
//! RDMA is not encrypted, so both ends would have to set `plaintext_rdma` (SECURITY.md).
//!
//! `cargo run -p tonic-rdma --example tls_tickets`

use std::error::Error;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tonic::transport::server::TcpIncoming;
use tonic_rdma::{Certificate, ClientTlsConfig, Endpoint, Identity, Server, ServerTlsConfig};
use tonic_rdma_example_services::Hello;
use tonic_rdma_example_services::greeter::HelloRequest;
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
use tonic_rdma_example_services::greeter::greeter_server::GreeterServer;

/// A certificate authority. Real programs load certificates from files.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Result<Self, rcgen::Error> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Ok(Self(CertifiedIssuer::self_signed(params, KeyPair::generate()?)?))
    }

    fn root(&self) -> Certificate {
        Certificate::from_pem(self.0.pem())
    }

    fn identity(&self, name: &str) -> Result<Identity, rcgen::Error> {
        let key = KeyPair::generate()?;
        let signed = CertificateParams::new([name.to_owned()])?.signed_by(&key, &self.0)?;
        Ok(Identity::from_pem(signed.pem(), key.serialize_pem()))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let authority = Authority::new()?;
    let tls = ServerTlsConfig::new()
        .identity(authority.identity("localhost")?)
        .client_ca_root(authority.root());
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse()?)?;
    let url = format!("https://{}", incoming.local_addr()?);
    let router = Server::builder().tls_config(tls)?.add_service(GreeterServer::new(Hello));
    tokio::spawn(router.serve_with_incoming(incoming));

    let trusting = ClientTlsConfig::new().ca_certificate(authority.root()).domain_name("localhost");
    let known = trusting.clone().identity(authority.identity("alice")?);
    println!("with a certificate: {}", call(&url, known).await?);
    match call(&url, trusting).await {
        Ok(reply) => println!("without one: {reply}"),
        Err(_) => println!("without one: no ticket, no connection"),
    }
    Ok(())
}

async fn call(url: &str, tls: ClientTlsConfig) -> Result<String, Box<dyn Error>> {
    let channel = Endpoint::from_shared(url.to_owned())?.tls_config(tls)?.connect().await?;
    let request = HelloRequest { name: "alice".into() };
    let reply = GreeterClient::new(channel).say_hello(request).await?;
    Ok(reply.into_inner().message)
}
