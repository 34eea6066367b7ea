//! Records single events. Recording a rare event looks up its metric. Recording an event of a call
//! uses a handle that was looked up before.

use std::time::Duration;

use ::metrics::{Counter, counter, histogram};
use tonic_rdma_proto::{Reject, Side};

use crate::path::Path;
use crate::path::reason::{self, Reason};
use crate::telemetry::metrics::names::{
    CALLS, COPIED, FALLBACKS, HANDSHAKE, PAYLOAD, RECONNECTS, REFUSED, ROUND_TRIP,
};
use crate::telemetry::role;

/// Records a decision for TCP.
pub(crate) fn fallback(side: Side, reason: &Reason) {
    let whose = match reason.side() {
        reason::Side::Local => "local",
        reason::Side::Peer => "peer",
    };
    counter!(FALLBACKS, "role" => role(side), "reason" => reason.code().as_str(), "side" => whose)
        .increment(1);
}

/// Records a connection that a server refused.
pub(crate) fn refused(reject: Reject) {
    let reason = match reject {
        Reject::Version { .. } => "version",
        Reject::Ticket | Reject::TicketWithdrawn => "ticket",
        Reject::Resources => "resources",
        Reject::ShuttingDown => "shutting-down",
        Reject::Connections => "connections",
        Reject::Handshakes => "handshakes",
        Reject::Bare => "bare",
        Reject::MemoryFiles => "memory-files",
        Reject::ProcessLimit { .. } => "process-limit",
        Reject::Malformed => "malformed",
        Reject::Other(_) => "other",
    };
    counter!(REFUSED, "reason" => reason).increment(1);
}

/// Records that a channel has recovered its fast path.
pub(crate) fn reconnect(path: Path) {
    counter!(RECONNECTS, "path" => path.as_str()).increment(1);
}

/// Records the time until a fast path was established.
pub(crate) fn handshake(path: Path, took: Duration) {
    histogram!(HANDSHAKE, "path" => path.as_str()).record(took.as_secs_f64());
}

/// Records the time until a peer's device answered.
pub(crate) fn round_trip(path: Path, device: &str, took: Duration) {
    histogram!(ROUND_TRIP, "device" => device.to_owned(), "path" => path.as_str())
        .record(took.as_secs_f64());
}

pub(crate) fn calls(role: &'static str, path: &'static str) -> Counter {
    counter!(CALLS, "role" => role, "path" => path)
}

pub(crate) fn copied(role: &'static str, path: &'static str, reason: &'static str) -> Counter {
    counter!(COPIED, "role" => role, "path" => path, "reason" => reason)
}

pub(crate) fn payload(
    role: &'static str,
    path: &'static str,
    direction: &'static str,
    by: &'static str,
) -> Counter {
    counter!(PAYLOAD, "role" => role, "path" => path, "direction" => direction, "by" => by)
}
