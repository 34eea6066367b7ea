//! Counters of calls and bytes, by path.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tonic_rdma_proto::Side;

use crate::path::Path;
use crate::telemetry::metrics::{self, Durations, RecorderCounter};
use crate::telemetry::role;

/// The counters of a channel since its creation, over all its clones and reconnects, or of a
/// server, over all its connections ([`ServerStats`]).
///
/// Bytes are payload bytes: the data of gRPC messages with their 5-byte prefix, without headers,
/// framing and control messages. The counters are read one after another. A snapshot during calls
/// can therefore be inconsistent by the bytes that move during the snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct TransportStats {
    /// Calls begun on a fast path.
    pub calls_fast: u64,
    /// Calls begun on TCP.
    pub calls_tcp: u64,
    /// Calls that moved to another path or connection, because their first connection ended or
    /// refused them before the server processed them. A call counts once for each move, and is also
    /// counted among the calls of the path that it finally took.
    pub calls_moved: u64,
    /// Attempts at the fast path that a channel has begun. [`Channel::path`](crate::Channel::path)
    /// returns the reason why the last attempt failed.
    pub attempts: u64,
    /// Fast-path connections established.
    pub connections: u64,
    /// Fast-path connections that broke, or whose peer counted as dead, instead of closing
    /// gracefully.
    pub connections_lost: u64,
    /// Connect requests that a server has refused, and TCP connections beyond its limit.
    pub connections_refused: u64,
    /// Payload bytes sent by RDMA WRITE.
    pub bytes_sent_write: u64,
    /// Payload bytes that were lent to the peer: see
    /// [`ContextBuilder::lending`](crate::ContextBuilder::lending).
    pub bytes_sent_lent: u64,
    /// Payload bytes sent eagerly, inside SENDs.
    pub bytes_sent_send: u64,
    /// Payload bytes sent over TCP.
    pub bytes_sent_tcp: u64,
    /// Payload bytes that the peer sent by RDMA WRITE.
    pub bytes_received_write: u64,
    /// Payload bytes that the peer has lent.
    pub bytes_received_lent: u64,
    /// Payload bytes that the peer sent eagerly, inside SENDs.
    pub bytes_received_send: u64,
    /// Payload bytes received over TCP.
    pub bytes_received_tcp: u64,
    /// RDMA WRITEs of at least 4 KiB directly from the payload's memory, without a copy to staging.
    pub long_writes: u64,
    /// The long WRITEs whose source and destination addresses are equal modulo 64. On shared
    /// memory, where each WRITE is a copy, these WRITEs are the fastest on any processor.
    pub long_writes_in_phase: u64,
    /// Payload bytes that this process copied for calls on a fast path.
    pub copied_fast: Copied,
    /// Payload bytes that this process copied for calls on TCP, apart from copies in the kernel.
    pub copied_tcp: Copied,
}

impl TransportStats {
    /// All payload bytes, in both directions.
    pub fn payload_bytes(&self) -> u64 {
        self.bytes_sent_write
            + self.bytes_sent_lent
            + self.bytes_sent_send
            + self.bytes_sent_tcp
            + self.bytes_received_write
            + self.bytes_received_lent
            + self.bytes_received_send
            + self.bytes_received_tcp
    }

    /// The share of payload bytes that travelled by RDMA WRITE, from 0.0 to 1.0. The share is 0.0
    /// without payload.
    pub fn write_share(&self) -> f64 {
        let all = self.payload_bytes();
        if all == 0 {
            return 0.0;
        }
        (self.bytes_sent_write + self.bytes_received_write) as f64 / all as f64
    }
}

/// Payload bytes that a CPU has copied for calls, sent and received together, by reason. The
/// numbers do not include transfers by the device, nor the copies that replace these transfers on
/// shared memory.
///
/// In a [message that is split](crate::codec), up to 256 consecutive bytes between its segments
/// (tags, lengths, small fields) do not count as payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Copied {
    /// Short messages, which are copied to a control slot, out of a control slot, or out of a batch
    /// of messages that were sent together. On TCP, short messages are copied while encoding. A
    /// short message is copied once more if it waits behind unread messages.
    pub eager: u64,
    /// Copied to staging, because the payload was not in memory registered with the device.
    pub staging: u64,
    /// Messages in several parts that were joined, and data that landed in parts that are too short
    /// for the memory that they occupy. On TCP, all received data counts here.
    pub joined: u64,
    /// Copied from landing memory to the heap, because the application held as much landing memory
    /// as is allowed (at most three quarters of its connection's and of the pool's), or because
    /// nobody read the data while another stream waited for memory.
    pub pressure: u64,
    /// Copied from landing memory to the heap, because the peer is not trusted to leave sent data
    /// unchanged: [`Endpoint::copy_on_delivery`](crate::Endpoint::copy_on_delivery) and
    /// [`Server::copy_on_delivery`](crate::Server::copy_on_delivery).
    pub delivery: u64,
    /// Copied while encoding or decoding by a plain codec, or because a body was compressed. This
    /// crate's codec copies long fields that are not `Bytes`.
    pub plain_codec: u64,
    /// Copied before a method's codec was known. Includes padding: a message that is longer than
    /// all earlier messages of its method is padded to its true length in tonic's buffer, so that
    /// tonic checks that length.
    pub learning: u64,
    /// Copied to a buffer that the application has named for a reply or a request: see
    /// [`LandIn`](crate::LandIn).
    pub named: u64,
}

