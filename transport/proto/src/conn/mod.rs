//! The connection.
//!
//! | file | what |
//! |---|---|
//! | `types` | the types that the driver and the connection exchange |
//! | `connection` | the state of a connection |
//! | `id_map` | tables by stream id |
//! | `credits` | the credits for SENDs, in both directions |
//! | `recv_queue` | RECVs in the order in which they were posted, with their sizes |
//! | `stream` | a stream's two halves and their transition tables |
//! | `output` | the application's side of streams: open, send, reset, consume |
//! | `grants` | the grants that the peer holds |
//! | `landing` | receiving by WRITE: grants to the peer |
//! | `named` | receiving by WRITE into memory that this side names |
//! | `bulk` | sending by WRITE: grants of the peer |
//! | `leases` | what the sides have lent each other |
//! | `lend` | sending without a WRITE: bytes that the peer reads where they lie |
//! | `alignment` | the address in landing memory at which a message begins |
//! | `recall` | recalling grants before they are used |
//! | `answer_clock` | the clock of answers that the peer owes |
//! | `answer_timeout` | the time that the peer has to return grants which others want |
//! | `receive` | receiving messages |
//! | `reset_limit` | limits streams that a client resets before they are answered |
//! | `transmit` | composing messages and WRITEs |
//! | `write_order` | the order in which streams write |
//! | `shutdown` | GOAWAY, drain, CLOSE |
//! | `heartbeat` | rest, and proof that the peer's end of the link exists |
//! | `keep_alive` | the program's own keep-alive |
//!
//! # Bulk transfers
//!
//! A piece of a body that does not fit into a control slot is sent by WRITE, into memory that the
//! receiver has granted: a standing grant, advertised beforehand, or grants that answer a REQUEST.
//! A receiver that is short of memory grants less than requested, and the rest when memory comes
//! free. Every grant ends with DONE (its bytes have been written) or ABORT (they will not be). Both
//! follow the last WRITE on the queue pair, so the receiver knows that the memory is no longer
//! accessed (R4, R9).
//!
//! # Flow control
//!
//! Eager data is bounded by the stream's window, which begins small and grows as the application
//! reads. Grants are bounded by the receiver: at most `bulk_window` per stream, or one message of
//! up to `whole` bytes. So a stream that is not read blocks only itself (R13), until the unread
//! bytes of all streams reach `unread_total`. Then no standing grants are given, and a stream gets
//! memory for the one message that its reader waits for; small messages still have the windows that
//! their streams began with. Without this limit a peer could exhaust the heap. For the same reason
//! the output of all streams has a common limit, beyond which each has a floor
//! ([`Connection::has_room`]).
//!
//! # Why granted memory always comes back
//!
//! Grants answer the requests of a stream in order, and a standing grant is bound to a transfer
//! only when all earlier transfers have their memory. So a transfer that holds a grant never waits
//! for another grant. It waits for credits and for room in the send queue, and both always come
//! back. A grant that the peer keeps nevertheless is recalled when others want its memory
//! (`recall`), and the peer must answer in time (`answer_timeout`).

mod alignment;
mod answer_clock;
mod answer_timeout;
mod connection;
mod control;
mod credits;
mod decline;
mod grants;
mod heartbeat;
mod id_map;
mod keep_alive;
mod landing;
mod leases;
mod lend;
mod named;
mod output;
mod peer_grants;
mod recall;
mod receive;
mod recv_queue;
mod reset_limit;
mod send_queue;
mod shutdown;
mod stream;
mod streams;
#[cfg(test)]
mod tests;
mod transmit;
mod types;
mod write_order;

pub use self::connection::Connection;
pub use self::id_map::{IdHasher, StreamMap};
pub use self::types::{
    Event, Flow, GrantMemory, LandingWant, NamedWant, Pending, Room, SendError, Side, Stats,
    Transmit, Unsent, WantKey, Write,
};
