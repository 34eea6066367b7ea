//! Control memory of connections at rest, for different page sizes.

use std::sync::Arc;

use crate::arena::Arenas;
use crate::config::Pinning;
use crate::config::PoolConfig;
use crate::ledger::Ledger;
use crate::registrar::HeapRegistrar;
use crate::stats::Use;

const LARGE_PAGE: usize = 64 << 10;

/// Returns how many bytes of the budget this number of blocks of `len` bytes takes.
fn taken(page: usize, len: usize, blocks: usize) -> usize {
    let sizes = PoolConfig::default().fit(None, Pinning::default()).unwrap();
    let budget = sizes.control;
    let ledger = Arc::new(Ledger::new(sizes, Arc::new(HeapRegistrar::default())));
    let arenas = Arc::new(Arenas::with_page(Use::Control, budget, ledger.clone(), page));
    let held: Vec<_> = (0..blocks).map(|_| arenas.take(len).unwrap()).collect();
    let taken = ledger.budgets.used(Use::Control);
    // The blocks do not overlap.
    let mut begins: Vec<_> = held.iter().map(|slot| slot.ptr.addr().get()).collect();
    begins.sort_unstable();
    assert!(begins.windows(2).all(|pair| pair[1] - pair[0] >= len));
    drop(held);
    // Returned blocks are used again.
    let again: Vec<_> = (0..blocks).map(|_| arenas.take(len).unwrap()).collect();
    assert_eq!((again.len(), ledger.budgets.used(Use::Control)), (blocks, taken));
    taken
}

#[test]
fn connections_at_rest_take_the_same_bytes_on_large_pages() {
    for len in [4 << 10, 8 << 10] {
        assert_eq!(taken(LARGE_PAGE, len, 64), 64 * len);
        assert_eq!(taken(4 << 10, len, 64), 64 * len);
    }
    // A single block takes a whole page.
    assert_eq!(taken(LARGE_PAGE, 4 << 10, 1), LARGE_PAGE);
    // A block longer than half a page has pages of its own.
    assert_eq!(taken(LARGE_PAGE, 40 << 10, 3), 3 * LARGE_PAGE);
    assert_eq!(taken(LARGE_PAGE, 100 << 10, 3), 6 * LARGE_PAGE);
}
