//! Landing memory, to which peers may write.
//!
//! | file | what |
//! |---|---|
//! | `allocator` | [`Landing`]: one connection's allocator of landing memory |
//! | `making` | the chunk that the landing thread makes for a connection |
//! | `pending` | the landing thread's work for an allocator |
//! | `freeing` | chunks that wait for the landing thread to free them |
//! | `share` | the limit on leases while other connections claim memory |
//! | `chunk` | chunks leased to connections |
//! | `piece` | the pieces of chunks that are granted to peers, and filled by them |
//! | `chunk_bitmap` | which granules of a chunk are taken, or held by the application |
//! | `held` | memory that the application holds, and the limit on it |
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
