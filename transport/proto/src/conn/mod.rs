//! The connection.
//!
//! | file | what |
//! |---|---|
//! | `types` | the types that the driver and the connection exchange |
//! | `connection` | the state of a connection |
//! | `id_map` | tables by stream id |
//! | `credits` | the credits for SENDs, in both directions |
//! | `stream` | a stream's two halves and their transition tables |
//! | `output` | the application's side of streams: open, send, reset, consume |
//! | `grants` | the grants that the peer holds |
//! | `landing` | receiving by WRITE: grants to the peer |
//! | `bulk` | sending by WRITE: grants of the peer |
//! | `phase` | where in landing memory a message begins |
//! | `recall` | recalling grants before they are used |
//! | `answer_clock` | the clock of answers that the peer owes |
//! | `answer_timeout` | the time that the peer has to answer RESET and RECALL |
//! | `receive` | receiving messages |
//! | `reset_limit` | limits streams that a client resets before they are answered |
//! | `transmit` | composing messages and WRITEs |
//! | `shutdown` | GOAWAY, drain, CLOSE |
//! | `heartbeat` | PING, dead peer |
//!
//! # Bulk transfers
//!
//! A piece of a body that does not fit a control slot goes by WRITE, into memory that the receiver
//! has granted: a standing grant, advertised beforehand, or grants that answer a REQUEST. A
//! receiver short of memory grants less than was asked, and goes on when memory comes free. Every
//! grant ends with DONE (its bytes have been written) or ABORT (they will not be), both behind the
//! last WRITE on the queue pair, so that the receiver knows that nothing touches the memory any
//! more (R4, R9).
//!
//! # Flow control
//!
//! Eager data and standing grants are bounded by the stream's window, which grows again as the
//! application reads. Requested grants are bounded by the receiver, which grants no more than
//! `bulk_window` for a stream at once, or one message of up to `whole` bytes. So a stream that is
//! not read stops only itself (R13), until the unread of all streams together amounts to
//! `bulk_total`, beyond which a peer could fill any heap: bulk waits for a reader then, small
//! messages do not.
//!
//! # Why granted memory always comes back
//!
//! Grants answer the requests of a stream in their order, and a standing grant is bound to a
//! transfer only when all transfers in front of it have their memory. So nothing that holds a grant
//! waits for another grant: it waits for credits and for room in the send queue, and both come back
//! by themselves. A peer that keeps a grant all the same is asked for it (`recall`), and has a time
//! to answer (`answer_timeout`).

mod answer_clock;
mod answer_timeout;
mod bulk;
mod connection;
mod credits;
mod grants;
mod heartbeat;
mod id_map;
mod landing;
mod output;
mod phase;
mod recall;
mod receive;
mod reset_limit;
mod shutdown;
mod stream;
#[cfg(test)]
mod tests;
mod transmit;
mod types;

pub use self::connection::Connection;
pub use self::id_map::{IdHasher, StreamMap};
pub use self::types::{
    Event, Flow, GrantMemory, LandingWant, Pending, Room, SendError, Side, Stats, Transmit, Unsent,
    WantKey, Write,
};
