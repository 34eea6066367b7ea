//! Queue pairs, and batches of work for them.

pub(super) mod path_mtu;
pub(super) mod post;
pub(super) mod qp;
