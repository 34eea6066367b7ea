//! Names, kinds and labels of the metrics.

use ::metrics::Unit;

/// Description of one metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metric {
    /// The name by Prometheus' conventions: it states the base unit, and ends with `_total` for a
    /// counter.
    pub name: &'static str,
    /// How the metric is recorded and read.
    pub kind: MetricKind,
    /// The unit of the metric's value. `None` for a plain number.
    pub unit: Option<Unit>,
    /// The labels of each of the metric's series. `error_type` is absent from series that do not
    /// count errors, and `server_port` is absent if the server's URL has no port.
    pub labels: &'static [&'static str],
    /// A description in one sentence.
    pub help: &'static str,
}

/// How a metric is recorded and read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// A value that only increases.
    Counter,
    /// A value that goes up and down.
    Gauge,
    /// A distribution of values.
    Histogram,
}

macro_rules! metrics {
    ($($const:ident = $name:literal, $kind:ident, $unit:expr, [$($label:literal),*], $help:literal;)*) => {
        $(pub(super) const $const: &str = $name;)*

        /// Every metric of this crate.
        pub const ALL: &[Metric] = &[
            $(Metric { name: $name, kind: MetricKind::$kind, unit: $unit, labels: &[$($label),*], help: $help },)*
        ];
    };
}

metrics! {
    CALLS = "tonic_rdma_calls_total", Counter, None, ["role", "path"],
        "Calls, by the path they took.";
    CLIENT_CALLS = "rpc_client_call_duration_seconds", Histogram, Some(Unit::Seconds), ["rpc_system_name", "rpc_status_code", "path", "server_address", "server_port", "error_type"],
        "Duration of calls at the client, to the end of the response.";
    SERVER_CALLS = "rpc_server_call_duration_seconds", Histogram, Some(Unit::Seconds), ["rpc_system_name", "rpc_status_code", "path", "error_type"],
        "Duration of calls at the server, to the end of the response.";
    PAYLOAD = "tonic_rdma_payload_bytes_total", Counter, Some(Unit::Bytes), ["role", "path", "direction", "by"],
        "Payload bytes of gRPC messages.";
    COPIED = "tonic_rdma_copied_bytes_total", Counter, Some(Unit::Bytes), ["role", "path", "reason"],
        "Payload bytes that a CPU has copied in this process, by reason.";
    FALLBACKS = "tonic_rdma_fallbacks_total", Counter, None, ["role", "reason", "side"],
        "Decisions for TCP, by reason code.";
    CONNECTIONS_MADE = "tonic_rdma_connections_total", Counter, None, ["role", "path"],
        "Fast-path connections that were established.";
    CONNECTIONS = "tonic_rdma_connections", Gauge, None, ["role", "path"],
        "Fast-path connections that are open.";
    REFUSED = "tonic_rdma_connections_refused_total", Counter, None, ["reason"],
        "Fast-path connections that a server refused, by reason.";
    RECONNECTS = "tonic_rdma_reconnects_total", Counter, None, ["path"],
        "Fast paths that channels got again after a loss.";
    HANDSHAKE = "tonic_rdma_handshake_seconds", Histogram, Some(Unit::Seconds), ["path"],
        "Time from asking a server for its offer to the fast-path connection.";
    ROUND_TRIP = "tonic_rdma_round_trip_seconds", Histogram, Some(Unit::Seconds), ["device", "path"],
        "Time from asking a peer's device for a proof of life to its answer.";
    MESSAGES = "tonic_rdma_messages_total", Counter, None, ["role", "path", "direction"],
        "Control messages, each a SEND.";
    WRITES = "tonic_rdma_writes_total", Counter, None, ["role", "path"],
        "WRITEs of payload.";
    CREDIT_WAITS = "tonic_rdma_credit_waits_total", Counter, None, ["role", "path"],
        "Times that output began to wait for the peer's credits.";
    GRANTS = "tonic_rdma_grants_total", Counter, None, ["role", "path"],
        "Pieces of landing memory granted to peers.";
    COMPLETIONS = "tonic_rdma_completions_per_poll", Histogram, Some(Unit::Count), ["role", "path"],
        "Completions that a poll of the completion queue returned, if any.";
    POOL_BYTES = "tonic_rdma_pool_bytes", Gauge, Some(Unit::Bytes), ["device", "state"],
        "Registered memory, by use.";
    POOL_REGISTRATIONS = "tonic_rdma_pool_registrations_total", Counter, None, ["device"],
        "Memory regions registered.";
    POOL_WAITS = "tonic_rdma_pool_waits_total", Counter, None, ["device"],
        "Requests for pool memory that had to wait.";
}
