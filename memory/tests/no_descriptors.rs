//! A process without a free descriptor. Lendable memory needs a descriptor for each of its files.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::sync::Arc;

use tonic_rdma_memory::test_util::LendingRegistrar;
use tonic_rdma_memory::{LendScope, Pool, PoolConfig};

/// Sets the process's limit on descriptors. No other test runs in this process.
fn allow_descriptors(count: u64) {
    let limit = libc::rlimit { rlim_cur: count, rlim_max: 1024 };
    // SAFETY: the limit is read only.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

#[test]
fn memory_that_cannot_be_lent_is_memory_all_the_same() {
    let registrar = Arc::new(LendingRegistrar::new(LendScope::All));
    let pool = Pool::new(PoolConfig::default(), registrar).unwrap().for_peer();
    allow_descriptors(3);
    let mut buf = pool.try_alloc(100_000).unwrap();
    buf.resize_zeroed(100_000);
    assert!(pool.lend(&buf.freeze()).is_none());
    allow_descriptors(1024);
    // This length needs another arena.
    let mut buf = pool.try_alloc(3 << 20).unwrap();
    buf.resize_zeroed(3 << 20);
    assert!(pool.lend(&buf.freeze()).is_some());
}
