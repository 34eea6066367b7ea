//! The sizes of a connection, derived from its pool.

use std::sync::Arc;
use std::time::Duration;

use tonic_rdma_fabric::{LinkConfig, Takes};
use tonic_rdma_memory::Pool;
use tonic_rdma_proto::{Config, HEADERS, KeepAlive};

use crate::land_in::allocators::Allocators;

/// Bytes of a staging block, which is the longest WRITE of memory that is not pinned.
const STAGING_BLOCK: usize = 64 * 1024;

/// Maximum number of bulk bytes that a stream may have unread. The limit is half of the landing
/// memory if that is less. With a lot of landing memory, a single message may be longer: up to a
/// quarter of the landing memory, and at most [`MAX_WHOLE`]. A longer message lands in parts.
const BULK_WINDOW: usize = 32 << 20;
/// Maximum length in bytes of a message that lands in one piece.
const MAX_WHOLE: usize = 256 << 20;
/// Landing memory is allocated in units of this many bytes.
const GRANULE: u32 = 4096;
/// Maximum number of a connection's standing grants. Each standing grant has room for one message,
/// so this number of messages may be in flight before the sender has to send a REQUEST.
const MAX_STANDING: usize = 8;
/// Minimum bytes of landing memory. With less, a connection could not receive everything that the
/// protocol may send.
const MIN_LANDING: usize = 256 * 1024;

/// The sizes of one connection.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionConfig {
    /// The protocol's limits. The hello carries the limits that the peer must know.
    pub(crate) proto: Config,
    /// The link's slots and queues.
    pub(crate) link: LinkConfig,
    /// Maximum number of staging blocks, and the bytes of each.
    pub(crate) staging: (usize, usize),
    /// Bytes of landing memory that the connection may lease at a time.
    pub(crate) landing: usize,
    /// Whether received payload is copied to the heap before it is delivered.
    pub(crate) copy_on_delivery: bool,
    /// Allocators of buffers for requests to land in (server).
    pub(crate) allocators: Option<Arc<Allocators>>,
}

/// Number of RECVs of a connection at rest, each with room for a small call's message. The RECVs
/// and one SEND slot together take 8 KiB of pinned memory.
const REST_RECVS: u32 = 6;
const REST_RECV_SIZE: u32 = 1024;
/// Bytes of the SEND slot of a connection at rest.
const REST_SEND_SIZE: u32 = 2048;

/// Minimum of a keep-alive's interval, and of its time limit.
const MIN_KEEP_ALIVE: Duration = Duration::from_millis(10);
/// tonic's default time limit for the answer to a keep-alive ping.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// tonic's keep-alive settings of an endpoint or a server, for the fast path.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KeepAliveSettings {
    /// The interval of pings. `None` turns keep-alive off.
    pub(crate) interval: Option<Duration>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) while_idle: bool,
}

/// Control memory that a busy connection has in addition to the memory of a connection at rest, if
/// the pool can spare it.
struct Shape {
    /// Bytes of a SEND or RECV slot.
    slot: u32,
    recvs: u32,
    sends: u32,
    /// Maximum number of staging blocks, and the bytes of each.
    staging: (usize, usize),
}

/// The shapes, the largest first. A busy connection has 408, 164 or 82 KiB, including the 8 KiB
/// that it has at rest. A shape and [`REST_RECVS`] together have at most 31 RECVs, because
/// Soft-RoCE's queue takes one page for up to 31 RECVs, and two pages for more.
const SHAPES: [Shape; 3] = [
    Shape { slot: 4096, recvs: 25, sends: 11, staging: (4, STAGING_BLOCK) },
    Shape { slot: 4096, recvs: 15, sends: 8, staging: (2, 32 * 1024) },
    Shape { slot: 2048, recvs: 13, sends: 8, staging: (2, 16 * 1024) },
];

impl Shape {
    fn busy(&self) -> usize {
        let rest = REST_RECVS * REST_RECV_SIZE + REST_SEND_SIZE;
        let slots = self.slot * (self.recvs + self.sends);
        (rest + slots) as usize + self.staging.0 * self.staging.1
    }
}

impl ConnectionConfig {
    /// Picks the largest shape with which the pool's control memory has room for four busy
    /// connections. If no shape fits four times, picks the smallest shape.
    ///
    /// `grows` says that slots are added and removed with the load. Otherwise, as on shared memory,
    /// all RECVs are posted from the start, outside the control memory. One SEND slot is then
    /// enough, because the link does work at the moment when the work is queued.
    ///
    /// `pinned` is the number of bytes that the connection may pin, including control memory. This
    /// limit does not reduce landing memory below [`MIN_LANDING`].
    pub(crate) fn for_pool(pool: &Pool, grows: bool, pinned: Option<usize>) -> Self {
        let sizes = pool.config();
        let shape = SHAPES
            .iter()
            .find(|s| s.busy() * 4 <= sizes.control)
            .unwrap_or(&SHAPES[SHAPES.len() - 1]);
        let landing = match pinned {
            Some(pinned) => sizes.landing.min(pinned.saturating_sub(shape.busy()).max(MIN_LANDING)),
            None => sizes.landing,
        };
        Self::sized(shape, grows, landing)
    }

    /// Sets the length of the longest header block that is received, in bytes, clamped to the range
    /// that the protocol allows.
    pub(crate) fn headers(&mut self, bytes: Option<u32>) {
        if let Some(bytes) = bytes {
            self.proto.max_headers = bytes.clamp(*HEADERS.start(), *HEADERS.end());
        }
    }

