//! Builder methods that are forwarded to tonic's endpoint, and `plaintext_rdma`. Most of these
//! methods do not affect the fast path, which has its own flow control and limits. The methods for
//! keep-alive pings apply to both paths.

use std::net::IpAddr;
use std::time::Duration;

use crate::endpoint::Endpoint;
#[cfg(feature = "_tls-any")]
use crate::error::Error;

impl Endpoint {
    fn with_tcp(
        mut self,
        f: impl FnOnce(tonic::transport::Endpoint) -> tonic::transport::Endpoint,
    ) -> Self {
        self.tcp = f(self.tcp);
        self
    }

    /// Limit the time to establish the TCP connection (TCP side). Default is no limit.
    ///
    /// The limit of the fast path is [`fast_path_timeout`](Endpoint::fast_path_timeout).
    pub fn connect_timeout(self, dur: Duration) -> Self {
        self.with_tcp(|e| e.connect_timeout(dur))
    }

    /// Idle time before TCP keep-alive probes are sent; `None`, the default, sends none (TCP
    /// side).
    pub fn tcp_keepalive(self, tcp_keepalive: Option<Duration>) -> Self {
        self.with_tcp(|e| e.tcp_keepalive(tcp_keepalive))
    }

    /// Time between TCP keep-alive probes; `None` is the system's default (TCP side).
    pub fn tcp_keepalive_interval(self, interval: Option<Duration>) -> Self {
        self.with_tcp(|e| e.tcp_keepalive_interval(interval))
    }

    /// Number of unanswered TCP keep-alive probes after which the connection is closed; `None` is
    /// the system's default (TCP side).
    pub fn tcp_keepalive_retries(self, retries: Option<u32>) -> Self {
        self.with_tcp(|e| e.tcp_keepalive_retries(retries))
    }

    /// Set `TCP_NODELAY`. On by default (TCP side).
    pub fn tcp_nodelay(self, enabled: bool) -> Self {
        self.with_tcp(|e| e.tcp_nodelay(enabled))
    }

    /// HTTP/2 flow control window of a stream, in bytes (TCP side). Default is hyper's, 2 MiB.
    pub fn initial_stream_window_size(self, sz: impl Into<Option<u32>>) -> Self {
        self.with_tcp(|e| e.initial_stream_window_size(sz))
    }

    /// HTTP/2 flow control window of the connection, in bytes (TCP side). Default is hyper's, 5
    /// MiB.
    pub fn initial_connection_window_size(self, sz: impl Into<Option<u32>>) -> Self {
        self.with_tcp(|e| e.initial_connection_window_size(sz))
    }

    /// Interval of keep-alive pings (both paths). By default no pings are sent, and calls wait for
    /// a server that is silent because its process is stopped or busy.
    ///
    /// On the fast path, as over HTTP/2, a ping is sent when no message was received during this
    /// interval. Any message counts as the answer. A server that does not answer within
    /// [`keep_alive_timeout`](Self::keep_alive_timeout) loses the connection, and its calls end
    /// with UNAVAILABLE. The loss of a process, host or path is noticed without pings. On the fast
    /// path, the value is clamped to the range from 10 ms to one day. Timers may be late by a 32nd
    /// of their wait, so that the timers of many connections expire together.
    pub fn http2_keep_alive_interval(mut self, interval: Duration) -> Self {
        self.shared.keep_alive.interval = Some(interval);
        self.with_tcp(|e| e.http2_keep_alive_interval(interval))
    }

    /// Time to wait for the answer to a keep-alive ping (both paths). Default is 20 seconds.
    pub fn keep_alive_timeout(mut self, duration: Duration) -> Self {
        self.shared.keep_alive.timeout = Some(duration);
        self.with_tcp(|e| e.keep_alive_timeout(duration))
    }

    /// Whether keep-alive pings are sent while no call is in flight (both paths). Default is no.
    pub fn keep_alive_while_idle(mut self, enabled: bool) -> Self {
        self.shared.keep_alive.while_idle = enabled;
        self.with_tcp(|e| e.keep_alive_while_idle(enabled))
    }

    /// Whether HTTP/2 adapts its flow control window (TCP side).
    pub fn http2_adaptive_window(self, enabled: bool) -> Self {
        self.with_tcp(|e| e.http2_adaptive_window(enabled))
    }

    /// HTTP/2 header table size, in bytes. Default is 4,096 (TCP side).
    pub fn http2_header_table_size(self, size: u32) -> Self {
        self.with_tcp(|e| e.http2_header_table_size(size))
    }

    /// Maximum size of a header block accepted over HTTP/2, in bytes (TCP side). Default is
    /// hyper's, 16 KiB. The fast path does not use this setting: see
    /// [`max_header_size`](Self::max_header_size).
    pub fn http2_max_header_list_size(self, size: u32) -> Self {
        self.with_tcp(|e| e.http2_max_header_list_size(size))
    }

