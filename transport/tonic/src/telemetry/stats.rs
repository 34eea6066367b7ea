//! Counters of what went which way.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tonic_rdma_proto::Side;

use crate::path::Path;
use crate::telemetry::metrics::record;

/// What a channel has carried since it was made, over all its clones and reconnects; or a server,
/// over all its connections ([`ServerStats`]).
///
/// Bytes are payload bytes: the data of gRPC messages with their 5-byte prefix, without headers,
/// framing and control. The counters are read one by one, so that a snapshot taken while calls
/// run may be off by what moved meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct TransportStats {
    /// Calls begun on a fast path.
    pub calls_fast: u64,
    /// Calls begun on TCP.
    pub calls_tcp: u64,
    /// Calls that went to another path or connection, because theirs ended before the server saw
    /// them. Each counts once for every time, and is among the calls of the path that it took in
    /// the end.
    pub calls_moved: u64,
    /// Attempts at the fast path that a channel has begun. Why they failed,
    /// [`Channel::path`](crate::Channel::path) tells.
    pub attempts: u64,
    /// Fast-path connections that came about.
    pub connections: u64,
    /// Of these, those that broke, or were given up as dead, in place of ending in good order.
    pub connections_lost: u64,
    /// Connect requests that a server has refused, and TCP connections beyond its limit.
    pub connections_refused: u64,
    /// Payload bytes sent by RDMA WRITE.
    pub bytes_sent_write: u64,
    /// Payload bytes sent eagerly, inside SENDs.
    pub bytes_sent_send: u64,
    /// Payload bytes sent over TCP.
    pub bytes_sent_tcp: u64,
    /// Payload bytes that the peer sent by RDMA WRITE.
    pub bytes_received_write: u64,
    /// Payload bytes that the peer sent eagerly, inside SENDs.
    pub bytes_received_send: u64,
    /// Payload bytes received over TCP.
    pub bytes_received_tcp: u64,
    /// RDMA WRITEs of 4 KiB and more of memory as it lies, without a copy to staging.
    pub long_writes: u64,
    /// Of these, those whose source and destination are equal modulo 64: on shared memory, where
    /// each is a copy, they are the fastest on any processor.
    pub long_writes_in_phase: u64,
    /// What this process copied of the payload of calls on a fast path.
    pub copied_fast: Copied,
    /// What this process copied of the payload of calls on TCP, apart from what the kernel does.
    pub copied_tcp: Copied,
}

impl TransportStats {
    /// All payload bytes of both directions.
    pub fn payload_bytes(&self) -> u64 {
        self.bytes_sent_write
            + self.bytes_sent_send
            + self.bytes_sent_tcp
            + self.bytes_received_write
            + self.bytes_received_send
            + self.bytes_received_tcp
    }

    /// The part of the payload that went by RDMA WRITE, 0.0 to 1.0; 0.0 when nothing went at all.
    pub fn write_share(&self) -> f64 {
        let all = self.payload_bytes();
        if all == 0 {
            return 0.0;
        }
        (self.bytes_sent_write + self.bytes_received_write) as f64 / all as f64
    }
}

/// Payload bytes that a CPU has copied on behalf of calls, sent and received together, by reason.
/// What the device carries, or on shared memory the copy that stands for it, is not in here.
///
/// Where [a message is taken apart](crate::codec), up to 256 bytes in a row of what stands between
/// its segments (tags, lengths, small fields) do not count as payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Copied {
    /// Short messages: to a control slot, or out of one, or out of a batch; on TCP while encoding.
    /// Once more where they wait behind others that nobody has read.
    pub eager: u64,
    /// To staging, because it did not lie in memory that the device knows.
    pub staging: u64,
    /// Messages that came in several parts, brought together, and what has landed in parts that are
    /// short for the memory they keep. On TCP everything that is received.
    pub joined: u64,
    /// From landing memory to the heap, because less than a quarter of the landing memory was free.
    pub pressure: u64,
    /// From landing memory to the heap, because the peer is not trusted to leave alone what it has
    /// sent: [`Endpoint::copy_on_delivery`](crate::Endpoint::copy_on_delivery) and
    /// [`Server::copy_on_delivery`](crate::Server::copy_on_delivery).
    pub delivery: u64,
    /// By a plain codec, or because a body was compressed, while encoding or decoding; by the codec
    /// of this crate for long fields that are not `Bytes`.
    pub plain_codec: u64,
    /// Until it was known which codec a method uses, and to let tonic see the true length of a
    /// message that was longer than any of its method before: such a message is filled up to its
    /// length, and the filling is counted.
    pub learning: u64,
}

