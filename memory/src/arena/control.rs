//! Memory of connections at rest, which a page of 64 KiB has room for several of.

/// Bytes of blocks that share a page where they are shorter. At rest a connection has one of 8 KiB
/// over RDMA, and one of 4 KiB over shared memory.
const SMALL: [usize; 5] = [2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10];
/// Bytes of the pages that most systems have: each block gets pages of its own there.
const USUAL_PAGE: usize = 4 << 10;

/// The size classes of control blocks, and the bytes of an arena of theirs. A longer block has an
/// arena of its own, as it stays for the life of its connection.
pub(super) fn classes(page: usize) -> (Vec<usize>, usize) {
    let small = |slot: &usize| page > USUAL_PAGE && *slot < page;
    (SMALL.into_iter().filter(small).collect(), page)
}
