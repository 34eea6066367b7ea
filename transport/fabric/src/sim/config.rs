//! The settings of a simulated network, and its counts.

use std::time::Duration;

use crate::sim::faults::injected_bugs::InjectedBug;

/// How a network behaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimConfig {
    /// The seed of all random numbers. Default 1.
    pub seed: u64,
    /// Polls by which a work request, and then its completion, is delayed at most. 0, the default:
    /// everything is delivered when the doorbell is rung.
    pub delay: u32,
    /// Longest message in bytes. Default 1 GiB, which is what InfiniBand has, less one bit.
    pub max_msg: usize,
    /// Time by which a work request, and then its completion, is delayed at most, in whole
    /// milliseconds. Default 0.
    pub latency: Duration,
    /// One of this many arrivals wakes nobody: it is found with the next one, or by a timer. 0, the
    /// default: none is lost.
    pub lost_wakeups: u32,
    /// One of this many arrivals wakes the sender too, needlessly. 0, the default: never.
    pub idle_wakeups: u32,
    /// On one of this many links, work that has arrived when the link dies is not reported as done.
    /// 0, the default: never.
    pub flushed: u32,
    /// The bytes of one of this many WRITEs arrive in any order, some of them only when the RECV
    /// of a message behind it completes. 0, the default: never.
    pub unordered: u32,
    /// Whether memory that a peer has lent may be lent again. Default false.
    pub lends_on: bool,
    /// Maximum depth of a send queue; at least 4. Default: no maximum.
    pub send_queue: Option<u32>,
    /// Check the rules, see [`SimNet::breaches`](crate::sim::SimNet::breaches). Default false: it
    /// reads all payload three times.
    pub audit: bool,
    /// A bug to inject, and after how many occasions for it. Default none.
    pub injected_bug: Option<(InjectedBug, u64)>,
}

impl Default for SimConfig {
    fn default() -> Self {
        SimConfig {
            seed: 1,
            delay: 0,
            max_msg: 1 << 30,
            latency: Duration::ZERO,
            lost_wakeups: 0,
            idle_wakeups: 0,
            flushed: 0,
            unordered: 0,
            lends_on: false,
            send_queue: None,
            audit: false,
            injected_bug: None,
        }
    }
}

/// Counts over the whole network since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SimStats {
    /// Times that queued work was handed to a device.
    pub doorbells: u64,
    /// SENDs handed to a peer.
    pub sends: u64,
    /// WRITEs tried.
    pub writes: u64,
    /// Their bytes.
    pub write_bytes: u64,
    /// Leases that were given.
    pub leases: u64,
    /// The part of those leases whose memory a peer had lent.
    pub lent_on: u64,
    /// Completions reported, of either kind.
    pub completions: u64,
    /// SENDs that found no RECV posted. Anything but 0 is a bug in flow control (R2).
    pub receiver_not_ready: u64,
    /// WRITEs that the peer's table did not allow.
    pub remote_access_errors: u64,
    /// Link ends made.
    pub links: u64,
}
