//! A link over shared memory.
//!
//! The link does each request as soon as it is queued. So no request is ever in flight, and the
//! link reports no completions of SENDs and WRITEs.
//!
//! The driver reads the messages on the socket. A thread that may block (`blocking`) takes the
//! descriptors of CHUNK, LEND and NAME messages. The link changes its state as follows:
//!
//! | from | on | to |
//! |---|---|---|
//! | listening | a message other than CHUNK, LEND and NAME | listening |
//! | listening | CHUNK, LEND, NAME, while the peer owes too much (`map_debt`) | waiting |
//! | waiting | the peer has paid enough | as listening |
//! | listening | CHUNK, LEND, NAME otherwise: the message is checked, and a thread maps the file | taking |
//! | listening | LEND or NAME that this end does not accept | dead |
//! | taking | the file is mapped, or it cannot be mapped and this end answers DECLINED | listening |
//! | taking | the file is of a kind that cannot be used | dead |
//!
//! While the link is waiting or taking, it reads nothing from the socket. Messages that the peer
//! published in the ring after a chunk are not delivered until the chunk is mapped or declined. All
//! other work continues. This end declines a chunk if it is short of descriptors, mappings or
//! memory.

mod answers;

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::os::fd::AsFd;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use tonic_rdma_memory::{LendableBytes, Pool, throttled};

use crate::access::HostProcess;
use crate::addr::Addr;
use crate::busy_poll::{BusyPoll, PollStep};
use crate::control_block::ControlBlock;
use crate::error::{LinkError, Verb};
use crate::link::{
    Caps, Completion, Lent, Link, PROBE_LIMIT, PeerInfo, Posted, Shared, Work, WriteSource,
};
use crate::link_config::LinkConfig;
use crate::shm::context::{DeviceContext, NAME, ShmStats};
use crate::shm::lend::borrower::{Borrower, TakenFile, Taking};
use crate::shm::lend::lender::Lender;
use crate::shm::memory::chunks::{MAX_CHUNKS, PeerChunks};
use crate::shm::memory::peer_map::{MAX_CHUNK_BYTES, OfferedMemory, PeerMap, Usage};
use crate::shm::memory::table::{ChunkTable, RevokedKeys};
use crate::shm::memory::{Map, map_debt};
use crate::shm::named::Named;
use crate::shm::offers::Taken;
use crate::shm::recv_slots::RecvSlots;
use crate::shm::ring::{Put, Reader, RingBreach, Writer, processor};
use crate::shm::socket::wire::{Message, OF_A_LINK, unexpected};
use crate::shm::socket::{Credentials, Socket, SocketMessage, is_end, is_shortage};
use crate::shm::taking::{Deferred, Pending, take_file};
use crate::shm::wakeup::Wakeup;
use crate::shm::wakeup::wake_cost::{UNKNOWN, Waiting, WakeCost, monotonic, wake_up};

/// Maximum number of completions per poll.
const MAX_COMPLETIONS: usize = 256;
/// After this many polls that find messages in the ring, the socket is also read. Otherwise
/// messages on the socket would wait while the peer keeps sending messages through the ring.
const MAX_BUSY_POLLS: u32 = 32;
/// The number of polling rounds before other tasks run.
const MAX_ROUNDS: usize = 64;

