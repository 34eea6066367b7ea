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
//! | `pool` | [`Pool`] |
//! | `config` | sizes, and how they shrink to fit |
//! | `buf` | buffers to fill and send, and waiting for them |
//! | `landing` | landing memory: one connection's allocator, chunks, [`Landed`] bytes |
//! | `arena` | slots of size classes, and those that wait for them |
//! | `ledger` | budgets, counters, the index of regions, those that wait for landing memory |
//! | `region` | mappings and registrations; [`memfd`] |
//! | `registrar` | the boundary to devices |
//! | [`memlock`] | what the process may pin |
//! | `copy` | copies of payload at the speed of memory |
//! | `stats` | figures |
//! | `test_util` | memory that changes under its reader, for tests (feature `test-util`) |
//!
//! Each module imports from those below it only.

mod arena;
mod buf;
mod config;
mod copy;
mod error;
mod landing;
mod ledger;
pub mod memlock;
mod pool;
mod region;
mod registrar;
mod stats;
#[cfg(any(test, feature = "test-util"))]
pub mod test_util;

/// What `chunk_bitmap` and `waiter_count` are made of; loom's when they are checked.
mod atomics {
    pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
}

pub use buf::{Alloc, PinnedBuf, PinnedBytes, Segment, SegmentBuf};
pub use config::{DEFAULT_POOL, MIN_MEMLOCK, MIN_POOL, PoolConfig, Sizes};
pub use copy::{copy, copy_slice};
pub use error::{PoolError, RegisterError};
pub use landing::{Excess, Landed, LandedReader, Landing, LandingBuf, Window};
pub use memlock::Memlock;
pub use pool::Pool;
pub use region::memfd;
pub use region::page::HugePages;
pub use region::random_address::random_iova;
pub use registrar::{Access, HeapRegistrar, Memory, Registrar, Registration};
pub use stats::{ClassStats, PoolStats, Use};
