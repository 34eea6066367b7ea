//! The connection.
//!
//! | file | what |
//! |---|---|
//! | `types` | what the driver and the connection tell each other |
//! | `connection` | the state of a connection |
//! | `id_map` | tables by stream id |
//! | `credits` | who may SEND |
//! | `stream` | a stream's two halves and their transition tables |
//! | `output` | what the application sends, resets and has read |
//! | `grants` | the grants that the peer holds |
//! | `landing` | memory that is granted to the peer (receiving bulk) |
//! | `bulk` | memory that the peer has granted (sending bulk) |
//! | `phase` | where in landing memory a message begins |
//! | `recall` | grants that are asked back before they are used |
//! | `answer_clock` | the clock of answers that the peer owes |
//! | `answers` | the time that the peer has to answer RESET and RECALL |
//! | `receive` | messages in |
//! | `reset_limit` | how many streams a client may reset before they were answered |
//! | `transmit` | messages and WRITEs out |
//! | `ending` | GOAWAY, drain, CLOSE |
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
//! to answer (`answers`).

mod answer_clock;
mod answers;
mod bulk;
mod connection;
mod credits;
mod ending;
mod grants;
mod heartbeat;
mod id_map;
mod landing;
mod output;
mod phase;
mod recall;
mod receive;
mod reset_limit;
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