    /// Number of locally reset HTTP/2 streams that are remembered (TCP side).
    #[must_use]
    pub fn http2_max_concurrent_reset_streams(self, max: usize) -> Self {
        self.with_tcp(|e| e.http2_max_concurrent_reset_streams(max))
    }

    /// How long a locally reset HTTP/2 stream is remembered (TCP side).
    #[must_use]
    pub fn http2_reset_stream_duration(self, duration: Duration) -> Self {
        self.with_tcp(|e| e.http2_reset_stream_duration(duration))
    }

    /// Number of streams that this end may reset because of errors before HTTP/2 closes the
    /// connection (TCP side). `None` is no limit.
    #[must_use]
    pub fn http2_max_local_error_reset_streams(self, max: impl Into<Option<usize>>) -> Self {
        self.with_tcp(|e| e.http2_max_local_error_reset_streams(max))
    }

    /// Maximum size of an HTTP/2 frame, in bytes; `None` leaves the default (TCP side).
    #[must_use]
    pub fn max_frame_size(self, frame_size: impl Into<Option<u32>>) -> Self {
        self.with_tcp(|e| e.max_frame_size(frame_size))
    }

    /// The local IP address to connect from (TCP side). On the fast path, each [rail](Self::rails)
    /// determines its own local address.
    pub fn local_address(mut self, addr: Option<IpAddr>) -> Self {
        self.shared.local_address = addr;
        self.with_tcp(|e| e.local_address(addr))
    }

    /// Whether calls may go over RDMA in plain text although TLS encrypts the TCP connection (fast
    /// path). Off by default: a channel over TLS uses shared memory or TCP. If RDMA would have
    /// carried the calls, the reason is [`NotEncrypted`](crate::ReasonCode::NotEncrypted).
    ///
    /// This crate does not encrypt RDMA: anyone on the network between the devices can read and
    /// change the traffic. So both programs have to agree, the server by
    /// [`Server::plaintext_rdma`](crate::Server::plaintext_rdma).
    ///
    /// A connection counts as TLS if the address has the scheme `https`, or if the connector
    /// returns a stream of tokio-rustls. A connector that encrypts with its own stream type is not
    /// recognised.
    pub fn plaintext_rdma(mut self, allow: bool) -> Self {
        self.shared.plaintext_rdma = allow;
        self
    }

    /// Configures TLS (TCP side).
    ///
    /// The fast path carries no TLS. Shared memory stays on the host, and RDMA is used only where
    /// both programs have [agreed to plain text](Endpoint::plaintext_rdma).
    ///
    /// # Errors
    ///
    /// The configuration is invalid, for example a certificate or key, or the program has no
    /// cryptography ([`Cause::NoCryptography`](crate::Cause::NoCryptography)).
    #[cfg(feature = "_tls-any")]
    #[cfg_attr(docsrs, doc(cfg(any(feature = "tls-ring", feature = "tls-aws-lc"))))]
    pub fn tls_config(
        mut self,
        tls_config: tonic::transport::ClientTlsConfig,
    ) -> Result<Self, Error> {
        crate::tls::for_client()?;
        self.tcp = self.tcp.tls_config(tls_config)?;
        Ok(self)
    }

    /// Configures TLS with a custom verifier for the server's certificate (TCP side).
    ///
    /// **Warning:** a verifier that accepts too much disables the authentication of the server.
    ///
    /// # Errors
    ///
    /// The configuration is invalid, for example a certificate or key, or the program has no
    /// cryptography ([`Cause::NoCryptography`](crate::Cause::NoCryptography)).
    #[cfg(feature = "_tls-any")]
    #[cfg_attr(docsrs, doc(cfg(any(feature = "tls-ring", feature = "tls-aws-lc"))))]
    pub fn tls_config_with_verifier(
        mut self,
        tls_config: tonic::transport::ClientTlsConfig,
        verifier: std::sync::Arc<dyn tokio_rustls::rustls::client::danger::ServerCertVerifier>,
    ) -> Result<Self, Error> {
        crate::tls::for_client()?;
        self.tcp = self.tcp.tls_config_with_verifier(tls_config, verifier)?;
        Ok(self)
    }

    /// Get the value of `TCP_NODELAY` (TCP side).
    pub fn get_tcp_nodelay(&self) -> bool {
        self.tcp.get_tcp_nodelay()
    }

    /// Get the TCP connect timeout (TCP side).
    pub fn get_connect_timeout(&self) -> Option<Duration> {
        self.tcp.get_connect_timeout()
    }

    /// Get the idle time before TCP keep-alive probes (TCP side).
    pub fn get_tcp_keepalive(&self) -> Option<Duration> {
        self.tcp.get_tcp_keepalive()
    }

    /// Get the time between TCP keep-alive probes (TCP side).
    pub fn get_tcp_keepalive_interval(&self) -> Option<Duration> {
        self.tcp.get_tcp_keepalive_interval()
    }

    /// Get the number of TCP keep-alive probes (TCP side).
    pub fn get_tcp_keepalive_retries(&self) -> Option<u32> {
        self.tcp.get_tcp_keepalive_retries()
    }
}