/// A link over shared memory.
#[derive(Debug)]
pub struct ShmLink {
    caps: Caps,
    peer: Box<PeerInfo>,
    socket: Socket,
    reader: Reader<Map>,
    writer: Writer<PeerMap>,
    wakeup: Wakeup,
    chunks: PeerChunks,
    /// A file that the peer has given and whose descriptor is being taken.
    pending: Option<Box<Pending>>,
    /// A message whose file is not taken until the peer owes less.
    deferred: Option<Box<Deferred>>,
    /// Application buffers that the peer was offered.
    named: Named,
    taken: Taken,
    /// `Some` only if memory may be lent and the peer accepts lent memory.
    lender: Option<Box<Lender>>,
    /// `Some` once the peer has lent memory.
    borrower: Option<Box<Borrower>>,
    /// This link's pool, if re-lending is allowed.
    lends_on: Option<Pool>,
    table: Arc<ChunkTable>,
    /// The keys of this end's chunks that the peer knows. The value says whether the peer can write
    /// to the chunk.
    shared: HashMap<u32, Shared>,
    revoked: Arc<RevokedKeys>,
    busy_poll: Box<BusyPoll>,
    wake_cost: WakeCost,
    waiting: Waiting,
    /// Number of polls that have found messages in the ring since [`MAX_BUSY_POLLS`] last made the
    /// link read the socket.
    busy_polls: u32,
    stats: ShmStats,
    /// The reason why the link ends. The link reports this reason once all earlier messages are
    /// taken, because a dead link posts no RECV again.
    ending: Option<Box<LinkError>>,
    dead: Option<LinkError>,
    recv_slots: RecvSlots,
    block: ControlBlock,
}

impl ShmLink {
    pub(super) fn new(
        context: &DeviceContext,
        (socket, process, taken): (Socket, Option<HostProcess>, Taken),
        (reader, writer, wakeup): (Reader<Map>, Writer<PeerMap>, Wakeup),
        (pool, block): (&Pool, ControlBlock),
        config: &LinkConfig,
    ) -> ShmLink {
        ShmLink {
            caps: Caps {
                max_inline: 0,
                send_queue: config.send_queue as usize,
                recv_queue: config.recv_slots as usize,
                max_msg: 1 << 30,
                max_landing: MAX_CHUNK_BYTES as usize,
                any_memory: true,
                tells_end: true,
                probe_limit: PROBE_LIMIT,
            },
            peer: Box::new(PeerInfo {
                provider: NAME,
                device: NAME.to_owned(),
                local: Addr::Process(std::process::id()),
                remote: Addr::Process(socket.peer().pid),
                path_mtu: None,
            }),
            socket,
            reader,
            writer,
            wakeup,
            chunks: PeerChunks::default(),
            pending: None,
            deferred: None,
            named: Named::new(taken),
            taken,
            lender: Lender::new(&context.permit, process, taken).map(Box::new),
            borrower: None,
            lends_on: context.permit.lends_on().then(|| pool.clone()),
            table: context.table.clone(),
            shared: HashMap::new(),
            revoked: Arc::default(),
            busy_poll: Box::new(BusyPoll::new(config.busy_poll_limit, UNKNOWN)),
            wake_cost: WakeCost::default(),
            waiting: Waiting::No,
            busy_polls: 0,
            stats: ShmStats::default(),
            ending: None,
            dead: None,
            // Message n of the ring uses slot n modulo the number of slots.
            recv_slots: RecvSlots::new(config),
            block,
        }
    }

    /// Returns the counts of the link's work so far.
    pub fn stats(&self) -> ShmStats {
        self.stats
    }

    fn misuse(&self, what: String) -> LinkError {
        LinkError::Misuse { what, peer: self.peer.clone() }
    }

    fn device_error(&self, call: &'static str, source: io::Error) -> LinkError {
        LinkError::Device {
            verb: Verb::Call(call),
            source: Arc::new(source),
            peer: self.peer.clone(),
        }
    }

    fn breach(&self, what: String) -> LinkError {
        LinkError::Breach { what, peer: self.peer.clone() }
    }

    fn ring_breach(&self, breach: RingBreach) -> LinkError {
        self.breach(breach.to_string())
    }

    /// Ends the link. Only the first error is kept.
    fn fail(&mut self, error: LinkError) -> LinkError {
        self.socket.shut();
        self.dead.get_or_insert(error).clone()
    }

