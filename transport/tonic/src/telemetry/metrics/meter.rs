//! The metrics of one connection. The recorder's handles are looked up once for each connection,
//! never for each call.

use ::metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};
use tokio::time::Instant;
use tonic_rdma_fabric::PeerInfo;
use tonic_rdma_proto::{Side, Stats};

use crate::path::Path;
use crate::telemetry::metrics::names::{
    COMPLETIONS, CONNECTIONS, CONNECTIONS_MADE, CREDIT_WAITS, GRANTS, MESSAGES, WRITES,
};
use crate::telemetry::metrics::record::{calls, payload, round_trip};
use crate::telemetry::role;
use crate::telemetry::stats::{Copied, CopyCounters};

/// The metrics of one fast-path connection.
#[derive(Debug)]
pub(crate) struct ConnectionMeter {
    open: Option<Gauge>,
    completions: Histogram,
    calls: Counter,
    sent_write: Counter,
    sent_lent: Counter,
    sent_send: Counter,
    received_write: Counter,
    received_lent: Counter,
    received_send: Counter,
    messages_sent: Counter,
    messages_received: Counter,
    writes: Counter,
    credit_waits: Counter,
    grants: Counter,
    copied: CopyCounters,
    /// The values reported so far.
    told: Stats,
    told_copied: Copied,
    /// When the peer's device was asked for the proof of life that is still missing.
    asked: Option<Instant>,
}

impl ConnectionMeter {
    /// Records that a connection has opened.
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
            sent_lent: payload("sent", "lent"),
            sent_send: payload("sent", "send"),
            received_write: payload("received", "write"),
            received_lent: payload("received", "lent"),
            received_send: payload("received", "send"),
            messages_sent: messages("sent"),
            messages_received: messages("received"),
            writes: of(WRITES),
            credit_waits: of(CREDIT_WAITS),
            grants: of(GRANTS),
            copied: CopyCounters::told(role, path),
            told: Stats::default(),
            told_copied: Copied::default(),
            asked: None,
        }
    }

    /// Records the number of completions that a poll of the link returned.
    pub(crate) fn polled(&self, completions: usize) {
        if completions > 0 {
            self.completions.record(completions as f64);
        }
    }

    /// Reports the changes since the last report. `copied` does not include the first copy of eager
    /// data, which this method takes from `now`.
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
        add(&self.sent_lent, now.lent, before.lent);
        add(&self.sent_send, now.eager_sent, before.eager_sent);
        add(&self.received_write, now.write_received, before.write_received);
        add(&self.received_lent, now.borrowed, before.borrowed);
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

    /// Records that the peer's device was asked for a proof of life.
    pub(crate) fn asked(&mut self) {
        self.asked = Some(Instant::now());
    }

    /// Records the time until the peer's device answered.
    pub(crate) fn answered(&mut self, peer: &PeerInfo) {
        if let Some(asked) = self.asked.take() {
            round_trip(Path::of(peer), &peer.device, asked.elapsed());
        }
    }

    /// Records the end of the connection.
    pub(crate) fn close(&mut self) {
        if let Some(open) = self.open.take() {
            open.decrement(1);
        }
    }
}
