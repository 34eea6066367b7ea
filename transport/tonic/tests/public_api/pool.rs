//! A program gets from a pool what an application needs, and nothing of the transport's own.

use std::any::TypeId;
use std::path::Path;

use tonic_rdma::{Channel, Pool};

use crate::surface::{self, Surface};

/// All that a program can do with a pool. The transport's pool also hands out the memory of
/// connections, from which a program must not be able to take.
const POOL: &[(&str, &str)] = &[
    ("Pool: Clone", ""),
    ("Pool: Debug", ""),
    (
        "Pool::alloc()",
        "(&self, usize) -> impl Future<Output=Result<PinnedBuf,PoolError>>+Send+use<>",
    ),
    ("Pool::config()", "(&self) -> &PoolSizes"),
    ("Pool::contains()", "(&self, &Bytes) -> bool"),
    ("Pool::stats()", "(&self) -> PoolStats"),
    ("Pool::try_alloc()", "(&self, usize) -> Result<PinnedBuf,PoolError>"),
];

#[test]
fn a_pool_does_what_is_listed_and_no_more() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    // All files, so that an implementation elsewhere is found.
    let found = surface::read(&source, &[], &["Pool"], &[""]);
    let listed = POOL.iter().map(|(name, signature)| (name.to_string(), signature.to_string()));
    assert_eq!(found, Surface::from_iter(listed));
}

/// `Channel::pool` and the function `pool` return this crate's type, and not the transport's.
#[test]
fn pools_are_of_this_crates_type() {
    let _: fn(&Channel) -> Pool = Channel::pool;
    let _: fn(&tonic::Request<()>) -> Pool = tonic_rdma::pool;
    assert_ne!(TypeId::of::<Pool>(), TypeId::of::<tonic_rdma_memory::Pool>());
}
