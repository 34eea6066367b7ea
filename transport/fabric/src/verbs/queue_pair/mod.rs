//! Queue pairs, completion queues, and batches of work for them.

pub(super) mod cq;
pub(super) mod post;
pub(super) mod qp;
