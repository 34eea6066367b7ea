//! A link of the in-process network.
//!
//! After the doorbell, the link delivers the work itself: in [`ring_doorbell`](Link::ring_doorbell)
//! if there is no delay, otherwise in later polls. So only the owner of the link reads the source
//! memory.

use std::collections::VecDeque;
use std::pin::Pin;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use tokio::time::Sleep;
use tonic_rdma_memory::{LendableBytes, Pool};

use crate::control_block::ControlBlock;
use crate::error::{LinkError, Verb};
use crate::link::{Caps, Completion, Lent, Link, PROBE_LIMIT, PeerInfo, Posted, Shared, Work};
use crate::link_config::LinkConfig;
use crate::queue::{HeldMemory, SendQueue};
use crate::returns::Returns;
use crate::sim::config::{InjectedBug, Rng};
use crate::sim::end::{EndReason, SimEnd, Status};
use crate::sim::faults::Delay;
use crate::sim::link::work::{Checksums, SimWorkRequest, Source, Unordered, write_source};
use crate::sim::loans::to_lend_on;
use crate::sim::observer::{EndId, Event};
use crate::sim::state::{Counters, DeviceState};
use crate::timer::Timer;

mod work;

/// One in this many offers of memory is declined.
const DECLINED: u32 = 8;
/// One in this many loans finds that the peer has not mapped the memory yet.
const ASKED: u32 = 4;
/// Maximum number of completions per poll.
const MAX_COMPLETIONS: usize = 256;

/// One of the two ends of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SimSide {
    Connecting,
    Accepting,
}

/// A link of the in-process network.
#[derive(Debug)]
pub struct SimLink {
    caps: Caps,
    peer: PeerInfo,
    end: Arc<SimEnd>,
    peer_end: Option<(SimSide, Arc<SimEnd>)>,
    sq: SendQueue,
    /// Work that is queued until the doorbell rings.
    queued: Vec<SimWorkRequest>,
    /// Work whose doorbell has rung, but that is not delivered yet.
    in_flight: VecDeque<SimWorkRequest>,
    /// Delivered work whose completion has not been reported yet, with the delay of that
    /// completion.
    done: VecDeque<(u64, Delay)>,
    /// Fires when the next delivery or completion is due.
    timer: Option<Pin<Box<Sleep>>>,
    checksums: Checksums,
    /// The bytes, address and key of a WRITE that an injected bug lets land after the next SEND.
    late_write: Option<(Vec<u8>, u64, u32)>,
    unordered: Unordered,
    /// Whether an injected bug loses completions.
    loses_completions: bool,
    dead: Option<LinkError>,
    rng: Rng,
    /// The delay after which the open probe is answered. `None` if no probe is open.
    probe: Option<Delay>,
    /// Number of work requests that the link still carries, if a fault limits them.
    remaining_work: Option<u64>,
    waker: Option<Waker>,
    /// The peer's leases that this end no longer reads.
    returns: Option<Arc<Returns>>,
    /// The key of the memory, if the last call to `lend` found that the peer had not mapped it yet.
    mapping: Option<u32>,
    /// This link's pool, if re-lending is allowed.
    lends_on: Option<Pool>,
    block: ControlBlock,
}

impl SimLink {
    /// Creates one end and posts its RECVs.
    pub(super) fn new(
        device: &Arc<DeviceState>,
        pool: &Pool,
        block: ControlBlock,
        config: &LinkConfig,
        peer: PeerInfo,
    ) -> SimLink {
        let net = &device.net;
        let caps = Caps {
            max_inline: 0,
            send_queue: config.send_queue.min(net.config.send_queue.unwrap_or(u32::MAX).max(4))
                as usize,
            recv_queue: config.recv_slots as usize,
            max_msg: net.config.max_msg,
            max_landing: usize::MAX,
            any_memory: false,
            tells_end: false,
            probe_limit: PROBE_LIMIT,
        };
        let id = EndId(net.counters.links.fetch_add(1, Relaxed));
        let mut link = SimLink {
            peer,
            end: SimEnd::new(id, device.clone(), config.takes),
            peer_end: None,
            sq: SendQueue::new(caps.send_queue, config.max_sends()),
            caps,
            queued: Vec::new(),
            in_flight: VecDeque::new(),
            done: VecDeque::new(),
            timer: None,
            checksums: Checksums::default(),
            late_write: None,
            unordered: Unordered::default(),
            loses_completions: false,
            dead: None,
            rng: Rng::new(net.config.seed, id.0),
            probe: None,
            remaining_work: device.faults.kill_after(),
            waker: None,
            returns: None,
            mapping: None,
            lends_on: net.config.lends_on.then(|| pool.clone()),
            block,
        };
        for slot in 0..config.recv_slots {
            link.post(slot);
        }
        let (recv_slots, bytes) = (config.recv_slots, config.rest_recv());
        net.emit(Event::Made { end: id, device: &device.name, recv_slots, bytes });
        link
    }

