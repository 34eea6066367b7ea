//! Bytes that a peer on this host reads in place.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;

use crate::buf::PinnedBytes;
use crate::ledger::Ledger;

/// Bytes that can be lent to a peer, or that are lent already. Until this value is dropped, the
/// bytes count as lent and do not return to the pool.
///
/// At most three quarters of a pool's send memory are lent, so that some memory is left if peers
/// keep lent bytes for long. Bytes beyond this limit are copied.
/// [Registered](crate::Pool::register_lendable) memory has no such limit, because it stays
/// registered and no other request waits for it.
#[derive(Debug)]
pub struct LendableBytes {
    bytes: PinnedBytes,
    key: u32,
    counted: Counted,
}

#[derive(Debug)]
struct Counted {
    len: usize,
    /// Whether the bytes lie outside the pool.
    registered: bool,
    ledger: Arc<Ledger>,
}

impl Counted {
    /// Counts bytes as lent, and returns how many bytes of the same kind were lent before.
    fn new(len: usize, registered: bool, ledger: &Arc<Ledger>) -> (usize, Self) {
        let counted = Counted { len, registered, ledger: ledger.clone() };
        (counted.counter().fetch_add(len, Relaxed), counted)
    }

    fn counter(&self) -> &AtomicUsize {
        match self.registered {
            true => &self.ledger.counters.lent_application,
            false => &self.ledger.counters.lent,
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.counter().fetch_sub(self.len, Relaxed);
    }
}

impl LendableBytes {
    /// Makes bytes lendable to `peer`, the peer of the pool handle through which they are lent.
    /// Returns `None` if the bytes may not be lent to that peer, or if too many bytes are lent
    /// already.
    pub(crate) fn new(
        ledger: &Arc<Ledger>,
        peer: Option<NonZeroU32>,
        bytes: PinnedBytes,
    ) -> Option<Self> {
        if !bytes.may_be_lent_to(peer) {
            return None;
        }
        let (key, len) = (bytes.lend_key()?, bytes.len());
        let registered = bytes.is_registered();
        let limit = if registered { usize::MAX } else { ledger.sizes.send / 4 * 3 };
        // If the limit is exceeded, `counted` is dropped here, which ends the count.
        let (lent, counted) = Counted::new(len, registered, ledger);
        (lent.saturating_add(len) <= limit).then_some(LendableBytes { bytes, key, counted })
    }

    /// The key of the memory.
    pub fn key(&self) -> u32 {
        self.key
    }

    /// The address of the first byte, valid with that key.
    pub fn addr(&self) -> u64 {
        self.bytes.iova()
    }

    /// The number of bytes, at least 1.
    pub fn len(&self) -> usize {
        self.counted.len
    }

    /// Always false, because there is at least 1 byte.
    pub fn is_empty(&self) -> bool {
        self.counted.len == 0
    }