    fn check_alive(&self) -> Result<(), LinkError> {
        match &self.dead {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    fn send(&mut self, offset: usize, len: usize) -> Result<(), LinkError> {
        let slot_size = self.writer.slot_size();
        let message = self.block.block_mut().get(offset..offset.saturating_add(len));
        let Some(message) = message.filter(|_| len <= slot_size) else {
            return Err(self.misuse(format!(
                "SEND of {len} bytes at {offset} lies outside the block, or is longer than the peer's RECVs of {slot_size}"
            )));
        };
        match self.writer.put(message) {
            Ok(Put::Done) => {
                self.stats.sends += 1;
                Ok(())
            }
            Ok(Put::Full) => {
                // Messages queued before this one are still published.
                self.publish();
                let error = LinkError::Completion {
                    verb: Verb::Send,
                    status: "no RECV is posted at the peer: a SEND without a credit".to_owned(),
                    code: RNR_RETRY_EXCEEDED,
                    vendor_err: 0,
                    peer: self.peer.clone(),
                };
                Err(self.fail(error))
            }
            Err(breach) => {
                let error = self.ring_breach(breach);
                Err(self.fail(error))
            }
        }
    }

    fn write(&mut self, src: &WriteSource, remote_addr: u64, rkey: u32) -> Result<(), LinkError> {
        let ShmLink { chunks, block, .. } = self;
        let bytes = match src {
            WriteSource::Any(bytes) => Some(&bytes[..]),
            WriteSource::Bytes(bytes) => Some(bytes.as_ref()),
            WriteSource::Buf(buf) => Some(&buf[..]),
            WriteSource::Staged { offset, len } => {
                (*block.block_mut()).get(*offset..offset.saturating_add(*len))
            }
        };
        let Some(bytes) = bytes else {
            return Err(self.misuse("the WRITE's source lies outside the block".to_owned()));
        };
        let written = chunks.write(rkey, remote_addr, bytes);
        let len = bytes.len() as u64;
        if !written {
            let error = LinkError::Completion {
                verb: Verb::Write,
                status: format!(
                    "remote access error: {len} bytes at {remote_addr:#x} with rkey {rkey:#x}"
                ),
                code: REMOTE_ACCESS,
                vendor_err: 0,
                peer: self.peer.clone(),
            };
            return Err(self.fail(error));
        }
        self.stats.writes += 1;
        self.stats.write_bytes += len;
        Ok(())
    }

    /// Takes messages off the ring.
    fn receive(&mut self, out: &mut Vec<Completion>) -> Result<(), LinkError> {
        for _ in 0..MAX_COMPLETIONS {
            let ShmLink { reader, recv_slots, chunks, .. } = self;
            match reader.next(chunks.handled()) {
                Ok(None) => break,
                Ok(Some(message)) => {
                    let (slot, len) = (message.slot, message.len);
                    if !recv_slots.fill(slot, len, |bytes| message.copy_to(bytes)) {
                        return Err(
                            self.breach(format!("a SEND into slot {slot}, which is not posted"))
                        );
                    }
                    out.push(Completion::Received { slot, len });
                }
                Err(breach) => return Err(self.ring_breach(breach)),
            }
        }
        Ok(())
    }

    fn disconnected(&self) -> LinkError {
        LinkError::Disconnected { peer: self.peer.clone() }
    }

    fn socket_error(&self, error: io::Error) -> LinkError {
        match error.kind() {
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => self.disconnected(),
            io::ErrorKind::InvalidData => self.breach(error.to_string()),
            _ => self.device_error("recvmsg", error),
        }
    }

    /// Handles the next message on the socket, or completes the message whose descriptor is being
    /// taken.
    fn poll_socket(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut Vec<Completion>,
    ) -> Poll<Result<(), LinkError>> {
        while self.pending.is_none() {
            if let Some(deferred) = &mut self.deferred {
                ready!(deferred.poll(cx));
            }
            let message = match self.deferred.take() {
                Some(deferred) => deferred.message,
                None => match ready!(self.socket.poll(cx)) {
                    Ok(Some(message)) => message,
                    Ok(None) => return Poll::Ready(Err(self.disconnected())),
                    Err(error) => return Poll::Ready(Err(self.socket_error(error))),
                },
            };
            self.handle(message, out)?;
            if self.deferred.is_none() {
                break;
            }
        }
        let result = match self.pending.as_deref_mut() {
            None => Ok(()),
            Some(Pending::Chunk(offered, take_fds)) => {
                let (offered, map) = (*offered, ready!(Pin::new(take_fds).poll(cx)));
                // The memory may also be unusable because the peer is ending and has taken its
                // pages back.
                match map {
                    Ok(map) => {
                        self.chunks.insert(offered, Some(map));
                        Ok(())
                    }
                    Err(error)
                        if is_shortage(&error) || error.kind() == io::ErrorKind::QuotaExceeded =>
                    {
                        self.chunks.insert(offered, None);
                        out.push(Completion::NotMapped { rkey: offered.key });
                        self.answer(offered.key, Err(error))
                    }
                    Err(_) if self.socket.has_ended(cx) => Err(self.disconnected()),
                    Err(error) => {
                        Err(self.breach(format!("landing memory that cannot be used: {error}")))
                    }
                }
            }
            Some(Pending::Lent(offered, take_fds)) => {
                let (offered, taken) = (*offered, ready!(Pin::new(take_fds).poll(cx)));
                self.answer_lent(offered, taken)
            }
            Some(Pending::Named(offered, take_fds)) => {
                let (offered, map) = (*offered, ready!(Pin::new(take_fds).poll(cx)));
                let map = map.map(|map| self.chunks.insert_named(offered, map));
                self.answer(offered.key, map)
            }
        };
        self.pending = None;
        Poll::Ready(result)
    }

    fn handle(
        &mut self,
        message: SocketMessage,
        out: &mut Vec<Completion>,
    ) -> Result<(), LinkError> {
        let Credentials { uid, pid } = self.socket.peer();
        let wait = if message.has_fds { map_debt::wait((uid, pid)) } else { None };
        if let Some(time) = wait {
            self.stats.deferred_files += 1;
            self.deferred = Some(Box::new(Deferred::new(message, time)));
            return Ok(());
        }
        let SocketMessage { bytes, has_fds, .. } = message;
        let message = Message::decode(&bytes).map(|message| self.taken.check(message)).transpose();
        match (message.map_err(|what| self.breach(what))?, has_fds) {
            (Some(Message::Chunk { rkey, addr, len }), true) => {
                let offered = OfferedMemory { key: rkey, addr, len };
                let others = self.chunks.check(offered, pid).map_err(|what| self.breach(what))?;
                let take_fds = take_file(&self.socket, len, Usage::Chunk { others });
                self.pending = Some(Box::new(Pending::Chunk(offered, take_fds)));
                Ok(())
            }
            (Some(Message::Name { key, addr, len }), true) => {
                let offered = OfferedMemory { key, addr, len };
                let others = self.chunks.check_named(offered, pid);
                let others = others.map_err(|what| self.breach(what))?;
                let take_fds = take_file(&self.socket, len, Usage::Named { others });
                self.pending = Some(Box::new(Pending::Named(offered, take_fds)));
                Ok(())
            }
            (Some(Message::Unname { key }), false) => {
                self.chunks.unname(key).map_err(|what| self.breach(what))
            }
            (Some(Message::Lend { key, addr, len, lend_on }), true) => {
                let offered = OfferedMemory { key, addr, len };
                let borrower = self.borrower.get_or_insert_default();
                let others = borrower.check(offered, pid).map_err(|what| self.breach(what))?;
                let pool = self.lends_on.clone();
                let taking = Taking { offered, lend_on, user: uid, others, pool };
                let take_fds =
                    self.socket.take_fds(move |taken| TakenFile::new(&mut taken.fds, taking));
                self.pending = Some(Box::new(Pending::Lent(offered, take_fds)));
                Ok(())
            }
            (Some(Message::Taken { key }), false) => {
                self.answered(key, true);
                Ok(())
            }
            (Some(Message::Declined { key }), false) => {
                self.answered(key, false);
                Ok(())
            }
            (Some(Message::Unlend { key }), false) => {
                if let Some(borrower) = &mut self.borrower {
                    borrower.forget(key);
                }
                Ok(())
            }
            (Some(Message::Forget { rkey }), false) => {
                if !self.chunks.is_mapped(rkey) {
                    out.push(Completion::Forgotten { rkey });
                }
                self.chunks.forget(rkey).map_err(|what| self.breach(what))
            }
            // WAKE has no content. The arrival of WAKE has already woken this end.
            (Some(Message::Wake), false) => Ok(()),
            (Some(Message::Refused { text }), false) => {
                let source = io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    format!("the peer says: {text:?}"),
                );
                Err(self.device_error("accept", source))
            }
            _ => Err(self.breach(unexpected(OF_A_LINK, &bytes, has_fds))),
        }
    }

    /// Tells the peer which keys were revoked, so that the peer unmaps their memory.
    fn tell_revoked(&mut self) -> Result<(), LinkError> {
        let mut keys = self.revoked.take().into_iter();
        while let Some(rkey) = keys.next() {
            let message = if self.shared.contains_key(&rkey) {
                Message::Forget { rkey }
            } else if self.named.has_offered(rkey) {
                Message::Unname { key: rkey }
            } else if self.lender.as_ref().is_some_and(|lender| lender.has_offered(rkey)) {
                Message::Unlend { key: rkey }
            } else {
                continue;
            };
            match self.socket.send(&message.encode(), &[]) {
                // The socket is full, so a later call tells the peer. The memory was already
                // returned.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.revoked.put_back(std::iter::once(rkey).chain(keys));
                    return Ok(());
                }
                // The peer's last messages still have to be read.
                Err(error) if is_end(&error) => {}
                Err(error) => return Err(self.device_error("sendmsg", error)),
                Ok(()) => {}
            }
            self.shared.remove(&rkey);
            self.named.take_back(rkey);
            if let Some(lender) = &mut self.lender {
                lender.take_back(rkey);
            }
        }
        Ok(())
    }