    pub(super) fn join(&mut self, side: SimSide, other: Arc<SimEnd>) {
        let (end, peer, connecting) = (self.end.id, other.id, side == SimSide::Connecting);
        self.end.device.net.emit(Event::Joined { end, peer, connecting });
        self.peer_end = Some((side, other));
    }

    pub(super) fn end(&self) -> &Arc<SimEnd> {
        &self.end
    }

    /// Posts a slot that the driver holds.
    fn post(&mut self, slot: u32) {
        if let Some((ptr, _)) = self.block.slot_place(slot)
            && self.block.mark_posted(slot)
        {
            // SAFETY: the block writes or reads a slot only while the slot is held. The slot is
            // posted from here until its arrival is marked. The block lives until Drop has called
            // `close`.
            unsafe { self.end.post(slot, ptr, self.block.recv_size(slot)) };
        }
    }

    fn misuse(&self, what: String) -> LinkError {
        self.end.device.net.breach(|| format!("R5: {what} ({})", self.end.id));
        LinkError::Misuse { what, peer: Box::new(self.peer.clone()) }
    }

    fn error(&self, reason: EndReason) -> LinkError {
        let peer = Box::new(self.peer.clone());
        match reason {
            EndReason::Disconnected => LinkError::Disconnected { peer },
            EndReason::Closed => LinkError::Closed { peer },
            EndReason::Removed => LinkError::DeviceRemoved { peer },
            EndReason::Failed(verb, status) => LinkError::Completion {
                verb,
                status: status.words().to_owned(),
                code: status.code(),
                vendor_err: 0,
                peer,
            },
        }
    }

    fn frozen(&self) -> bool {
        self.end.device.faults.frozen()
            || self.peer_end.as_ref().is_some_and(|(_, o)| o.device.faults.frozen())
    }

    /// Delivers the work that is due.
    fn deliver_due(&mut self) {
        let Some((side, other)) = self.peer_end.clone() else { return };
        while self.in_flight.front().is_some_and(|request| request.delay.is_over())
            && !self.frozen()
            && !self.end.device.faults.paused()
        {
            if self.end.end_reason().is_some() {
                return;
            }
            let Some(request) = self.in_flight.pop_front() else { return };
            if let Err(status) = self.deliver(&request, side, &other) {
                self.fail(self.sq.verb(request.seq), status, &other);
                return;
            }
            if self.sq.is_signalled(request.seq) {
                let net = &self.end.device.net;
                self.loses_completions |= net.injects(InjectedBug::LoseCompletions);
                let delay = Delay::draw(&mut self.rng, &net.config);
                self.done.push_back((request.seq, delay));
            }
        }
    }

    fn deliver(
        &mut self,
        request: &SimWorkRequest,
        side: SimSide,
        other: &SimEnd,
    ) -> Result<(), Status> {
        let net = &self.end.device.net;
        if let Some(left) = &mut self.remaining_work {
            *left = left.checked_sub(1).ok_or(Status::RetryExceeded)?;
        }
        if side == SimSide::Accepting && !self.end.has_received() {
            return Err(Status::SentFirst);
        }
        let place = self.end.device.table.readable(request.lkey, request.iova, request.len);
        if place != Some(request.addr.as_ptr() as u64) {
            return Err(Status::LocalProtection);
        }
        if !self.checksums.is_same(request.seq) {
            net.breach(|| {
                format!("R10: the memory of work changed before it was sent ({})", self.end.id)
            });
        }
        match request.remote {
            None => self.send(request, other),
            Some((addr, rkey)) => self.write(request, other, addr, rkey),
        }
    }

