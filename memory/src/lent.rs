//! Bytes that a peer of this host reads where they lie.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;

use crate::buf::PinnedBytes;
use crate::ledger::Ledger;

/// Bytes of a pool that may be lent to a peer, or are: until this is dropped they do not return to
/// the pool, and count as lent.
///
/// All that is lent of a pool is at most three quarters of its memory for sending, so that peers
/// that keep it for long leave some: what exceeds that is copied. What is lent of
/// [registered](crate::Pool::register_lendable) memory has no such limit, as nobody else waits for
/// it: it stays registered.
#[derive(Debug)]
pub struct LendableBytes {
    bytes: PinnedBytes,
    key: u32,
    counted: Counted,
}

#[derive(Debug)]
struct Counted {
    len: usize,
    /// Not of the pool.
    registered: bool,
    ledger: Arc<Ledger>,
}

impl Counted {
    /// Counts bytes, and returns how many were lent of their kind before.
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
    pub(crate) fn new(ledger: &Arc<Ledger>, bytes: PinnedBytes) -> Option<Self> {
        let (key, len) = (bytes.lend_key()?, bytes.len());
        let registered = bytes.is_registered();
        let limit = if registered { usize::MAX } else { ledger.sizes.send / 4 * 3 };
        // Uncounted when it is dropped.
        let (lent, counted) = Counted::new(len, registered, ledger);
        (lent.saturating_add(len) <= limit).then_some(LendableBytes { bytes, key, counted })
    }

    /// The key of the memory.
    pub fn key(&self) -> u32 {
        self.key
    }

    /// The address of the first byte, with that key.
    pub fn addr(&self) -> u64 {
        self.bytes.iova()
    }

    /// The number of bytes: at least 1.
    pub fn len(&self) -> usize {
        self.counted.len
    }

    /// Whether there are no bytes: never.
    pub fn is_empty(&self) -> bool {
        self.counted.len == 0
    }

    /// The bytes. They keep the memory, but not its registration, and do not count as lent.
    pub fn bytes(&self) -> &Bytes {
        self.bytes.bytes()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::test_util::LendingRegistrar;
    use crate::{HeapRegistrar, LendableBuf, LendableMemory, Pool, PoolConfig};

    fn pool(lendable: bool) -> Pool {
        let config = PoolConfig::default().total(16 << 20).send(4 << 20).lendable(lendable);
        Pool::new(config, Arc::new(LendingRegistrar::default())).unwrap()
    }

    fn filled(pool: &Pool, len: usize) -> bytes::Bytes {
        let mut buf = pool.try_alloc(len).unwrap();
        buf.resize_zeroed(len);
        buf.freeze()
    }

    #[test]
    fn three_quarters_of_the_send_memory_may_be_lent() {
        let pool = pool(true);
        let all: Vec<_> = (0..4).map(|_| filled(&pool, 1 << 20)).collect();
        let mut lent: Vec<_> = all.iter().map(|bytes| pool.lend(bytes)).collect();
        assert_eq!(lent.iter().filter(|lent| lent.is_some()).count(), 3);
        assert_eq!(pool.stats().lent, 3 << 20);
        // What is lent stays in use, whatever becomes of the bytes.
        drop(all);
        assert_eq!(pool.stats().send, 3 << 20);
        lent.clear();
        assert_eq!((pool.stats().lent, pool.stats().send), (0, 0));
    }

    #[test]
    fn registered_memory_is_lent_whatever_the_pool_is() {
        let pool = pool(false);
        let mut buf = LendableBuf::zeroed(8 << 20).unwrap();
        buf.fill(7);
        let memory = Arc::new(buf.freeze());
        let bytes = LendableMemory::bytes(memory.clone());
        let registration = pool.register_lendable(memory).unwrap();
        // More than three quarters of the memory for sending.
        let lent: Vec<_> = (0..3).map(|_| pool.lend(&bytes.slice(64..)).unwrap()).collect();
        assert_eq!((lent[0].addr(), lent[0].len()), (bytes.as_ptr() as u64 + 64, (8 << 20) - 64));
        let stats = pool.stats();
        assert_eq!((stats.lent, stats.lent_application), (0, 3 * ((8 << 20) - 64)));
        // What is lent stays registered, whatever becomes of the registration and the bytes.
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
        let (plain, lendable) = (pool(false), pool(true));
        assert!(plain.lend(&filled(&plain, 4096)).is_none(), "not asked for");
        assert!(lendable.lend(&filled(&plain, 4096)).is_none(), "another pool's");
        assert!(lendable.lend(&bytes::Bytes::from(vec![0; 4096])).is_none());
        let device = Arc::new(HeapRegistrar::default());
        let cannot = Pool::new(PoolConfig::default().lendable(true), device).unwrap();
        assert!(cannot.lend(&filled(&cannot, 4096)).is_none(), "the device cannot lend");
        let bytes = filled(&lendable, 8192);
        let part = lendable.lend(&bytes.slice(100..200)).unwrap();
        assert_eq!((part.len(), part.bytes().as_ptr()), (100, bytes[100..].as_ptr()));
        let whole = lendable.lend(&bytes).unwrap();
        assert_eq!(part.addr() - whole.addr(), 100);
        assert_eq!(part.key(), whole.key());
    }
}
