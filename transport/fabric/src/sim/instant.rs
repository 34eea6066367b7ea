//! A link on which everything completes at once, however much there is of it: the peer of a loop
//! that must leave by itself (R20).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};

use tonic_rdma_memory::Pool;

use crate::addr::Addr;
use crate::error::LinkError;
use crate::link::{Caps, Completion, Link, PeerInfo, Posted, Work};
use crate::link_config::LinkConfig;

/// Counts the operations of an [`InstantLink`].
#[derive(Debug, Default)]
pub struct InstantCounts {
    queued: AtomicU64,
    received: AtomicU64,
}

impl InstantCounts {
    /// Work requests that were queued, and messages that were received.
    pub fn operations(&self) -> u64 {
        self.queued.load(Relaxed) + self.received.load(Relaxed)
    }
}

/// Composes the peer's next message. `None`: the peer sends nothing more.
pub type NextMessage = Box<dyn FnMut() -> Option<Vec<u8>> + Send>;

/// A link without an other end. Work is done when it is queued, and whenever the link is polled the
/// peer's next message is there.
pub struct InstantLink {
    caps: Caps,
    peer: PeerInfo,
    block: Vec<u8>,
    next_message: NextMessage,
    received: Vec<u8>,
    counts: Arc<InstantCounts>,
}

impl std::fmt::Debug for InstantLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InstantLink").field("counts", &self.counts).finish_non_exhaustive()
    }
}

impl InstantLink {
    /// A link whose peer sends what `next_message` composes.
    pub fn new(config: &LinkConfig, next_message: NextMessage) -> InstantLink {
        InstantLink {
            caps: Caps {
                max_inline: 0,
                send_queue: config.send_queue as usize,
                recv_queue: config.recv_slots as usize,
                max_msg: 1 << 30,
                max_landing: 64 << 20,
                any_memory: true,
                tells_end: true,
            },
            peer: PeerInfo {
                provider: "instant",
                device: "instant".to_owned(),
                local: Addr::Process(0),
                remote: Addr::Process(0),
            },
            block: vec![0; config.block_bytes()],
            next_message,
            received: Vec::new(),
            counts: Arc::default(),
        }
    }

    /// The counts of this link.
    pub fn counts(&self) -> Arc<InstantCounts> {
        self.counts.clone()
    }
}

impl Link for InstantLink {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn peer(&self) -> &PeerInfo {
        &self.peer
    }

    fn send_room(&self) -> usize {
        self.caps.send_queue
    }

    fn block_mut(&mut self) -> &mut [u8] {
        &mut self.block
    }

    fn queue(&mut self, _: u64, _: Work, _: bool) -> Result<Posted, LinkError> {
        self.counts.queued.fetch_add(1, Relaxed);
        Ok(Posted::Done)
    }

    fn share(&mut self, _: u32) -> Result<(), LinkError> {
        Ok(())
    }

    fn ring_doorbell(&mut self) -> Result<(), LinkError> {
        Ok(())
    }

    fn has_pending_recv(&self) -> bool {
        true
    }

    fn poll(
        &mut self,
        _: &mut Context<'_>,
        out: &mut Vec<Completion>,
    ) -> Poll<Result<(), LinkError>> {
        let Some(message) = (self.next_message)() else { return Poll::Pending };
        self.counts.received.fetch_add(1, Relaxed);
        out.push(Completion::Received { slot: 0, len: message.len() as u32 });
        self.received = message;
        Poll::Ready(Ok(()))
    }

    fn recv_slot(&self, _: u32, len: u32) -> &[u8] {
        self.received.get(..len as usize).unwrap_or_default()
    }

    fn repost(&mut self, _: u32) -> Result<bool, LinkError> {
        Ok(true)
    }

    fn grow(&mut self, _: &Pool) -> Result<u32, LinkError> {
        Ok(0)
    }

    fn shrink(&mut self) -> Result<u32, LinkError> {
        Ok(0)
    }

    fn disconnect(&mut self) {
        self.next_message = Box::new(|| None);
    }
}
