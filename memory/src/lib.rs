//! A pool of pinned memory.
//!
//! A device can access registered memory only. Registering is slow, because it pins pages. So the
//! pool maps and registers memory in large regions, within budgets, and hands out parts of them.
//!
//! | memory for | is allocated by | as |
//! |---|---|---|
//! | sending | [`Pool::alloc`], [`Pool::try_alloc`] | [`PinnedBuf`], then `Bytes` |
//! | landing (what peers write to) | [`Landing::alloc`] | [`LandingBuf`] until the peer sends DONE, then [`Landed`] |
//! | connections | [`Pool::control`] | [`PinnedBuf`] |
//! | sending from application memory | [`Pool::register`] | the application's `Bytes` |
//! | landing in application memory | [`NamedBuffer::new`] | [`NamedGrant`] until the peer sends DONE, then `Bytes` |
//!
//! Each use has its own budget, so that sending cannot starve receiving (R11). A pool shrinks so
//! that all its budgets together stay below RLIMIT_MEMLOCK, but to no less than [`MIN_POOL`] bytes.
//! Memory that is in use outlives the pool and the connection over which it was received.
//!
//! # Map
//!
//! | module | what |
//! |---|---|
//! | `pool` | [`Pool`] |
//! | `buf` | buffers to fill and send, and how to wait for them |
//! | `named` | application memory that a message lands in |
//! | `lent` | send memory that peers on this host read in place |
//! | `landing` | landing memory: allocator, chunks, [`Landed`] bytes |
//! | `arena` | slots in size classes, and the queue of requests for them |
//! | `registered` | application memory, registered with the device |
//! | `ledger` | budgets, counters, the index of regions, the waiters for landing memory, the landing thread |
//! | `config` | the sizes of a pool, and how they shrink to fit RLIMIT_MEMLOCK |
//! | `region` | mapped and registered memory; [`memfd`] |
//! | `registrar` | the interface to devices |
//! | [`memlock`] | how much the process may pin |
//! | `error`, `stats` | the errors and figures of a pool |
//! | `process` | tells values of this process from those of its parent or children |
//! | `log_throttle` | limits the log lines that a peer can cause, in all crates |
//! | `copy` | copies payload at memory speed |
//! | `disk` | files to and from pool memory through io_uring (feature `io-uring`, Linux) |
//! | `test_util` | memory that changes under its reader, for tests (feature `test-util`) |
//!
//! The modules from `pool` to `stats` import only from modules below them in this table, except
//! that `lent` imports from `buf`.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod arena;
mod buf;
mod config;
mod copy;
#[cfg(feature = "io-uring")]
pub mod disk;
mod error;
mod file;
mod landing;
mod ledger;
mod lent;
mod log_throttle;
pub mod memlock;
mod named;
mod pool;
mod process;
mod region;
mod registered;
mod registrar;
mod stats;
#[cfg(any(test, feature = "test-util"))]
pub mod test_util;

/// The atomics of `chunk_bitmap` and `waiter_count`. tests/loom.rs replaces them with loom's
/// atomics.
mod atomics {
    pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
}

pub use buf::{Alloc, PinnedBuf, PinnedBytes, Segment, SegmentBuf};
pub use config::{DEFAULT_POOL, MIN_MEMLOCK, MIN_POOL, Pinning, PoolConfig, PoolSizes};
pub use copy::{copy, copy_slice};
pub use error::{PoolError, RegionError, RegisterError};
pub use landing::{Landed, LandedReader, Landing, LandingBuf, Reclaim, Window};
pub use lent::LendableBytes;
pub use log_throttle::LogThrottle;
pub use memlock::Memlock;
pub use named::{InUse, NamedBuffer, NamedGrant, NamedLease, NamedRegistration};
pub use pool::Pool;
pub use process::{Forked, Owned, PerProcess, Process};
pub use region::lendable::{LandableBuf, LendableBuf, LendableMemory};
pub use region::memfd;
pub use region::page::HugePages;
pub use region::random_address::random_iova;
pub use registered::PoolRegistration;
pub use registrar::{Access, HeapRegistrar, LendScope, Memory, Registrar, Registration};
pub use stats::{ClassStats, PoolStats, Use};