    fn awaits_chunk(&self) -> bool {
        self.reader.awaits_chunk(self.chunks.handled())
    }

    /// Makes queued messages visible to the peer.
    fn publish(&mut self) {
        if !self.writer.has_unpublished() {
            return;
        }
        let ShmLink { writer, wakeup, socket, .. } = self;
        let woken = match writer.publish() {
            0 => false,
            value => wakeup.wake(value, socket, |now| writer.set_woken_at(now)),
        };
        self.stats.wakes += u64::from(woken);
        self.stats.wakes_spared += u64::from(!woken);
        self.busy_poll.sent(Some(woken));
    }

    /// Records that this end runs again after a wait. The time since the peer woke this end is the
    /// cost of a wake-up, unless both ends share a processor.
    fn record_wake_up(&mut self) {
        let waited = std::mem::replace(&mut self.waiting, Waiting::No);
        if waited == Waiting::No {
            return;
        }
        self.reader.stop_waiting();
        if let Waiting::Since(since) = waited
            && !self.shares_processor()
            && let Some(took) = wake_up(since, self.reader.woken_at(), monotonic())
        {
            let cost = self.wake_cost.learn(self.busy_poll.cost(), took);
            self.busy_poll.set_cost(cost);
        }
    }

    /// Polls the ring and the socket until a message has arrived or this end has to wait.
    fn poll_sources(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut Vec<Completion>,
    ) -> Poll<Result<(), LinkError>> {
        self.wakeup.wake_others();
        self.record_wake_up();
        self.tell_revoked()?;
        let before = out.len();
        for _ in 0..MAX_ROUNDS {
            self.receive(out)?;
            if out.len() > before {
                self.stats.polled += u64::from(self.busy_poll.received());
                self.busy_polls += 1;
                if self.busy_polls >= MAX_BUSY_POLLS && self.ending.is_none() {
                    self.busy_polls = 0;
                    if let Poll::Ready(Err(error)) = self.poll_socket(cx, out) {
                        self.ending = Some(Box::new(error));
                    }
                }
                return Poll::Ready(Ok(()));
            }
            if let Some(error) = self.ending.take() {
                return Poll::Ready(Err(*error));
            }
            if self.awaits_chunk() {
                // The messages in the ring come after a chunk that is not mapped yet, so only the
                // socket is polled.
                match self.poll_socket(cx, out) {
                    Poll::Ready(result) => result?,
                    Poll::Pending => return Poll::Pending,
                }
                continue;
            }
            let cpu = processor();
            self.reader.runs_on(cpu);
            let on_other_processor = self.writer.peer_runs_on() != cpu;
            let reader = &self.reader;
            if self.busy_poll.on_empty(on_other_processor, || reader.has_pending_recv())
                == PollStep::PollAgain
            {
                if self.reader.has_pending_recv() {
                    continue;
                }
                // Yielding lets every other task run before this task polls again. One of the other
                // tasks is the task that a single-threaded runtime blocks on. If this task woke
                // itself, it would delay that task.
                let _ = pin!(tokio::task::yield_now()).poll(cx);
                return Poll::Pending;
            }
            // The task is registered for the socket and for wake-ups before this end sets its
            // waiting flag, and the ring is checked afterwards, so that no message is missed in
            // between.
            match self.poll_socket(cx, out) {
                Poll::Ready(Ok(())) => continue,
                // Messages that the peer sent before the end are still delivered.
                Poll::Ready(Err(error)) => {
                    self.ending = Some(Box::new(error));
                    continue;
                }
                Poll::Pending => {}
            }
            if let Err(error) = self.wakeup.listen(cx) {
                let error = match error.kind() {
                    io::ErrorKind::InvalidData => self.breach(error.to_string()),
                    _ => self.device_error("epoll", error),
                };
                return Poll::Ready(Err(error));
            }
            let waiting = Waiting::begin(on_other_processor);
            if self.reader.wait(self.wakeup.value()) {
                self.waiting = waiting;
                self.stats.waits += 1;
                return Poll::Pending;
            }
        }
        // A peer that keeps this link busy must not keep the other tasks from running.
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

/// `IBV_WC_RNR_RETRY_EXC_ERR`.
const RNR_RETRY_EXCEEDED: u32 = 13;
/// `IBV_WC_REM_ACCESS_ERR`.
const REMOTE_ACCESS: u32 = 10;

impl Link for ShmLink {
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
        self.block.block_mut()
    }

    fn queue(&mut self, _: u64, work: Work, _: bool) -> Result<Posted, LinkError> {
        self.check_alive()?;
        match work {
            Work::Send { offset, len } => self.send(offset, len)?,
            Work::Write { src, remote_addr, rkey } => self.write(&src, remote_addr, rkey)?,
        }
        Ok(Posted::Done)
    }

    fn share(&mut self, rkey: u32) -> Result<Shared, LinkError> {
        self.check_alive()?;
        if let Some(shared) = self.shared.get(&rkey) {
            return Ok(*shared);
        }
        // A chunk counts towards the peer's limits until this end reports that the chunk was
        // revoked.
        self.tell_revoked().map_err(|error| self.fail(error))?;
        if self.shared.len() >= MAX_CHUNKS {
            return Err(
                self.misuse(format!("{MAX_CHUNKS} chunks are given, and a peer takes no more"))
            );
        }
        let Some(chunk) = self.table.share(rkey, &self.revoked) else {
            return Err(
                self.misuse(format!("rkey {rkey:#x} belongs to another link, or is unknown"))
            );
        };
        let message = Message::Chunk { rkey, addr: chunk.addr, len: chunk.len };
        match self.socket.send(&message.encode(), &[chunk.file.as_fd()]) {
            // A later poll reports the end, after the messages that the peer sent earlier.
            Err(error) if is_end(&error) => {}
            Err(error) => {
                let error = match error.kind() {
                    io::ErrorKind::WouldBlock => {
                        self.breach("it does not read its socket".to_owned())
                    }
                    _ => self.device_error("sendmsg", error),
                };
                return Err(self.fail(error));
            }
            Ok(()) => self.writer.chunk_sent(),
        }
        self.shared.insert(rkey, Shared::Yes);
        Ok(Shared::Yes)
    }

    fn share_named(&mut self, rkey: u32) -> Result<Shared, LinkError> {
        self.check_alive()?;
        // A file counts towards the peer's limits until this end reports that the file is gone.
        self.tell_revoked().map_err(|error| self.fail(error))?;
        let ShmLink { named, socket, table, revoked, .. } = self;
        match named.share(rkey, (socket, table, revoked)) {
            Ok(Some(shared)) => Ok(shared),
            Ok(None) => Err(self.misuse(format!("rkey {rkey:#x} is no buffer to land in"))),
            Err(error) => {
                let error = self.device_error("sendmsg", error);
                Err(self.fail(error))
            }
        }
    }

    fn may_lend(&self) -> bool {
        self.lender.as_ref().is_some_and(|lender| lender.may_lend())
    }

    fn lend(&mut self, bytes: LendableBytes) -> Result<Option<Lent>, LinkError> {
        self.check_alive()?;
        // A file counts towards the peer's limits until this end reports that the file is gone.
        self.tell_revoked().map_err(|error| self.fail(error))?;
        let ShmLink { lender, socket, table, revoked, .. } = self;
        let Some(lender) = lender else { return Ok(None) };
        match lender.lend(bytes, (socket, table, revoked)) {
            // A later poll reports that the peer has ended the link.
            Err(error) if is_end(&error) => Ok(None),
            lent => lent.map_err(|error| {
                let error = self.device_error("sendmsg", error);
                self.fail(error)
            }),
        }
    }

    fn is_mapping(&self, key: u32) -> bool {
        self.lender.as_ref().is_some_and(|lender| lender.is_asked(key))
    }

    fn end_lease(&mut self, lease: u32) {
        if !self.lender.as_mut().is_some_and(|lender| lender.end_lease(lease)) {
            throttled!(error, lease, peer = %self.peer, "a lease has ended twice");
        }
    }

    fn borrow(&mut self, lent: Lent, len: u32) -> Result<Bytes, LinkError> {
        let bytes = match &self.borrower {
            Some(borrower) => borrower.borrow(lent, len),
            None => Err(format!("{len} bytes, where nothing is lent: {lent:?}")),
        };
        bytes.map_err(|what| self.breach(what))
    }

    fn take_returned(&mut self, waker: &Waker, out: &mut Vec<u32>) {
        if let Some(borrower) = &self.borrower {
            borrower.returns().take(waker, out);
        }
    }

    fn ring_doorbell(&mut self) -> Result<(), LinkError> {
        self.check_alive()?;
        self.publish();
        Ok(())
    }

    fn is_eager(&self) -> bool {
        self.dead.is_none() && !self.shares_processor() && self.busy_poll.is_ready()
    }

    fn wait_goes_on(&mut self) {
        self.busy_poll.wait_goes_on();
    }

    fn has_pending_recv(&self) -> bool {
        self.reader.has_pending_recv() && !self.awaits_chunk()
    }

    fn shares_processor(&self) -> bool {
        self.writer.peer_runs_on() == processor()
    }

    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut Vec<Completion>,
    ) -> Poll<Result<(), LinkError>> {
        self.check_alive()?;
        match self.poll_sources(cx, out) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(self.fail(error))),
            other => other,
        }
    }

    fn recv_slot(&self, slot: u32, len: u32) -> &[u8] {
        self.recv_slots.get(slot, len)
    }

    fn repost(&mut self, slot: u32) -> Result<bool, LinkError> {
        self.check_alive()?;
        if !self.recv_slots.post(slot) {
            return Err(
                self.misuse(format!("RECV slot {slot} is posted already, or does not exist"))
            );
        }
        let ShmLink { reader, recv_slots, .. } = self;
        reader.free(|slot| recv_slots.is_posted(slot));
        Ok(true)
    }

    fn grow(&mut self, _: &Pool) -> Result<u32, LinkError> {
        self.check_alive().map(|()| 0)
    }

    fn shrink(&mut self) -> Result<u32, LinkError> {
        self.wakeup.settle();
        // Only this end writes to the slots, so it knows that the released pages hold no message.
        if self.dead.is_none()
            && let Some((ring, keep)) = self.writer.rest()
        {
            ring.release(keep);
        }
        Ok(0)
    }

    fn disconnect(&mut self) {
        if self.dead.is_none() {
            let error = LinkError::Closed { peer: self.peer.clone() };
            self.fail(error);
        }
    }
}
