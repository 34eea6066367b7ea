//! The builder's settings for the fast path and for the TCP port.

use std::sync::Arc;
use std::time::Duration;

use http::Request;

use crate::connection::KeepAliveSettings;
use crate::context::Context;
use crate::land_in::allocators::Allocators;
use crate::path::plaintext::Plaintext;
use crate::path::policy::{FabricKind, Policy};
use crate::server::observer::Registry;
use crate::telemetry::stats::ServerStats;

/// Default maximum number of fast-path connections.
pub(crate) const MAX_CONNECTIONS: usize = 4096;
/// Maximum number of descriptors of a fast-path connection and its TCP connection.
#[cfg(feature = "diagnose")]
pub(crate) const DESCRIPTORS: usize = 3;

/// Creates a request's span from its headers.
pub(super) type TraceFn = Arc<dyn Fn(&Request<()>) -> tracing::Span + Send + Sync>;

/// Settings of the fast path, and settings for binding the TCP port.
#[derive(Clone, Default)]
pub(super) struct ServerSettings {
    pub(super) trace_fn: Option<TraceFn>,
    pub(super) concurrency_limit: Option<usize>,
    pub(super) load_shed: bool,
    pub(super) timeout: Option<Duration>,
    pub(super) max_concurrent_streams: Option<u32>,
    pub(super) max_connection_age: Option<Duration>,
    pub(super) max_connection_age_grace: Option<Duration>,
    pub(super) policy: Policy,
    pub(super) fabrics: Option<Vec<FabricKind>>,
    pub(super) context: Option<Context>,
    pub(super) tickets: Option<(usize, Duration)>,
    pub(super) max_connections: Option<usize>,
    pub(super) max_handshakes: Option<usize>,
    pub(super) max_tcp_connections: Option<usize>,
    pub(super) max_header_size: Option<u32>,
    pub(super) keep_alive: KeepAliveSettings,
    pub(super) ack_timeout: Option<Duration>,
    pub(super) type_of_service: Option<u8>,
    pub(super) copy_on_delivery: bool,
    pub(super) plaintext: Plaintext,
    pub(super) measuring: bool,
    pub(super) allocators: Arc<Allocators>,
    pub(super) offer_through_gateways: bool,
    pub(super) tcp_nodelay_off: bool,
    pub(super) tcp_keepalive: Option<Duration>,
    pub(super) tcp_keepalive_interval: Option<Duration>,
    pub(super) tcp_keepalive_retries: Option<u32>,
    pub(super) stats: ServerStats,
    pub(super) registry: Arc<Registry>,
}
