//! A pool of pinned memory.
//!
//! A device reads and writes registered memory only, and registering is slow: it pins pages. So
//! memory is mapped and registered in arenas, within budgets, and handed out in slots.
//!
//! | for | made by | is |
//! |---|---|---|
//! | sending | [`Pool::alloc`], [`Pool::try_alloc`] | [`PinnedBuf`], then `Bytes` |
//! | landing | [`Landing::alloc`] | [`LandingBuf`] until the peer has said DONE, then [`Landed`] |
//! | connections | [`Pool::control`] | [`PinnedBuf`] |
//!
//! Each has a budget of its own, so that sending cannot starve receiving (R11); all together stay
//! under RLIMIT_MEMLOCK, down to a pool of [`MIN_POOL`] bytes. Memory that is held outlives the
//! pool, the device's other users, and the connection that it came by.
//!
//! # Map
//!
//! | module | what |
//! |---|---|
//! | `config` | sizes, and how they shrink to fit |
//! | [`memlock`] | what the process may pin |
//! | `registrar` | the boundary to devices |
//! | [`memfd`] | memory that can be shared with another process |
//! | `region` | mappings and registrations |
//! | `random_address` | addresses of landing memory that peers cannot guess |
//! | `arena` | slots of size classes |
//! | `copy` | copies of payload at the speed of memory |
//! | `buf` | [`PinnedBuf`], [`PinnedBytes`] |
//! | `segments` | encoding without copying what is large |
//! | `wait` | waiting for memory in order |
//! | `waiter_count` | the count of those that wait, by which no wake-up is lost |
//! | `landing` | one connection's account of landing memory |
//! | `landing_waiters` | waking those that wait for landing memory |
//! | `share` | what an account may have while others wait |
//! | `memlock_budget` | the landing budget where the process may pin less |
//! | `chunk` | chunks leased to connections, pieces granted to peers |
//! | `landed` | [`Landed`] bytes, and how they are read while a peer may write to them |
//! | `chunk_bitmap` | which parts of a chunk are taken |
//! | `index` | from an address to its lkey and iova |
//! | `stats` | figures |
//! | `test_util` | memory that changes under its reader, for tests (feature `test-util`) |

mod arena;
mod buf;
mod chunk;
mod chunk_bitmap;
mod config;
mod copy;
mod error;
mod index;
mod landed;
mod landing;
mod landing_waiters;
pub mod memfd;
pub mod memlock;
mod memlock_budget;
mod pool;
mod random_address;
mod region;
mod registrar;
mod segments;
mod share;
mod stats;
#[cfg(any(test, feature = "test-util"))]
pub mod test_util;
mod wait;
mod waiter_count;

/// What `chunk_bitmap` and `waiter_count` are made of; loom's when they are checked.
mod atomics {
    pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
}

pub use buf::{PinnedBuf, PinnedBytes};
pub use chunk::LandingBuf;
pub use config::{DEFAULT_POOL, HugePages, MIN_MEMLOCK, MIN_POOL, PoolConfig, Sizes};
pub use copy::{copy, copy_slice};
pub use error::{PoolError, RegisterError};
pub use landed::{Landed, LandedReader, Window};
pub use landing::Landing;
pub use memlock::Memlock;
pub use pool::Pool;
pub use random_address::random_iova;
pub use registrar::{Access, HeapRegistrar, Memory, Registrar, Registration};
pub use segments::{Segment, SegmentBuf};
pub use share::Excess;
pub use stats::{ClassStats, PoolStats, Use};
pub use wait::Alloc;
