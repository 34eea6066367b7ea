//! Snapshots of connections for operators.

use std::net::SocketAddr;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::path::Path;
use crate::path::reason::Reason;

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
    /// path, why the connection takes no new calls. `None` if no reason exists.
    pub reason: Option<Reason>,
    /// The use of a fast-path connection. `None` on TCP, because tonic owns the TCP connections.
    pub usage: Option<ConnectionUsage>,
}

/// A snapshot of the calls, bytes, credits and memory of a fast-path connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ConnectionUsage {
    /// Calls that have begun and not ended.
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
    /// Bytes for control messages while the connection is at rest. These bytes are pinned, except
    /// on shared memory. A busy connection takes more bytes.
    pub control_memory: usize,
    /// Bytes of the pool's landing memory that the connection holds.
    pub landing_memory: usize,
    /// Bytes that the peer may write to now, in the landing memory or in buffers that callers have
    /// named for their replies.
    pub granted: usize,
}

/// Returns the number of the next connection.
pub(crate) fn next_id() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Relaxed) + 1
}
