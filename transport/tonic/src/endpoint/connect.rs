//! Connects an endpoint: the TCP side, and the channel over it. Also has the settings for policy,
//! fabrics and time limit of the fast path.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;

use crate::channel::Channel;
use crate::endpoint::Endpoint;
use crate::error::{BoxError, Error};
use crate::path::policy::{EnvSettings, FabricKind, Plaintext, Policy, distinct};
use crate::tcp::connector::{AnyConnector, LocalAddr, TcpChannel, recording};
use crate::tcp::reused_tasks::ReusedTasks;

impl Endpoint {
    /// Connect, and wait until the path is decided.
    ///
    /// Returns when TCP is connected and the path is decided, at the latest
    /// [`fast_path_timeout`](Endpoint::fast_path_timeout) after the TCP connection is up.
    ///
    /// # Errors
    ///
    /// There are three causes. The TCP connection cannot be made, which is tonic's own error. An
    /// environment variable has a bad value ([`Cause::Environment`](crate::Cause::Environment)). Or
    /// the fast path is required and not available ([`Cause::Required`](crate::Cause::Required)).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future closes the connections that it has opened. `connect` can then be called
    /// again.
    pub async fn connect(&self) -> Result<Channel, Error> {
        self.connect_over(self.connector()).await
    }

    /// Create a channel that connects at its first call, which goes over TCP. The channel sets up
    /// its fast path at the second call, or 20 ms after the first call, and then uses the fast
    /// path. So a program that makes a channel for each call does not pay for a fast path, unless
    /// the channel lives longer than 20 ms. With
    /// [`require_fast_path`](Endpoint::require_fast_path), the channel sets up the path at the
    /// first call.
    ///
    /// A bad environment variable makes every call fail with UNAVAILABLE and a message that names
    /// the variable.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime, unless an [`executor`](Endpoint::executor) was set.
    pub fn connect_lazy(&self) -> Channel {
        Channel::lazy(self.connect_tcp_lazy(), self, EnvSettings::read())
    }

    /// Connect with a custom connector for the TCP side, such as a Unix socket or a proxy.
    ///
    /// The Offer travels over the connector like any call, so the channel uses the fast path if the
    /// server offers a fast path that the channel can reach. Add `.policy(Policy::Off)` to keep
    /// calls on the connector.
    ///
    /// A server accepts an Offer only if the Offer states the address of the client's end of the
    /// TCP connection ([`ThroughGateway`](crate::ReasonCode::ThroughGateway)). The address is known
    /// if the connector returns `TokioIo<TcpStream>`, or a stream of tokio-rustls around such a
    /// stream. Over any other type, over Unix sockets and through proxies, calls stay on the
    /// connector, unless the server [offers through
    /// gateways](crate::Server::offer_through_gateways).
    ///
    /// [`connect_timeout`](Endpoint::connect_timeout) applies to the connector.
    ///
    /// # Errors
    ///
    /// The errors of [`connect`](Endpoint::connect).
    ///
    /// # Cancel safety
    ///
    /// The cancel safety of [`connect`](Endpoint::connect).
    pub async fn connect_with_connector<C>(&self, connector: C) -> Result<Channel, Error>
    where
        C: tower::Service<Uri> + Send + 'static,
        C::Response: hyper::rt::Read + hyper::rt::Write + Send + Unpin,
        C::Future: Send,
        BoxError: From<C::Error> + Send,
    {
        self.connect_over(recording(connector)).await
    }

    /// Like [`connect_with_connector`](Endpoint::connect_with_connector), but connects at the first
    /// call, like [`connect_lazy`](Endpoint::connect_lazy).
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime, unless an [`executor`](Endpoint::executor) was set.
    pub fn connect_with_connector_lazy<C>(&self, connector: C) -> Channel
    where
        C: tower::Service<Uri> + Send + 'static,
        C::Response: hyper::rt::Read + hyper::rt::Write + Send + Unpin,
        C::Future: Send,
        BoxError: From<C::Error> + Send,
    {
        let tcp = self.connect_tcp_lazy_over(recording(connector));
        Channel::lazy(tcp, self, EnvSettings::read())
    }

