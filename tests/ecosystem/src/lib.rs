//! The environment of an ecosystem case: addresses, servers and channels of one path.

// Test code: a failed unwrap is a failed test.
#![allow(clippy::unwrap_used)]

use std::fmt;
use std::net::SocketAddr;

use tokio::net::TcpListener;
use tonic::Status;
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::codegen::{Body as HttpBody, Bytes, StdError};
use tonic_rdma::server::TcpIncoming;
use tonic_rdma::{Channel, Endpoint, Path, Policy};
use tonic_rdma_example_services::greeter::HelloRequest;
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
use tonic_rdma_tests::fabric::{Fabric, bind_ip};

/// The path that a case's calls take.
#[derive(Clone, Copy, Debug)]
pub struct Net(Fabric);

impl fmt::Display for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Net {
    /// The paths named in `TONIC_RDMA_TEST_FABRIC`, or shared memory and TCP if it is not set.
    ///
    /// # Errors
    /// A name is none of `shm`, `tcp` and `verbs`.
    pub fn chosen() -> Result<Vec<Net>, String> {
        if std::env::var_os("TONIC_RDMA_TEST_FABRIC").is_none() {
            return Ok(vec![Net(Fabric::Shm), Net(Fabric::Tcp)]);
        }
        let known = |fabric| matches!(fabric, Fabric::Shm | Fabric::Tcp | Fabric::Verbs);
        let fabrics = Fabric::chosen()?;
        match fabrics.iter().find(|fabric| !known(**fabric)) {
            Some(other) => Err(format!(
                "TONIC_RDMA_TEST_FABRIC: this suite runs over shm, tcp and verbs, not {other}"
            )),
            None => Ok(fabrics.into_iter().map(Net).collect()),
        }
    }

    /// The path of the channels.
    pub fn path(self) -> Path {
        self.0.fast().unwrap_or(Path::Tcp)
    }

    /// A port to serve on: on the RDMA device in the guest, and otherwise on loopback.
    pub async fn listen(self) -> (SocketAddr, TcpIncoming) {
        let listener = TcpListener::bind((bind_ip().unwrap(), 0)).await.unwrap();
        (listener.local_addr().unwrap(), TcpIncoming::from(listener))
    }

    /// A server's endpoint that requires the path. A channel takes this path or does not connect.
    pub fn endpoint(self, addr: SocketAddr) -> Endpoint {
        let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
        match self.0.fast() {
            Some(_) => endpoint.policy(Policy::Require).fabrics(self.0.kinds().iter().copied()),
            None => endpoint.policy(Policy::Off),
        }
    }

    /// A channel to a server.
    pub async fn connect(self, addr: SocketAddr) -> Channel {
        let channel = self.endpoint(addr).connect().await.unwrap();
        assert_eq!(channel.path().path, self.path());
        channel
    }

    /// The answer of the examples' `Hello` service to a caller over this path.
    pub fn greeting(self) -> String {
        format!("hello you, you came by {}", self.path())
    }
}

/// Calls a `Hello` service, and returns its answer.
///
/// # Errors
/// The errors of the call.
pub async fn greet<T>(service: T) -> Result<String, Status>
where
    T: GrpcService<Body>,
    T::Error: Into<StdError>,
    T::ResponseBody: HttpBody<Data = Bytes> + Send + 'static,
    <T::ResponseBody as HttpBody>::Error: Into<StdError> + Send,
{
    let reply = GreeterClient::new(service).say_hello(HelloRequest { name: "you".into() }).await?;
    Ok(reply.into_inner().message)
}
