//! The unix socket of a connection.
//!
//! | module | what |
//! |---|---|
//! | `seqpacket` | sockets with message boundaries, and descriptors with the messages |
//! | `wire` | the messages |
//! | `blocking` | threads for calls that a peer can make block |

pub(super) mod blocking;
pub(super) mod seqpacket;
pub(crate) mod wire;
