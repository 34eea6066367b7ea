//! The transfers of a stream that are sent by WRITE, and the peer's memory that they are bound to.

use std::collections::VecDeque;

use super::alignment;
use crate::ids::GrantId;
use crate::payload::{Field, Payload};

/// A grant of the peer's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerGrant {
    pub(super) id: GrantId,
    pub(super) rkey: u32,
    pub(super) len: u32,
    pub(super) addr: u64,
    /// Bytes of a bound standing grant before `addr`, which are skipped and not part of `len`.
    pub(super) begin: u32,
    /// Bytes for which a WRITE has been handed out.
    pub(super) used: u32,
    /// Whether this is, or was, a standing grant.
    pub(super) standing: bool,
    /// Whether the peer has recalled the grant, which is then written before all others.
    pub(super) recalled: bool,
}

impl PeerGrant {
    /// Creates a grant that the peer has just given.
    pub(super) fn new(id: GrantId, standing: bool, rkey: u32, len: u32, addr: u64) -> Self {
        PeerGrant { id, rkey, len, addr, begin: 0, used: 0, standing, recalled: false }
    }
}

/// A piece of a body that is sent by WRITE.
#[derive(Debug)]
pub(super) struct Bulk {
    pub(super) payload: Payload,
    pub(super) end: bool,
    /// Whether memory has been bound or requested.
    pub(super) prepared: bool,
    /// Bytes that have been granted for the payload.
    pub(super) granted: u64,
    pub(super) len: u64,
    /// The time on the clock of [`WriteOrder`](super::write_order::WriteOrder) at which the
    /// transfer would be written completely. Set once the transfer can be written.
    pub(super) finish: Option<u64>,
    /// The transfer's begin in the peer's memory: see [`alignment`].
    pub(super) begin: u32,
    /// The field for which the peer may name memory, if it is known.
    pub(super) field: Option<Field>,
    pub(super) grants: VecDeque<PeerGrant>,
}

impl Bulk {
    /// Creates a transfer to a peer that requires the alignment `align`.
    pub(super) fn new(payload: Payload, end: bool, align: u16) -> Self {
        let (len, begin) = (payload.len() as u64, alignment::begin(&payload, align));
        let (field, grants) = (payload.field(), VecDeque::new());
        Bulk { payload, end, prepared: false, granted: 0, len, finish: None, begin, field, grants }
    }
}

/// A DONE to be sent after the last WRITE of its grant.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingDone {
    pub(super) grant: GrantId,
    pub(super) len: u32,
    /// The offset of the first byte in the grant.
    pub(super) begin: u32,
    pub(super) end: bool,
}

/// A REQUEST to be sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueuedRequest {
    pub(super) len: u64,
    pub(super) begin: u32,
    pub(super) field: Option<Field>,
}

/// The frames that transfers of the sending half still owe the peer.
#[derive(Debug, Default)]
pub(super) struct Transfers {
    pub(super) dones: VecDeque<PendingDone>,
    pub(super) requests: VecDeque<QueuedRequest>,
    /// The number of recalled grants in the output that are written before the grants of other
    /// streams.
    pub(super) urgent: u32,
}
