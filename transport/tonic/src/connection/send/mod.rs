//! Passes the protocol's output to the link. All output that can be sent now is posted in one
//! batch.
//!
//! | file | what |
//! |---|---|
//! | `link_io` | the link, and its work in flight |
//! | `in_flight` | SEND slots, staging blocks and WRITEs in flight |
//! | `payload` | bodies in the form that the protocol takes, and bytes that the peer reads in place |
//! | `write_window` | how many bytes of WRITEs may be in flight |

mod in_flight;
pub(super) mod link_io;
mod payload;
mod write_window;
