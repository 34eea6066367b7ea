//! A link over verbs.

use std::future::{Future as _, poll_fn};
use std::io;
use std::mem::ManuallyDrop;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rdma_sys::{ibv_wc_status, rdma_cm_event_type as kind};
use tonic_rdma_memory::Pool;

use crate::busy_poll::{BusyPoll, PollStep};
use crate::control_block::ControlBlock;
use crate::error::{ConnectError, LinkError, Verb};
use crate::link::{
    Caps, Completion, Link, PROBE_LIMIT, PeerInfo, Posted, Shared, Work, WriteSource,
};
use crate::link_config::LinkConfig;
use crate::queue::{HeldMemory, SendQueue};
use crate::turn;
use crate::verbs::cm::{CmId, name};
use crate::verbs::completion::dispatch::{Armed, BATCH, Completed, PROBE, PROOF, RECV, Sleep};
use crate::verbs::context::DeviceContext;
use crate::verbs::discovery::is_inherited;
use crate::verbs::queue_pair::path_mtu::PathProof;
use crate::verbs::queue_pair::post::{Batch, Operation, SendWorkRequest};
use crate::verbs::queue_pair::{Qp, QpCapacity};
use crate::verbs::wake_cost::{host_has_one, process_has_one};
use crate::verbs::{siw, wake_cost};
use crate::wake_gate::WakeGate;

/// Maximum number of completions that one poll reports.
const MAX_COMPLETIONS: usize = 256;

/// The reason why the link is going down, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// The peer closed the connection.
    Disconnected,
    /// This end closed the connection.
    Closed,
    /// The device was removed.
    Removed,
}

/// A work completion that failed.
#[derive(Debug, Clone, Copy)]
struct Failure {
    verb: Verb,
    status: u32,
    vendor_err: u32,
}

/// Memory that posted work refers to. This memory is freed only when the work is complete or the
/// queue pair is destroyed (R9, R10).
#[derive(Debug)]
struct PostedMemory {
    sq: SendQueue,
    block: ControlBlock,
    /// The exchange that proves the path. `None` once the exchange is done.
    proof: Option<PathProof>,
}

/// The reason why no link was made.
pub(super) struct LinkNotMade {
    /// The id, if no queue pair was made on it. The caller can then still reject the request.
    pub(super) id: Option<CmId>,
    pub(super) error: ConnectError,
}

/// A link over verbs.
#[derive(Debug)]
pub struct VerbsLink {
    caps: Caps,
    pub(super) peer: PeerInfo,
    pub(super) qp: Qp,
    memory: ManuallyDrop<PostedMemory>,
    batch: Batch,
    /// `None` if this end never polls for a message and sleeps at once.
    busy_poll: Option<BusyPoll>,
    /// True if the last poll found nothing and the link polls again instead of sleeping.
    polls_on: bool,
    /// Completions that arrived before the path was proven. The first poll reports them.
    early_completions: Vec<Completion>,
    ending: Option<Ending>,
    failure: Option<Failure>,
    dead: Option<LinkError>,
    events: WakeGate,
    /// The time when a probe was last requested.
    asked: Option<Instant>,
}

/// A new silence begins when no probe was requested for this long. Over iWARP the link skips the
/// first probe of a silence, because a READ must not be among the lost packets that TCP repeats. If
/// a READ arrives while Soft-iWARP of Linux 6.1 is sending, Soft-iWARP answers with bytes of its
/// last message (siw_activate_tx leaves its sge in place). That answer ends the connection.
const NEW_SILENCE: Duration = Duration::from_secs(2);

