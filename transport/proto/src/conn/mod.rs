//! The connection.
//!
//! `Connection` consists of the parts in the second table, some of which lie inside others. Each
//! part changes its own state, and gets the stream as an argument if the change concerns a stream.
//! `Connection` brings the parts together.
//!
//! | file | what |
//! |---|---|
//! | `types` | the types that the driver and the connection exchange |
//! | `connection` | a connection as a whole: its parts, its streams, its memory and its end |
//! | `messages` | received messages, messages to send, and the timers |
//!
//! | part | what |
//! |---|---|
//! | `lifecycle` | GOAWAY, drain, CLOSE |
//! | `credits` | the credits for SENDs, in both directions |
//! | `recv_queue` | RECVs in the order in which they were posted, with their sizes |
//! | `timers` | the actions that are due when nothing was received for a while |
//! | `heartbeat` | rest, and proof that the peer's end of the link exists |
//! | `keep_alive` | the program's own keep-alive |
//! | `streams` | the streams by key and by id |
//! | `stream` | a stream, and the transition tables of its two halves |
//! | `send_half` | the half that this side sends: its output and its window |
//! | `recv_half` | the half that this side receives: its header blocks and its window |
//! | `transfers` | a stream's transfers that are sent by WRITE |
//! | `requests` | the peer's requests for memory on a stream |
//! | `reset_limit` | limits streams that a client resets before they are answered |
//! | `output_queue` | the output: which streams send and write next |
//! | `control` | control frames, and CLOSE |
//! | `write_order` | the order in which streams write |
//! | `peer_grants` | sending by WRITE: the peer's grants |
//! | `landing` | receiving by WRITE: streams that want memory |
//! | `named` | receiving by WRITE into memory that this side names |
//! | `grants` | the grants that the peer holds, and their recall |
//! | `answer_clock` | limits how long the peer may keep grants whose memory others want |
//! | `unread` | the bytes that are granted or unread, of all streams together |
//! | `leases` | sending without a WRITE: the peer reads bytes where they lie |
//! | `alignment` | the address in landing memory at which a message begins |
//!
//! # Bulk transfers
//!
//! A piece of a body that does not fit into a control slot is sent by WRITE, into memory that the
//! receiver has granted: a standing grant, advertised beforehand, or grants that answer a REQUEST.
//! A receiver that is short of memory grants less than requested, and the rest when memory comes
//! free. Every grant ends with DONE (its bytes have been written) or ABORT (its bytes will not be
//! written). DONE and ABORT follow the grant's last WRITE on the queue pair, so the receiver knows
//! that the memory is no longer accessed (R4, R9).
//!
//! # Flow control
//!
//! Eager data is bounded by the stream's window, which begins small and grows as the application
//! reads. Grants are bounded by the receiver: at most `bulk_window` per stream, or one message of
//! up to `whole` bytes. So a stream that is not read blocks only itself (R13), until the unread
//! bytes of all streams reach `unread_total`. While this total is reached, no standing grants are
//! given. A stream that holds nothing else gets memory for one message that its reader waits for,
//! or for one message of up to `stream_window` bytes. Small messages still have the windows that
//! their streams began with. Without the limit `unread_total`, a peer could exhaust the heap. For
//! the same reason the output of all streams has a common limit, beyond which each stream has a
//! floor ([`Connection::has_room`]).
//!
//! # Why granted memory always comes back
//!
//! Grants answer the requests of a stream in order, and a standing grant is bound to a transfer
//! only when all earlier transfers have their memory. So a transfer needs no further grant before
//! it can write to a grant that it holds. Such a transfer waits only for credits and for room in
//! the send queue, and both always come back. If the peer keeps a grant nevertheless, this side
//! recalls it when others want its memory (`grants`), and the peer must answer in time
//! (`answer_clock`).

mod alignment;
mod answer_clock;
mod connection;
mod control;
mod credits;
mod grants;
mod heartbeat;
mod keep_alive;
mod landing;
mod leases;
mod lifecycle;
mod messages;
mod named;
mod output_queue;
mod peer_grants;
mod recv_half;
mod recv_queue;
mod requests;
mod reset_limit;
mod send_half;
mod stream;
mod streams;
#[cfg(test)]
mod tests;
mod timers;
mod transfers;
mod types;
mod unread;
mod write_order;

pub use self::connection::Connection;
pub use self::types::{
    CreditCounts, Event, Flow, GrantMemory, LandingWant, NamedWant, Pending, Room, SendError, Side,
    Stats, Transmit, Unsent, WantKey, Write,
};
