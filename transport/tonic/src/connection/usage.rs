//! Reports a connection's usage to the counters of its channel or server, and as metrics.

use std::sync::Arc;

use tonic_rdma_fabric::PeerInfo;
use tonic_rdma_proto::{Side, Stats};

use crate::path::Path;
use crate::telemetry::metrics::ConnectionMeter;
use crate::telemetry::stats::{Copied, Counter, Counters};

/// The connection's usage as plain integers under the connection's lock, and the values that were
/// last reported.
#[derive(Debug)]
pub(super) struct Usage {
    /// Bytes that the CPU has copied since the connection began, without eager data.
    pub(super) copied: Copied,
    counters: Arc<Counters>,
    reported: Reported,
    meter: ConnectionMeter,
}

impl Usage {
    pub(super) fn new(side: Side, peer: &PeerInfo, counters: Arc<Counters>) -> Self {
        Usage {
            copied: Copied::default(),
            counters,
            reported: Reported::default(),
            meter: ConnectionMeter::open(side, Path::of(peer)),
        }
    }

    /// Counts a poll of the link that returned `completions`.
    #[inline]
    pub(super) fn polled(&self, completions: usize) {
        self.meter.polled(completions);
    }

    /// Updates the channel's counters with the changes since the last update.
    #[inline]
    pub(super) fn count(&mut self, stats: Stats) {
        if stats.body_bytes() != self.reported.body_bytes() {
            self.reported.add(stats, &self.counters);
        }
        if self.copied != self.reported.copied {
            self.counters.fast.add(self.copied - self.reported.copied);
            self.reported.copied = self.copied;
        }
    }

    /// Records the changes since the last report as metrics.
    #[inline]
    pub(super) fn record(&mut self, stats: Stats) {
        self.meter.tell(stats, self.copied);
    }

    /// Records that the peer's device was asked for a proof that the peer's end of the link exists.
    pub(super) fn asked(&mut self) {
        self.meter.asked();
    }

    /// Records that the peer's device has answered.
    pub(super) fn answered(&mut self, peer: &PeerInfo) {
        self.meter.answered(peer);
    }

    /// Records the end of the connection.
    pub(super) fn close(&mut self) {
        self.meter.close();
    }
}

/// The totals added to the channel's counters since the connection began.
#[derive(Clone, Copy, Debug, Default)]
struct Reported {
    write_sent: u64,
    lent: u64,
    eager_sent: u64,
    write_received: u64,
    borrowed: u64,
    eager_received: u64,
    long_writes: u64,
    long_writes_in_phase: u64,
    /// Copied bytes, without eager data.
    copied: Copied,
}

impl Reported {
    fn body_bytes(&self) -> u64 {
        let sent = self.write_sent + self.lent + self.eager_sent;
        sent + self.write_received + self.borrowed + self.eager_received
    }

    fn add(&mut self, now: Stats, counters: &Counters) {
        let add = |counter: &Counter, now: u64, before: &mut u64| {
            let more = now - std::mem::replace(before, now);
            if more > 0 {
                counter.add(more);
            }
            more
        };
        add(&counters.bytes_sent_write, now.write_sent, &mut self.write_sent);
        add(&counters.bytes_sent_lent, now.lent, &mut self.lent);
        add(&counters.bytes_received_lent, now.borrowed, &mut self.borrowed);
        add(&counters.bytes_received_write, now.write_received, &mut self.write_received);
        add(&counters.long_writes, now.long_writes, &mut self.long_writes);
        add(
            &counters.long_writes_in_phase,
            now.long_writes_in_phase,
            &mut self.long_writes_in_phase,
        );
        let sent = add(&counters.bytes_sent_send, now.eager_sent, &mut self.eager_sent);
        let received =
            add(&counters.bytes_received_send, now.eager_received, &mut self.eager_received);
        if sent + received > 0 {
            counters.fast.eager.add(sent + received);
        }
    }
}
