//! Reports a connection's usage to the counters of its channel or server, as metrics, and as
//! snapshots for operators.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tonic_rdma_fabric::PeerInfo;
use tonic_rdma_proto::{Connection, Side, Stats};

use crate::path::Path;
use crate::path::reason::Reason;
use crate::telemetry::metrics::ConnectionMeter;
use crate::telemetry::stats::{Copied, Counter, Counters};

/// The connection's usage as plain integers under the connection's lock, and the values that were
/// last reported.
#[derive(Debug)]
pub(super) struct Usage {
    /// Bytes that the CPU has copied since the connection began. The first copy of eager data is
    /// not included, because the protocol's statistics count it.
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

    /// Counts a poll of the link, which returned this number of completions.
    #[inline]
    pub(super) fn polled(&self, completions: usize) {
        self.meter.polled(completions);
    }

    /// Updates the counters of the channel or the server with the changes since the last update.
    #[inline]
    pub(super) fn count(&mut self, conn: &Connection) {
        let body_bytes = conn.body_bytes();
        if body_bytes != self.reported.body_bytes {
            self.reported.body_bytes = body_bytes;
            self.reported.add(conn.stats(), &self.counters);
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

/// The totals added to the counters of the channel or the server since the connection began.
#[derive(Clone, Copy, Debug, Default)]
struct Reported {
    /// Body bytes sent and received by any method.
    body_bytes: u64,
    write_sent: u64,
    lent: u64,
    eager_sent: u64,
    write_received: u64,
    borrowed: u64,
    eager_received: u64,
    long_writes: u64,
    long_writes_in_phase: u64,
    /// Copied bytes, counted like [`Usage::copied`].
    copied: Copied,
}

impl Reported {
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

/// A snapshot of a connection: a fast-path connection of a channel or a server, or a TCP connection
/// of a server.
///
/// [`Channel::connections`](crate::Channel::connections) and
/// [`ServerObserver::connections`](crate::ServerObserver::connections) return snapshots.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionInfo {
    /// Distinguishes the connection from all others of this process. A later connection has a
    /// greater number. The first connection has number 1.
    pub id: u64,
    /// The time since the connection was established.
    pub age: Duration,
    /// The path of the connection's calls.
    pub path: Path,
    /// The RDMA device at this end. `None` on TCP and shared memory.
    pub device: Option<String>,
    /// This end's address. `None` on shared memory, and for a server's TCP connections.
    pub local_addr: Option<SocketAddr>,
    /// The peer's address. `None` on shared memory.
    pub remote_addr: Option<SocketAddr>,
    /// The peer's process ID on shared memory, as reported by the kernel. `None` on other paths.
    pub peer_pid: Option<u32>,
    /// Whether the client has asked for the fast path. A stock gRPC client does not ask. The value
    /// is always true on a fast path. A client on the fast path keeps the TCP connection over which
    /// it has asked.
    pub asked: bool,
    /// On TCP, why the server refused the fast path when the client last asked for it. On a fast
    /// path, why the connection takes no new calls. `None` if there is no reason.
    pub reason: Option<Reason>,
    /// The use of a fast-path connection. `None` on TCP, because tonic owns the TCP connections.
    pub usage: Option<ConnectionUsage>,
}

/// A snapshot of the calls, bytes, credits and memory of a fast-path connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ConnectionUsage {
    /// Calls that have begun and not ended, including those that wait because the server allows no
    /// more calls at a time.
    pub calls_in_flight: usize,
    /// Calls since the connection was established.
    pub calls: u64,
    /// Payload bytes sent, counted as in [`TransportStats`](crate::TransportStats).
    pub bytes_sent: u64,
    /// Payload bytes received.
    pub bytes_received: u64,
    /// Number of control messages that this end may send before the peer gives more credits.
    pub credits: u32,
    /// Number of control messages that the peer may send before this end gives more credits.
    pub peer_credits: u32,
    /// Number of times that output has waited for a credit.
    pub credit_waits: u64,
    /// Bytes of memory for control messages while the connection is at rest. This memory is pinned,
    /// except on shared memory. A busy connection takes more memory.
    pub control_memory: usize,
    /// Bytes of the pool's landing memory that the connection holds.
    pub landing_memory: usize,
    /// Bytes that the peer may write to now, in the landing memory or in buffers that the
    /// application has named ([`LandIn`](crate::LandIn)).
    pub granted: usize,
}

/// Returns the number of the next connection.
pub(crate) fn next_id() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Relaxed) + 1
}
