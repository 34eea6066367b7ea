//! Messages: sizes, streams, compression, copies, and all of them mixed.

pub(crate) mod compression;
pub(crate) mod mixed_load;
pub(crate) mod sizes;
pub(crate) mod streams;
pub(crate) mod zero_copy;