    /// Sets the keep-alive, if the program has asked for one.
    pub(crate) fn keep_alive(&mut self, settings: KeepAliveSettings) {
        self.proto.keep_alive = settings.interval.map(|interval| KeepAlive {
            interval: interval.max(MIN_KEEP_ALIVE),
            timeout: settings.timeout.unwrap_or(KEEP_ALIVE_TIMEOUT).max(MIN_KEEP_ALIVE),
            while_idle: settings.while_idle,
        });
    }

    /// Sets the kinds of memory that this side accepts from its peer over shared memory.
    pub(crate) fn takes(&mut self, takes: Takes) {
        self.link.takes = takes;
        self.proto.takes_lent = takes.lent;
    }

    /// Sets whether received payload is copied before it is delivered. If payload is copied, this
    /// side borrows nothing from the peer.
    pub(crate) fn copy_on_delivery(&mut self, copy: bool) {
        self.copy_on_delivery = copy;
        if copy {
            self.takes(Takes { lent: false, ..self.link.takes });
        }
    }

    /// Makes requests land in application buffers.
    pub(crate) fn land_in(&mut self, allocators: &Arc<Allocators>) {
        if !allocators.is_empty() {
            self.proto.names_requests = true;
            self.allocators = Some(allocators.clone());
        }
    }

    fn sized(shape: &Shape, grows: bool, landing: usize) -> Self {
        let (recv_slots, recv_extra) = match grows {
            true => (REST_RECVS, shape.recvs),
            // These are the slots of a ring, whose memory is not pinned.
            false => (shape.recvs.next_multiple_of(16), 0),
        };
        let rest = |size: u32| if grows && size < shape.slot { size } else { 0 };
        let (rest_recv_size, rest_send_size) = (rest(REST_RECV_SIZE), rest(REST_SEND_SIZE));
        let capped = |max: usize, share: usize| max.min((landing / share).max(64 * 1024)) as u32;
        let default = Config::default();
        let standing_max = capped(default.standing_max as usize, 16);
        ConnectionConfig {
            proto: Config {
                slot_size: shape.slot,
                rest_slot_size: rest_recv_size,
                recv_slots: recv_slots as u16,
                max_recvs: (recv_slots + recv_extra) as u16,
                max_stream_window: capped(default.max_stream_window as usize, 4),
                // Add room for the header of a message of maximum length.
                bulk_window: capped(BULK_WINDOW, 2) + GRANULE,
                whole: capped(MAX_WHOLE, 4) + GRANULE,
                standing_max,
                // Together the standing grants take at most a quarter of the landing memory.
                standing_grants: (landing / 4 / standing_max.max(1) as usize).clamp(1, MAX_STANDING)
                    as u8,
                ..default
            },
            link: LinkConfig {
                recv_slots,
                recv_extra,
                slot_size: shape.slot,
                rest_recv_size,
                rest_send_size,
                send_slots: 1,
                busy_send_slots: if grows { shape.sends } else { 0 },
                staging: 0,
                ..LinkConfig::default()
            },
            staging: shape.staging,
            landing,
            copy_on_delivery: false,
            allocators: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tonic_rdma_memory::{HeapRegistrar, PoolConfig};

    use super::*;

    #[test]
    fn shapes_follow_the_pool() {
        let options = |total, grows| {
            let pool =
                Pool::new(PoolConfig::default().total(total), Arc::new(HeapRegistrar::default()));
            ConnectionConfig::for_pool(&pool.unwrap(), grows, None)
        };
        for (total, busy) in [(8 << 20, 408), (4 << 20, 164), (2 << 20, 82)] {
            for grows in [true, false] {
                let ConnectionConfig { proto, link, staging, .. } = options(total, grows);
                proto.check().unwrap();
                link.check().unwrap();
                let extra = ((link.recv_extra + link.busy_send_slots) * link.slot_size) as usize;
                if grows {
                    assert_eq!(link.control_bytes(), 8 * 1024);
                    assert_eq!(link.control_bytes() + extra + staging.0 * staging.1, busy * 1024);
                } else {
                    assert_eq!((link.block_bytes(), extra), (link.slot_size as usize, 0));
                }
                assert_eq!(u32::from(proto.recv_slots), link.recv_slots);
                assert_eq!(u32::from(proto.max_recvs), link.max_recvs());
            }
        }
    }

    #[test]
    fn a_keep_alive_is_tonics() {
        let pool = Pool::new(PoolConfig::default(), Arc::new(HeapRegistrar::default())).unwrap();
        let mut options = ConnectionConfig::for_pool(&pool, true, None);
        let second = Duration::from_secs(1);
        let settings = KeepAliveSettings { timeout: Some(second), ..Default::default() };
        options.keep_alive(settings);
        assert_eq!(options.proto.keep_alive, None, "no interval, no keep-alive");
        let timeout = Duration::from_secs(20);
        options.keep_alive(KeepAliveSettings { interval: Some(second), ..Default::default() });
        let keep_alive = KeepAlive { interval: second, timeout, while_idle: false };
        assert_eq!(options.proto.keep_alive, Some(keep_alive));
        options.keep_alive(KeepAliveSettings { interval: Some(Duration::ZERO), ..settings });
        assert_eq!(options.proto.keep_alive.unwrap().interval, MIN_KEEP_ALIVE);
    }

    #[test]
    fn what_a_connection_may_pin_bounds_its_landing_memory() {
        let pool = Pool::new(PoolConfig::default(), Arc::new(HeapRegistrar::default())).unwrap();
        let landing = |pinned| ConnectionConfig::for_pool(&pool, true, pinned).landing;
        assert_eq!(landing(None), 32 << 20);
        assert_eq!(landing(Some(1 << 20)), (1 << 20) - 408 * 1024);
        assert_eq!(landing(Some(0)), MIN_LANDING);
    }
}
