//! The events of a simulated network, for checkers and traces.

use std::fmt;

/// One end of a connection, by number. Ends are numbered from 0 in the order in which they are
/// created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndId(pub u64);

impl fmt::Display for EndId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "end {}", self.0)
    }
}

/// An event. Events of one end, and of the work on one link, come in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// An end was created, and its RECVs are posted.
    Made {
        /// The number of the new end.
        end: EndId,
        /// The name of the end's device.
        device: &'a str,
        /// Number of RECVs that were posted.
        recv_slots: u32,
        /// The size of each RECV in bytes.
        bytes: u32,
    },
    /// Two ends are connected. Each end reports the event, so each connection has two of these
    /// events.
    Joined {
        /// The end on this side.
        end: EndId,
        /// The other end.
        peer: EndId,
        /// Whether this end is the connecting end.
        connecting: bool,
    },
    /// Work that reads memory was queued.
    Queued {
        /// The sender.
        end: EndId,
        /// The sender's id of the work.
        id: u64,
        /// Whether the work is a WRITE. If false, the work is a SEND.
        write: bool,
        /// The address of the memory, as in the request.
        addr: u64,
        /// The number of bytes.
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
        /// The address, as in the request.
        addr: u64,
        /// The key used.
        rkey: u32,
        /// The number of bytes.
        len: usize,
    },
    /// A message was handed to the driver.
    Received {
        /// The receiver.
        end: EndId,
        /// The number of bytes.
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
        /// The number of RECVs.
        recv_slots: u32,
        /// The size of each RECV in bytes.
        bytes: u32,
    },
    /// A RECV was not posted again. If it is posted again later, [`Grown`](Event::Grown) counts it.
    Retired {
        /// The receiver.
        end: EndId,
    },
    /// Work was reported to the driver as done.
    Completed {
        /// The sender.
        end: EndId,
        /// The driver's id of the last completed work.
        id: u64,
    },
    /// The link was reported to the driver as dead.
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
        /// The start address in work requests (iova).
        addr: u64,
        /// The number of bytes.
        len: usize,
        /// Whether peers may write to the memory.
        remote: bool,
    },
    /// A registration has ended.
    Deregistered {
        /// The name of the device.
        device: &'a str,
        /// The start address, as it was registered.
        addr: u64,
        /// The number of bytes.
        len: usize,
    },
}

/// Receives the events of a network. The network calls the observer in the middle of an operation.
/// So an observer must not use the network, and should return quickly.
pub trait Observer: Send + Sync + 'static {
    /// Handles an event.
    fn event(&self, event: Event<'_>);
}