impl VerbsLink {
    /// Makes a queue pair on an id that is bound to the device, and posts all RECVs (R1). The local
    /// address may be preliminary: [`established`](VerbsLink::established) reads it again.
    pub(super) fn new(
        device: &Arc<DeviceContext>,
        id: CmId,
        config: &LinkConfig,
        pool: &Pool,
        remote: SocketAddr,
    ) -> Result<VerbsLink, LinkNotMade> {
        let block = match ControlBlock::new(pool, config) {
            Ok(block) => block,
            Err(error) => return Err(LinkNotMade { id: Some(id), error }),
        };
        let proof = match PathProof::new(pool) {
            Ok(proof) => proof,
            Err(error) => return Err(LinkNotMade { id: Some(id), error }),
        };
        let limits = device.limits;
        let send = config.send_queue.min(limits.max_qp_wr);
        // The additional RECV is for the message that proves the path.
        let recv = config.max_recvs() + 1;
        let max_cq_entries = limits.max_cqe.min(config.max_cq_entries);
        let capacity = QpCapacity { send, recv, inline: config.inline, max_cq_entries };
        if recv > limits.max_qp_wr || capacity.completions() > max_cq_entries {
            let error = ConnectError::Config(format!(
                "{recv} RECV slots and {send} send_queue: {} has queues of {} and completion queues of {max_cq_entries}",
                device.name, limits.max_qp_wr
            ));
            return Err(LinkNotMade { id: Some(id), error });
        }
        let qp = Qp::new(device, id, capacity)
            .map_err(|(id, error)| LinkNotMade { id: Some(id), error: error.into() })?;
        let caps = Caps {
            max_inline: qp.max_inline as usize,
            send_queue: qp.send as usize,
            recv_queue: config.recv_slots as usize,
            max_msg: limits.max_msg as usize,
            max_landing: usize::MAX,
            any_memory: false,
            tells_end: false,
            // Over iWARP a WRITE completes when TCP has accepted it, and TCP retries for a quarter
            // of an hour.
            probe_limit: if device.is_iwarp() { PROBE_LIMIT } else { config.ack_limit() },
        };
        let local = qp.id.local().unwrap_or(remote);
        let peer = PeerInfo {
            provider: "verbs",
            device: device.name.clone(),
            local: local.into(),
            remote: remote.into(),
            path_mtu: None,
        };
        let sq = SendQueue::new(qp.send as usize, config.max_sends());
        let mut link = VerbsLink {
            caps,
            peer,
            qp,
            memory: ManuallyDrop::new(PostedMemory { sq, block, proof: Some(proof) }),
            batch: Batch::default(),
            busy_poll: (!config.busy_poll_limit.is_zero() && !process_has_one())
                .then(|| BusyPoll::new(config.busy_poll_limit, wake_cost::get())),
            polls_on: false,
            early_completions: Vec::new(),
            ending: None,
            failure: None,
            dead: None,
            events: WakeGate::new(),
            asked: None,
        };
        let posted = link
            .post_proof()
            .and_then(|()| (0..config.recv_slots).try_for_each(|slot| link.post(slot)));
        posted.map_err(|source| {
            let error = device.verb_error("ibv_post_recv", source).into();
            LinkNotMade { id: None, error }
        })?;
        Ok(link)
    }

    pub(super) fn id(&self) -> &CmId {
        &self.qp.id
    }

    fn is_iwarp(&self) -> bool {
        self.qp.device.is_iwarp()
    }

    /// Prepares the link for use once the connection is established.
    pub(super) fn established(&mut self) {
        self.qp.set_rnr_timer();
        if let Some(local) = self.qp.id.local() {
            self.peer.local = local.into();
        }
    }

    /// Posts the RECV for the message that proves the path.
    fn post_proof(&mut self) -> io::Result<()> {
        let Some(sge) = self.memory.proof.as_ref().map(PathProof::sge) else { return Ok(()) };
        // SAFETY: the proof holds the memory. The proof is dropped once both of its requests are
        // complete, or after the queue pair (R9).
        unsafe { self.qp.post_recv(RECV | PROOF, sge) }
    }

    /// Sends the message that proves the path, and waits until both this message and the peer's
    /// message have arrived. Messages that arrive after the peer's proof are kept for the first
    /// poll.
    ///
    /// # Errors
    /// The link has failed.
    pub(super) async fn prove_path(&mut self) -> Result<(), LinkError> {
        let Some(sge) = self.memory.proof.as_ref().map(PathProof::sge) else { return Ok(()) };
        let rdma_sys::ibv_sge { addr, length: len, lkey } = sge;
        self.batch
            .push(SendWorkRequest { wr_id: PROOF, addr, len, lkey, operation: Operation::Send }, 0);
        self.post_batch()?;
        poll_fn(|cx| self.poll_proof(cx)).await
    }

