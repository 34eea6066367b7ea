//! The sizes of a bare connection.

use crate::link_config::LinkConfig;

/// Bytes of a slot.
pub(super) const SLOT: usize = 512;
/// Number of SEND slots, and of RECVs.
pub(super) const SLOTS: usize = 24;
/// Maximum number of echoes in flight. The other end has a RECV for each echo and a few more RECVs.
pub const MAX_ECHOES: usize = 16;

/// The queues of a bare connection, which take 24 KiB of control memory.
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
pub struct BareLimits {
    /// Number of places for WRITEs, at most 16. WRITEs in flight go to different places, like
    /// messages that have not been read yet.
    pub places: usize,
    /// Length in bytes of each place, which limits the longest WRITE. The accepting end grants
    /// places that are no longer than the connecting end's places.
    pub place_len: usize,
    /// All places together may take 1 / `landing_part` of the pool's landing memory. If that is
    /// less than one place, places are shorter. The rest of the landing memory is for calls,
    /// because a bare connection keeps its memory while calls wait.
    pub landing_part: usize,
    /// Bytes of source memory, parts of which WRITEs use in turn. At least as long as one WRITE.
    pub source_len: usize,
    /// Maximum bytes that one request may make this end WRITE, and that this end requests at a
    /// time.
    pub requested: u64,
    /// Maximum number of WRITEs that one request may make this end do, and that this end requests
    /// at a time. A WRITE of one byte takes as long as a WRITE of a page.
    pub requested_writes: u64,
}

impl Default for BareLimits {
    /// 8 places of 1 MiB in at most an eighth of the landing memory, one source for all WRITEs, and
    /// 1 GiB or 16,384 WRITEs a request.
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
