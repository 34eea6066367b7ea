//! Receives payload, from its landing memory to its reader.
//!
//! | file | what |
//! |---|---|
//! | `landing` | the landing memory of the connection |
//! | `grant` | grants landing memory to the peer, or refuses it |
//! | `named` | grants buffers that callers have named for their replies |
//! | `delays` | when unread data is copied, a message lands in parts, and grants are recalled |
//! | `relieve` | acts on these delays |
//! | `unread` | the unread part of a received body |

pub(super) mod delays;
pub(super) mod grant;
pub(super) mod landing;
mod named;
mod relieve;
pub(super) mod unread;
