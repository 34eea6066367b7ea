//! The size of a bare connection.

use crate::link_config::LinkConfig;

/// Bytes of a slot.
pub(super) const SLOT: usize = 512;
/// SEND slots, and RECVs.
pub(super) const SLOTS: usize = 24;
/// Echoes in flight, at most: the other end has RECVs for them and a few more.
pub const MAX_ECHOES: usize = 16;

/// The queues of a bare connection: 24 KiB of control memory.
pub fn config() -> LinkConfig {
    LinkConfig {
        recv_slots: SLOTS as u32,
        slot_size: SLOT as u32,
        send_slots: SLOTS as u32,
        staging: 0,
        ..LinkConfig::default()
    }
}

/// The memory that one end grants to the other, and the work that it does on request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Places for WRITEs, at most 16. WRITEs in flight go to different ones, as messages that have
    /// not been read yet do.
    pub places: usize,
    /// Bytes of each: the longest WRITE. The accepting end grants no longer ones than it was
    /// granted.
    pub place_len: usize,
    /// The part of the pool's landing memory that they may take together, as a divisor: 1 /
    /// `landing_part`. Where that is less than one place, places are shorter. The rest is for
    /// calls. A bare connection keeps its memory while others wait.
    pub landing_part: usize,
    /// Bytes of memory that WRITEs are taken from, in turn; as many as one WRITE has if that is
    /// more.
    pub source_len: usize,
    /// Bytes that one request may have this end WRITE, and that this end asks for at a time.
    pub requested: u64,
    /// WRITEs that one request may have this end do, and that this end asks for at a time: a WRITE
    /// of one byte takes as long as one of a page.
    pub requested_writes: u64,
}

impl Default for Limits {
    /// 8 places of 1 MiB, an eighth of the landing memory, one source for all WRITEs, and 1 GiB and
    /// 16,384 WRITEs a request.
    fn default() -> Self {
        Self {
            places: 8,
            place_len: 1 << 20,
            landing_part: 8,
            source_len: 0,
            requested: 1 << 30,
            requested_writes: 1 << 14,
        }
    }
}
