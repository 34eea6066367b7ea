//! Application memory that a message lands in.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use common::pinning::wait_until;
use common::{RKEY, RecordingRegistrar, small};
use tonic_rdma_memory::{
    Access, InUse, Landed, Landing, NamedBuffer, NamedGrant, NamedLease, RegionError,
};

/// An owner whose drop adds 1 to `dropped`, plus the number of bytes that are still registered for
/// peers.
struct Owner {
    bytes: Vec<u8>,
    registrar: Arc<RecordingRegistrar>,
    dropped: Arc<AtomicUsize>,
}

impl AsMut<[u8]> for Owner {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let early = self.registrar.bytes_of(Access::RemoteWrite);
        self.dropped.fetch_add(1 + early, SeqCst);
    }
}

fn owner(len: usize, registrar: &Arc<RecordingRegistrar>) -> (Owner, Arc<AtomicUsize>) {
    let dropped = Arc::new(AtomicUsize::new(0));
    let owner =
        Owner { bytes: vec![0; len], registrar: registrar.clone(), dropped: dropped.clone() };
    (owner, dropped)
}

fn grant(
    landing: &Landing,
    lease: &NamedLease,
    range: std::ops::Range<usize>,
) -> Result<NamedGrant, RegionError> {
    let registration = landing.register_named(lease.clone(), range);
    let mut result = None;
    wait_until("it is registered", || {
        result = registration.take_result();
        result.is_some()
    });
    result.unwrap()
}

/// Writes like the peer's device.
fn write(registrar: &RecordingRegistrar, grant: &NamedGrant, bytes: &[u8]) {
    assert!(registrar.covers(grant.rkey() & !RKEY, grant.addr(), bytes.len()));
    let to = registrar.place(grant.rkey() & !RKEY, grant.addr());
    // SAFETY: the registration covers the range and is live; nobody reads it (R8).
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
}

/// The bytes in two parts.
fn landed(bytes: &[u8]) -> [Landed; 2] {
    let (first, second) = bytes.split_at(bytes.len() / 3);
    [first, second].map(|part| Bytes::copy_from_slice(part).into())
}

fn is_idle(buffer: &NamedBuffer) -> bool {
    buffer.poll_idle(&Context::from_waker(Waker::noop())).is_ready()
}

#[test]
fn a_buffer_comes_back_by_value_filled_and_deregistered() {
    let (pool, registrar) = small();
    let landing = pool.landing();
    let (memory, dropped) = owner(10_000, &registrar);
    let start = memory.bytes.as_ptr();
    let buffer = NamedBuffer::new(memory);
    let lease = buffer.claim().unwrap();
    assert!(buffer.claim().is_none(), "one call at a time");
    let granted = grant(&landing, &lease, 0..9000).unwrap();
    assert_eq!(registrar.bytes_of(Access::RemoteWrite), 9000);
    assert_eq!(pool.stats().application, 9000);
    write(&registrar, &granted, &[7; 9000]);
    let view = granted.filled(9000);
    assert_eq!(registrar.bytes_of(Access::RemoteWrite), 0, "the key is withdrawn");
    assert_eq!((view.as_ptr(), &view[..]), (start, &[7; 9000][..]));
    assert_eq!((lease.filled(), lease.range_of(&view.slice(5..6).into())), (9000, Some(5..6)));
    assert_eq!(lease.range_of(&Bytes::from_static(&[1]).into()), None);
    assert_eq!(buffer.take::<Owner>().err(), Some(InUse::Claimed));
    drop(lease);
    assert_eq!(buffer.take::<Owner>().err(), Some(InUse::Viewed(1)));
    let clone = view.slice(100..);
    drop(view);
    assert_eq!(buffer.take::<Owner>().err(), Some(InUse::Viewed(1)));
    drop(clone);
    let memory = buffer.take::<Owner>().unwrap();
    assert_eq!((memory.bytes.as_ptr(), &memory.bytes[..9000]), (start, &[7; 9000][..]));
    assert_eq!(buffer.take::<Owner>().err(), Some(InUse::Taken));
    assert!(buffer.claim().is_none());
    drop((buffer, memory));
    assert_eq!((dropped.load(SeqCst), pool.stats().application), (1, 0));
    drop((landing, pool));
    registrar.assert_settled();
}

/// In any order of drops, the memory lives until its last holder is dropped, and the registration
/// ends before the memory is dropped.
#[test]
fn memory_is_dropped_behind_the_grant_and_the_views() {
    let (pool, registrar) = small();
    let landing = pool.landing();
    for filled in [false, true] {
        let (memory, dropped) = owner(5000, &registrar);
        let buffer = NamedBuffer::new(memory);
        let lease = buffer.claim().unwrap();
        let granted = grant(&landing, &lease, 0..5000).unwrap();
        drop((buffer, lease));
        assert_eq!(dropped.load(SeqCst), 0);
        if filled {
            let view = granted.filled(5000);
            assert_eq!(dropped.load(SeqCst), 0);
            drop(view);
        } else {
            drop(granted);
        }
        assert_eq!(dropped.load(SeqCst), 1, "once, with nothing registered");
    }
}

