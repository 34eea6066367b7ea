//! A link of the in-process network.
//!
//! Work that was rung lies in the link itself and is delivered by it, in [`ring`](Link::ring) when there is no delay and
//! otherwise in later polls: only the owner of the source memory's link ever reads it.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, Waker};

use tonic_rdma_memory::{PinnedBuf, PinnedBytes};

use super::net::DeviceInner;
use super::rng::Rng;
use super::wire::{End, Over, Status};
use crate::block::ControlBlock;
use crate::error::{LinkError, Verb};
use crate::link::{Caps, Completion, Link, LinkConfig, PeerInfo, Posted, Work, WriteSource};
use crate::queue::{Held, SendQueue};

/// Completions per poll, at most.
const BUDGET: usize = 256;

/// Which end this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ends {
    Connecting,
    Accepting,
}

#[derive(Debug)]
struct Op {
    seq: u64,
    addr: NonNull<u8>,
    len: usize,
    lkey: u32,
    /// Address and key of a WRITE.
    remote: Option<(u64, u32)>,
    /// Polls until it is delivered.
    delay: u32,
}

// SAFETY: `addr` points into memory that the link owns (its block) or holds in its send queue; it is used by the
// link's owner only.
unsafe impl Send for Op {}
// SAFETY: &Op gives no access to the memory.
unsafe impl Sync for Op {}

/// A link of the in-process network.
#[derive(Debug)]
pub struct SimLink {
    caps: Caps,
    peer: PeerInfo,
    me: Arc<End>,
    other: Option<(Ends, Arc<End>)>,
    sq: SendQueue,
    /// Queued, not rung.
    queued: Vec<Op>,
    /// Rung, not delivered.
    wire: VecDeque<Op>,
    /// Delivered, completion not reported: sequence number and polls to wait.
    done: VecDeque<(u64, u32)>,
    dead: Option<LinkError>,
    rng: Rng,
    /// Work requests that it still carries, by a fault.
    life: Option<u64>,
    waker: Option<Waker>,
    block: ControlBlock,
}

impl SimLink {
    /// Makes one end and posts its RECVs.
    pub(super) fn new(
        device: &Arc<DeviceInner>,
        block: ControlBlock,
        config: &LinkConfig,
        peer: PeerInfo,
    ) -> SimLink {
        let net = &device.net;
        let caps = Caps {
            max_inline: 0,
            send_queue: config.send_queue as usize,
            recv_queue: config.recv_slots as usize,
            max_msg: net.config.max_msg,
            any_memory: false,
        };
        let mut link = SimLink {
            caps,
            peer,
            me: End::new(device.clone(), block.slot_size()),
            other: None,
            sq: SendQueue::new(config.send_queue as usize, config.send_slots),
            queued: Vec::new(),
            wire: VecDeque::new(),
            done: VecDeque::new(),
            dead: None,
            rng: Rng::new(net.config.seed, net.counters.links.fetch_add(1, Relaxed)),
            life: device.faults.kill_after(),
            waker: None,
            block,
        };
        for slot in 0..config.recv_slots {
            link.post(slot);
        }
        link
    }

    pub(super) fn join(&mut self, side: Ends, other: Arc<End>) {
        self.other = Some((side, other));
    }

    pub(super) fn end(&self) -> &Arc<End> {
        &self.me
    }

    /// Posts a slot that the driver has.
    fn post(&mut self, slot: u32) {
        if let Some(ptr) = self.block.slot_ptr(slot)
            && self.block.mark_posted(slot)
        {
            // SAFETY: the block writes or reads a slot only while it is held; it is posted from here until its arrival
            // is marked. The block lives until Drop has called `abandon`.
            unsafe { self.me.post(slot, ptr) };
        }
    }

    fn misuse(&self, what: String) -> LinkError {
        LinkError::Misuse { what, peer: Box::new(self.peer.clone()) }
    }

    fn error(&self, over: Over) -> LinkError {
        let peer = Box::new(self.peer.clone());
        match over {
            Over::Disconnected => LinkError::Disconnected { peer },
            Over::Closed => LinkError::Closed { peer },
            Over::Removed => LinkError::DeviceRemoved { peer },
            Over::Failed(verb, status) => LinkError::Completion {
                verb,
                status: status.words().to_owned(),
                code: status.code(),
                vendor_err: 0,
                peer,
            },
        }
    }

