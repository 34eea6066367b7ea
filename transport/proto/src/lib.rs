//! The connection of tonic-rdma as a state machine without IO.
//!
//! Each end of a link has one [`Connection`]. The inputs of a connection are received messages,
//! time and landing memory. The outputs are descriptors: bytes to SEND, and WRITEs. A connection
//! has no socket, clock, memory region or source of randomness, so the same inputs always give the
//! same outputs. A connection copies payload only into the small control messages that it composes.
//!
//! # Map
//!
//! | module | what |
//! |---|---|
//! | [`hello`] | the private data of connect and accept: version, ticket, settings |
//! | [`frame`] | the wire format of control messages, byte by byte |
//! | [`headers`] | header blocks |
//! | [`error`] | breaches of the protocol |
//! | [`Config`] | limits and sizes |
//! | [`Payload`] | a piece of a body, in segments |
//! | [`Connection`] | credits, streams, windows, bulk transfers, drain, rest, keep-alive |
//!
//! # How a driver uses it
//!
//! 1. Call [`Connection::client`] or [`Connection::server`] once hellos have been exchanged.
//! 2. For every completed RECV, repost the slot, then call [`Connection::receive`] (R1).
//! 3. Call [`Connection::poll_event`] until it returns nothing, and deliver the events to streams.
//!    Answer [`Connection::poll_landing`] with memory.
//! 4. Call [`Connection::poll_transmit`] until it returns nothing or the send queue is full, and
//!    post the returned work in that order (R4).
//! 5. Call [`Connection::handle_timeout`] at [`Connection::next_timeout`].
//!
//! After an error from [`Connection::receive`], the driver sends the one message that
//! [`Connection::poll_transmit`] still returns, a CLOSE frame that names the breach, and
//! disconnects.
//!
//! When a connection ends, no event returns the landing memory that the peer still holds. The
//! driver frees this memory only once the queue pair is destroyed (R9).
//!
//! ```
//! use std::time::Instant;
//! use tonic_rdma_proto::{Config, Connection, Event, Room, Transmit};
//!
//! let (config, now) = (Config::default(), Instant::now());
//! config.check()?;
//! // Settings are exchanged in hello and accept.
//! let mut client = Connection::client(config.clone(), config.settings(), now);
//! let mut server = Connection::server(config.clone(), config.settings(), now);
//!
//! let id = client.open("header block".into(), false)?;
//! client.send_data(id, "a small message".into(), false, true)?;
//!
//! // A driver posts this work; here it "arrives" at once.
//! let mut slot = vec![0; config.slot_size as usize];
//! let room = Room { write: 1 << 20, staging: 64 << 10, chunk: 0 };
//! while let Some(work) = client.poll_transmit(Some(&mut slot), room) {
//!     let Transmit::Send(len) = work else { panic!("nothing here needs a WRITE") };
//!     server.receive(now, slot[..len].to_vec().into())?;
//! }
//! let block = "header block".into();
//! assert_eq!(server.poll_event(), Some(Event::Opened { stream: id, block, end: false }));
//! let data = "a small message".into();
//! assert_eq!(server.poll_event(), Some(Event::Data { stream: id, data, end: true }));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod config;
mod conn;
pub mod error;
pub mod frame;
pub mod headers;
pub mod hello;
mod ids;
mod payload;
#[cfg(test)]
mod tests;

pub use config::{Config, ConfigError, KeepAlive, Liveness};
pub use conn::{
    Connection, CreditCounts, Event, Flow, GrantMemory, LandingWant, NamedWant, Pending, Room,
    SendError, Side, Stats, Transmit, Unsent, WantKey, Write,
};
pub use error::{Breach, CloseCode};
pub use hello::{Accept, HEADERS, Hello, PeerSettings, Reject};
pub use ids::{GrantId, IdHasher, ResetCode, StreamId, StreamMap};
pub use payload::{LentBody, LentPlace, Payload};
