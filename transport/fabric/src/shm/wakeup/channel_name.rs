//! The name of a channel in a handshake.

use crate::shm::wakeup::event_fd::ChannelEnd;

/// The connecting end's name for a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChannelName {
    /// The number that the maker gave the channel.
    pub(crate) number: u64,
    /// The runtime of the connecting end.
    pub(crate) runtime: u64,
    /// The end of the channel that the connecting process has.
    pub(crate) end: ChannelEnd,
}