    /// Connects with this connector. The future is boxed, so that it is compiled in this crate and
    /// not in each program.
    fn connect_over(
        &self,
        (connector, local_addr): (AnyConnector, LocalAddr),
    ) -> Pin<Box<dyn Future<Output = Result<Channel, Error>> + Send + '_>> {
        Box::pin(async move {
            let env = EnvSettings::read()?;
            let channel = self.tcp().connect_with_connector(connector).await?;
            Channel::establish(self.over(channel, local_addr), self, env).await
        })
    }

    fn connect_tcp_lazy_over(
        &self,
        (connector, local_addr): (AnyConnector, LocalAddr),
    ) -> TcpChannel {
        self.over(self.tcp().connect_with_connector_lazy(connector), local_addr)
    }

    #[cfg(any(test, feature = "diagnose"))]
    pub(crate) async fn connect_tcp(&self) -> Result<TcpChannel, tonic::transport::Error> {
        let (connector, local_addr) = self.connector();
        Ok(self.over(self.tcp().connect_with_connector(connector).await?, local_addr))
    }

    /// Like [`connect_tcp`](Self::connect_tcp), but connects at the first call.
    pub(crate) fn connect_tcp_lazy(&self) -> TcpChannel {
        self.connect_tcp_lazy_over(self.connector())
    }

    /// tonic's endpoint, ready to connect. If the executor is known to be tokio's, the endpoint
    /// reuses the tasks of calls.
    pub(crate) fn tcp(&self) -> tonic::transport::Endpoint {
        match self.shared.reuses_tasks {
            true => self.tcp.clone().executor(ReusedTasks::default()),
            false => self.tcp.clone(),
        }
    }

    /// Describes `channel` as the TCP side of this endpoint.
    pub(crate) fn over(
        &self,
        channel: tonic::transport::Channel,
        local_addr: LocalAddr,
    ) -> TcpChannel {
        // tonic connects to an address with this scheme only over TLS.
        let tls = self.tcp.uri().scheme() == Some(&http::uri::Scheme::HTTPS);
        let plaintext = Plaintext { tls, agreed: self.shared.plaintext_rdma };
        TcpChannel { channel, local_addr, plaintext }
    }

    /// The connector to the endpoint's address.
    fn connector(&self) -> (AnyConnector, LocalAddr) {
        match self.shared.unix_socket.clone() {
            Some(path) => recording(tower::service_fn(move |_| unix_stream(path.clone()))),
            None => recording(self.http_connector()),
        }
    }

    /// Returns a connector with the endpoint's settings, built in the same way as tonic's own
    /// connector.
    fn http_connector(&self) -> HttpConnector {
        let mut http = HttpConnector::new();
        // tonic adds TLS around the connector.
        http.enforce_http(false);
        http.set_nodelay(self.tcp.get_tcp_nodelay());
        http.set_keepalive(self.tcp.get_tcp_keepalive());
        http.set_keepalive_interval(self.tcp.get_tcp_keepalive_interval());
        http.set_keepalive_retries(self.tcp.get_tcp_keepalive_retries());
        http.set_connect_timeout(self.tcp.get_connect_timeout());
        http.set_local_address(self.shared.local_address);
        http
    }
}

#[cfg(unix)]
async fn unix_stream(path: Arc<str>) -> io::Result<TokioIo<tokio::net::UnixStream>> {
    tokio::net::UnixStream::connect(&*path).await.map(TokioIo::new)
}

#[cfg(not(unix))]
async fn unix_stream(_: Arc<str>) -> io::Result<TokioIo<tokio::io::DuplexStream>> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "uds connections are not allowed on windows"))
}

/// Maximum of [`Endpoint::fast_path_timeout`]. Any clock can add this time to the current time.
const MAX_FAST_PATH_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

