//! The sizes of a connection and its queues, and when its device retransmits.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

/// The sizes of a connection: its slots, its staging and its queues. Each end chooses its own
/// sizes, but a SEND must fit the peer's `slot_size`, and a peer may have no more SENDs in flight
/// than this end has RECVs posted (R2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkConfig {
    /// Number of RECVs posted from the start. At least 1. Default 64.
    pub recv_slots: u32,
    /// Number of RECVs that [`Link::grow`](crate::Link::grow) may add. The memory of these RECVs is
    /// not part of the block. Default 0.
    pub recv_extra: u32,
    /// The size in bytes of one RECV slot, and of one SEND slot. A multiple of 64. Default 1024.
    pub slot_size: u32,
    /// The size in bytes of each RECV posted from the start. A connection at rest has only these
    /// RECVs. A multiple of 64 less than `slot_size`, or 0, which means `slot_size`. Shorter RECVs
    /// are left out while at least as many extra RECVs are posted
    /// ([`Link::repost`](crate::Link::repost)). Default 0.
    pub rest_recv_size: u32,
    /// The size in bytes of each SEND slot in the block, as long as
    /// [`Link::grow_sends`](crate::Link::grow_sends) has not replaced the slots. A multiple of 64
    /// less than `slot_size`, or 0, which means `slot_size`. Default 0.
    pub rest_send_size: u32,
    /// Number of SEND slots in the block. At least 1. Default 64.
    pub send_slots: u32,
    /// Number of SEND slots of a busy connection: [`Link::grow_sends`](crate::Link::grow_sends)
    /// leases them to replace the slots in the block. More than `send_slots`, and only without
    /// staging. 0 means that the number of SEND slots is fixed. Default 0.
    pub busy_send_slots: u32,
    /// The size in bytes of the staging area after the SEND slots. Default 256 KiB.
    pub staging: usize,
    /// Number of work requests that may be in flight at once, SENDs and WRITEs together. At least
    /// four. If memory is short, a connection gets a queue of at most 8 requests. Default 31: at
    /// 400 Gb/s, 31 WRITEs of 64 KiB take 40 us. Soft-RoCE rounds the size of a queue up to a power
    /// of two and leaves one place empty. On Soft-RoCE this queue takes 20 KiB of the process's
    /// memory.
    pub send_queue: u32,
    /// Longest payload in bytes that should travel inside the work request itself. The device may
    /// grant less, as [`Caps::max_inline`](crate::Caps::max_inline) says. Default 256.
    pub inline: u32,
    /// Maximum time for which an end polls for a message before it sleeps until the peer or the
    /// device wakes it. Whether and how long an end polls within this limit depends on the time of
    /// a wake-up on this machine. Over shared memory, an end does not poll for a peer on its own
    /// processor. Over verbs, an end does not poll if the process may use only one processor.
    /// Default 2 ms. Zero means that the end never polls.
    pub busy_poll_limit: Duration,
    /// Maximum number of entries of a completion queue. Connections of a device share a queue that
    /// has room for all completions of their send queues and RECVs. When the room is used up,
    /// another queue is opened. Devices may have a lower limit. At least `send_queue` plus all
    /// RECVs plus one RECV for the first message. Default 32,768; verbs only.
    pub max_cq_entries: u32,
    /// Time after which an unacknowledged packet is sent again, rounded up to 4.096 us times a
    /// power of two, within [`ACK_TIMEOUTS`]. Default 268 ms. InfiniBand and RoCE only; on iWARP,
    /// TCP decides.
    pub ack_timeout: Duration,
    /// Number of times that a packet is sent again before the link is lost. The connecting side's
    /// value holds at both ends. Clamped to 1 to 6, because devices may treat 7 as infinite.
    /// Default 6. InfiniBand and RoCE only.
    pub ack_retries: u8,
    /// Type of service of the packets: the byte of the IP header with the differentiated services
    /// code point in its upper six bits. On InfiniBand and RoCE v2 the connecting side's value
    /// holds at both ends, but a device may ignore this value. `None` means the system's default.
    /// Verbs only.
    pub type_of_service: Option<u8>,
    /// The address of this host to connect from. The connection leaves through the device with this
    /// address, which must be the device that `connect` is called on. With `None`, the route
    /// decides. Verbs only.
    pub source: Option<IpAddr>,
    /// The memory that this end accepts from its peer, in addition to chunks to WRITE to. Default:
    /// none. Shared memory only.
    pub takes: Takes,
}

/// Memory that an end of a connection over shared memory accepts from its peer, in addition to
/// chunks to WRITE to. The greeting tells the peer which memory this end accepts. A peer that gives
/// memory of another kind breaks a rule (R22).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Takes {
    /// Memory that the peer lends, so that this end reads messages in place.
    pub lent: bool,
    /// Buffers of the peer's program, into which this end WRITEs.
    pub named: bool,
}

impl Takes {
    /// All kinds of memory.
    pub const ALL: Takes = Takes { lent: true, named: true };
}

/// The range to which an ACK timeout is clamped: 1 ms to 17 s.
pub const ACK_TIMEOUTS: RangeInclusive<Duration> =
    Duration::from_nanos(4096 << 8)..=Duration::from_nanos(4096 << 22);

/// With this timeout and [`ACK_RETRIES`], a device that waits one timeout for each try detects a
/// dead path within about two seconds, and any device within 7.5 s. rdma_cm's default is 2.1 s for
/// each try. With a much shorter time, a software device on a busy host would retransmit packets
/// that are only late.
const ACK_TIMEOUT: Duration = Duration::from_nanos(4096 << 16);
const ACK_RETRIES: u8 = 6;