    fn poll_proof(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LinkError>> {
        let mut early = std::mem::take(&mut self.early_completions);
        loop {
            let polled = self.poll(cx, &mut early);
            if self.memory.proof.as_ref().is_none_or(PathProof::is_done) {
                self.memory.proof = None;
                self.early_completions = early;
                return Poll::Ready(Ok(()));
            }
            match polled {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => {
                    self.early_completions = early;
                    return Poll::Pending;
                }
            }
        }
    }

    /// Polls for the peer's first message. That message proves that both ends of the connection are
    /// established, even if the event that reports the establishment was lost (InfiniBand
    /// Architecture Specification 1.3, section 12.9.8.3, "communication established").
    ///
    /// # Errors
    /// The completion queue failed.
    pub(super) fn poll_first_message(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut early = std::mem::take(&mut self.early_completions);
        let polled = loop {
            match self.take_completions(&mut early) {
                Ok(_) if self.memory.proof.as_ref().is_none_or(PathProof::is_received) => {
                    break Poll::Ready(Ok(()));
                }
                Ok(_) => {}
                Err(error) => break Poll::Ready(Err(error)),
            }
            let VerbsLink { qp, memory, failure, .. } = self;
            let own = |completed: &Completed| complete(memory, failure, completed, &mut early);
            match qp.cq.sleep(cx, Armed::All, own) {
                // Completions of other links may keep the queue from becoming empty (R20).
                Ok(Sleep::PollAgain) if turn::charge(cx, &mut 1).is_pending() => {
                    break Poll::Pending;
                }
                Ok(Sleep::PollAgain) => {}
                Ok(Sleep::Asleep) => break Poll::Pending,
                Ok(Sleep::Orphaned) => break poll_on(cx).map(Ok),
                Err(error) => break Poll::Ready(Err(error)),
            }
        };
        self.early_completions = early;
        polled
    }

    fn post(&mut self, slot: u32) -> io::Result<()> {
        let block = &mut self.memory.block;
        let Some((ptr, lkey)) = block.slot_place(slot).filter(|_| block.mark_posted(slot)) else {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        };
        let sge = rdma_sys::ibv_sge {
            addr: ptr.as_ptr().expose_provenance() as u64,
            length: block.recv_size(slot),
            lkey,
        };
        // SAFETY: the slot is posted from here until its completion is marked. The block shows only
        // held slots, frees extra slots only when no extra slot is posted, and is freed after the
        // queue pair (R9).
        unsafe { self.qp.post_recv(RECV | u64::from(slot), sge) }
    }

    fn boxed_peer(&self) -> Box<PeerInfo> {
        Box::new(self.peer.clone())
    }

    fn misuse(&self, what: String) -> LinkError {
        LinkError::Misuse { what, peer: self.boxed_peer() }
    }

    /// Marks the link as dead because a call failed.
    fn device_error(&mut self, call: &'static str, source: io::Error) -> LinkError {
        let error = LinkError::Device {
            verb: Verb::Call(call),
            source: source.into(),
            peer: self.boxed_peer(),
        };
        self.dead.get_or_insert(error).clone()
    }

    /// Marks the link as dead because the completion queue failed. Some devices destroy the queue
    /// when they are removed, and this end may see the queue fail before it sees the removal.
    fn queue_error(&mut self, call: &'static str, source: io::Error) -> LinkError {
        if self.qp.device.is_removed() {
            let removed = LinkError::DeviceRemoved { peer: self.boxed_peer() };
            return self.dead.insert(removed).clone();
        }
        self.device_error(call, source)
    }

    /// Takes all connection events, or as many as the task's turn allows, and registers the waker
    /// (R20).
    fn poll_events(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let VerbsLink { events, qp, .. } = self;
        while let Poll::Ready(event) = events.poll(cx, |cx| qp.id.poll_event(cx)) {
            let ending = match event?.kind {
                // The peer's connection manager rejects an established connection if the peer ends
                // the connection before this end's last message of the handshake is processed. A
                // packet on the queue pair may overtake that message, and also establishes the
                // connection.
                kind::RDMA_CM_EVENT_DISCONNECTED | kind::RDMA_CM_EVENT_REJECTED => {
                    Some(Ending::Disconnected)
                }
                kind::RDMA_CM_EVENT_DEVICE_REMOVAL => {
                    qp.device.mark_removed();
                    Some(Ending::Removed)
                }
                kind::RDMA_CM_EVENT_TIMEWAIT_EXIT => None,
                other => {
                    tracing::debug!(peer = %self.peer, event = name(other), "connection event");
                    None
                }
            };
            // The first reason stays, because the peer answers a disconnect of this end with
            // DISCONNECTED.
            self.ending = self.ending.or(ending);
            if turn::charge(cx, &mut 1).is_pending() {
                break;
            }
        }
        Ok(())
    }

    /// Takes completions until the queue is empty or one poll's limit is reached. Returns false if
    /// the queue may hold more completions, of this link or of other links.
    fn take_completions(&mut self, out: &mut Vec<Completion>) -> io::Result<bool> {
        // While another member polls the queue, a busy poll sees nothing. The link reports its end
        // only after it has seen all completions (R7), so an ending link does not use a busy poll.
        let is_ending = self.ending.is_some() || self.failure.is_some();
        let busy = std::mem::take(&mut self.polls_on) && !is_ending;
        let (memory, failure) = (&mut *self.memory, &mut self.failure);
        let polled = self.qp.cq.poll(busy, MAX_COMPLETIONS - BATCH, |completed| {
            complete(memory, failure, completed, out);
        })?;
        Ok(polled.drained)
    }

    /// Registers the waker, unless completions are waiting.
    fn sleep(&mut self, cx: &Context<'_>, out: &mut Vec<Completion>) -> io::Result<Sleep> {
        // Soft-iWARP cannot announce solicited messages alone, because it does not distinguish them
        // from other messages.
        let memory = &*self.memory;
        let all = memory.sq.is_waited_for() || memory.proof.is_some() || self.qp.device.is_siw;
        let what = if all { Armed::All } else { Armed::Solicited };
        let (memory, failure) = (&mut *self.memory, &mut self.failure);
        self.qp.cq.sleep(cx, what, |completed| complete(memory, failure, completed, out))
    }

    /// Returns the reason why the link is dead, if it is dead. The caller must have drained the
    /// queue.
    fn terminal_error(&mut self) -> Option<LinkError> {
        let flushed = self.failure.is_some_and(|f| f.status == ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
        match (self.ending, self.failure) {
            (Some(Ending::Closed), _) => Some(LinkError::Closed { peer: self.boxed_peer() }),
            (Some(Ending::Removed), _) => {
                Some(LinkError::DeviceRemoved { peer: self.boxed_peer() })
            }
            (Some(Ending::Disconnected), None) => {
                Some(LinkError::Disconnected { peer: self.boxed_peer() })
            }
            (Some(Ending::Disconnected), Some(_)) if flushed => {
                Some(LinkError::Disconnected { peer: self.boxed_peer() })
            }
            // On iWARP a connection that ends flushes its queues first. The event comes afterwards.
            (None, Some(_)) if flushed && self.qp.device.is_iwarp() => None,
            (_, Some(failure)) => Some(LinkError::Completion {
                verb: failure.verb,
                status: status_words(failure.status),
                code: failure.status,
                vendor_err: failure.vendor_err,
                peer: self.boxed_peer(),
            }),
            (None, None) => None,
        }
    }

    /// Posts the batch, which must not be empty.
    fn post_batch(&mut self) -> Result<(), LinkError> {
        self.memory.sq.end_batch();
        if self.memory.sq.is_waited_for()
            && let Err(source) = self.qp.cq.announce_all()
        {
            return Err(self.device_error("ibv_req_notify_cq", source));
        }
        let sq = &mut self.memory.sq;
        // SAFETY: the payload lies in the block or is held by the send queue, and both are freed
        // after the queue pair (R9, R10).
        unsafe { self.batch.post(&mut self.qp, |seq| sq.is_signalled(seq)) }
            .map_err(|source| self.device_error("ibv_post_send", source))
    }

    fn try_poll(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut Vec<Completion>,
    ) -> Result<Poll<()>, LinkError> {
        let before = out.len();
        out.append(&mut self.early_completions);
        if let Err(error) = self.poll_events(cx) {
            return Err(self.device_error("rdma_get_cm_event", error));
        }
        loop {
            let drained = match self.take_completions(out) {
                Ok(drained) => drained,
                Err(error) => return Err(self.queue_error("ibv_poll_cq", error)),
            };
            if out.len() > before {
                self.note_messages(&out[before..]);
                return Ok(Poll::Ready(()));
            }
            if !drained {
                return Ok(poll_on(cx));
            }
            // The link reports its end after all completions (R7).
            if let Some(error) = self.terminal_error() {
                return Err(self.dead.insert(error).clone());
            }
            if let Some(busy_poll) = &mut self.busy_poll {
                if busy_poll.on_empty(true, || false) == PollStep::PollAgain {
                    self.polls_on = true;
                    return Ok(poll_on(cx));
                }
                busy_poll.set_cost(wake_cost::get());
                wake_cost::measure_if_old(Instant::now());
            }
            match self.sleep(cx, out) {
                Ok(Sleep::Asleep) => return Ok(Poll::Pending),
                Ok(Sleep::Orphaned) => return Ok(poll_on(cx)),
                Ok(Sleep::PollAgain) if out.len() > before => {
                    self.note_messages(&out[before..]);
                    return Ok(Poll::Ready(()));
                }
                // Completions of other links may keep the queue from becoming empty (R20).
                Ok(Sleep::PollAgain) if turn::charge(cx, &mut 1).is_pending() => {
                    return Ok(Poll::Pending);
                }
                Ok(Sleep::PollAgain) => {}
                Err(error) => return Err(self.queue_error("ibv_req_notify_cq", error)),
            }
        }
    }

    /// Ends the wait if a message is among the reported completions. Completions of this end's own
    /// work are not messages.
    fn note_messages(&mut self, reported: &[Completion]) {
        let is_message =
            |completion: &Completion| matches!(completion, Completion::Received { .. });
        if let Some(busy_poll) = &mut self.busy_poll
            && reported.iter().any(is_message)
        {
            busy_poll.received();
        }
    }
}

/// Yields, so that every other task runs before this task polls again.
fn poll_on(cx: &mut Context<'_>) -> Poll<()> {
    let _ = pin!(tokio::task::yield_now()).poll(cx);
    Poll::Pending
}

/// Records one completion.
fn complete(
    memory: &mut PostedMemory,
    failure: &mut Option<Failure>,
    wc: &Completed,
    out: &mut Vec<Completion>,
) {
    let is_proof = wc.wr_id & PROOF != 0;
    // The id of a RECV holds its slot. The ids of SENDs and WRITEs are their sequence numbers.
    let slot = (wc.wr_id & RECV != 0).then_some((wc.wr_id & !RECV) as u32);
    if wc.status != ibv_wc_status::IBV_WC_SUCCESS {
        let flushed = wc.status == ibv_wc_status::IBV_WC_WR_FLUSH_ERR;
        // Keep the first failure that was not caused by another failure.
        let better = match failure {
            None => true,
            Some(known) => known.status == ibv_wc_status::IBV_WC_WR_FLUSH_ERR && !flushed,
        };
        if better {
            let verb = match slot {
                Some(_) => Verb::Recv,
                None if is_proof => Verb::Send,
                None if wc.wr_id == PROBE => memory.sq.end_probe().unwrap_or(Verb::SendOrWrite),
                None => memory.sq.verb(wc.wr_id),
            };
            *failure = Some(Failure { verb, status: wc.status, vendor_err: wc.vendor_err });
        }
        return;
    }
    match slot {
        _ if is_proof => {
            if let Some(proof) = &mut memory.proof {
                proof.complete(slot.is_some());
            }
        }
        Some(slot) => {
            if memory.block.mark_received(slot, wc.byte_len) {
                out.push(Completion::Received { slot, len: wc.byte_len });
            } else {
                tonic_rdma_memory::throttled!(
                    error,
                    slot,
                    len = wc.byte_len,
                    "the device completed a RECV that was not posted"
                );
            }
        }
        None if wc.wr_id == PROBE => {
            out.extend(memory.sq.end_probe().map(|_| Completion::Answered));
        }
        None => out.extend(memory.sq.complete(wc.wr_id).map(|id| Completion::Sent { id })),
    }
}

fn status_words(status: u32) -> String {
    // SAFETY: ibv_wc_status_str gives a static string for any number.
    unsafe {
        let text = rdma_sys::ibv_wc_status_str(status);
        match text.is_null() {
            true => "unknown status".to_owned(),
            false => std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned(),
        }
    }
}

impl Link for VerbsLink {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn peer(&self) -> &PeerInfo {
        &self.peer
    }

    fn send_room(&self) -> usize {
        self.memory.sq.room()
    }

    fn block_mut(&mut self) -> &mut [u8] {
        self.memory.block.block_mut()
    }

    fn queue(&mut self, id: u64, work: Work, signal: bool) -> Result<Posted, LinkError> {
        if let Some(error) = &self.dead {
            return Err(error.clone());
        }
        let memory = &mut *self.memory;
        if memory.sq.room() == 0 {
            return Err(self.misuse("the send queue is full".to_owned()));
        }
        let block = |offset: usize, len: usize| {
            let at = memory.block.range(offset, len)?.as_ptr().expose_provenance() as u64;
            Some((at, len, memory.block.lkey()))
        };
        let (verb, held, place, operation) = match work {
            Work::Send { offset, len } => {
                (Verb::Send, HeldMemory::Slot, block(offset, len), Operation::Send)
            }
            Work::Write { src, remote_addr, rkey } => {
                let write = Operation::Write { remote_addr, rkey };
                match src {
                    WriteSource::Staged { offset, len } => {
                        (Verb::Write, HeldMemory::Staging, block(offset, len), write)
                    }
                    WriteSource::Bytes(b) => {
                        // The processor copies inline payloads. The device reads all other
                        // payloads.
                        let inline = b.len() <= self.qp.max_inline as usize;
                        let place =
                            Some((if inline { b.addr() } else { b.iova() }, b.len(), b.lkey()));
                        (Verb::Write, HeldMemory::Bytes(b), place, write)
                    }
                    WriteSource::Buf(b) => {
                        let place = Some((b.addr(), b.len(), b.lkey()));
                        (Verb::Write, HeldMemory::Buf(b), place, write)
                    }
                    WriteSource::Any(_) => (Verb::Write, HeldMemory::Slot, None, write),
                }
            }
        };
        let Some((addr, len, lkey)) = place else {
            return Err(self.misuse(format!(
                "{verb}: the source is not registered, or lies outside the block"
            )));
        };
        if len > self.caps.max_msg {
            let max = self.caps.max_msg;
            return Err(
                self.misuse(format!("{verb} of {len} bytes: the device carries at most {max}"))
            );
        }
        let signal = signal || (self.qp.device.is_siw && len >= siw::SENT_IN_PLACE);
        let seq = memory.sq.push(id, verb, held, signal);
        let request = SendWorkRequest { wr_id: seq, addr, len: len as u32, lkey, operation };
        self.batch.push(request, self.qp.max_inline);
        Ok(Posted::InFlight)
    }

    fn share(&mut self, _: u32) -> Result<Shared, LinkError> {
        Ok(Shared::Yes)
    }

    fn blocks_on_drop(&self) -> bool {
        true
    }

    fn ring_doorbell(&mut self) -> Result<(), LinkError> {
        if let Some(error) = &self.dead {
            return Err(error.clone());
        }
        if self.batch.is_empty() {
            return Ok(());
        }
        self.post_batch()?;
        if let Some(busy_poll) = &mut self.busy_poll {
            busy_poll.sent(None);
        }
        Ok(())
    }

    fn probe(&mut self) -> Result<bool, LinkError> {
        self.ring_doorbell()?;
        let now = Instant::now();
        let before = self.asked.replace(now);
        let is_first = before.is_none_or(|before| now.duration_since(before) > NEW_SILENCE);
        if self.is_iwarp() && is_first {
            return Ok(false);
        }
        let (verb, operation) = match self.is_iwarp() {
            true => (Verb::Read, Operation::ProbeByRead),
            false => (Verb::Write, Operation::ProbeByWrite),
        };
        let block = &self.memory.block;
        let Some(addr) = block.range(0, 0).map(|at| at.as_ptr().expose_provenance() as u64) else {
            return Ok(false);
        };
        let lkey = block.lkey();
        if !self.memory.sq.begin_probe(verb) {
            return Ok(false);
        }
        self.batch.push(SendWorkRequest { wr_id: PROBE, addr, len: 0, lkey, operation }, 0);
        self.post_batch()?;
        Ok(true)
    }

    /// Whether polling for an answer is worthwhile.
    fn is_eager(&self) -> bool {
        self.dead.is_none() && self.busy_poll.as_ref().is_some_and(BusyPoll::is_ready)
    }

    fn wait_goes_on(&mut self) {
        if let Some(busy_poll) = &mut self.busy_poll {
            busy_poll.wait_goes_on();
        }
    }

    fn shares_processor(&self) -> bool {
        host_has_one()
            && self.peer.local.ip().map(|a| a.ip()) == self.peer.remote.ip().map(|a| a.ip())
    }

    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut Vec<Completion>,
    ) -> Poll<Result<(), LinkError>> {
        if let Some(error) = &self.dead {
            return Poll::Ready(Err(error.clone()));
        }
        match self.try_poll(cx, out) {
            Ok(poll) => poll.map(Ok),
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    fn recv_slot(&self, slot: u32, len: u32) -> &[u8] {
        self.memory.block.recv_slot(slot, len)
    }

    fn repost(&mut self, slot: u32) -> Result<bool, LinkError> {
        if let Some(error) = &self.dead {
            return Err(error.clone());
        }
        if !self.memory.block.is_held(slot) {
            return Err(
                self.misuse(format!("RECV slot {slot} is posted already, or does not exist"))
            );
        }
        if self.memory.block.retire(slot) {
            return Ok(false);
        }
        self.post(slot).map(|()| true).map_err(|source| self.device_error("ibv_post_recv", source))
    }

    fn grow(&mut self, pool: &Pool) -> Result<u32, LinkError> {
        if let Some(error) = &self.dead {
            return Err(error.clone());
        }
        let mut posted = 0;
        for slot in self.memory.block.lease_extra(pool) {
            if self.memory.block.revive(slot) {
                self.post(slot).map_err(|source| self.device_error("ibv_post_recv", source))?;
                posted += 1;
            }
        }
        Ok(posted)
    }

    fn shrink(&mut self) -> Result<u32, LinkError> {
        self.memory.block.retire_extra();
        let mut posted = 0;
        for slot in self.memory.block.ring() {
            if self.dead.is_none() && self.memory.block.rejoin(slot) {
                self.post(slot).map_err(|source| self.device_error("ibv_post_recv", source))?;
                posted += 1;
            }
        }
        Ok(posted)
    }

    fn grow_sends(&mut self, pool: &Pool) -> Option<u32> {
        self.memory.block.lease_sends(pool)
    }

    fn shrink_sends(&mut self) -> Option<u32> {
        let memory = &mut *self.memory;
        (memory.sq.in_flight() == 0).then(|| memory.block.return_sends()).flatten()
    }

    fn disconnect(&mut self) {
        if self.dead.is_some() || self.ending.is_some() {
            return;
        }
        self.ending = Some(Ending::Closed);
        if let Err(error) = self.qp.id.disconnect() {
            tracing::debug!(peer = %self.peer, %error, "rdma_disconnect");
        }
    }
}

impl Drop for VerbsLink {
    fn drop(&mut self) {
        if is_inherited() {
            return;
        }
        if self.qp.destroy() {
            // SAFETY: dropped once, here; nothing uses it afterwards.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        } else {
            tonic_rdma_memory::throttled!(error, peer = %self.peer, "the queue pair cannot be destroyed: its memory is leaked");
        }
    }
}
