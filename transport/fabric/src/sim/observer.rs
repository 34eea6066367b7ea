//! The events of a simulated network, for checkers and traces.

use std::fmt;

/// One end of a connection, by number. Ends are numbered from 0 in the order in which they are
/// made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndId(pub u64);

impl fmt::Display for EndId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "end {}", self.0)
    }
}

/// Something that happened. In the order of the numbers of one end, and of the work on one link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// An end was made, and its RECVs are posted.
    Made {
        /// The end that was made.
        end: EndId,
        /// The name of the end's device.
        device: &'a str,
        /// RECVs posted.
        recv_slots: u32,
        /// Bytes of each.
        bytes: u32,
    },
    /// Two ends are connected, seen from one of them: told twice for each connection.
    Joined {
        /// The end on this side.
        end: EndId,
        /// The other one.
        peer: EndId,
        /// This end is the connecting one.
        connecting: bool,
    },
    /// Work was queued that reads this memory.
    Queued {
        /// The sender.
        end: EndId,
        /// The id that it gave to the work.
        id: u64,
        /// A WRITE, not a SEND.
        write: bool,
        /// Where its bytes lie, as the request names it.
        addr: u64,
        /// How many.
        len: usize,
    },
    /// A SEND has filled one of the peer's RECVs.
    Sent {
        /// The sender.
        end: EndId,
        /// The receiver.
        peer: EndId,
        /// The bytes of the message.
        message: &'a [u8],
    },
    /// A WRITE has landed.
    Written {
        /// The sender.
        end: EndId,
        /// The owner of the memory.
        peer: EndId,
        /// Where, as the request names it.
        addr: u64,
        /// With which key.
        rkey: u32,
        /// Bytes.
        len: usize,
    },
    /// A message was handed to the driver.
    Received {
        /// The receiver.
        end: EndId,
        /// Bytes.
        len: u32,
    },
    /// A RECV was posted again.
    Reposted {
        /// The receiver.
        end: EndId,
        /// The length in bytes.
        bytes: u32,
    },
    /// New RECVs were posted.
    Grown {
        /// The receiver.
        end: EndId,
        /// How many.
        recv_slots: u32,
        /// Bytes of each.
        bytes: u32,
    },
    /// A RECV was not posted again: for good, or until its end has grown by it again.
    Retired {
        /// The receiver.
        end: EndId,
    },
    /// The driver was told that work is done.
    Completed {
        /// The sender.
        end: EndId,
        /// The id that it had given to the last of it.
        id: u64,
    },
    /// The driver was told that the link is dead.
    Died {
        /// The end on which the link died.
        end: EndId,
    },
    /// The queue pair was destroyed.
    Destroyed {
        /// The end that had the queue pair.
        end: EndId,
    },
    /// Memory was registered.
    Registered {
        /// The name of the device.
        device: &'a str,
        /// From here, as work requests name it (iova).
        addr: u64,
        /// Bytes.
        len: usize,
        /// Peers may write to it.
        remote: bool,
    },
    /// A registration has ended.
    Deregistered {
        /// The name of the device.
        device: &'a str,
        /// From here, as it was registered.
        addr: u64,
        /// Bytes.
        len: usize,
    },
}

/// Receives the events of a network. It is called while the network is locked: it must not use the
/// network, and should return quickly.
pub trait Observer: Send + Sync + 'static {
    /// Something has happened.
    fn event(&self, event: Event<'_>);
}
