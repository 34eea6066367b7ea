//! One end of a bare connection, which posts SENDs and WRITEs and waits for messages.
//!
//! The peer says how many WRITEs this end has to do. Over shared memory each WRITE is done as soon
//! as it is queued. So this end charges every work request and every completion to the task's turn
//! (R20).

use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::Poll;

use bytes::{BufMut as _, Bytes};
use tonic_rdma_memory::{LandingBuf, Pool};

use super::message::{self, BareError, BareMessage, BarePlace, MAX_LEN, MAX_PLACES, Writes};
use crate::link::{Completion, Link, Posted, Shared, Work, WriteSource};
use crate::link_config::LinkConfig;
use crate::provider::AnyLink;
use crate::turn;

/// Number of work requests between two checks of the link.
const LOOK: u64 = 128;
/// The length in bytes below which places are not shortened, even if the pool has little landing
/// memory.
const SHORTEST: usize = 4096;
/// Maximum number of WRITEs in flight.
const MAX_IN_FLIGHT: usize = 1024;

#[derive(Debug)]
pub(super) struct BareEnd {
    // Fields are dropped in this order, so the queue pair is destroyed before the memory that it
    // reads and writes (R9).
    link: AnyLink,
    /// The source of WRITEs, in pool memory.
    source: Bytes,
    limits: BareLimits,
    /// The buffers to which the other end may WRITE. This end never reads these buffers.
    landing: Vec<LandingBuf>,
    /// The length of each buffer in `landing` in bytes.
    granted: usize,
    pool: Pool,
    out: Vec<Completion>,
    /// The slot and the length in bytes of each received message that has not been read.
    received: VecDeque<(u32, u32)>,
    message: Vec<u8>,
    queued: u64,
    done: u64,
    sends: usize,
    /// The places to which this end may WRITE.
    places: Vec<BarePlace>,
}

impl BareEnd {
    pub(super) fn new(link: AnyLink, pool: Pool, limits: BareLimits) -> Self {
        Self {
            link,
            source: Bytes::new(),
            limits,
            landing: Vec::new(),
            granted: 0,
            pool,
            out: Vec::new(),
            received: VecDeque::new(),
            message: Vec::new(),
            queued: 0,
            done: 0,
            sends: 0,
            places: Vec::new(),
        }
    }

    /// Waits for completions, and charges the completions to the task's turn.
    async fn poll(&mut self) -> Result<(), BareError> {
        let done = poll_fn(|cx| self.link.poll(cx, &mut self.out)).await;
        self.complete().await;
        Ok(done?)
    }

    /// Takes available completions, and notices the end of the link. If a link does work as soon as
    /// it is queued, no other call polls that link.
    async fn look(&mut self) -> Result<(), BareError> {
        let polled = poll_fn(|cx| Poll::Ready(self.link.poll(cx, &mut self.out))).await;
        self.complete().await;
        match polled {
            Poll::Ready(Err(error)) => Err(error.into()),
            _ => Ok(()),
        }
    }

    async fn complete(&mut self) {
        turn::spend(self.out.len()).await;
        for completion in self.out.drain(..) {
            match completion {
                Completion::Sent { id } => self.done = self.done.max(id),
                Completion::Received { slot, len } => self.received.push_back((slot, len)),
                // This end ignores these completions. If this end writes to memory that is not
                // mapped, the link fails and reports the failure. This end sends no probes.
                Completion::NotMapped { .. }
                | Completion::Forgotten { .. }
                | Completion::Answered => {}
            }
        }
    }

    /// Posts queued work, and waits for the next message.
    pub(super) async fn receive(&mut self) -> Result<BareMessage, BareError> {
        loop {
            if let Some((slot, len)) = self.received.pop_front() {
                self.message.clear();
                self.message.extend_from_slice(self.link.recv_slot(slot, len));
                self.link.repost(slot)?;
                return message::decode(&self.message);
            }
            self.link.ring_doorbell()?;
            self.poll().await?;
        }
    }