    fn send(&mut self, request: &SimWorkRequest, other: &SimEnd) -> Result<(), Status> {
        let net = &self.end.device.net;
        let (end, peer) = (self.end.id, other.id);
        net.counters.sends.fetch_add(1, Relaxed);
        // SAFETY: the source lies in this link's block, whose SEND part only &mut self writes.
        let message = unsafe { std::slice::from_raw_parts(request.addr.as_ptr(), request.len) };
        let mut flipped = Vec::new();
        let mut from = request.addr;
        if net.injects(InjectedBug::FlipSend) && !message.is_empty() {
            flipped.extend_from_slice(message);
            flipped[request.len - 1] ^= 1;
            from = NonNull::from(flipped.as_mut_slice()).cast();
        }
        self.unordered.arrive(&other.device.table, &mut self.rng);
        let wake = !self.rng.one_in(net.config.lost_wakeups);
        if !net.injects(InjectedBug::LoseSend) {
            let times = if net.injects(InjectedBug::RepeatSend) { 2 } else { 1 };
            for _ in 0..times {
                // SAFETY: as above, or the source is the copy.
                unsafe { other.deliver(from, request.len, wake)? };
                net.emit(Event::Sent { end, peer, message });
            }
        }
        if self.rng.one_in(net.config.idle_wakeups) {
            self.end.wake();
        }
        if let Some((mut bytes, addr, rkey)) = self.late_write.take() {
            net.emit(Event::Written { end, peer, addr, rkey, len: bytes.len() });
            let src = NonNull::from(bytes.as_mut_slice()).cast();
            // SAFETY: the source is a copy of this link's own. `RegionTable::write` allows any peer
            // such a write to its memory. The injected bug breaks R9 on purpose.
            unsafe { other.device.table.write(rkey, addr, src, bytes.len()) };
        }
        Ok(())
    }

    fn write(
        &mut self,
        request: &SimWorkRequest,
        other: &SimEnd,
        addr: u64,
        rkey: u32,
    ) -> Result<(), Status> {
        let net = &self.end.device.net;
        if other.end_reason().is_some() {
            return Err(Status::RetryExceeded);
        }
        net.counters.writes.fetch_add(1, Relaxed);
        net.counters.write_bytes.fetch_add(request.len as u64, Relaxed);
        let late = net.injects(InjectedBug::LateWrite);
        if late || net.injects(InjectedBug::RepeatWrite) {
            // SAFETY: the source is held by the send queue or lies in this link's block.
            let bytes = unsafe { std::slice::from_raw_parts(request.addr.as_ptr(), request.len) };
            self.late_write = Some((bytes.to_vec(), addr, rkey));
            if late {
                return Ok(());
            }
        }
        let (table, rng, len) = (&other.device.table, &mut self.rng, request.len);
        let mut changed = Vec::new();
        let mut src = request.addr;
        // The byte must change before the WRITE lands, because bytes that arrive in any order would
        // overwrite a later change.
        if len > 0 && net.injects(InjectedBug::FlipWrite) {
            // SAFETY: as for a late WRITE.
            changed.extend_from_slice(unsafe { std::slice::from_raw_parts(src.as_ptr(), len) });
            changed[0] ^= 1;
            src = NonNull::from(changed.as_mut_slice()).cast();
        }
        // SAFETY: the source is a private copy of this call, lies in this link's block, which only
        // &mut self writes, or lies in pool memory that the send queue holds. Such memory is
        // frozen, or is a buffer that the send queue owns.
        let allowed = unsafe {
            match rng.one_in(net.config.unordered) {
                true => self.unordered.write(table, (rkey, addr), (src, len), rng),
                false => table.write(rkey, addr, src, len),
            }
        };
        if !allowed {
            return Err(Status::RemoteAccess);
        }
        net.emit(Event::Written { end: self.end.id, peer: other.id, addr, rkey, len: request.len });
        Ok(())
    }

    /// Fails work, which puts both queue pairs into the error state.
    fn fail(&mut self, verb: Verb, status: Status, other: &SimEnd) {
        let net = &self.end.device.net;
        let rule = match status {
            Status::ReceiverNotReady | Status::RemoteInvalidRequest => Some("R2"),
            Status::SentFirst => Some("R3"),
            Status::RemoteAccess | Status::LocalProtection => Some("R9"),
            Status::LocalLength | Status::Flushed | Status::RetryExceeded => None,
        };
        if let Some(rule) = rule {
            net.breach(|| {
                format!(
                    "{rule}: {verb} failed, {} ({} to {})",
                    status.words(),
                    self.end.id,
                    other.id
                )
            });
        }
        let counters = &net.counters;
        match status {
            Status::ReceiverNotReady => drop(counters.receiver_not_ready.fetch_add(1, Relaxed)),
            Status::RemoteAccess => drop(counters.remote_access_errors.fetch_add(1, Relaxed)),
            _ => {}
        }
        other.end(match status {
            Status::RemoteAccess => EndReason::Failed(Verb::Recv, Status::Flushed),
            _ => EndReason::Disconnected,
        });
        self.end.end(EndReason::Failed(verb, status));
    }

