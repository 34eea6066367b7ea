//! Received payload, from its landing memory to its reader.
//!
//! | file | what |
//! |---|---|
//! | `landing` | the landing memory of the connection |
//! | `grant` | grants of it: for what the peer wants to write, or refused |
//! | `named` | grants of buffers that callers have named for their replies |
//! | `landing_wait` | how long a message waits for landing memory in one piece |
//! | `reclaim` | landing memory above the connection's share goes back while others claim some |
//! | `stall` | what nobody reads makes room, when a stream has waited long for landing memory |
//! | `relieve` | acts on these delays |
//! | `unread` | the part of a received body that nobody has read |

pub(super) mod grant;
pub(super) mod landing;
mod landing_wait;
mod named;
mod reclaim;
mod relieve;
pub(super) mod stall;
pub(super) mod unread;
