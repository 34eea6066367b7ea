//! Received payload, from its landing memory to its reader.
//!
//! | file | what |
//! |---|---|
//! | `landing_wait` | how long a message waits for landing memory in one piece |
//! | `give_back` | landing memory above the connection's share, given back while others wait |
//! | `unread` | the part of a received body that nobody has read |

pub(in crate::connection) mod give_back;
pub(in crate::connection) mod landing_wait;
pub(in crate::connection) mod unread;
