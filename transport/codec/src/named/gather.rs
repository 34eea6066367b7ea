//! The first message of a body whose field is to land in an application buffer. The message is kept
//! in the parts in which it arrived, however short they are.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tonic_rdma_memory::Landed;

use crate::land_in::Claimed;

/// A message that is being received.
#[derive(Debug)]
pub(crate) struct Gather {
    pub(crate) claimed: Arc<Claimed>,
    pub(crate) parts: Vec<Landed>,
    /// Whether a part of the message's header has been read but not all of it. The part is kept
    /// here instead of being passed on.
    pub(crate) begun: bool,
}

/// The state that remains of a [`Gather`] once its message is complete and the decoder owns the
/// buffer.
#[derive(Debug, Default)]
pub(crate) struct Gathered {
    /// Bytes that the decoder copies to the buffer.
    pub(crate) copied: Option<Arc<AtomicU64>>,
    /// Whether nothing else of the body can land in the buffer, so that the stream may release the
    /// buffer.
    pub(crate) lets_go: bool,
}

impl Gather {
    /// Appends a part. Consecutive parts in the buffer become one part.
    pub(crate) fn push(&mut self, part: Landed) {
        let lease = &self.claimed.lease;
        let both = self.parts.last().and_then(|last| lease.range_of(last));
        if let (Some(before), Some(now)) = (both, lease.range_of(&part))
            && before.end == now.start
            && let Some(joined) = lease.view(before.start..now.end)
        {
            self.parts.pop();
            self.parts.push(joined.into());
        } else if !part.is_empty() {
            self.parts.push(part);
        }
    }
}
