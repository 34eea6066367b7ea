//! Queue pairs, and batches of work for them.

pub(super) mod post;
pub(super) mod qp;
