//! Application memory that is registered with a pool's device.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use bytes::{Buf, BufMut, Bytes};
use common::{RecordingRegistrar, small};
use tonic_rdma_memory::{Access, Pool, RegionError};

const MIB: usize = 1 << 20;

/// An owner whose drop adds 1 to `dropped`, plus the number of bytes that are still registered.
struct Owner {
    bytes: Vec<u8>,
    registrar: Arc<RecordingRegistrar>,
    dropped: Arc<AtomicUsize>,
}

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let early = self.registrar.bytes_of(Access::LocalRead);
        self.dropped.fetch_add(1 + early, SeqCst);
    }
}

fn owned(len: usize, registrar: &Arc<RecordingRegistrar>) -> (Bytes, Arc<AtomicUsize>) {
    let dropped = Arc::new(AtomicUsize::new(0));
    let bytes = (0..len).map(|at| at as u8).collect();
    let (registrar, counter) = (registrar.clone(), dropped.clone());
    (Bytes::from_owner(Owner { bytes, registrar, dropped: counter }), dropped)
}

fn refused(pool: &Pool, memory: &Bytes) -> RegionError {
    pool.register(memory.clone()).unwrap_err()
}

#[test]
fn any_part_resolves_where_it_lies_until_the_last_holder_is_gone() {
    let (pool, registrar) = small();
    let before = pool.stats();
    // The memory begins at an odd address, which is not on a page boundary.
    let (mut memory, dropped) = owned(100_001, &registrar);
    memory.advance(1);
    let registered = pool.register(memory.clone()).unwrap();
    let second = registered.clone();
    for range in [0..1, 0..100_000, 5..6, 99_999..100_000, 4000..9000] {
        let part = memory.slice(range);
        let found = pool.resolve(&part).unwrap();
        assert_eq!((found.addr(), found.len()), (part.as_ptr() as u64, part.len()));
        assert!(registrar.covers(found.lkey(), found.iova(), found.len()));
    }
    assert_eq!(registrar.bytes_of(Access::LocalRead), 100_000, "once, for reading only");
    let now = pool.stats();
    assert_eq!((now.application, now.registered), (100_000, before.registered));
    assert_eq!(now.registrations, before.registrations + 1);

    // Work in flight keeps the memory registered, even after the application has dropped its
    // registrations.
    let in_flight = pool.resolve(&memory).unwrap().slice(10..20);
    drop((registered, second));
    assert!(registrar.covers(in_flight.lkey(), in_flight.iova(), 10));
    assert_eq!(in_flight.as_ref(), &memory[10..20]);
    drop(in_flight);
    assert_eq!((registrar.bytes_of(Access::LocalRead), pool.stats().application), (0, 0));
    assert!(pool.resolve(&memory).is_none(), "registered no longer");
    assert_eq!(dropped.load(SeqCst), 0, "the application still has it");
    drop(memory);
    assert_eq!(dropped.load(SeqCst), 1, "dropped once, and registered no longer");
    registrar.assert_clean();
}

#[test]
fn it_outlives_the_pool_and_is_given_back_after_it() {
    let (pool, registrar) = small();
    let (memory, dropped) = owned(5000, &registrar);
    let registered = pool.register(memory.clone()).unwrap();
    let found = pool.resolve(&memory).unwrap();
    drop((pool, memory, registered));
    assert!(registrar.covers(found.lkey(), found.iova(), 5000));
    drop(found);
    assert_eq!(dropped.load(SeqCst), 1);
    registrar.assert_settled();
}

#[test]
fn memory_of_a_slow_device_is_given_back_by_another_thread() {
    let (pool, registrar) = small();
    registrar.slow();
    // Memory of any length is dropped by another thread, because the owner's Drop may use the
    // connection that the last holder has locked.
    struct Elsewhere(std::thread::ThreadId, Bytes);
    impl AsRef<[u8]> for Elsewhere {
        fn as_ref(&self) -> &[u8] {
            &self.1
        }
    }
    impl Drop for Elsewhere {
        fn drop(&mut self) {
            assert_ne!(std::thread::current().id(), self.0);
        }
    }
    let (memory, dropped) = owned(2 * MIB, &registrar);
    let own = Bytes::from_owner(Elsewhere(std::thread::current().id(), memory));
    let registered = pool.register(own).unwrap();
    drop(registered);
    assert_eq!(pool.stats().application, 0, "found no longer, at once");
    let started = Instant::now();
    while dropped.load(SeqCst) == 0 {
        assert!(started.elapsed() < Duration::from_secs(60), "never given back");
        std::thread::yield_now();
    }
    assert_eq!(dropped.load(SeqCst), 1);
    drop(pool);
    registrar.assert_settled();
}

#[test]
fn what_is_registered_already_is_refused_and_stays_registered() {
    let (pool, registrar) = small();
    let (memory, _) = owned(50_000, &registrar);
    let registered = pool.register(memory.slice(10_000..20_000)).unwrap();
    for range in [10_000..20_000, 0..10_001, 19_999..50_000, 0..50_000, 12_000..13_000] {
        let error = refused(&pool, &memory.slice(range.clone()));
        assert!(
            matches!(error, RegionError::Overlap { len, pool: false } if len == range.len()),
            "{error}"
        );
    }
    let beside = [0..10_000, 20_000..50_000].map(|part| pool.register(memory.slice(part)).unwrap());
    assert!(pool.resolve(&memory.slice(9_000..10_001)).is_none(), "two regions");
    drop(beside);
    assert!(pool.resolve(&memory.slice(10_000..20_000)).is_some());
    drop(registered);

    // Pool memory needs no registration.
    let mut buf = pool.try_alloc(5000).unwrap();
    buf.put_slice(&[1; 5000]);
    let own = buf.freeze();
    assert!(matches!(refused(&pool, &own), RegionError::Overlap { len: 5000, pool: true }));
    assert!(pool.resolve(&own).is_some());
    assert_eq!(pool.stats().application, 0);
    registrar.assert_clean();
}

#[test]
fn a_refusal_of_the_device_gives_the_memory_back() {
    let (pool, registrar) = small();
    let (memory, dropped) = owned(5000, &registrar);
    registrar.fail(true);
    let error = refused(&pool, &memory);
    assert!(error.to_string().starts_with("registering 5000 bytes failed"), "{error}");
    registrar.fail(false);
    assert_eq!(pool.stats().application, 0);
    assert!(pool.resolve(&memory).is_none());
    drop(memory);
    assert_eq!(dropped.load(SeqCst), 1);
}

#[test]
fn no_bytes_are_no_registration() {
    let (pool, registrar) = small();
    let registered = pool.register(Bytes::new()).unwrap();
    assert_eq!((registrar.registrations(), pool.stats().application), (0, 0));
    drop(registered);
}

#[test]
fn threads_that_register_the_same_memory_leave_one_registration() {
    let (pool, registrar) = small();
    let (memory, _) = owned(8192, &registrar);
    for _ in 0..200 {
        let registered: Vec<_> = std::thread::scope(|scope| {
            let each = [(); 4].map(|()| scope.spawn(|| pool.register(memory.clone())));
            each.map(|thread| thread.join().unwrap()).into_iter().flatten().collect()
        });
        assert_eq!(registered.len(), 1);
        assert_eq!(pool.stats().application, 8192);
        assert!(pool.resolve(&memory).is_some());
        drop(registered);
        assert_eq!((pool.stats().application, registrar.bytes_of(Access::LocalRead)), (0, 0));
    }
}
