//! A program in which `tonic_rdma::` replaces `tonic::transport::` in some paths compiles,
//! whichever of the two prefixes each path has.

#![allow(dead_code, reason = "it has to compile, and nobody calls it")]

use tonic::body::Body;
use tonic_rdma_example_services::Hello;
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
use tonic_rdma_example_services::greeter::greeter_server::GreeterServer;
use tower::util::BoxCloneSyncService;
use tower::{Service, ServiceExt};

type Info = tonic::transport::server::TcpConnectInfo;

/// Checks that a type under both names is the same type.
macro_rules! same {
    ($($first:ident $(:: $next:ident)* $(<$($argument:tt),*>)?),* $(,)?) => {
        /// Names that stand for tonic's own type or trait in both crates.
        pub(crate) const SAME: &[&str] = &[
            "Body",
            "server::Connected",
            $(concat!(stringify!($first) $(, "::", stringify!($next))*)),*
        ];

        fn types_are_the_same() {
            $(
                let _: fn(tonic::transport::$first $(::$next)* $(<$($argument),*>)?)
                    -> tonic_rdma::$first $(::$next)* $(<$($argument),*>)? = |same| same;
            )*
        }
    };
}

same! {
    Error, Uri, Certificate, CertificateDer<'static>, ClientTlsConfig, Identity, ServerTlsConfig,
    channel::Change<u32, Info>, channel::ClientTlsConfig, server::ServerTlsConfig,
    server::TcpConnectInfo, server::TcpIncoming, server::TlsConnectInfo<Info>,
    server::UdsConnectInfo,
}

fn traits_are_the_same() {
    fn ours<B: tonic_rdma::Body, C: tonic_rdma::server::Connected>() {}
    fn theirs<B: tonic::transport::Body, C: tonic::transport::server::Connected>() {
        ours::<B, C>();
    }
    theirs::<Body, tokio::net::TcpStream>();
}

/// An error of the program, made from tonic's.
enum Failed {
    Transport(tonic::transport::Error),
    Status(tonic::Status),
}

impl From<tonic::transport::Error> for Failed {
    fn from(error: tonic::transport::Error) -> Self {
        Self::Transport(error)
    }
}

impl From<tonic::Status> for Failed {
    fn from(status: tonic::Status) -> Self {
        Self::Status(status)
    }
}

mod return_types {
    use super::*;

    async fn theirs(
        uri: &'static str,
    ) -> Result<GreeterClient<tonic_rdma::Channel>, tonic::transport::Error> {
        let channel = tonic_rdma::Channel::from_static(uri).connect().await?;
        Ok(GreeterClient::new(channel))
    }

    async fn ours(uri: &'static str) -> Result<tonic::transport::Channel, tonic_rdma::Error> {
        tonic::transport::Channel::from_static(uri).connect().await
    }

    async fn a_programs_own(uri: String) -> Result<tonic_rdma::Channel, Failed> {
        let channel = tonic_rdma::Endpoint::from_shared(uri)?.connect().await?;
        let mut client = GreeterClient::new(channel.clone());
        client.say_hello(tonic::Request::new(Default::default())).await?;
        Ok(channel)
    }

    async fn of_a_server(addr: std::net::SocketAddr) -> Result<(), tonic::transport::Error> {
        let server = tonic_rdma::Server::builder().add_service(GreeterServer::new(Hello));
        server.serve(addr).await?;
        tonic::transport::Server::builder().add_service(GreeterServer::new(Hello)).serve(addr).await
    }

    fn of_a_layer() -> Result<tonic_rdma::Server, tonic::transport::Error> {
        let identity = tonic::transport::Identity::from_pem("", "");
        let tls = tonic_rdma::ServerTlsConfig::new().identity(identity);
        tonic_rdma::Server::builder().tls_config(tls)
    }
}

mod bounds_and_arguments {
    use super::*;

    type Boxed<E> = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, E>;

    fn boxed(
        ours: tonic_rdma::Channel,
        theirs: tonic::transport::Channel,
    ) -> [Boxed<tonic_rdma::Error>; 2] {
        let boxed: Boxed<tonic::transport::Error> = BoxCloneSyncService::new(ours);
        [boxed, BoxCloneSyncService::new(theirs)]
    }

    fn bound<S>(service: S)
    where
        S: Service<
                http::Request<Body>,
                Response = http::Response<Body>,
                Error = tonic::transport::Error,
            >,
    {
        drop(service.map_err(|error: tonic_rdma::Error| error));
    }

    fn bounds(channel: tonic_rdma::Channel, uri: tonic::transport::Uri) {
        bound(channel);
        drop(tonic_rdma::Channel::builder(uri));
    }

    fn downcast(status: &tonic::Status) -> Option<&tonic_rdma::Error> {
        std::error::Error::source(status)?.downcast_ref::<tonic::transport::Error>()
    }
}
