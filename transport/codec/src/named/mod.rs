//! Messages whose longest field lands in an application buffer (`LandIn`).
//!
//! | file | what |
//! |---|---|
//! | `gather` | such a message while it is received |
//! | `gathering` | finds it in a body, and keeps it for the decoder |
//! | `message` | decodes it |

pub(super) mod gather;
mod gathering;
pub(super) mod message;
