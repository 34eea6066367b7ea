//! RLIMIT_MEMLOCK. One test, because the limit is the process's.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::sync::Arc;

use tonic_rdma_memory::{
    HeapRegistrar, MIN_POOL, Memlock, Memory, Pool, PoolConfig, PoolError, RegisterError, Registrar,
    Registration,
};

/// A device that applies the limit to everyone, as Soft-iWARP does.
struct Strict(HeapRegistrar);

// SAFETY: as HeapRegistrar.
unsafe impl Registrar for Strict {
    fn pins(&self) -> bool {
        true
    }
    fn ignores_ipc_lock(&self) -> bool {
        true
    }
    unsafe fn register(&self, memory: Memory) -> Result<Box<dyn Registration>, RegisterError> {
        // SAFETY: the caller's promise.
        unsafe { self.0.register(memory) }
    }
}

fn limit(soft: u64, hard: u64) {
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
    // SAFETY: limit is a valid rlimit.
    let result = unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) };
    assert_eq!(result, 0, "needs a hard limit of 8 MiB or more");
}

fn pool() -> Result<Pool, PoolError> {
    Pool::new(PoolConfig::default(), Arc::new(Strict(HeapRegistrar::default())))
}

#[test]
fn the_limit_decides_the_size() {
    const MARGIN: usize = 256 << 10;
    limit(64 << 10, 8 << 20);
    let all = pool().unwrap();
    assert_eq!(all.config().total, (8 << 20) - MARGIN);
    assert_eq!(Memlock::read().unwrap().soft, Some(8 << 20), "the soft limit is raised to the hard one");
    // It works: everything that the parts have, at once.
    let sizes = all.config().clone();
    let mut landing = all.landing();
    let held = (
        all.try_alloc(sizes.send).unwrap(),
        all.control(80 << 10).unwrap(),
        all.control(80 << 10).unwrap(),
        landing.alloc(sizes.landing, sizes.landing).unwrap().unwrap(),
    );
    assert!(all.stats().registered <= sizes.total);
    drop(held);

    let least = (MIN_POOL + MARGIN) as u64;
    limit(0, least);
    assert_eq!(pool().unwrap().config().total, MIN_POOL);

    limit(0, least - 1);
    let error = pool().unwrap_err();
    let PoolError::Memlock { needed, limit: named, pinned: 0 } = error else { panic!("{error}") };
    assert_eq!((needed, named), (least, least - 1));
    let text = error.to_string();
    for part in ["2359296 bytes", "2359295 bytes", "ulimit -l 2304", "LimitMEMLOCK=", "--ulimit memlock=-1"] {
        assert!(text.contains(part), "{text}");
    }
    // What pins nothing does not care.
    let heap = Pool::new(PoolConfig::default(), Arc::new(HeapRegistrar::default())).unwrap();
    assert_eq!(heap.config().total, tonic_rdma_memory::DEFAULT_POOL);
}
