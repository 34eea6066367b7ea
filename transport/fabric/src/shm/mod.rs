//! Connections between two processes on one host, over shared memory.
//!
//! A connection has a unix socket, which carries descriptors and shows when the peer ends. Its
//! shared memory is in files without a name (memfd) that can neither shrink nor grow:
//!
//! | memory | made and owned by | mapped by | holds |
//! |---|---|---|---|
//! | ring | the receiving end | the sending end | RECV slots: SEND copies a message into the next one |
//! | landing chunk | the receiving end's pool | the sending end, once it is granted | WRITE copies into it |
//! | control block, send arenas | each end | nobody else | bytes to send |
//! | RECV slots | the receiving end, on its heap | nobody else | received messages, once they are checked |
//!
//! ```text
//!   sender                                          receiver
//!   SEND slot --copy--> ring slot                   ring slot --copy, once--> RECV slot --> driver
//!                       tail, published on doorbell tail, read once, checked
//!   any memory --copy--> landing chunk              the same pages, handed up as Bytes after DONE
//! ```
//!
//! An end that waits sets a flag in its ring. All connections between a runtime of one process and
//! a runtime of another share a wake-up channel (`wakeup::channel`): an eventfd for each direction,
//! and a page with a bit for each connection. The sender sets the bit. If the receiving process
//! sleeps with regard to these connections, the sender also signals the eventfd, by a read that
//! never blocks. So waking a process that is awake costs no system call. Before an end waits it
//! polls for a while (`crate::busy_poll`).
//!
//! A connection at rest has one descriptor at either end, the socket, and all connections share two
//! eventfds. Each ring of such a connection has one page. Only the sending end writes to a ring, so
//! that end frees the other pages when they hold no messages
//! ([`Link::shrink`](crate::Link::shrink)).
//!
//! A handshake is three messages. HELLO carries a ticket and no descriptor. ACCEPT carries the ring
//! of the accepting end and the number of its runtime. RING carries the ring of the connecting end
//! and the number of the channel that this end has chosen (`wakeup::channels`). Until the accepting
//! end has the channel's eventfds and page, RING also carries them. A process opens no descriptor
//! from a peer before it has checked the peer's ticket. Calls that may block on such a descriptor
//! run on dedicated threads (`blocking`). In particular, no task opens, waits for or closes an
//! unknown file: tasks wait only for sockets, and for descriptors that were found to be eventfds.
//!
//! Data in shared memory is as untrusted as a packet. So `ring` reads each word once, and checks
//! the copy. A peer that breaks the rules reaches only the ring and the chunks that it was given,
//! all of which belong to its own connection.
//!
//! | module | what |
//! |---|---|
//! | `device` | [`ShmDevice`]: listens and connects |
//! | `context` | state that the connections of a device share: its chunks, and with whom it shares memory |
//! | `user`, `same_user` | who a peer is, and whether it could in any case stop this process |
//! | `listener`, `connect` | the accepting and the connecting side |
//! | `setup` | the result of a handshake |
//! | `link`, `stats` | the [`Link`](crate::Link), and its counts |
//! | `ring` | the ring: its layout, its reading and its writing end |
//! | `ready_fd` | a descriptor that a task waits for |
//! | `recv_slots` | the memory of received messages until they are read |
//! | `memory` | mapped files, and landing chunks |
//! | `named` | application buffers that the peer maps and writes to |
//! | `taking` | files that the peer has given, until they are mapped |
//! | `offers` | files that the peer was offered for mapping |
//! | `lend` | messages that the peer reads in the sender's memory |
//! | `socket` | the unix socket, its messages, and threads for calls that may block |
//! | `wakeup` | waking and being woken |

mod connect;
mod context;
mod device;
mod lend;
mod link;
mod listener;
mod memory;
mod named;
pub(crate) mod offers;
mod ready_fd;
mod recv_slots;
pub(crate) mod ring;
mod same_user;
mod setup;
pub(crate) mod socket;
mod stats;
mod taking;
#[cfg(test)]
mod tests;
mod user;
mod wakeup;

pub use self::device::ShmDevice;
pub(crate) use self::device::boot_id;
pub use self::link::ShmLink;
pub use self::listener::{ShmIncoming, ShmListener};
pub use self::stats::ShmStats;