    /// Returns the bytes. A clone of them keeps the memory alive, but not its registration, and
    /// does not count as lent.
    pub fn bytes(&self) -> &Bytes {
        self.bytes.bytes()
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::sync::Arc;

    use crate::test_util::LendingRegistrar;
    use crate::{HeapRegistrar, LendScope, LendableBuf, LendableMemory, Pool, PoolConfig};

    fn common(scope: LendScope) -> Pool {
        let config = PoolConfig::default().total(16 << 20).send(4 << 20);
        Pool::new(config, Arc::new(LendingRegistrar::new(scope))).unwrap()
    }

    fn pool(scope: LendScope) -> Pool {
        common(scope).for_peer()
    }

    fn filled(pool: &Pool, len: usize) -> bytes::Bytes {
        let mut buf = pool.try_alloc(len).unwrap();
        buf.resize_zeroed(len);
        buf.freeze()
    }

    #[test]
    fn three_quarters_of_the_send_memory_may_be_lent() {
        let pool = pool(LendScope::All);
        let all: Vec<_> = (0..4).map(|_| filled(&pool, 1 << 20)).collect();
        let mut lent: Vec<_> = all.iter().map(|bytes| pool.lend(bytes)).collect();
        assert_eq!(lent.iter().filter(|lent| lent.is_some()).count(), 3);
        assert_eq!(pool.stats().lent, 3 << 20);
        // Lent memory stays in use, whatever becomes of the bytes.
        drop(all);
        assert_eq!(pool.stats().send, 3 << 20);
        lent.clear();
        assert_eq!((pool.stats().lent, pool.stats().send), (0, 0));
    }

    /// The attack: a peer maps the memory that it was lent, and looks for bytes that were sent to
    /// another peer.
    #[test]
    fn peers_are_lent_memory_of_their_own() {
        let common = common(LendScope::All);
        let (one, other) = (common.for_peer(), common.for_peer());
        // The handles allocate in turn. Without separate arenas, they would share an arena and
        // reuse each other's slots.
        for _ in 0..3 {
            let secret = filled(&one, 32 << 10);
            let public = filled(&other, 32 << 10);
            let plain = filled(&common, 32 << 10);
            let (lent, shown) = (one.lend(&secret).unwrap(), other.lend(&public).unwrap());
            assert_ne!(lent.key(), shown.key(), "they are in files of their own");
            assert!(other.lend(&secret).is_none(), "it is for another peer");
            assert!(common.lend(&secret).is_none(), "it is for one peer");
            for pool in [&one, &other, &common] {
                assert!(pool.lend(&plain).is_none(), "it may be for anybody");
                assert!(pool.resolve(&secret).is_some(), "it is sent by WRITE");
            }
        }
        let all = [&common, &one, &other].map(|pool| pool.stats());
        assert!(all.iter().all(|stats| stats.send == 0 && stats.classes == all[0].classes));
    }

    /// A peer that keeps a slot of each arena hinders others no more than a peer that keeps all the
    /// bytes that may be lent to it.
    #[test]
    fn a_peer_that_keeps_what_it_is_lent_leaves_memory_to_others() {
        let greedy = pool(LendScope::All);
        let kept: Vec<_> = std::iter::from_fn(|| greedy.try_alloc(64 << 10).ok()).collect();
        assert_eq!(kept.len(), 64, "all of it");
        // One slot of each arena.
        let mut kept: Vec<_> = kept
            .into_iter()
            .map(|buf| {
                let mut buf = buf;
                buf.resize_zeroed(64 << 10);
                buf.freeze()
            })
            .collect();
        kept.sort_by_key(|bytes| bytes.as_ptr());
        let mut lent: Vec<_> = kept.iter().filter_map(|bytes| greedy.lend(bytes)).collect();
        let mut keys = std::collections::HashSet::new();
        lent.retain(|lent| keys.insert(lent.key()));
        drop(kept);
        let others: Vec<_> = (0..3).map(|_| greedy.for_peer()).collect();
        for other in &others {
            let got: Vec<_> = std::iter::from_fn(|| other.try_alloc(64 << 10).ok()).collect();
            assert!(got.len() >= 16, "a quarter, not {} of 64", got.len());
        }
        // Once the greedy peer has returned the bytes, other peers may be lent the maximum.
        drop(lent);
        let all: Vec<_> = (0..3).map(|_| filled(&others[0], 1 << 20)).collect();
        assert_eq!(all.iter().filter_map(|bytes| others[0].lend(bytes)).count(), 3);
    }

    /// A waiting request is served from another peer's free memory, even after that peer has gone.
    #[test]
    fn memory_of_one_peer_comes_free_for_another() {
        let waiting = pool(LendScope::All);
        for leaves in [false, true] {
            let mut holder = Some(waiting.for_peer());
            let take = || holder.as_ref()?.try_alloc(64 << 10).ok();
            let held: Vec<_> = std::iter::from_fn(take).collect();
            let mut waits = std::pin::pin!(waiting.alloc(1 << 20));
            let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(waits.as_mut().poll(&mut cx).is_pending());
            if leaves {
                holder = None;
            }
            drop(held);
            assert!(waits.as_mut().poll(&mut cx).is_ready(), "{holder:?}");
        }
    }

    #[test]
    fn registered_memory_is_lent_whatever_the_pool_is() {
        let pool = pool(LendScope::Registered);
        let mut buf = LendableBuf::zeroed(8 << 20).unwrap();
        buf.fill(7);
        let memory = Arc::new(buf.freeze());
        let bytes = LendableMemory::bytes(memory.clone());
        let registration = pool.register_lendable(memory).unwrap();
        // The lent bytes exceed three quarters of the send memory.
        let lent: Vec<_> = (0..3).map(|_| pool.lend(&bytes.slice(64..)).unwrap()).collect();
        assert_eq!((lent[0].addr(), lent[0].len()), (bytes.as_ptr() as u64 + 64, (8 << 20) - 64));
        let stats = pool.stats();
        assert_eq!((stats.lent, stats.lent_application), (0, 3 * ((8 << 20) - 64)));
        // Lent memory stays registered, whatever becomes of the registration and the bytes.
        drop((registration, bytes));
        assert_eq!(pool.stats().application, 8 << 20);
        drop(lent);
        let stats = pool.stats();
        assert_eq!((stats.lent_application, stats.application), (0, 0));
        let plain = Pool::new(PoolConfig::default(), Arc::new(HeapRegistrar::default())).unwrap();
        let memory = Arc::new(LendableBuf::zeroed(4096).unwrap().freeze());
        let bytes = LendableMemory::bytes(memory.clone());
        let _registration = plain.register_lendable(memory).unwrap();
        assert!(plain.resolve(&bytes).is_some(), "registered");
        assert!(plain.lend(&bytes).is_none(), "the device cannot lend");
    }

    #[test]
    fn only_memory_that_peers_can_map_is_lent() {
        let (plain, lendable) = (pool(LendScope::Registered), pool(LendScope::All));
        assert!(plain.lend(&filled(&plain, 4096)).is_none(), "not asked for");
        assert!(lendable.lend(&filled(&plain, 4096)).is_none(), "another pool's");
        assert!(lendable.lend(&bytes::Bytes::from(vec![0; 4096])).is_none());
        let device = Arc::new(HeapRegistrar::default());
        let cannot = Pool::new(PoolConfig::default(), device).unwrap().for_peer();
        assert!(cannot.lend(&filled(&cannot, 4096)).is_none(), "the device cannot lend");
        let bytes = filled(&lendable, 8192);
        let part = lendable.lend(&bytes.slice(100..200)).unwrap();
        assert_eq!((part.len(), part.bytes().as_ptr()), (100, bytes[100..].as_ptr()));
        let whole = lendable.lend(&bytes).unwrap();
        assert_eq!(part.addr() - whole.addr(), 100);
        assert_eq!(part.key(), whole.key());
    }
}
