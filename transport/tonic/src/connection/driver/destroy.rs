//! How the link of an ended connection is destroyed.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use tonic_rdma_fabric::{AnyLink, Link, off_worker};
use tonic_rdma_memory::Owned;

/// A link that is being destroyed. If the destruction takes long, it runs on a thread that may
/// block. The peer may write until the link is destroyed, so the connection keeps its landing
/// memory until then (R9).
pub(super) struct Destroying {
    /// The link, or `None` once it is destroyed. The lock is held while a thread destroys the link.
    link: Owned<Arc<Mutex<Option<AnyLink>>>>,
    thread: Option<Pin<Box<dyn Future<Output = io::Result<()>> + Send>>>,
}

impl Destroying {
    pub(super) fn new(link: AnyLink) -> Destroying {
        let blocks = link.blocks_on_drop();
        let link = Arc::new(Mutex::new(Some(link)));
        let thread = blocks.then(|| {
            let link = link.clone();
            Box::pin(off_worker(move || destroy(&link))) as _
        });
        Destroying { link: Owned::new(link), thread }
    }

    /// Ready once the link is destroyed.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(thread) = &mut self.thread {
            // If the system could not start a thread, the call of `destroy` below destroys the
            // link.
            let _ = ready!(thread.as_mut().poll(cx));
            self.thread = None;
        }
        destroy(&self.link);
        Poll::Ready(())
    }
}

impl Drop for Destroying {
    /// Destroys the link of a dropped driver, because the driver frees the connection's memory
    /// next.
    fn drop(&mut self) {
        if self.link.is_own() {
            destroy(&self.link);
        }
    }
}

/// Destroys the link, or waits until another thread has destroyed it.
fn destroy(link: &Mutex<Option<AnyLink>>) {
    *link.lock().unwrap_or_else(PoisonError::into_inner) = None;
}
