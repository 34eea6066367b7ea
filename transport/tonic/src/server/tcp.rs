//! `plaintext_rdma`, and the builder methods of the TCP side, most of which are forwarded to
//! tonic's server. Most methods of the TCP side do not affect the fast path, which has its own flow
//! control and limits. The methods for keep-alive pings apply to both paths, and `tls_config`
//! limits the use of RDMA.

use std::time::Duration;

#[cfg(feature = "_tls-any")]
use crate::error::Error;
use crate::server::builder::Server;

impl<L> Server<L> {
    /// Configure TLS for this server (TCP side).
    ///
    /// The fast path carries no TLS. Shared memory admits only clients that received a ticket over
    /// a TLS connection which this configuration accepted. RDMA also requires that both programs
    /// have [agreed to plain text](Server::plaintext_rdma).
    ///
    /// # Errors
    ///
    /// The configuration is invalid, for example a certificate or key, or the program has no
    /// cryptography ([`Cause::NoCryptography`](crate::Cause::NoCryptography)).
    #[cfg(feature = "_tls-any")]
    #[cfg_attr(docsrs, doc(cfg(any(feature = "tls-ring", feature = "tls-aws-lc"))))]
    pub fn tls_config(
        mut self,
        tls_config: tonic::transport::ServerTlsConfig,
    ) -> Result<Self, Error> {
        crate::tls::for_server()?;
        self.tcp = self.tcp.tls_config(tls_config)?;
        self.shared.plaintext.tls = true;
        Ok(self)
    }

    /// Whether calls of clients that connected over TLS may go over RDMA in plain text (fast path).
    /// Off by default: clients over TLS get shared memory or TCP, with the reason
    /// [`NotEncrypted`](crate::ReasonCode::NotEncrypted), and a server with
    /// [`tls_config`](Server::tls_config) does not listen on RDMA devices.
    ///
    /// The client has to agree as well
    /// ([`Endpoint::plaintext_rdma`](crate::Endpoint::plaintext_rdma)). Connections that the server
    /// is given ([`Router::serve_with_incoming`](crate::Router::serve_with_incoming)) are known to
    /// use TLS if they are streams of tokio-rustls.
    #[must_use]
    pub fn plaintext_rdma(mut self, allow: bool) -> Self {
        self.shared.plaintext.agreed = allow;
        self
    }

    /// Limit the number of concurrent TCP connections (TCP side). Further connections are closed
    /// when they are accepted. Default is 16,384.
    ///
    /// Each connection takes a descriptor. RLIMIT_NOFILE limits the number of descriptors per
    /// process. While no descriptor is free, the server accepts no connections, and established
    /// connections continue.
    #[must_use]
    pub fn max_tcp_connections(mut self, most: usize) -> Self {
        self.shared.max_tcp_connections = Some(most);
        self
    }

    /// HTTP/2 flow control window of a stream, in bytes (TCP side). Default is hyper's, 1 MiB.
    #[must_use]
    pub fn initial_stream_window_size(self, sz: impl Into<Option<u32>>) -> Self {
        self.with_tcp(|s| s.initial_stream_window_size(sz))
    }

    /// HTTP/2 flow control window of a connection, in bytes (TCP side). Default is hyper's, 1 MiB.
    #[must_use]
    pub fn initial_connection_window_size(self, sz: impl Into<Option<u32>>) -> Self {
        self.with_tcp(|s| s.initial_connection_window_size(sz))
    }

    /// Interval of keep-alive pings (both paths). The default, `None`, sends none. See
    /// [`Endpoint::http2_keep_alive_interval`](crate::Endpoint::http2_keep_alive_interval). A
    /// server also sends pings while a connection has no call, like tonic's server.
    #[must_use]
    pub fn http2_keepalive_interval(mut self, interval: Option<Duration>) -> Self {
        let settings = &mut self.shared.keep_alive;
        (settings.interval, settings.while_idle) = (interval, true);
        self.with_tcp(|s| s.http2_keepalive_interval(interval))
    }

    /// Time to wait for the answer to a keep-alive ping. Default is 20 seconds (both paths).
    #[must_use]
    pub fn http2_keepalive_timeout(mut self, timeout: Option<Duration>) -> Self {
        self.shared.keep_alive.timeout = timeout;
        self.with_tcp(|s| s.http2_keepalive_timeout(timeout))
    }

    /// Whether HTTP/2 adapts its flow control window. Default is no (TCP side).
    #[must_use]
    pub fn http2_adaptive_window(self, enabled: Option<bool>) -> Self {
        self.with_tcp(|s| s.http2_adaptive_window(enabled))
    }

    /// Number of HTTP/2 streams, reset by the peer before they were accepted, that may be pending
    /// before a GOAWAY; `None` is h2's default (TCP side).
    #[must_use]
    pub fn http2_max_pending_accept_reset_streams(self, max: Option<usize>) -> Self {
        self.with_tcp(|s| s.http2_max_pending_accept_reset_streams(max))
    }

    /// Number of streams that this end may reset because of errors before HTTP/2 sends a GOAWAY;
    /// `None`, the default, is no limit (TCP side).
    #[must_use]
    pub fn http2_max_local_error_reset_streams(self, max: Option<usize>) -> Self {
        self.with_tcp(|s| s.http2_max_local_error_reset_streams(max))
    }

    /// Idle time before TCP keep-alive probes are sent; `None`, the default, sends none (TCP
    /// side). Ignored when serving an incoming stream.
    #[must_use]
    pub fn tcp_keepalive(mut self, tcp_keepalive: Option<Duration>) -> Self {
        self.shared.tcp_keepalive = tcp_keepalive;
        self
    }

    /// Time between TCP keep-alive probes; `None` is the system's default (TCP side). Ignored when
    /// serving an incoming stream.
    #[must_use]
    pub fn tcp_keepalive_interval(mut self, interval: Option<Duration>) -> Self {
        self.shared.tcp_keepalive_interval = interval;
        self
    }

    /// Number of unanswered TCP keep-alive probes after which a connection is closed; `None` is the
    /// system's default (TCP side). Ignored when serving an incoming stream.
    #[must_use]
    pub fn tcp_keepalive_retries(mut self, retries: Option<u32>) -> Self {
        self.shared.tcp_keepalive_retries = retries;
        self
    }

    /// Set `TCP_NODELAY` on accepted connections. On by default (TCP side). Ignored when serving
    /// an incoming stream.
    #[must_use]
    pub fn tcp_nodelay(mut self, enabled: bool) -> Self {
        self.shared.tcp_nodelay_off = !enabled;
        self
    }

    /// Maximum size of a header block accepted over HTTP/2, in bytes (TCP side). Default is
    /// hyper's, 16 KiB. The fast path does not use this setting: see
    /// [`max_header_size`](Server::max_header_size).
    #[must_use]
    pub fn http2_max_header_list_size(self, max: impl Into<Option<u32>>) -> Self {
        self.with_tcp(|s| s.http2_max_header_list_size(max))
    }

    /// Maximum size of an HTTP/2 frame, in bytes; `None` leaves the default (TCP side).
    #[must_use]
    pub fn max_frame_size(self, frame_size: impl Into<Option<u32>>) -> Self {
        self.with_tcp(|s| s.max_frame_size(frame_size))
    }

    /// Accept HTTP/1 requests, for grpc-web. Default is no (TCP side).
    #[must_use]
    pub fn accept_http1(self, accept_http1: bool) -> Self {
        self.with_tcp(|s| s.accept_http1(accept_http1))
    }
}
