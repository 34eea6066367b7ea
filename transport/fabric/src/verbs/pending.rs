//! A link whose attempt has not succeeded yet. If the attempt fails or is given up, the queue pair
//! is destroyed on a separate thread. Firmware takes milliseconds to destroy a queue pair, and
//! Soft-iWARP waits up to 10 s for the answer to a connect request.

use std::mem::ManuallyDrop;

use tonic_rdma_memory::Pool;

use crate::off_worker::run_on_thread;
use crate::verbs::link::VerbsLink;

/// Owns a link until its attempt has succeeded.
pub(super) struct PendingLink {
    /// The link, until `into_link` or `drop` takes it.
    link: ManuallyDrop<VerbsLink>,
    /// The pool with the link's memory. The attempt may have been the pool's only user. Taken
    /// together with the link.
    pool: Option<Pool>,
}

impl PendingLink {
    pub(super) fn new(link: VerbsLink, pool: &Pool) -> PendingLink {
        PendingLink { link: ManuallyDrop::new(link), pool: Some(pool.clone()) }
    }

    pub(super) fn link(&self) -> &VerbsLink {
        &self.link
    }

    pub(super) fn link_mut(&mut self) -> &mut VerbsLink {
        &mut self.link
    }

    /// Takes the link out.
    pub(super) fn into_link(self) -> VerbsLink {
        let mut this = ManuallyDrop::new(self);
        this.pool = None;
        // SAFETY: taken once: `this` is not dropped, and nothing else takes it.
        unsafe { ManuallyDrop::take(&mut this.link) }
    }
}

impl Drop for PendingLink {
    fn drop(&mut self) {
        // SAFETY: taken once: `into_link` keeps this from running.
        let link = unsafe { ManuallyDrop::take(&mut self.link) };
        let pool = self.pool.take();
        let end = move || {
            drop(link);
            // The pool is trimmed here, because there may be no other connection that trims it
            // later.
            pool.inspect(Pool::trim_now);
        };
        // If no thread can be started, the closure is dropped here, together with the link.
        if let Err(error) = run_on_thread("rdma-destroy", end) {
            tracing::debug!(%error, "no thread to end a connection attempt on");
        }
    }
}
