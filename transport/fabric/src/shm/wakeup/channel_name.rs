//! How the ends of a handshake name a channel.

use crate::shm::wakeup::event_fd::End;

/// A channel, as the connecting end names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChannelName {
    /// The number that its maker gave it.
    pub(crate) number: u64,
    /// The runtime of the connecting end.
    pub(crate) runtime: u64,
    /// Which end of the channel the connecting end has.
    pub(crate) end: End,
}
