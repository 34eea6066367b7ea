//! A link on which any amount of work completes at once. Tests use this link for loops that must
//! yield by themselves (R20).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};

use tonic_rdma_memory::Pool;

use crate::addr::Addr;
use crate::error::LinkError;
use crate::link::{Caps, Completion, Link, PROBE_LIMIT, PeerInfo, Posted, Shared, Work};
use crate::link_config::LinkConfig;

/// Counts the operations of an [`InstantLink`].
#[derive(Debug, Default)]
pub struct InstantCounts {
    queued: AtomicU64,
    received: AtomicU64,
}

impl InstantCounts {
    /// Number of work requests queued and messages received.
    pub fn operations(&self) -> u64 {
        self.queued.load(Relaxed) + self.received.load(Relaxed)
    }
}

/// The other end of an [`InstantLink`].
pub trait InstantPeer: Send + 'static {
    /// Receives a SEND.
    fn receive(&mut self, message: &[u8]);

    /// Composes the next message, or returns `None` if no message is due.
    fn next_message(&mut self) -> Option<Vec<u8>>;
}

/// A link without another end. Work is done when it is queued. Each poll puts one of the peer's
/// next messages into each posted RECV.
pub struct InstantLink {
    caps: Caps,
    peer: PeerInfo,
    block: Vec<u8>,
    other: Box<dyn InstantPeer>,
    /// The messages in the RECV slots. `None` for a posted slot.
    slots: Vec<Option<Vec<u8>>>,
    counts: Arc<InstantCounts>,
    ended: bool,
}

impl std::fmt::Debug for InstantLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InstantLink").field("counts", &self.counts).finish_non_exhaustive()
    }
}

impl InstantLink {
    /// Creates a link to `other`.
    pub fn new(config: &LinkConfig, other: impl InstantPeer) -> InstantLink {
        InstantLink {
            caps: Caps {
                max_inline: 0,
                send_queue: config.send_queue as usize,
                recv_queue: config.recv_slots as usize,
                max_msg: 1 << 30,
                max_landing: 64 << 20,
                any_memory: true,
                tells_end: true,
                probe_limit: PROBE_LIMIT,
            },
            peer: PeerInfo {
                provider: "instant",
                device: "instant".to_owned(),
                local: Addr::Process(0),
                remote: Addr::Process(0),
                path_mtu: None,
            },
            block: vec![0; config.block_bytes()],
            other: Box::new(other),
            slots: vec![None; config.recv_slots as usize],
            counts: Arc::default(),
            ended: false,
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

    fn queue(&mut self, _: u64, work: Work, _: bool) -> Result<Posted, LinkError> {
        self.counts.queued.fetch_add(1, Relaxed);
        if let Work::Send { offset, len } = work {
            let message = self.block.get(offset..offset + len).unwrap_or_default();
            self.other.receive(message);
        }
        Ok(Posted::Done)
    }

    fn share(&mut self, _: u32) -> Result<Shared, LinkError> {
        Ok(Shared::Yes)
    }

    fn ring_doorbell(&mut self) -> Result<(), LinkError> {
        Ok(())
    }

    fn has_pending_recv(&self) -> bool {
        true
    }

    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut Vec<Completion>,
    ) -> Poll<Result<(), LinkError>> {
        if self.ended {
            return Poll::Ready(Err(LinkError::Closed { peer: Box::new(self.peer.clone()) }));
        }
        let before = out.len();
        for (slot, place) in self.slots.iter_mut().enumerate().filter(|(_, place)| place.is_none())
        {
            let Some(message) = self.other.next_message() else { break };
            self.counts.received.fetch_add(1, Relaxed);
            out.push(Completion::Received { slot: slot as u32, len: message.len() as u32 });
            *place = Some(message);
        }
        if out.len() > before {
            return Poll::Ready(Ok(()));
        }
        // The peer may send as soon as it has received something.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn recv_slot(&self, slot: u32, len: u32) -> &[u8] {
        let message = self.slots.get(slot as usize).and_then(Option::as_deref);
        message.and_then(|message| message.get(..len as usize)).unwrap_or_default()
    }

    fn repost(&mut self, slot: u32) -> Result<bool, LinkError> {
        if let Some(place) = self.slots.get_mut(slot as usize) {
            *place = None;
        }
        Ok(true)
    }

    fn grow(&mut self, _: &Pool) -> Result<u32, LinkError> {
        Ok(0)
    }

    fn shrink(&mut self) -> Result<u32, LinkError> {
        Ok(0)
    }

    fn disconnect(&mut self) {
        self.ended = true;
    }
}