#[test]
fn a_slow_device_withdraws_the_key_before_the_buffer_comes_back() {
    let (pool, registrar) = small();
    registrar.slow();
    let mut landing = pool.landing();
    landing.register_waker(Waker::noop());
    let (memory, _) = owner(9000, &registrar);
    let buffer = NamedBuffer::new(memory);
    let lease = buffer.claim().unwrap();
    // This registration is given up before it is made.
    drop(landing.register_named(lease.clone(), 0..10));
    let view = loop {
        match grant(&landing, &lease, 0..9000) {
            Ok(granted) => break granted.filled(9000),
            Err(RegionError::Overlap { .. }) => thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    };
    drop((lease, view));
    block_on(poll_fn(|cx| buffer.poll_idle(cx)));
    assert_eq!(registrar.bytes_of(Access::RemoteWrite), 0);
    assert_eq!(buffer.take::<Owner>().unwrap().bytes.len(), 9000);
}

#[test]
fn a_registration_that_is_kept_serves_calls_until_the_buffer_is_closed() {
    for slow in [false, true] {
        let (pool, registrar) = small();
        if slow {
            registrar.slow();
        }
        let mut landing = pool.landing();
        landing.register_waker(Waker::noop());
        let (memory, dropped) = owner(9000, &registrar);
        let start = memory.bytes.as_ptr();
        let buffer = NamedBuffer::new(memory);
        buffer.keep_registered();
        let before = pool.stats().registrations;
        let mut keys = Vec::new();
        for call in 1..=5 {
            let lease = buffer.claim().unwrap();
            // The call uses two grants, and gives up the second.
            let granted = grant(&landing, &lease, 0..4000).unwrap();
            keys.push((granted.rkey(), granted.addr()));
            write(&registrar, &granted, &[call; 4000]);
            let view = granted.filled(4000);
            let second = grant(&landing, &lease, 4000..9000).unwrap();
            assert_eq!(second.addr(), keys[0].1 + 4000);
            write(&registrar, &second, &[call + 100; 5000]);
            drop((second, lease));
            assert_eq!((view.as_ptr(), &view[..]), (start, &[call; 4000][..]));
            drop(view);
            assert!(is_idle(&buffer), "the next call can have it");
            assert_eq!(registrar.bytes_of(Access::RemoteWrite), 9000, "and the key still works");
        }
        assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
        assert_eq!(pool.stats().registrations, before + 1);
        assert_eq!(pool.stats().application, 9000);
        // A call that has claimed the buffer delays the end of the registration.
        let lease = buffer.claim().unwrap();
        buffer.close();
        assert_eq!(registrar.bytes_of(Access::RemoteWrite), 9000);
        assert_eq!(buffer.take::<Owner>().err(), Some(InUse::Claimed));
        drop(lease);
        block_on(poll_fn(|cx| buffer.poll_idle(cx)));
        assert_eq!((registrar.bytes_of(Access::RemoteWrite), pool.stats().application), (0, 0));
        let memory = buffer.take::<Owner>().unwrap();
        assert_eq!((memory.bytes.as_ptr(), memory.bytes[4500]), (start, 105));
        drop(memory);
        assert_eq!(dropped.load(SeqCst), 1);
    }
}

/// No registration outlives the memory, whether the buffer is taken or dropped, and whether one
/// device or two have registered it.
#[test]
fn what_a_buffer_keeps_ends_before_its_owner() {
    for slow in [false, true] {
        let ((pool, registrar), (other, another)) = (small(), small());
        if slow {
            registrar.slow();
            another.slow();
        }
        let use_it = |buffer: &NamedBuffer, landing: &Landing| {
            let lease = buffer.claim().unwrap();
            grant(landing, &lease, 0..100).unwrap().filled(100)
        };
        let [here, there] = [&pool, &other].map(|pool| {
            let mut landing = pool.landing();
            landing.register_waker(Waker::noop());
            landing
        });
        for taken in [false, true] {
            let (memory, dropped) = owner(9000, &registrar);
            let buffer = NamedBuffer::new(memory);
            buffer.keep_registered();
            drop(use_it(&buffer, &here));
            // Registering with another device ends the registration with the first.
            let view = use_it(&buffer, &there);
            wait_until("the first registration ends", || {
                registrar.bytes_of(Access::RemoteWrite) == 0
            });
            assert_eq!(another.bytes_of(Access::RemoteWrite), 9000);
            drop(view);
            block_on(poll_fn(|cx| buffer.poll_idle(cx)));
            drop(use_it(&buffer, &here));
            if taken {
                // The buffer is taken without being closed first.
                wait_until("it is taken", || buffer.take::<Owner>().is_ok());
            } else {
                drop(buffer);
            }
            wait_until("the owner is dropped", || dropped.load(SeqCst) > 0);
            assert_eq!(dropped.load(SeqCst), 1, "once, with nothing registered");
            wait_until("nothing is left", || another.bytes_of(Access::RemoteWrite) == 0);
        }
    }
}

#[test]
fn all_who_wait_for_a_buffer_are_woken() {
    struct Count(AtomicUsize);
    impl std::task::Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }
    let buffer = NamedBuffer::new(vec![0; 10]);
    let lease = buffer.claim().unwrap();
    let counts = [(); 3].map(|()| Arc::new(Count(AtomicUsize::new(0))));
    for count in &counts {
        let waker = Waker::from(count.clone());
        for _ in 0..2 {
            assert!(buffer.poll_idle(&Context::from_waker(&waker)).is_pending());
        }
    }
    drop(lease);
    assert!(counts.iter().all(|count| count.0.load(SeqCst) == 1), "each once");
    assert!(is_idle(&buffer));
}