    /// Counts a poll for the delays that last a number of polls.
    fn tick(&mut self) {
        if let Some(request) = self.in_flight.front_mut() {
            request.delay.tick();
        }
        if let Some((_, delay)) = self.done.front_mut() {
            delay.tick();
        }
        if let Some(delay) = &mut self.probe {
            delay.tick();
        }
    }

    /// Wakes the task when the next delivery or completion is due.
    fn schedule_poll(&mut self, cx: &mut Context<'_>, report: bool) {
        let done = self
            .done
            .front()
            .map(|(_, delay)| *delay)
            .filter(|_| report && !self.loses_completions);
        self.wake_after(
            cx,
            [self.in_flight.front().map(|request| request.delay), done, self.probe],
        );
    }

    /// Wakes the task when the first of the delays is over.
    fn wake_after<const N: usize>(&mut self, cx: &mut Context<'_>, delays: [Option<Delay>; N]) {
        let mut next = None;
        for delay in delays.into_iter().flatten() {
            match delay.waits_until() {
                // This delay lasts a number of polls.
                None => return cx.waker().wake_by_ref(),
                Some(until) => next = Some(next.map_or(until, |next| until.min(next))),
            }
        }
        let Some(next) = next else { return };
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(next)));
        if timer.deadline() != next {
            timer.as_mut().reset(next);
        }
        if timer.as_mut().poll(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
    }

    /// Answers a probe. Like a real device, the peer's device answers as long as its end of the
    /// connection exists, even if its process does nothing.
    fn answer_probe(&mut self, out: &mut Vec<Completion>) {
        let Some((_, other)) = self.peer_end.clone() else { return };
        if self.probe.is_none_or(|delay| !delay.is_over()) || self.end.end_reason().is_some() {
            return;
        }
        self.probe = None;
        match other.end_reason() {
            None => out.push(Completion::Answered),
            Some(_) => self.fail(Verb::Write, Status::RetryExceeded, &other),
        }
    }

    fn report_sent(&mut self, out: &mut Vec<Completion>, all: bool) {
        while let Some((seq, delay)) = self.done.front().copied() {
            if self.loses_completions || (!delay.is_over() && !all) {
                return;
            }
            self.done.pop_front();
            let net = &self.end.device.net;
            if !self.checksums.done(seq) {
                net.breach(|| {
                    format!("R10: the memory of work changed before it was done ({})", self.end.id)
                });
            }
            if let Some(id) = self.sq.complete(seq) {
                net.counters.completions.fetch_add(1, Relaxed);
                net.emit(Event::Completed { end: self.end.id, id });
                out.push(Completion::Sent { id });
            }
        }
    }

    fn set_waker(&mut self, waker: &Waker) {
        match &mut self.waker {
            Some(old) => old.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }
}

impl Link for SimLink {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn peer(&self) -> &PeerInfo {
        &self.peer
    }

    fn send_room(&self) -> usize {
        self.sq.room()
    }

    fn block_mut(&mut self) -> &mut [u8] {
        self.block.block_mut()
    }

    fn queue(&mut self, id: u64, work: Work, signal: bool) -> Result<Posted, LinkError> {
        if let Some(error) = &self.dead {
            return Err(error.clone());
        }
        if self.sq.room() == 0 {
            return Err(self.misuse("the send queue is full".to_owned()));
        }
        let (verb, held, source, remote) = match work {
            Work::Send { offset, len } => match Source::in_block(&self.block, offset, len) {
                Some(source) => (Verb::Send, HeldMemory::Slot, source, None),
                None => {
                    return Err(self.misuse(format!(
                        "SEND of {len} bytes at {offset} lies outside the block"
                    )));
                }
            },
            Work::Write { src, remote_addr, rkey } => match write_source(src, &self.block) {
                Some((held, source)) => (Verb::Write, held, source, Some((remote_addr, rkey))),
                None => {
                    return Err(self.misuse(
                        "the WRITE's source is not registered, or lies outside the block"
                            .to_owned(),
                    ));
                }
            },
        };
        let Source { addr, iova, lkey, len } = source;
        if len > self.caps.max_msg {
            return Err(self.misuse(format!(
                "message of {len} bytes, the device carries {}",
                self.caps.max_msg
            )));
        }
        let seq = self.sq.push(id, verb, held, signal);
        let net = &self.end.device.net;
        let write = remote.is_some();
        net.emit(Event::Queued { end: self.end.id, id, write, addr: iova, len });
        if net.config.audit {
            // SAFETY: the range lies in the block, or in memory that the send queue now holds until
            // the work is done; only &mut self writes to the block.
            unsafe { self.checksums.watch(seq, addr, len) };
        }
        let delay = Delay::draw(&mut self.rng, &net.config);
        self.queued.push(SimWorkRequest { seq, addr, iova, len, lkey, remote, delay });
        Ok(Posted::InFlight)
    }

