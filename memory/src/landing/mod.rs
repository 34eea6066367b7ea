//! Landing memory: what peers may write to.
//!
//! | file | what |
//! |---|---|
//! | `allocator` | [`Landing`]: one connection's allocator of landing memory |
//! | `making` | the chunk that the landing thread makes for a connection |
//! | `pending` | what an allocator has the landing thread do, and waits for |
//! | `freeing` | chunks that wait for the landing thread to free them |
//! | `share` | what a connection may lease while others claim memory |
//! | `chunk` | chunks leased to connections |
//! | `piece` | the pieces of chunks that are granted to peers, and filled by them |
//! | `chunk_bitmap` | which granules of a chunk are taken, or held by the application |
//! | `held` | what the application holds, and how much of it that may be |
//! | `landed` | [`Landed`] bytes, and how they are read while a peer may write to them |

mod allocator;
mod chunk;
mod chunk_bitmap;
mod freeing;
mod held;
mod landed;
mod making;
mod pending;
mod piece;
mod share;

pub use self::allocator::Landing;
pub use self::landed::{Landed, LandedReader, Window};
pub use self::piece::LandingBuf;
pub use self::share::Reclaim;
