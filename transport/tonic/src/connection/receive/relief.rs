//! The copies of unread payload that the driver has still to make, over several turns (R20).

use std::collections::VecDeque;

use tonic_rdma_proto::StreamId;

/// The copies that the driver makes of what nobody reads.
#[derive(Debug, Default)]
pub(crate) struct Relief {
    /// The streams whose payload is copied, in their order.
    pub(super) streams: VecDeque<StreamId>,
    /// The number of bytes after which no other stream is copied.
    pub(super) want: usize,
    pub(super) copied: usize,
    /// A stream has waited for a period: with the last copy, that is over.
    pub(super) ends_stall: bool,
}

impl Relief {
    /// Whether the driver has to run again soon.
    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        !self.streams.is_empty()
    }

    /// What has landed for a lagging stream is to be copied, whatever else is.
    pub(super) fn add(&mut self, id: StreamId) {
        self.want = usize::MAX;
        if self.streams.back() != Some(&id) {
            self.streams.push_back(id);
        }
    }
}