    fn frozen(&self) -> bool {
        self.me.device.faults.frozen() || self.other.as_ref().is_some_and(|(_, o)| o.device.faults.frozen())
    }

    /// Delivers what is due.
    fn step(&mut self) {
        let Some((side, other)) = self.other.clone() else { return };
        while self.wire.front().is_some_and(|op| op.delay == 0) && !self.frozen() {
            if self.me.over().is_some() {
                return;
            }
            let Some(op) = self.wire.pop_front() else { return };
            if let Err(status) = self.deliver(&op, side, &other) {
                self.fail(self.sq.verb(op.seq), status, &other);
                return;
            }
            if self.sq.is_signalled(op.seq) {
                let delay = self.rng.up_to(self.me.device.net.config.delay);
                self.done.push_back((op.seq, delay));
            }
        }
    }

    fn deliver(&mut self, op: &Op, side: Ends, other: &End) -> Result<(), Status> {
        let net = &self.me.device.net;
        if let Some(left) = &mut self.life {
            *left = left.checked_sub(1).ok_or(Status::RetryExceeded)?;
        }
        if side == Ends::Accepting && !self.me.heard() {
            return Err(Status::SentFirst);
        }
        if !self.me.device.table.readable(op.lkey, op.addr.as_ptr() as u64, op.len) {
            return Err(Status::LocalProtection);
        }
        match op.remote {
            None => {
                net.counters.sends.fetch_add(1, Relaxed);
                // SAFETY: the source lies in this link's block, whose SEND part only &mut self writes.
                unsafe { other.deliver(op.addr, op.len) }
            }
            Some((addr, rkey)) => {
                if other.over().is_some() {
                    return Err(Status::RetryExceeded);
                }
                net.counters.writes.fetch_add(1, Relaxed);
                net.counters.write_bytes.fetch_add(op.len as u64, Relaxed);
                // SAFETY: the source lies in this link's block, which only &mut self writes, or in pool memory that the
                // send queue holds: frozen, or a buffer that it owns.
                match unsafe { other.device.table.write(rkey, addr, op.addr, op.len) } {
                    true => Ok(()),
                    false => Err(Status::RemoteAccess),
                }
            }
        }
    }

    /// Work failed: both queue pairs go to error.
    fn fail(&mut self, verb: Verb, status: Status, other: &End) {
        let counters = &self.me.device.net.counters;
        match status {
            Status::ReceiverNotReady => drop(counters.receiver_not_ready.fetch_add(1, Relaxed)),
            Status::RemoteAccess => drop(counters.remote_access_errors.fetch_add(1, Relaxed)),
            _ => {}
        }
        other.end(match status {
            Status::RemoteAccess => Over::Failed(Verb::Recv, Status::Flushed),
            _ => Over::Disconnected,
        });
        self.me.end(Over::Failed(verb, status));
    }

    /// One poll has passed. True when something still waits for polls to pass.
    fn tick(&mut self) {
        if let Some(op) = self.wire.front_mut() {
            op.delay = op.delay.saturating_sub(1);
        }
        if let Some((_, delay)) = self.done.front_mut() {
            *delay = delay.saturating_sub(1);
        }
    }

    fn report_sent(&mut self, out: &mut Vec<Completion>, all: bool) {
        while let Some((seq, delay)) = self.done.front().copied() {
            if delay > 0 && !all {
                return;
            }
            self.done.pop_front();
            if let Some(id) = self.sq.complete(seq) {
                self.me.device.net.counters.completions.fetch_add(1, Relaxed);
                out.push(Completion::Sent { id });
            }
        }
    }

