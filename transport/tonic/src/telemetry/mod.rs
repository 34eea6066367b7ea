//! Counters, metrics and spans of the transport.

#[cfg_attr(not(feature = "metrics"), path = "unrecorded.rs")]
#[cfg_attr(not(feature = "metrics"), allow(unreachable_pub, reason = "the feature exports it"))]
pub mod metrics;
pub(crate) mod spans;
pub(crate) mod stats;
pub(crate) mod status;

use http::Uri;
use tonic_rdma_proto::Side;

/// The value of the label `role`, in metrics and spans.
pub(crate) fn role(side: Side) -> &'static str {
    match side {
        Side::Client => "client",
        Side::Server => "server",
    }
}

/// The host in a server's URI, as the server's address in metrics and spans. IPv6 addresses have no
/// brackets.
pub(crate) fn server_address(server: &Uri) -> Option<&str> {
    server.host().map(|host| host.trim_matches(['[', ']']))
}
