//! The lock-free parts under loom, which explores every interleaving and every outcome that the
//! memory model allows.

#![allow(dead_code, clippy::unwrap_used, reason = "a test, and a part of what it includes")]

mod atomics {
    pub(crate) use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
}
#[path = "../src/landing/chunk_bitmap.rs"]
mod chunk_bitmap;
#[path = "../src/ledger/waiter_count.rs"]
mod waiter_count;

use chunk_bitmap::ChunkBitmap;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use waiter_count::WaiterCount;

/// A bitmap and the memory that it manages. Loom reports unordered accesses to the memory.
struct Chunk {
    granules: ChunkBitmap,
    memory: UnsafeCell<u32>,
    waiting: WaiterCount,
}

/// All accesses by the reader of a piece happen before the owner of the chunk grants it again.
#[test]
fn freeing_happens_before_the_next_use() {
    loom::model(|| {
        let chunk = Arc::new(Chunk {
            granules: ChunkBitmap::new(70),
            memory: UnsafeCell::new(0),
            waiting: WaiterCount::default(),
        });
        chunk.granules.take(60, 8);
        let reader = {
            let chunk = chunk.clone();
            thread::spawn(move || {
                chunk.memory.with(|memory| {
                    // SAFETY: loom checks that nobody writes concurrently.
                    assert_eq!(unsafe { *memory }, 0);
                });
                assert!(chunk.granules.free(60, 8));
            })
        };
        if chunk.granules.find(70) == Some(0) {
            chunk.granules.take(0, 70);
            // SAFETY: as above.
            chunk.memory.with_mut(|memory| unsafe { *memory = 1 });
        }
        reader.join().unwrap();
    });
}

/// Two readers free neighbouring runs in one word while the owner takes a third one.
#[test]
fn concurrent_frees_in_one_word_are_independent() {
    loom::model(|| {
        let map = Arc::new(ChunkBitmap::new(12));
        map.take(0, 4);
        map.take(4, 4);
        let threads = [0, 4].map(|start| {
            let map = map.clone();
            thread::spawn(move || assert!(map.free(start, 4)))
        });
        let (start, _) = map.longest().unwrap();
        map.take(start, 4);
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert!(!map.is_free());
        assert!(map.free(start, 4));
        assert!(map.is_free());
        assert!(!map.free(0, 1), "freed twice");
    });
}

/// Either the waiter sees the freed memory, or the thread that frees it sees the waiter.
#[test]
fn no_wakeup_is_lost() {
    loom::model(|| {
        let chunk = Arc::new(Chunk {
            granules: ChunkBitmap::new(1),
            memory: UnsafeCell::new(0),
            waiting: WaiterCount::default(),
        });
        chunk.granules.take(0, 1);
        let frees = {
            let chunk = chunk.clone();
            thread::spawn(move || {
                assert!(chunk.granules.free(0, 1));
                chunk.waiting.any_after_free()
            })
        };
        chunk.waiting.enter();
        let found = chunk.granules.find(1).is_some();
        let told = frees.join().unwrap();
        assert!(found || told, "the waiter neither finds the free memory nor is woken");
        chunk.waiting.leave();
        assert_eq!(chunk.waiting.count(), 0);
    });
}
