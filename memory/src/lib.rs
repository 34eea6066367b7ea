//! Pinned memory pool: arenas, size classes, PinnedBuf, Bytes out.