    fn remember(&mut self, waker: &Waker) {
        match &mut self.waker {
            Some(old) => old.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }
}

/// A WRITE's source taken apart: what keeps it, and where it lies.
fn take_apart(src: WriteSource, block: &ControlBlock) -> Option<(Held, NonNull<u8>, usize, u32)> {
    fn at(addr: u64) -> NonNull<u8> {
        // A pool's memory has an address, so the fallback is never used; length 0 makes it harmless.
        NonNull::new(std::ptr::with_exposed_provenance_mut(addr as usize)).unwrap_or(NonNull::dangling())
    }
    fn bytes(b: PinnedBytes) -> (Held, NonNull<u8>, usize, u32) {
        let (addr, len, lkey) = (at(b.addr()), b.len(), b.lkey());
        (Held::Bytes(b), addr, len, lkey)
    }
    fn buf(b: PinnedBuf) -> (Held, NonNull<u8>, usize, u32) {
        let (addr, len, lkey) = (at(b.addr()), b.len(), b.lkey());
        (Held::Buf(b), addr, len, lkey)
    }
    Some(match src {
        WriteSource::Bytes(b) => bytes(b),
        WriteSource::Buf(b) => buf(b),
        WriteSource::Staged { offset, len } => (Held::Staging, block.range(offset, len)?, len, block.lkey()),
        WriteSource::Any(_) => return None,
    })
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
        let (verb, held, addr, len, lkey, remote) = match work {
            Work::Send { offset, len } => match self.block.range(offset, len) {
                Some(addr) => (Verb::Send, Held::Slot, addr, len, self.block.lkey(), None),
                None => {
                    return Err(
                        self.misuse(format!("SEND of {len} bytes at {offset} lies outside the block"))
                    );
                }
            },
            Work::Write { src, remote_addr, rkey } => match take_apart(src, &self.block) {
                Some((held, addr, len, lkey)) => {
                    (Verb::Write, held, addr, len, lkey, Some((remote_addr, rkey)))
                }
                None => {
                    return Err(self.misuse(
                        "the WRITE's source is not registered, or lies outside the block".to_owned(),
                    ));
                }
            },
        };
        if len > self.caps.max_msg {
            return Err(
                self.misuse(format!("message of {len} bytes, the device carries {}", self.caps.max_msg))
            );
        }
        let seq = self.sq.push(id, verb, held, signal);
        let delay = self.rng.up_to(self.me.device.net.config.delay);
        self.queued.push(Op { seq, addr, len, lkey, remote, delay });
        Ok(Posted::UnderWay)
    }

    fn share(&mut self, _: u32) -> Result<(), LinkError> {
        Ok(())
    }

    fn ring(&mut self) -> Result<(), LinkError> {
        if let Some(error) = &self.dead {
            return Err(error.clone());
        }
        if self.queued.is_empty() {
            return Ok(());
        }
        self.sq.seal();
        self.wire.extend(self.queued.drain(..));
        self.step();
        // What is left is delivered by polls, and completions are reported by them.
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
        Ok(())
    }

    fn poll(&mut self, cx: &mut Context<'_>, out: &mut Vec<Completion>) -> Poll<Result<(), LinkError>> {
        let before = out.len();
        self.remember(cx.waker());
        if !self.frozen() {
            self.tick();
            self.step();
        }
        let (arrivals, over) = self.me.arrivals(cx.waker(), BUDGET);
        // As with a device: completions of bare SENDs that nobody waits for wake nobody, and come with something else.
        let report = !arrivals.is_empty() || self.sq.is_waited_for();
        for (slot, len) in arrivals {
            if self.block.mark_received(slot, len) {
                self.me.device.net.counters.completions.fetch_add(1, Relaxed);
                out.push(Completion::Received { slot, len });
            }
        }
        if (report && !self.frozen()) || over.is_some() {
            self.report_sent(out, over.is_some());
        }
        if out.len() > before {
            return Poll::Ready(Ok(()));
        }
        if let Some(over) = over {
            // The queue pair is in error: nothing of the posted work will be read again.
            self.queued.clear();
            self.wire.clear();
            self.sq.clear();
            let error = self.dead.take().unwrap_or_else(|| self.error(over));
            self.dead = Some(error.clone());
            return Poll::Ready(Err(error));
        }
        if !self.frozen() && (!self.wire.is_empty() || (report && !self.done.is_empty())) {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }

    fn recv_slot(&self, slot: u32, len: u32) -> &[u8] {
        self.block.recv_slot(slot, len)
    }

    fn repost(&mut self, slot: u32) -> Result<(), LinkError> {
        if let Some(error) = &self.dead {
            return Err(error.clone());
        }
        if !self.block.is_held(slot) {
            return Err(self.misuse(format!("RECV slot {slot} is posted already, or does not exist")));
        }
        self.post(slot);
        Ok(())
    }

    fn disconnect(&mut self) {
        self.me.end(Over::Closed);
        if let Some((_, other)) = &self.other {
            other.end(Over::Disconnected);
        }
    }
}

impl Drop for SimLink {
    fn drop(&mut self) {
        self.me.abandon();
        if let Some((_, other)) = &self.other {
            other.end(Over::Disconnected);
        }
    }
}