impl Copied {
    /// The sum over all reasons.
    pub fn total(&self) -> u64 {
        self.by_reason().map(|(_, bytes)| bytes).sum()
    }
}

/// Formats as `nothing`, or as the total and the reasons: `1200 bytes (eager 200, staging 1000)`.
impl std::fmt::Display for Copied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.total() == 0 {
            return f.write_str("nothing");
        }
        write!(f, "{} bytes", self.total())?;
        let mut before = " (";
        for (reason, bytes) in self.by_reason().filter(|(_, bytes)| *bytes > 0) {
            write!(f, "{before}{reason} {bytes}")?;
            before = ", ";
        }
        f.write_str(")")
    }
}

macro_rules! counters {
    ($($field:ident),* ; $($copied:ident: $of:ident),* ; $($reason:ident),* $(,)?) => {
        /// The live counters behind [`TransportStats`], one for each of its fields.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $field: Counter,)*
            $(pub(crate) $of: CopyCounters,)*
            /// Measures a server's calls for the metrics recorder. A channel has its own
            /// `Durations` for each server.
            pub(crate) durations: Durations,
        }

        impl Counters {
            /// Creates the counters of a channel or a server. These counters also report calls over
            /// TCP to the metrics recorder. Connections report the fast path.
            pub(crate) fn of(side: Side) -> Self {
                let (role, path) = (role(side), Path::Tcp.as_str());
                Counters {
                    calls_tcp: Counter::told(metrics::calls(role, path)),
                    bytes_sent_tcp: Counter::told(metrics::payload(role, path, "sent", "http2")),
                    bytes_received_tcp: Counter::told(metrics::payload(role, path, "received", "http2")),
                    tcp: CopyCounters::told(role, path),
                    ..Counters::default()
                }
            }

            pub(crate) fn snapshot(&self) -> TransportStats {
                TransportStats {
                    $($field: self.$field.get(),)*
                    $($copied: self.$of.snapshot(),)*
                }
            }
        }

        impl std::ops::AddAssign for TransportStats {
            fn add_assign(&mut self, other: Self) {
                $(self.$field += other.$field;)*
                $(self.$copied += other.$copied;)*
            }
        }

        /// The live counters behind [`Copied`].
        #[derive(Debug, Default)]
        pub(crate) struct CopyCounters {
            $(pub(crate) $reason: Counter,)*
        }

        impl CopyCounters {
            /// Creates counters that also report to the metrics recorder.
            pub(crate) fn told(role: &'static str, path: &'static str) -> Self {
                CopyCounters {
                    $($reason: Counter::told(metrics::copied(role, path, stringify!($reason))),)*
                }
            }

            fn snapshot(&self) -> Copied {
                Copied { $($reason: self.$reason.get(),)* }
            }

            /// Adds `more` to each counter.
            pub(crate) fn add(&self, more: Copied) {
                $(if more.$reason > 0 {
                    self.$reason.add(more.$reason);
                })*
            }
        }

        impl Copied {
            /// Each reason and its bytes. A reason's name is the name of its field, and the value
            /// of the label in the metrics.
            pub fn by_reason(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((stringify!($reason), self.$reason),)*].into_iter()
            }
        }

        impl std::ops::Sub for Copied {
            type Output = Copied;

            /// The bytes copied since `before` was taken.
            fn sub(self, before: Copied) -> Copied {
                Copied { $($reason: self.$reason.saturating_sub(before.$reason),)* }
            }
        }

        impl std::ops::AddAssign for Copied {
            fn add_assign(&mut self, other: Self) {
                $(self.$reason += other.$reason;)*
            }
        }
    };
}

counters!(
    calls_fast,
    calls_tcp,
    calls_moved,
    attempts,
    connections,
    connections_lost,
    connections_refused,
    bytes_sent_write,
    bytes_sent_lent,
    bytes_sent_send,
    bytes_sent_tcp,
    bytes_received_write,
    bytes_received_lent,
    bytes_received_send,
    bytes_received_tcp,
    long_writes,
    long_writes_in_phase;
    copied_fast: fast,
    copied_tcp: tcp;
    eager,
    staging,
    joined,
    pressure,
    delivery,
    plain_codec,
    learning,
    named,
);