    fn share(&mut self, _: u32) -> Result<Shared, LinkError> {
        Ok(Shared::Yes)
    }

    fn blocks_on_drop(&self) -> bool {
        self.end.device.faults.holds_destroy()
    }

    fn ring_doorbell(&mut self) -> Result<(), LinkError> {
        if let Some(error) = &self.dead {
            return Err(error.clone());
        }
        if self.queued.is_empty() {
            return Ok(());
        }
        self.end.device.net.counters.doorbells.fetch_add(1, Relaxed);
        self.sq.end_batch();
        self.in_flight.extend(self.queued.drain(..));
        self.deliver_due();
        // Polls deliver the remaining work, and report completions.
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
        Ok(())
    }

    fn probe(&mut self) -> Result<bool, LinkError> {
        self.ring_doorbell()?;
        if self.probe.is_some() {
            return Ok(false);
        }
        self.probe = Some(Delay::draw(&mut self.rng, &self.end.device.net.config));
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
        Ok(true)
    }

    /// Uses tokio's clock, because tests stop that clock.
    fn timer(&self) -> Timer {
        Timer::with_tokio_clock()
    }

    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut Vec<Completion>,
    ) -> Poll<Result<(), LinkError>> {
        let before = out.len();
        self.set_waker(cx.waker());
        if !self.frozen() {
            self.tick();
            self.deliver_due();
            self.answer_probe(out);
        }
        if self.end.device.faults.paused() {
            // Arrivals stay in the queue, and this end is woken when the pause ends.
            let _ = self.end.arrivals(cx.waker(), 0);
            // Unlike in a stopped process, the clock continues, so this end may probe. All other
            // work is held back, even work that has long been due.
            if out.len() > before {
                return Poll::Ready(Ok(()));
            }
            if !self.frozen() && self.end.end_reason().is_none() {
                self.wake_after(cx, [self.probe]);
            }
            return Poll::Pending;
        }
        let (arrivals, end_reason) = self.end.arrivals(cx.waker(), MAX_COMPLETIONS);
        // If nobody waits for a SEND, its completion wakes nobody, as on a device. The completion
        // is reported with the next message.
        let report = !arrivals.is_empty() || self.sq.is_waited_for();
        for (slot, len) in arrivals {
            if self.block.mark_received(slot, len) {
                let net = &self.end.device.net;
                net.counters.completions.fetch_add(1, Relaxed);
                net.emit(Event::Received { end: self.end.id, len });
                out.push(Completion::Received { slot, len });
            }
        }
        if end_reason.is_some()
            && self.dead.is_none()
            && self.rng.one_in(self.end.device.net.config.flushed)
        {
            self.done.clear();
        }
        if (report && !self.frozen()) || end_reason.is_some() {
            self.report_sent(out, end_reason.is_some());
        }
        if out.len() > before {
            return Poll::Ready(Ok(()));
        }
        if let Some(reason) = end_reason {
            // The queue pair is in the error state, so the memory of posted work will not be read
            // again.
            self.queued.clear();
            self.in_flight.clear();
            self.checksums.clear();
            self.sq.clear();
            let error = match self.dead.take() {
                Some(error) => error,
                None => {
                    self.end.device.net.emit(Event::Died { end: self.end.id });
                    self.error(reason)
                }
            };
            self.dead = Some(error.clone());
            return Poll::Ready(Err(error));
        }
        if !self.frozen() {
            self.schedule_poll(cx, report);
        }
        Poll::Pending
    }

    fn recv_slot(&self, slot: u32, len: u32) -> &[u8] {
        self.block.recv_slot(slot, len)
    }

    fn repost(&mut self, slot: u32) -> Result<bool, LinkError> {
        if let Some(error) = &self.dead {
            return Err(error.clone());
        }
        if !self.block.is_held(slot) {
            return Err(
                self.misuse(format!("RECV slot {slot} is posted already, or does not exist"))
            );
        }
        let net = &self.end.device.net;
        if self.block.retire(slot) {
            net.emit(Event::Retired { end: self.end.id });
            return Ok(false);
        }
        if !net.injects(InjectedBug::LoseRepost) {
            net.emit(Event::Reposted { end: self.end.id, bytes: self.block.recv_size(slot) });
            self.post(slot);
        }
        Ok(true)
    }

    fn grow(&mut self, pool: &Pool) -> Result<u32, LinkError> {
        if let Some(error) = &self.dead {
            return Err(error.clone());
        }
        let mut posted = 0;
        for slot in self.block.lease_extra(pool) {
            if self.block.revive(slot) {
                self.post(slot);
                posted += 1;
            }
        }
        if posted > 0 {
            let bytes = self.block.recv_size(u32::MAX);
            self.end.device.net.emit(Event::Grown { end: self.end.id, recv_slots: posted, bytes });
        }
        Ok(posted)
    }

    fn shrink(&mut self) -> Result<u32, LinkError> {
        self.block.retire_extra();
        let mut posted = 0;
        for slot in self.block.ring() {
            if self.dead.is_none() && self.block.rejoin(slot) {
                self.post(slot);
                posted += 1;
            }
        }
        if posted > 0 {
            let (end, bytes) = (self.end.id, self.block.recv_size(0));
            self.end.device.net.emit(Event::Grown { end, recv_slots: posted, bytes });
        }
        Ok(posted)
    }

    fn grow_sends(&mut self, pool: &Pool) -> Option<u32> {
        self.block.lease_sends(pool)
    }

    fn shrink_sends(&mut self) -> Option<u32> {
        (self.sq.in_flight() == 0).then(|| self.block.return_sends()).flatten()
    }

    fn may_lend(&self) -> bool {
        self.peer_end.as_ref().is_some_and(|(_, other)| other.takes.lent)
    }

    fn lend(&mut self, bytes: LendableBytes) -> Result<Option<Lent>, LinkError> {
        // Simulates a peer that cannot map the memory, or has not mapped it yet.
        let declined = !self.may_lend() || self.rng.one_in(DECLINED);
        let asked = !declined && self.rng.one_in(ASKED);
        self.mapping = asked.then(|| bytes.key());
        if declined || asked || self.dead.is_some() {
            if asked {
                self.end.wake();
            }
            return Ok(None);
        }
        let Counters { leases, lent_on, .. } = &self.end.device.net.counters;
        leases.fetch_add(1, Relaxed);
        lent_on.fetch_add(u64::from(self.end.device.borrowed().contains(&bytes.key())), Relaxed);
        Ok(Some(self.end.loans.add(bytes)))
    }

    fn is_mapping(&self, key: u32) -> bool {
        self.mapping == Some(key)
    }

    fn end_lease(&mut self, lease: u32) {
        if let Err(what) = self.end.loans.end(lease) {
            self.end.device.net.breach(|| format!("R9: {what} ({})", self.end.id));
        }
    }

    fn borrow(&mut self, lent: Lent, len: u32) -> Result<Bytes, LinkError> {
        let other = self.peer_end.as_ref();
        let returns = self.returns.get_or_insert_default();
        let bytes = other.and_then(|(_, other)| other.loans.borrow(lent, len, returns));
        let bytes = bytes.map(|bytes| match &self.lends_on {
            Some(pool) => to_lend_on(bytes, pool, &self.end.device),
            None => bytes,
        });
        if bytes.is_some() && self.end.device.net.injects(InjectedBug::ReturnEarly) {
            returns.push(lent.lease);
        }
        bytes.ok_or_else(|| LinkError::Breach {
            what: format!("{len} bytes are lent that are not there: {lent:?}"),
            peer: Box::new(self.peer.clone()),
        })
    }

    fn take_returned(&mut self, waker: &Waker, out: &mut Vec<u32>) {
        if let Some(returns) = &self.returns {
            returns.take(waker, out);
        }
    }

    fn disconnect(&mut self) {
        self.end.end(EndReason::Closed);
        self.tell_peer();
    }
}

impl Drop for SimLink {
    fn drop(&mut self) {
        self.end.device.faults.wait_to_destroy();
        self.end.close();
        self.end.device.net.emit(Event::Destroyed { end: self.end.id });
        self.tell_peer();
    }
}

impl SimLink {
    fn tell_peer(&self) {
        if let Some((_, other)) = &self.peer_end
            && !self.end.device.faults.lose_disconnects()
        {
            other.end(EndReason::Disconnected);
        }
    }
}
