//! The fuzz targets, with one function for each, which panics when a property does not hold.
//!
//! | target | input |
//! |---|---|
//! | `frames` | one control message, as received |
//! | `hello` | the private data of connect, accept or reject |
//! | `headers` | one header block |
//! | `ring` | actions of the two ends of a shared-memory ring, and concurrent writes by a hostile process |
//! | `socket` | messages on a shared-memory connection's socket, and which of them either end accepts |
//! | `peer` | messages of a hostile peer to a connection, and actions of its own side: see [`peer()`] |
//! | `encode` | messages for the zero-copy codec: see [`encode`] |
//! | `decode` | a body of messages for the zero-copy codec, in pieces: see [`decode`] |
//! | `landed` | the same, with the sender's writes during decoding: see [`landed`] |
//!
//! A new target is a function here, a line in [`TARGETS`], a file in `../fuzz/fuzz_targets` and a
//! folder in `../fuzz/corpus`.

mod codec;
mod frames;
mod headers;
mod hello;
mod peer;
mod shm;

pub use codec::{decode, encode, landed};
pub use frames::frames;
pub use headers::headers;
pub use hello::hello;
pub use peer::peer;
pub use shm::{ring, socket};

/// The name of a target, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 9] = [
    ("frames", frames),
    ("hello", hello),
    ("headers", headers),
    ("peer", peer),
    ("ring", ring),
    ("socket", socket),
    ("encode", encode),
    ("decode", decode),
    ("landed", landed),
];