/// A handle to a server's counters, over all its connections. The handle remains valid after the
/// server has ended.
///
/// ```
/// use tonic_rdma::Server;
///
/// let mut server = Server::builder();
/// let stats = server.stats();
/// // server.add_service(...).serve(...)
/// println!("{} calls by the fast path", stats.get().calls_fast);
/// ```
#[derive(Debug, Clone, Default)]
pub struct ServerStats(Arc<Book>);

#[derive(Debug, Default)]
struct Book {
    /// Counters of all TCP connections, created when serving begins.
    tcp: OnceLock<Arc<Counters>>,
    /// Counters of the open fast-path connections. Each connection has its own set, which avoids
    /// contention.
    live: Mutex<Vec<Arc<Counters>>>,
    /// Sum over closed connections. Locked only while `live` is locked.
    gone: Mutex<TransportStats>,
}

impl ServerStats {
    /// Reads the counters.
    pub fn get(&self) -> TransportStats {
        let live = self.0.live.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = *self.0.gone.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tcp) = self.0.tcp.get() {
            all += tcp.snapshot();
        }
        for counters in live.iter() {
            all += counters.snapshot();
        }
        all
    }

    pub(crate) fn tcp(&self) -> &Arc<Counters> {
        self.0.tcp.get_or_init(|| {
            let durations = Durations::server();
            Arc::new(Counters { durations, ..Counters::of(Side::Server) })
        })
    }

    /// Creates counters for a connection. Dropping the counters adds their values to the sum over
    /// closed connections.
    pub(crate) fn connection(&self) -> ConnectionCounters {
        let durations = self.tcp().durations.clone();
        let counters = Arc::new(Counters { durations, ..Counters::default() });
        self.0.live.lock().unwrap_or_else(PoisonError::into_inner).push(counters.clone());
        ConnectionCounters { stats: self.clone(), counters }
    }
}

/// One connection's part of [`ServerStats`].
#[derive(Debug)]
pub(crate) struct ConnectionCounters {
    stats: ServerStats,
    pub(crate) counters: Arc<Counters>,
}

impl Drop for ConnectionCounters {
    fn drop(&mut self) {
        let mut live = self.stats.0.live.lock().unwrap_or_else(PoisonError::into_inner);
        live.retain(|counters| !Arc::ptr_eq(counters, &self.counters));
        *self.stats.0.gone.lock().unwrap_or_else(PoisonError::into_inner) +=
            self.counters.snapshot();
    }
}

/// A count that threads share. The count decreases only by [`take_back`](Self::take_back).
#[derive(Debug)]
pub(crate) struct Counter {
    count: AtomicU64,
    /// The metrics recorder's counter, if this counter reports to the recorder.
    told: RecorderCounter,
}

impl Default for Counter {
    fn default() -> Self {
        Counter::told(RecorderCounter::noop())
    }
}

impl Counter {
    /// Creates a counter that reports to the metrics recorder.
    fn told(told: RecorderCounter) -> Self {
        Counter { count: AtomicU64::new(0), told }
    }

    pub(crate) fn add(&self, n: u64) {
        self.count.fetch_add(n, Relaxed);
        self.told.increment(n);
    }

    /// Undoes an `add` of the same amount on a counter that does not report.
    pub(crate) fn take_back(&self, n: u64) {
        self.count.fetch_sub(n, Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.count.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_that_are_gone_still_count() {
        let stats = ServerStats::default();
        let (a, b) = (stats.connection(), stats.connection());
        a.counters.calls_fast.add(1);
        b.counters.fast.joined.add(2);
        stats.tcp().calls_tcp.add(3);
        let before = stats.get();
        assert_eq!((before.calls_fast, before.copied_fast.joined, before.calls_tcp), (1, 2, 3));
        drop(a);
        drop(b);
        assert_eq!(stats.get(), before);
        assert!(stats.0.live.lock().unwrap().is_empty());
    }

    #[test]
    fn copies_are_told_by_reason() {
        let copied = Copied { eager: 200, staging: 1000, ..Copied::default() };
        assert_eq!(copied.to_string(), "1200 bytes (eager 200, staging 1000)");
        assert_eq!((copied - copied).to_string(), "nothing");
        let all = Copied {
            eager: 1,
            staging: 2,
            joined: 4,
            pressure: 8,
            delivery: 16,
            plain_codec: 32,
            learning: 64,
            named: 128,
        };
        assert_eq!(all.total(), 255);
        let first = "255 bytes (eager 1, staging 2, joined 4, pressure 8, ";
        let last = "delivery 16, plain_codec 32, learning 64, named 128)";
        assert_eq!(all.to_string(), format!("{first}{last}"));
    }

    #[test]
    fn share_is_of_all_payload() {
        let counters = Counters::default();
        assert_eq!(counters.snapshot().write_share(), 0.0);
        counters.bytes_sent_write.add(3);
        counters.bytes_received_tcp.add(1);
        let stats = counters.snapshot();
        assert_eq!(stats.payload_bytes(), 4);
        assert_eq!(stats.write_share(), 0.75);
    }
}
