//! Two processes of one host, over memory that they share.
//!
//! A connection is a unix socket, by which descriptors travel and the peer's end is noticed, and
//! three kinds of memory, all of it files without a name (memfd) that can neither shrink nor grow:
//!
//! | memory | made and owned by | mapped by | holds |
//! |---|---|---|---|
//! | ring | the receiving end | the sending end | RECV slots: SEND copies a message into the next one |
//! | landing chunk | the receiving end's pool | the sending end, when it is granted | WRITE copies into it |
//! | control block, send arenas | each end | nobody else | what is sent, and received messages once they are checked |
//!
//! ```text
//!   sender                                          receiver
//!   SEND slot --copy--> ring slot                   ring slot --copy, once--> RECV slot --> driver
//!                       tail, published by ring()   tail, read once, checked
//!   any memory --copy--> landing chunk              the same pages, handed up as Bytes after DONE
//! ```
//!
//! A process that waits says so in its ring and is woken through an eventfd; one that does not wait
//! costs its peer no system call. Before it sleeps it polls for a while (`crate::busy_poll`).
//!
//! A handshake is three messages: HELLO, which carries a ticket and no descriptor; ACCEPT, with the
//! ring of the end that accepts; RING, with that of the other end. No descriptor of a peer's is
//! opened before its ticket was checked, and what may block on one is done by threads of its own
//! (`blocking`). In particular there is no task that opens, waits for or closes a file that it does
//! not know: what tasks wait for are sockets and eventfds that this end has made.
//!
//! Everything in shared memory is as untrusted as a packet: `ring` reads each word once, and checks
//! the copy. What a peer that breaks the rules can reach is the ring and the chunks that it was
//! given, all of them its own connection's.
//!
//! | module | what |
//! |---|---|
//! | `device` | [`ShmDevice`]: listens and connects |
//! | `context` | what the connections of a device share: its chunks, and whom it shares memory with |
//! | `user`, `same_user` | who a peer is, and whether it could stop this process anyway |
//! | `listener`, `connect` | the accepting and the connecting side |
//! | `setup` | what a handshake yields |
//! | `link` | the [`Link`](crate::Link) |
//! | `ring` | the ring: its layout, its reading and its writing end |
//! | `memory` | files that are mapped, and landing chunks |
//! | `socket` | the unix socket, its messages, and threads for what may block |
//! | `wakeup` | waking and being woken |

mod connect;
mod context;
mod device;
mod link;
mod listener;
mod memory;
pub(crate) mod ring;
mod same_user;
mod setup;
mod socket;
mod user;
mod wakeup;

pub use self::device::ShmDevice;
pub(crate) use self::device::boot_id;
pub use self::link::{ShmLink, ShmStats};
pub use self::listener::{ShmIncoming, ShmListener};