/// Blocks this thread on a future, because the crate has no runtime.
fn block_on(future: impl Future<Output = ()>) {
    struct Unpark(thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = std::pin::pin!(future);
    while future.as_mut().poll(&mut Context::from_waker(&waker)) == Poll::Pending {
        thread::park_timeout(Duration::from_secs(20));
    }
}

#[test]
fn a_field_that_lands_in_parts_is_granted_in_order() {
    let (pool, registrar) = small();
    let landing = pool.landing();
    let (memory, _) = owner(10_000, &registrar);
    let buffer = NamedBuffer::new(memory);
    let lease = buffer.claim().unwrap();
    let overlap =
        |range| matches!(grant(&landing, &lease, range), Err(RegionError::Overlap { .. }));
    assert!(overlap(1..10) && overlap(0..10_001) && overlap(0..0));
    let granted = grant(&landing, &lease, 0..10_000).unwrap();
    assert!(overlap(0..10), "one at a time");
    write(&registrar, &granted, &[1; 4000]);
    // The grant was recalled after the peer had written a part.
    let first = granted.filled(4000);
    assert!(overlap(0..10_000) && overlap(3999..10_000), "what has landed is not written again");
    // The grant is dropped before the peer has written anything.
    drop(grant(&landing, &lease, 4000..10_000).unwrap());
    let granted = grant(&landing, &lease, 4000..10_000).unwrap();
    write(&registrar, &granted, &[2; 6000]);
    let second = granted.filled(6000);
    assert_eq!(lease.range_of(&second.clone().into()), Some(4000..10_000));
    assert_eq!(lease.view(0..10_001), None);
    let whole = lease.view(0..10_000).unwrap();
    assert_eq!((&whole[..4000], &whole[4000..]), (&first[..], &second[..]));
    drop((first, second, whole, lease));
    assert!(is_idle(&buffer));
}

#[test]
fn what_cannot_land_is_copied_unless_the_buffer_is_in_use() {
    let (pool, registrar) = small();
    let landing = pool.landing();
    let (memory, _) = owner(5000, &registrar);
    let buffer = NamedBuffer::new(memory);
    let lease = buffer.claim().unwrap();
    assert_eq!(lease.fill(&landed(&[1; 5001])), None, "too long");
    let granted = grant(&landing, &lease, 0..5000).unwrap();
    assert_eq!(lease.fill(&landed(&[1; 10])), None, "a peer may write there");
    drop(granted);
    let view = lease.fill(&landed(&[1; 10])).unwrap();
    assert_eq!(&view[..], [1; 10]);
    assert_eq!(lease.fill(&[view.clone().into()]), None, "it is viewed");
    drop(view);
    assert_eq!(&lease.fill(&landed(&[2; 7])).unwrap()[..], [2; 7]);
    drop(lease);
    // For the next call, no bytes have landed yet.
    assert_eq!(buffer.claim().unwrap().filled(), 0);
    buffer.close();
    assert!(buffer.claim().is_none());
}

#[test]
fn a_refusal_of_the_device_leaves_the_buffer_as_it_was() {
    let (pool, registrar) = small();
    let landing = pool.landing();
    let (memory, _) = owner(5000, &registrar);
    let buffer = NamedBuffer::new(memory);
    let lease = buffer.claim().unwrap();
    registrar.fail(true);
    let error = grant(&landing, &lease, 0..5000).unwrap_err();
    assert!(matches!(error, RegionError::Register(_)), "{error}");
    registrar.fail(false);
    assert_eq!(pool.stats().application, 0);
    assert_eq!(grant(&landing, &lease, 0..5000).unwrap().capacity(), 5000);
    drop(lease);
    let nothing = NamedBuffer::new(Vec::new());
    assert!(nothing.is_empty() && nothing.claim().unwrap().fill(&[]).unwrap().is_empty());
    assert_eq!(nothing.take::<Vec<u8>>(), Ok(Vec::new()));
}

/// Bytes that lie inside the owner itself move only when the owner is taken back.
#[test]
fn an_owner_may_hold_its_bytes_inline() {
    struct Inline([u8; 4096]);
    impl AsMut<[u8]> for Inline {
        fn as_mut(&mut self) -> &mut [u8] {
            &mut self.0
        }
    }
    let buffer = NamedBuffer::new(Inline([0; 4096]));
    let lease = buffer.claim().unwrap();
    drop(lease.fill(&landed(&[9; 4096])).unwrap());
    drop(lease);
    assert_eq!(buffer.take::<Inline>().unwrap().0, [9; 4096]);
}
