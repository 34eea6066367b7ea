//! Identifiers and codes that are plain numbers on the wire, and maps by stream id.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

/// Identifies a stream. The client opens streams with increasing ids, from 1.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct StreamId(pub(crate) u32);

impl StreamId {
    /// The number on the wire.
    pub fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {}", self.0)
    }
}

/// Identifies one grant of landing memory, from GRANT to its DONE or ABORT.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct GrantId(pub(crate) u32);

impl GrantId {
    /// The number on the wire.
    pub fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for GrantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "grant {}", self.0)
    }
}

/// Why a stream was reset. The numbers are the same as in HTTP/2 (RFC 9113 section 7), so gRPC's
/// mapping of reset codes to status codes applies unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ResetCode(pub u32);

impl ResetCode {
    /// The stream ended without an error, and the peer need not send the rest.
    pub const NO_ERROR: ResetCode = ResetCode(0x0);
    /// The sender of the reset had an internal error.
    pub const INTERNAL: ResetCode = ResetCode(0x2);
    /// The stream was refused before any processing, so that it is safe to retry.
    pub const REFUSED: ResetCode = ResetCode(0x7);
    /// The call has been cancelled.
    pub const CANCEL: ResetCode = ResetCode(0x8);
    /// The peer causes too much load.
    pub const ENHANCE_YOUR_CALM: ResetCode = ResetCode(0xb);
}

impl fmt::Display for ResetCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            ResetCode::NO_ERROR => f.write_str("no error"),
            ResetCode::INTERNAL => f.write_str("internal error"),
            ResetCode::REFUSED => f.write_str("refused"),
            ResetCode::CANCEL => f.write_str("cancelled"),
            ResetCode::ENHANCE_YOUR_CALM => f.write_str("too much asked for"),
            ResetCode(code) => write!(f, "reset code {code}"),
        }
    }
}

/// A hasher for stream ids and lease numbers. The peer may choose these numbers, but can have only
/// a limited number of streams and leases open, so collisions are harmless.
#[derive(Clone, Copy, Debug, Default)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.0 = (self.0 << 8) ^ u64::from(*b);
        }
    }
    fn write_u32(&mut self, n: u32) {
        let spread = u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = spread ^ (spread >> 32);
    }
}

/// A map by stream number.
pub(crate) type Ids<V> = HashMap<u32, V, BuildHasherDefault<IdHasher>>;

/// A map by stream id, for the driver's own state of each stream.
pub type StreamMap<V> = HashMap<StreamId, V, BuildHasherDefault<IdHasher>>;
