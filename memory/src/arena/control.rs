//! Size classes for control memory. A page of 64 KiB has room for several connections at rest.

/// Bytes of blocks that share a page if the page is longer. A connection at rest has a block of 8
/// KiB over RDMA, and a block of 4 KiB over shared memory.
const SMALL: [usize; 5] = [2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10];
/// The page size of most systems. On such systems each block gets separate pages.
const USUAL_PAGE: usize = 4 << 10;

/// The size classes of control blocks, and the size of their arenas in bytes. A longer block has a
/// dedicated arena, because a control block lasts as long as its connection.
pub(super) fn classes(page: usize) -> (Vec<usize>, usize) {
    let small = |slot: &usize| page > USUAL_PAGE && *slot < page;
    (SMALL.into_iter().filter(small).collect(), page)
}