impl Endpoint {
    /// Whether to use the fast path. Default is [`Policy::Auto`].
    ///
    /// The environment variable `TONIC_RDMA`, if set, overrides this setting.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.shared.policy = policy;
        self
    }

    /// The fabrics that the fast path may use, in order of preference. Default is
    /// [`FabricKind::DEFAULT`]: shared memory if the server runs on the same host, RDMA otherwise.
    /// With an empty list the channel stays on TCP.
    ///
    /// Fabrics that the environment variable `TONIC_RDMA` names override this setting.
    ///
    /// ```
    /// use tonic_rdma::{Endpoint, FabricKind};
    ///
    /// // RDMA even between two processes on one host.
    /// let endpoint = Endpoint::from_static("http://10.0.0.1:50051").fabrics([FabricKind::Verbs]);
    /// ```
    pub fn fabrics(mut self, fabrics: impl IntoIterator<Item = FabricKind>) -> Self {
        self.shared.fabrics = Some(distinct(fabrics));
        self
    }

    /// Whether calls fail instead of going over TCP. `true` is the same as
    /// [`policy`](Endpoint::policy)`(Policy::Require)`, and `false` is the same as `Policy::Auto`.
    /// Shared memory satisfies the requirement as well as RDMA.
    ///
    /// With `true`, [`connect`](Endpoint::connect) waits for the fast path, and without a fast path
    /// fails with [`Cause::Required`](crate::Cause::Required) and the [`Reason`](crate::Reason). On
    /// a channel from [`connect_lazy`](Endpoint::connect_lazy), calls wait up to
    /// [`fast_path_timeout`](Endpoint::fast_path_timeout) and then fail with UNAVAILABLE and the
    /// reason. The TCP connection is made in any case, because the Offer of the fast path needs it.
    pub fn require_fast_path(self, require: bool) -> Self {
        self.policy(if require { Policy::Require } else { Policy::Auto })
    }

    /// Whether calls fail instead of going over TCP or shared memory. `true` is the same as
    /// [`policy`](Endpoint::policy)`(Policy::RequireVerbs)`, and `false` is the same as
    /// `Policy::Auto`. In all other respects, this method is like
    /// [`require_fast_path`](Endpoint::require_fast_path).
    pub fn require_rdma(self, require: bool) -> Self {
        self.policy(if require { Policy::RequireVerbs } else { Policy::Auto })
    }

    /// How long [`connect`](Endpoint::connect) waits for the fast path once TCP is connected. After
    /// this time the channel starts on TCP, and uses the fast path once the fast path is up.
    ///
    /// Default is one second. A time of more than a day counts as a day.
    pub fn fast_path_timeout(mut self, timeout: Duration) -> Self {
        self.shared.fast_path_timeout = Some(timeout.min(MAX_FAST_PATH_TIMEOUT));
        self
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tower::Service;

    use super::*;

    #[test]
    fn unix_sockets_are_told_from_hosts() {
        for (address, path) in [
            ("unix:///run/server.sock", Some("/run/server.sock")),
            ("unix:/run/server.sock", Some("/run/server.sock")),
            ("unix:server.sock", Some("server.sock")),
            ("http://tonic:50051", None),
            ("https://tonic", None),
            ("http://tonic", None),
        ] {
            let known = [
                Endpoint::from_static(address),
                Endpoint::from_shared(address).unwrap(),
                Endpoint::try_from(address.to_owned()).unwrap(),
            ];
            for endpoint in known {
                assert_eq!(endpoint.shared.unix_socket.as_deref(), path, "{address}");
            }
        }
    }

    #[tokio::test]
    async fn the_end_is_that_of_the_newest_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
        let local = Some([127, 0, 0, 9].into());
        let (mut connector, end) = recording(endpoint.local_address(local).http_connector());
        assert_eq!(end.get(), None);
        for _ in 0..2 {
            let uri = format!("http://{addr}").parse().unwrap();
            let _io = connector.call(uri).await.unwrap();
            let (_, peer) = listener.accept().await.unwrap();
            assert_eq!((end.get(), end.get().map(|end| end.ip())), (Some(peer), local));
        }
        let pipe = tower::service_fn(|_: Uri| async {
            Ok::<_, std::io::Error>(TokioIo::new(tokio::io::duplex(1).0))
        });
        let mut pipes = crate::tcp::connector::record(pipe, end.clone());
        pipes.call(Uri::from_static("http://pipe")).await.unwrap();
        assert_eq!(end.get(), None);
    }
}