/// The time of two wake-ups, one at each end, on the slowest virtual machines. On other machines an
/// end stops polling much earlier.
const BUSY_POLL_LIMIT: Duration = Duration::from_millis(2);

impl Default for LinkConfig {
    fn default() -> Self {
        LinkConfig {
            recv_slots: 64,
            recv_extra: 0,
            slot_size: 1024,
            rest_recv_size: 0,
            rest_send_size: 0,
            send_slots: 64,
            busy_send_slots: 0,
            staging: 256 * 1024,
            send_queue: 31,
            inline: 256,
            busy_poll_limit: BUSY_POLL_LIMIT,
            max_cq_entries: 1 << 15,
            ack_timeout: ACK_TIMEOUT,
            ack_retries: ACK_RETRIES,
            type_of_service: None,
            source: None,
            takes: Takes::default(),
        }
    }
}

impl LinkConfig {
    /// Number of RECVs that may be posted at once, including extra RECVs.
    pub fn max_recvs(&self) -> u32 {
        self.recv_slots.saturating_add(self.recv_extra)
    }

    /// Maximum number of SEND slots.
    pub fn max_sends(&self) -> u32 {
        self.send_slots.max(self.busy_send_slots)
    }

    /// The size in bytes of each RECV posted from the start.
    pub fn rest_recv(&self) -> u32 {
        if self.rest_recv_size == 0 { self.slot_size } else { self.rest_recv_size }
    }

    /// The size in bytes of each SEND slot in the block before `Link::grow_sends`.
    pub fn rest_send(&self) -> u32 {
        if self.rest_send_size == 0 { self.slot_size } else { self.rest_send_size }
    }

    /// The size of the RECV ring in bytes.
    pub fn recv_bytes(&self) -> usize {
        self.recv_slots as usize * self.rest_recv() as usize
    }

    /// The length in bytes of [`Link::block_mut`](crate::Link::block_mut) before
    /// `Link::grow_sends`: SEND slots, then staging.
    pub fn block_bytes(&self) -> usize {
        self.send_slots as usize * self.rest_send() as usize + self.staging
    }

    /// The size in bytes of the whole control block, which one connection takes from the pool's
    /// control budget. A connection over shared memory takes only
    /// [`block_bytes`](Self::block_bytes), because its RECVs lie in the ring.
    pub fn control_bytes(&self) -> usize {
        self.recv_bytes() + self.block_bytes()
    }

    /// The exponent n of the ACK timeout in the InfiniBand specification, 4.096 us x 2^n.
    pub fn ack_exponent(&self) -> u8 {
        let time = self.ack_timeout.clamp(*ACK_TIMEOUTS.start(), *ACK_TIMEOUTS.end());
        time.as_nanos().div_ceil(4096).next_power_of_two().ilog2() as u8
    }

    /// Maximum time after which an InfiniBand or RoCE device ends a link whose peer does not
    /// acknowledge. Each try takes up to four ACK timeouts (InfiniBand Architecture Specification,
    /// volume 1, 9.7.6.1.3).
    pub fn ack_limit(&self) -> Duration {
        let timeout = Duration::from_nanos(4096 << self.ack_exponent());
        timeout * 4 * (u32::from(self.ack_retries.clamp(1, 6)) + 1)
    }

    /// Checks that all numbers are within their bounds.
    ///
    /// # Errors
    /// The error names the number that is out of bounds, and the bounds.
    pub fn check(&self) -> Result<(), String> {
        if self.recv_slots == 0 || self.recv_slots > 1 << 16 {
            return Err(format!("recv_slots is {}, must be 1 to 65536", self.recv_slots));
        }
        if self.max_recvs() > 1 << 16 {
            let all = self.max_recvs();
            return Err(format!(
                "recv_slots and recv_extra are {all}, must be 65536 together at most"
            ));
        }
        if self.send_slots == 0 || self.send_slots > 1 << 16 {
            return Err(format!("send_slots is {}, must be 1 to 65536", self.send_slots));
        }
        let busy = self.busy_send_slots;
        if busy > 0 && (busy <= self.send_slots || busy > 1 << 16 || self.staging > 0) {
            return Err(format!(
                "busy_send_slots is {busy}, must be 0, or more than send_slots, up to 65536, and \
                 without staging"
            ));
        }
        if self.slot_size == 0 || !self.slot_size.is_multiple_of(64) || self.slot_size > 1 << 20 {
            return Err(format!(
                "slot_size is {}, must be a multiple of 64 up to 1 MiB",
                self.slot_size
            ));
        }
        for (name, size) in
            [("rest_recv_size", self.rest_recv_size), ("rest_send_size", self.rest_send_size)]
        {
            if !size.is_multiple_of(64) || (size > 0 && size >= self.slot_size) {
                return Err(format!(
                    "{name} is {size}, must be 0, or a multiple of 64 below slot_size"
                ));
            }
        }
        if self.staging > 1 << 30 {
            return Err(format!("staging is {} bytes, must be at most 1 GiB", self.staging));
        }
        if !(4..=1 << 15).contains(&self.send_queue) {
            return Err(format!("send_queue is {}, must be 4 to 32768", self.send_queue));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ack_timeouts_are_rounded_up_to_what_devices_know() {
        let exponent =
            |ack_timeout| LinkConfig { ack_timeout, ..LinkConfig::default() }.ack_exponent();
        assert_eq!(LinkConfig::default().ack_exponent(), 16);
        assert_eq!(exponent(ACK_TIMEOUT + Duration::from_nanos(1)), 17);
        assert_eq!(exponent(Duration::ZERO), 8);
        assert_eq!(exponent(Duration::from_secs(1)), 18);
        assert_eq!(exponent(Duration::MAX), 22);
    }
}
