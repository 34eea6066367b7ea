//! The settings of a simulated network, its random numbers, its counters, and the bugs to inject.

use std::time::Duration;

/// The settings of a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimConfig {
    /// The seed of all random numbers. Default 1.
    pub seed: u64,
    /// Maximum number of polls by which a work request, and then its completion, is delayed. With
    /// 0, the default, all work is delivered when the doorbell rings.
    pub delay: u32,
    /// Maximum length of a message in bytes. Default 1 GiB, half of InfiniBand's maximum.
    pub max_msg: usize,
    /// Maximum time by which a work request, and then its completion, is delayed, in whole
    /// milliseconds. Default 0.
    pub latency: Duration,
    /// One in this many arrivals wakes nobody. The receiver finds such an arrival together with the
    /// next arrival, or when a timer fires. With 0, the default, no wake-up is lost.
    pub lost_wakeups: u32,
    /// One in this many arrivals also wakes the sender needlessly. 0, the default, means never.
    pub idle_wakeups: u32,
    /// On one in this many links, work that has arrived when the link dies is not reported as done.
    /// 0, the default, means never.
    pub flushed: u32,
    /// The bytes of one in this many WRITEs arrive in any order. Some of these bytes arrive only
    /// when the RECV of a later message completes. 0, the default, means never.
    pub unordered: u32,
    /// Whether send memory of pools may be lent. Memory that is registered for lending always may
    /// be. On simulated devices this setting decides, and the lending of the context has no effect.
    /// Default false.
    pub lends_pool: bool,
    /// Whether memory that a peer has lent may be lent on to others. Default false.
    pub lends_on: bool,
    /// Maximum depth of a send queue, at least 4. Default: no maximum.
    pub send_queue: Option<u32>,
    /// Whether the rules are checked: see [`SimNet::breaches`](crate::sim::SimNet::breaches).
    /// Default false, because checking reads all payload three times.
    pub audit: bool,
    /// A bug to inject, and the number of occasions to skip first. Default none.
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
            lends_pool: false,
            lends_on: false,
            send_queue: None,
            audit: false,
            injected_bug: None,
        }
    }
}

/// Counters for the whole network since it was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SimStats {
    /// Number of times that queued work was handed to a device.
    pub doorbells: u64,
    /// SENDs handed to a peer.
    pub sends: u64,
    /// WRITEs attempted.
    pub writes: u64,
    /// The number of bytes in all attempted WRITEs.
    pub write_bytes: u64,
    /// Leases that were given.
    pub leases: u64,
    /// The part of `leases` for memory that a peer had lent.
    pub lent_on: u64,
    /// Completions reported: of sent work and of received messages.
    pub completions: u64,
    /// SENDs that found no RECV posted. A number other than 0 shows a bug in flow control (R2).
    pub receiver_not_ready: u64,
    /// WRITEs that the peer's table did not allow.
    pub remote_access_errors: u64,
    /// Link ends created.
    pub links: u64,
}

/// A small seeded generator (splitmix64). The same seed gives the same run.
#[derive(Debug, Clone)]
pub(super) struct Rng(u64);

impl Rng {
    /// Creates a generator. `stream` distinguishes generators with the same seed.
    pub(super) fn new(seed: u64, stream: u64) -> Rng {
        let mut rng = Rng(seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95));
        rng.next();
        rng
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number from 0 to `max`, both included.
    pub(super) fn up_to(&mut self, max: u32) -> u32 {
        if max == 0 {
            return 0;
        }
        (self.next() % (u64::from(max) + 1)) as u32
    }

    /// Returns true once in `n` draws on average, and never if `n` is 0.
    pub(super) fn one_in(&mut self, n: u32) -> bool {
        n > 0 && self.next().is_multiple_of(u64::from(n))
    }
}

/// A bug that breaks a promise of the fabric once, or permanently where stated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum InjectedBug {
    /// From one completion on, the link reports no completions.
    LoseCompletions,
    /// A byte of a WRITE changes in transit.
    FlipWrite,
    /// The last byte of a SEND changes in transit.
    FlipSend,
    /// A WRITE lands after the SEND that follows it.
    LateWrite,
    /// A WRITE lands, and lands again after the SEND that follows it.
    RepeatWrite,
    /// A SEND is reported as done but does not arrive.
    LoseSend,
    /// A SEND arrives twice.
    RepeatSend,
    /// A RECV that is posted again is forgotten.
    LoseRepost,
    /// A registration is not ended.
    KeepRegistration,
    /// A lease is returned while its memory is read.
    ReturnEarly,
}
