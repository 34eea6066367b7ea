//! Messages: sizes, streams, compression, copies, and a mix of all.

pub(crate) mod compression;
pub(crate) mod land_in;
pub(crate) mod mixed_load;
pub(crate) mod sizes;
pub(crate) mod streams;
pub(crate) mod zero_copy;