impl Copied {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.by_reason().map(|(_, bytes)| bytes).sum()
    }
}

/// `nothing`, or the total and the reasons: `1200 bytes (eager 200, staging 1000)`.
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
        /// The live counters behind [`TransportStats`]; one field for each of its.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $field: Counter,)*
            $(pub(crate) $of: CopyCounters,)*
        }

        impl Counters {
            /// Of a channel or a server: what goes over TCP is told to the recorder, too. What goes
            /// over a fast path is told by its connections.
            pub(crate) fn of(side: Side) -> Self {
                let (role, path) = (record::role(side), Path::Tcp.as_str());
                Counters {
                    calls_tcp: Counter::told(record::calls(role, path)),
                    bytes_sent_tcp: Counter::told(record::payload(role, path, "sent", "http2")),
                    bytes_received_tcp: Counter::told(record::payload(role, path, "received", "http2")),
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
            /// Counters that tell the recorder, too.
            pub(crate) fn told(role: &'static str, path: &'static str) -> Self {
                CopyCounters {
                    $($reason: Counter::told(record::copied(role, path, stringify!($reason))),)*
                }
            }

            fn snapshot(&self) -> Copied {
                Copied { $($reason: self.$reason.get(),)* }
            }

            /// Adds what has moved.
            pub(crate) fn add(&self, more: Copied) {
                $(if more.$reason > 0 {
                    self.$reason.add(more.$reason);
                })*
            }
        }

        impl Copied {
            /// Each reason, by the name that it has as a field here and as a label in the
            /// [metrics](crate::telemetry::metrics), with its bytes.
            pub fn by_reason(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((stringify!($reason), self.$reason),)*].into_iter()
            }
        }

        impl std::ops::Sub for Copied {
            type Output = Copied;

            /// What was copied since `before` was taken.
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
    bytes_sent_send,
    bytes_sent_tcp,
    bytes_received_write,
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
);

/// What a server has carried, over all its connections: a handle that stays good while the server
/// runs, and after.
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
    /// Of all TCP connections; made when serving begins.
    tcp: OnceLock<Arc<Counters>>,
    /// Of the fast-path connections: each has its own, so that they do not contend for them.
    live: Mutex<Vec<Arc<Counters>>>,
    /// Of those that are gone. Locked within `live` only.
    gone: Mutex<TransportStats>,
}

impl ServerStats {
    /// The counters now.
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
        self.0.tcp.get_or_init(|| Arc::new(Counters::of(Side::Server)))
    }

    /// Counters for one more connection, until this is dropped.
    pub(crate) fn connection(&self) -> ConnectionCounters {
        let counters = Arc::<Counters>::default();
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

/// A count.
#[derive(Debug)]
pub(crate) struct Counter {
    count: AtomicU64,
    /// The recorder's, where this is told to it.
    told: ::metrics::Counter,
}

impl Default for Counter {
    fn default() -> Self {
        Counter::told(::metrics::Counter::noop())
    }
}

impl Counter {
    /// One that tells the recorder.
    fn told(told: ::metrics::Counter) -> Self {
        Counter { count: AtomicU64::new(0), told }
    }

    pub(crate) fn add(&self, n: u64) {
        self.count.fetch_add(n, Relaxed);
        self.told.increment(n);
    }

    /// Undoes an `add` of the same amount, of a count that is not told.
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
        };
        assert_eq!(all.total(), 127);
        let told = "127 bytes (eager 1, staging 2, joined 4, pressure 8, delivery 16, plain_codec 32, learning 64)";
        assert_eq!(all.to_string(), told);
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