    /// Queues one work request when there is room for it, and charges the request to the turn.
    async fn queue(&mut self, work: Work, signal: bool) -> Result<(), BareError> {
        if turn::is_over() {
            // Lets the device work on the queued requests while other tasks run.
            self.link.ring_doorbell()?;
        }
        turn::spend(1).await;
        if self.queued.is_multiple_of(LOOK) {
            self.look().await?;
        }
        while self.link.send_room() == 0 {
            self.link.ring_doorbell()?;
            self.poll().await?;
        }
        let len = match &work {
            Work::Send { len, .. } => *len,
            Work::Write { src, .. } => src.len(),
        };
        self.queued += 1;
        if self.link.queue(self.queued, work, signal)? == Posted::Done {
            self.done = self.queued;
            turn::spend(turn::copies(len)).await;
        }
        Ok(())
    }

    async fn send(&mut self) -> Result<(), BareError> {
        // A slot may be reused only once fewer than `SLOTS` requests are unfinished.
        while self.queued - self.done >= SLOTS as u64 {
            self.link.ring_doorbell()?;
            self.poll().await?;
        }
        let (offset, len) = (self.sends % SLOTS * MAX_LEN, self.message.len());
        self.sends += 1;
        if let Some(slot) = self.link.block_mut().get_mut(offset..offset + len) {
            slot.copy_from_slice(&self.message);
        }
        self.queue(Work::Send { offset, len }, false).await
    }

    pub(super) async fn send_echo(&mut self, len: usize) -> Result<(), BareError> {
        message::echo(len, &mut self.message);
        self.send().await
    }

    /// Sends the last received message back.
    pub(super) async fn send_back(&mut self) -> Result<(), BareError> {
        self.send().await
    }

    pub(super) async fn send_writes(&mut self, writes: Writes) -> Result<(), BareError> {
        message::write(writes, &mut self.message);
        self.send().await
    }

    pub(super) async fn send_written(&mut self) -> Result<(), BareError> {
        message::written(&mut self.message);
        self.send().await
    }

    /// Leases places of at most `longest` bytes each, and tells the other end about them.
    pub(super) async fn send_places(&mut self, longest: usize) -> Result<(), BareError> {
        let limits = self.limits;
        let budget = self.pool.config().landing / limits.landing_part.max(1);
        let mut len = limits.place_len.min(longest);
        while len > budget && len > SHORTEST {
            len = (len / 4).max(SHORTEST);
        }
        let places = limits.places.min(MAX_PLACES).min(budget.checked_div(len).unwrap_or_default());
        let mut landing = self.pool.landing_up_to(places * len);
        while self.landing.len() < places {
            let Some(place) = landing.alloc_spare(len)? else { break };
            if self.link.share(place.rkey())? != Shared::Yes {
                break;
            }
            self.landing.push(place);
        }
        self.granted = if self.landing.is_empty() { 0 } else { len };
        let granted = |place: &LandingBuf| BarePlace {
            addr: place.addr(),
            rkey: place.rkey(),
            len: len as u32,
        };
        let granted: Vec<_> = self.landing.iter().map(granted).collect();
        message::places(&granted, &mut self.message);
        self.send().await
    }

    pub(super) fn has_granted(&self) -> bool {
        !self.landing.is_empty()
    }

    pub(super) fn set_places(&mut self, places: Vec<BarePlace>) {
        self.places = places;
    }

    /// The length of the longest place in bytes.
    pub(super) fn longest_place(&self) -> usize {
        self.places.iter().map(|place| place.len as usize).max().unwrap_or(0)
    }

    /// Allocates at least `len` bytes of pool memory to WRITE from, unless this end has that much
    /// already.
    fn fill(&mut self, len: usize) -> Result<(), BareError> {
        if self.source.len() < len {
            let len = len.max(self.limits.source_len);
            let mut buf = self.pool.try_alloc(len)?;
            buf.put_bytes(0xa5, len);
            self.source = buf.freeze();
        }
        Ok(())
    }

