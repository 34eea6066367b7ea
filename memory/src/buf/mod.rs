//! Buffers that the application fills.
//!
//! | file | what |
//! |---|---|
//! | `pinned` | [`PinnedBuf`], [`PinnedBytes`] |
//! | `alloc` | [`Alloc`]: waiting for send memory |
//! | `segments` | [`SegmentBuf`]: encoding without copying large fields |

mod alloc;
mod pinned;
mod segments;

pub use self::alloc::Alloc;
pub(crate) use self::alloc::try_alloc;
pub use self::pinned::{PinnedBuf, PinnedBytes};
pub use self::segments::{Segment, SegmentBuf};
