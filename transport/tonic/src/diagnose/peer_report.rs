//! The result for a server, and for one step of a diagnosis.

use std::net::SocketAddr;

use crate::path::Path;
use crate::path::reason::Reason;

/// A server's offers, and how it can be reached.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Peer {
    /// The server's address, as given.
    pub uri: String,
    /// The steps from the TCP connection to the RDMA connections, with their durations.
    pub steps: Vec<Step>,
    /// The addresses that the server offers.
    pub offered: Vec<Offered>,
    /// Fabrics that the server does not offer, or that this side cannot use, with the reasons.
    pub refused: Vec<Refused>,
    /// The path that a channel takes. `None` if the TCP connection failed, or if a required fast
    /// path is not available.
    pub path: Option<Path>,
    /// The path with its details, as [`PathInfo`](crate::PathInfo) displays it.
    pub path_detail: String,
    /// The payload of the path's longest packet in bytes, as in [`PathInfo`](crate::PathInfo). If
    /// this value is less than the MTU of this host's port, the server's port has the smaller MTU.
    pub path_mtu: Option<u32>,
    /// The reason for TCP, if the path is TCP, or the reason why a required fast path is not
    /// available.
    pub reason: Option<Reason>,
    /// The error if the server cannot be reached over TCP either.
    pub error: Option<String>,
    /// The measurement over TCP.
    pub tcp: Option<Measured>,
    /// The measurement over the fast path.
    pub fast: Option<Measured>,
    /// The measurement of SENDs over a connection without calls. Their round trip is a lower bound
    /// for the latency of any call over this path.
    pub bare: Option<Bare>,
    /// Why there is no connection without calls, although there is a fast path.
    pub not_bare: Option<String>,
    /// Rates of the same transfers over TCP, over the fast path and without calls. Transfers for
    /// which there was no time are left out.
    pub rates: Vec<Rates>,
    /// Why there is no measurement, or why the measurement ended early. `None` if the measurement
    /// succeeded.
    pub not_measured: Option<String>,
    /// How calls over the fast path failed during the measurement. A program's calls would fail in
    /// the same way. `None` if the measurement succeeded, or no connection of the fast path was
    /// lost.
    pub fast_failed: Option<String>,
}

/// The measurement of a connection that carries SENDs and WRITEs without calls.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Bare {
    /// This host's device.
    pub device: String,
    /// The server's address.
    pub place: String,
    /// Number of timed SENDs of 64 bytes, each answered by a SEND.
    pub sends: u32,
    /// The median round trip of the SENDs in microseconds.
    pub latency_median_us: f64,
    /// The 99th percentile of the SENDs' round trips in microseconds.
    pub latency_p99_us: f64,
    /// Bandwidth in MiB/s that the device's fastest active port claims. `None` if the port claims
    /// no bandwidth.
    pub claimed_mib_s: Option<f64>,
}

/// The direction of a measurement's payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum Direction {
    /// To the server and back: a call with payload in both directions, or a SEND in each direction.
    Both,
    /// To the server: requests, or WRITEs.
    Up,
    /// From the server: replies, or WRITEs.
    Down,
}

/// Rates of the same transfer over each way, in operations per second. An operation is a call, a
/// WRITE, or a SEND that is answered by a SEND. With one operation in flight, the difference
/// between the durations with and without calls is the cost of the layers that only calls pass.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Rates {
    /// The direction of the payload.
    pub direction: Direction,
    /// Bytes of payload. A call's payload is on the heap.
    pub bytes: u32,
    /// Number of operations in flight.
    pub in_flight: u32,
    /// Transfers without calls. `None` if there is no connection without calls, or no memory for
    /// transfers of this length.
    pub bare_per_s: Option<f64>,
    /// Calls over the fast path.
    pub fast_per_s: Option<f64>,
    /// Calls over TCP.
    pub tcp_per_s: Option<f64>,
}

/// An address that a server offers.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Offered {
    /// The path that leads to the address.
    pub path: Path,
    /// The address as text.
    pub place: String,
    /// The IP address and port. `None` if the place has none, as on shared memory.
    pub addr: Option<SocketAddr>,
}

/// A fabric that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Refused {
    /// The fabric's path.
    pub path: Path,
    /// Why the fabric cannot be used.
    pub reason: Reason,
}

/// A short measurement of one path, with unary calls to the transport's own service.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Measured {
    /// Number of timed calls, with 64 bytes in each direction.
    pub calls: u32,
    /// The median round trip of the calls in microseconds.
    pub latency_median_us: f64,
    /// The 99th percentile of the calls' round trips in microseconds.
    pub latency_p99_us: f64,
    /// Throughput to the server in MiB/s, in messages of 1 MiB, four at a time.
    pub upload_mib_s: f64,
    /// Throughput from the server in MiB/s, in messages of 1 MiB, four at a time.
    pub download_mib_s: f64,
}

/// A step of the diagnosis.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Step {
    /// The attempted step.
    pub name: String,
    /// Duration in microseconds.
    pub micros: u64,
    /// Why the step failed, with the code that the transport would give. `None` if the step
    /// succeeded.
    pub reason: Option<Reason>,
    /// The result, if there is more to report than success.
    pub detail: String,
}

impl Step {
    /// Whether the step succeeded.
    pub fn ok(&self) -> bool {
        self.reason.is_none()
    }
}
