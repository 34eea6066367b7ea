//! What the fuzzer calls: one function for each target, which panics when something is wrong.
//!
//! | target | input |
//! |---|---|
//! | `frames` | one control message, as received |
//! | `hello` | the private data of connect, accept or reject |
//! | `headers` | one header block |
//! | `ring` | what the two ends of a shared-memory ring do, and what a stranger writes into it meanwhile |
//! | `peer` | what a hostile peer sends to a connection, and what its own side does meanwhile: see [`peer()`] |
//! | `encode` | messages for the zero-copy codec: see [`encode`] |
//! | `decode` | a body of messages for the zero-copy codec, in pieces: see [`decode`] |
//! | `landed` | likewise, and what its sender writes to it while it is decoded: see [`landed`] |
//!
//! A new target is a function here, a line in [`TARGETS`], a file in `../fuzz/fuzz_targets` and a
//! folder in `../fuzz/corpus`.

mod codec;
mod frames;
mod headers;
mod hello;
mod peer;
mod ring;

pub use codec::{decode, encode, landed};
pub use frames::frames;
pub use headers::headers;
pub use hello::hello;
pub use peer::peer;
pub use ring::ring;

/// A target's name, and what it calls.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 8] = [
    ("frames", frames),
    ("hello", hello),
    ("headers", headers),
    ("peer", peer),
    ("ring", ring),
    ("encode", encode),
    ("decode", decode),
    ("landed", landed),
];