    /// Does WRITEs, and returns when the device has reported all of them. On InfiniBand and RoCE
    /// the WRITEs have arrived when this function returns. WRITEs in flight go to different places
    /// if there are enough places.
    pub(super) async fn write(&mut self, writes: Writes) -> Result<(), BareError> {
        let len = writes.len as usize;
        let window = (writes.in_flight as usize).clamp(1, MAX_IN_FLIGHT);
        let parts: Vec<(u64, u32)> = self
            .places
            .iter()
            .filter_map(|place| Some((place, (place.len as usize).checked_div(len)?)))
            .flat_map(|(place, n)| {
                (0..n).map(|at| (place.addr.wrapping_add((at * len) as u64), place.rkey))
            })
            // The peer may have stated places of any length.
            .take(window)
            .collect();
        if parts.is_empty() {
            return Err(BareError::TooLong { len, longest: self.longest_place() });
        }
        self.fill(len)?;
        let sources = self.limits.source_len.max(len) / len.max(1);
        let window = window as u64;
        // SENDs queued before the first WRITE may not have been reported yet.
        let first = self.queued;
        let last = first + u64::from(writes.count);
        while self.done.max(first) < last {
            let in_flight = self.queued - self.done.max(first);
            if self.queued == last || in_flight >= window {
                self.link.ring_doorbell()?;
                self.poll().await?;
                continue;
            }
            let at = (self.queued - first) as usize;
            let (remote_addr, rkey) = parts[at % parts.len()];
            let from = at.checked_rem(sources).unwrap_or_default() * len;
            let source = self.source.slice(from..from + len);
            let src = self.pool.resolve(&source).ok_or(BareError::NoSource)?;
            let work = Work::Write { src: WriteSource::Bytes(src), remote_addr, rkey };
            // The last WRITE before a wait must be signalled.
            let waits = self.queued + 1 == last || in_flight + 1 == window;
            self.queue(work, waits).await?;
        }
        self.link.ring_doorbell()?;
        Ok(())
    }

    /// The length in bytes of each place that this end has granted.
    pub(super) fn granted(&self) -> usize {
        self.granted
    }

    pub(super) fn disconnect(&mut self) {
        self.link.disconnect();
    }
}

/// Number of SEND slots, and of RECVs, each of [`MAX_LEN`] bytes.
pub(super) const SLOTS: usize = 24;
/// Maximum number of echoes in flight. The other end has a RECV for each echo and a few more RECVs.
pub const MAX_ECHOES: usize = 16;

/// The queues of a bare connection, which take 24 KiB of control memory, or 12 KiB over shared
/// memory.
pub fn config() -> LinkConfig {
    LinkConfig {
        recv_slots: SLOTS as u32,
        slot_size: MAX_LEN as u32,
        send_slots: SLOTS as u32,
        staging: 0,
        ..LinkConfig::default()
    }
}

/// The memory that one end grants to the other, and the work that it does on request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BareLimits {
    /// Number of places for WRITEs, at most 16. WRITEs in flight go to different places, like
    /// messages that have not been read yet.
    pub places: usize,
    /// Length in bytes of each place, which limits the longest WRITE. The accepting end grants
    /// places that are no longer than the connecting end's places.
    pub place_len: usize,
    /// All places together may take 1 / `landing_part` of the pool's landing memory. If this part
    /// is shorter than one place, places are shorter. The rest of the landing memory is for calls,
    /// because a bare connection keeps its memory while calls wait.
    pub landing_part: usize,
    /// The number of bytes of source memory. WRITEs use different parts of this memory in turn. The
    /// source memory is at least as long as one WRITE.
    pub source_len: usize,
    /// Maximum bytes that one request may make this end WRITE, and that this end requests at a
    /// time.
    pub requested: u64,
    /// Maximum number of WRITEs that one request may make this end do, and that this end requests
    /// at a time. A WRITE of one byte takes about as long as a WRITE of a page.
    pub requested_writes: u64,
}

impl Default for BareLimits {
    /// 8 places of 1 MiB in at most an eighth of the landing memory, one source for all WRITEs, and
    /// 1 GiB or 16,384 WRITEs for each request.
    fn default() -> Self {
        Self {
            places: 8,
            place_len: 1 << 20,
            landing_part: 8,
            source_len: 0,
            requested: 1 << 30,
            requested_writes: 1 << 14,
        }
    }
}
