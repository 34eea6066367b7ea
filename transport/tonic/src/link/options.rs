//! Sizes of a connection, taken from the pool that it draws on.

use std::time::Duration;
use tonic_rdma_fabric::{LinkConfig, link::one_processor};
use tonic_rdma_memory::Pool;
use tonic_rdma_proto::{Config, DEAD_PEER, HEADERS};

/// Bytes of a staging block: the longest WRITE of memory that is not pinned.
const STAGING_BLOCK: usize = 64 * 1024;

/// What a stream may have unread, where that is no more than half of the landing memory. One message may be longer: a
/// quarter of that memory, and no more than [`WHOLE`].
const BULK_WINDOW: usize = 32 << 20;
const WHOLE: usize = 256 << 20;
const GRANULE: u32 = 4096;
/// Standing grants of a connection, at most: so many messages of their length may be on their way at a time before one has
/// to ask.
const STANDING: usize = 8;
/// With less a connection could not receive what the protocol has to be able to send.
const LEAST_LANDING: usize = 256 * 1024;

/// Sizes of one connection.
#[derive(Clone, Debug)]
pub(crate) struct LinkOptions {
    /// The protocol's limits; what the peer must know of them goes into the hello.
    pub(crate) proto: Config,
    /// Slots and queues.
    pub(crate) link: LinkConfig,
    /// Bytes of one staging block.
    pub(crate) staging_block: usize,
    /// This process may use one processor only.
    pub(crate) alone: bool,
    /// Bytes of landing memory that the connection may lease at a time.
    pub(crate) landing: usize,
    /// What lands is copied to the heap before it is handed up.
    pub(crate) copy_on_delivery: bool,
}

/// Slot size, RECV slots, SEND slots, staging blocks, bytes of a staging block.
type Shape = (u32, u32, u32, usize, usize);

/// From the largest down: 448, 160 and 80 KiB of control memory.
const SHAPES: [Shape; 3] =
    [(4096, 32, 16, 4, STAGING_BLOCK), (4096, 16, 8, 2, 32 * 1024), (2048, 16, 8, 2, 16 * 1024)];

impl LinkOptions {
    /// The largest shape of which the pool's control memory holds at least eight; in the smallest pool the smallest
    /// shape, whatever it holds.
    ///
    /// `pinned`: what the connection may pin, control memory included; at least [`LEAST_LANDING`] bytes are left for
    /// landing.
    pub(crate) fn for_pool(pool: &Pool, pinned: Option<usize>) -> Self {
        let sizes = pool.config();
        let mut options = Self::sized(sizes.control, sizes.landing);
        if let Some(pinned) = pinned {
            let landing = pinned.saturating_sub(options.link.control_bytes()).max(LEAST_LANDING);
            options = Self::sized(sizes.control, sizes.landing.min(landing));
        }
        options
    }

    /// Sets the longest header block that is received, if one is given, as near as may be.
    pub(crate) fn headers(&mut self, bytes: Option<u32>) {
        if let Some(bytes) = bytes {
            self.proto.max_headers = bytes.clamp(*HEADERS.start(), *HEADERS.end());
        }
    }

    /// Sets how long a peer may be silent, if that is given, as near as may be.
    pub(crate) fn dead_peer(&mut self, time: Option<Duration>) {
        if let Some(time) = time {
            self.proto.dead_peer = time.clamp(*DEAD_PEER.start(), *DEAD_PEER.end());
        }
    }

    fn sized(control: usize, landing: usize) -> Self {
        let fits = |s: &&Shape| {
            let (slot, recv, send, blocks, block) = **s;
            (slot as usize * (recv + send) as usize + blocks * block) * 8 <= control
        };
        let (slot_size, recv_slots, send_slots, blocks, block) =
            *SHAPES.iter().find(fits).unwrap_or(&SHAPES[SHAPES.len() - 1]);
        let capped = |most: usize, share: usize| most.min((landing / share).max(64 * 1024)) as u32;
        let default = Config::default();
        let standing_max = capped(default.standing_max as usize, 16);
        LinkOptions {
            proto: Config {
                slot_size,
                recv_slots: recv_slots as u16,
                stream_window: capped(default.stream_window as usize, 4),
                // With room for the header of a message that fills it.
                bulk_window: capped(BULK_WINDOW, 2) + GRANULE,
                whole: capped(WHOLE, 4) + GRANULE,
                standing_max,
                // All together no more than a quarter.
                standing_grants: (landing / 4 / standing_max.max(1) as usize).clamp(1, STANDING) as u8,
                ..default
            },
            link: LinkConfig {
                recv_slots,
                slot_size,
                send_slots,
                staging: blocks * block,
                ..LinkConfig::default()
            },
            staging_block: block,
            alone: one_processor(),
            landing,
            copy_on_delivery: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_follow_the_pool() {
        let big = LinkOptions::sized(16 << 20, 32 << 20);
        assert_eq!(big.link.control_bytes(), 448 * 1024);
        let small = LinkOptions::sized(512 << 10, 1 << 20);
        assert_eq!(small.link.control_bytes(), 80 * 1024);
        for options in [big, small] {
            options.proto.check().unwrap();
            options.link.check().unwrap();
        }
    }
}
