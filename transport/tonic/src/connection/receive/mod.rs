//! Receives payload, from its landing memory to its reader.
//!
//! | file | what |
//! |---|---|
//! | `landing` | the landing memory of the connection |
//! | `grant` | grants landing memory to the peer, or refuses it |
//! | `named` | grants buffers that callers have named for their replies |
//! | `landing_wait` | how long a message waits for landing memory in one piece |
//! | `reclaim` | returns landing memory above the connection's share while others claim some |
//! | `stall` | when unread data is copied because a stream has waited long for landing memory |
//! | `relieve` | acts on these delays |
//! | `unread` | the unread part of a received body |

pub(super) mod grant;
pub(super) mod landing;
mod landing_wait;
mod named;
mod reclaim;
mod relieve;
pub(super) mod stall;
pub(super) mod unread;
