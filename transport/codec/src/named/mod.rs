//! Messages whose longest field lands in an application buffer (`LandIn`).
//!
//! | file | what |
//! |---|---|
//! | `gathering` | finds it in a body, and keeps it for the decoder |
//! | `message` | such a message while it is received, and its decoding |

mod gathering;
pub(super) mod message;
