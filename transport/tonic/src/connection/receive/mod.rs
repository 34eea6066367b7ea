//! Received payload, from its landing memory to its reader.
//!
//! | file | what |
//! |---|---|
//! | `landing` | the landing memory of the connection |
//! | `grant` | grants of it: for what the peer wants to write, or refused |
//! | `landing_wait` | how long a message waits for landing memory in one piece |
//! | `give_back` | landing memory above the connection's share goes back while others claim some |
//! | `stall` | what nobody reads makes room, when a stream has waited long for landing memory |
//! | `deliver` | landed and received payload goes to its stream |
//! | `unread` | the part of a received body that nobody has read |

mod deliver;
mod give_back;
mod grant;
pub(in crate::connection) mod landing;
mod landing_wait;
pub(in crate::connection) mod stall;
pub(in crate::connection) mod unread;
