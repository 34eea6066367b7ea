//! Protocol to link: posts everything that can go out now, in one batch.
//!
//! | file | what |
//! |---|---|
//! | `link_io` | the link, and the work that is in flight on it |
//! | `in_flight` | SEND slots, staging blocks and WRITEs in flight |
//! | `payload` | bodies as the protocol takes them, and bytes that the peer reads where they lie |
//! | `write_window` | how many bytes of WRITEs may be in flight |

mod in_flight;
pub(super) mod link_io;
mod payload;
mod write_window;
