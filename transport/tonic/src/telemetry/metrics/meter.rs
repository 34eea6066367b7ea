//! Handles of what connections and channels count. They are looked up when a connection is made,
//! never per call.

use std::time::Duration;

use ::metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};
use tonic_rdma_proto::{Side, Stats};

use crate::path::Path;
use crate::path::reason::{self, Reason};
use crate::telemetry::metrics::{
    CALLS, COMPLETIONS, CONNECTIONS, CONNECTIONS_MADE, COPIED, CREDIT_WAITS, FALLBACKS, GRANTS,
    HANDSHAKE, MESSAGES, PAYLOAD, RECONNECTS, WRITES,
};
use crate::telemetry::stats::{Copied, CopyCounters};

/// The value of the label `role`.
pub(crate) fn role(side: Side) -> &'static str {
    match side {
        Side::Client => "client",
        Side::Server => "server",
    }
}

/// A decision for TCP.
pub(crate) fn fallback(side: Side, reason: &Reason) {
    let whose = match reason.side() {
        reason::Side::Local => "local",
        reason::Side::Peer => "peer",
    };
    counter!(FALLBACKS, "role" => role(side), "reason" => reason.code().as_str(), "side" => whose)
        .increment(1);
}

/// A channel that had lost its fast path has one again.
pub(crate) fn reconnect(path: Path) {
    counter!(RECONNECTS, "path" => path.as_str()).increment(1);
}

/// A fast path came about within this time.
pub(crate) fn handshake(path: Path, took: Duration) {
    histogram!(HANDSHAKE, "path" => path.as_str()).record(took.as_secs_f64());
}

/// One connection on a fast path.
#[derive(Debug)]
pub(crate) struct ConnectionMeter {
    open: Option<Gauge>,
    completions: Histogram,
    calls: Counter,
    sent_write: Counter,
    sent_send: Counter,
    received_write: Counter,
    received_send: Counter,
    messages_sent: Counter,
    messages_received: Counter,
    writes: Counter,
    credit_waits: Counter,
    grants: Counter,
    copied: CopyCounters,
    /// What has been told so far.
    told: Stats,
    told_copied: Copied,
}

impl ConnectionMeter {
    /// Of a connection that is open.
    pub(crate) fn open(side: Side, path: Path) -> Self {
        let (role, path) = (role(side), path.as_str());
        let payload = |direction, by| payload(role, path, direction, by);
        let messages = |direction: &'static str| counter!(MESSAGES, "role" => role, "path" => path, "direction" => direction);
        let of = |name: &'static str| counter!(name, "role" => role, "path" => path);
        of(CONNECTIONS_MADE).increment(1);
        let open = gauge!(CONNECTIONS, "role" => role, "path" => path);
        open.increment(1);
        ConnectionMeter {
            open: Some(open),
            completions: histogram!(COMPLETIONS, "role" => role, "path" => path),
            calls: calls(role, path),
            sent_write: payload("sent", "write"),
            sent_send: payload("sent", "send"),
            received_write: payload("received", "write"),
            received_send: payload("received", "send"),
            messages_sent: messages("sent"),
            messages_received: messages("received"),
            writes: of(WRITES),
            credit_waits: of(CREDIT_WAITS),
            grants: of(GRANTS),
            copied: CopyCounters::told(role, path),
            told: Stats::default(),
            told_copied: Copied::default(),
        }
    }

    /// A poll of the link brought this many completions.
    pub(crate) fn polled(&self, completions: usize) {
        if completions > 0 {
            self.completions.record(completions as f64);
        }
    }

    /// Tells what has moved since the last time; eager data is not in `copied`.
    pub(crate) fn tell(&mut self, now: Stats, copied: Copied) {
        if now == self.told && copied == self.told_copied {
            return;
        }
        let before = std::mem::replace(&mut self.told, now);
        let add = |counter: &Counter, now: u64, before: u64| {
            if now != before {
                counter.increment(now - before);
            }
        };
        add(&self.calls, now.streams, before.streams);
        add(&self.sent_write, now.write_sent, before.write_sent);
        add(&self.sent_send, now.eager_sent, before.eager_sent);
        add(&self.received_write, now.write_received, before.write_received);
        add(&self.received_send, now.eager_received, before.eager_received);
        add(&self.messages_sent, now.messages_sent, before.messages_sent);
        add(&self.messages_received, now.messages_received, before.messages_received);
        add(&self.writes, now.writes, before.writes);
        add(&self.credit_waits, now.credit_waits, before.credit_waits);
        add(&self.grants, now.grants_given, before.grants_given);
        let eager = |stats: &Stats| stats.eager_sent + stats.eager_received;
        if eager(&now) != eager(&before) {
            self.copied.eager.add(eager(&now) - eager(&before));
        }
        if copied != self.told_copied {
            self.copied.add(copied - std::mem::replace(&mut self.told_copied, copied));
        }
    }

    /// The connection is gone.
    pub(crate) fn close(&mut self) {
        if let Some(open) = self.open.take() {
            open.decrement(1);
        }
    }
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
