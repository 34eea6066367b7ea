//! The state of a connection, behind one lock.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use bytes::{Bytes, BytesMut};
use slab::Slab;
use smallvec::SmallVec;
use tokio::sync::{Notify, watch};
use tonic::Status;
use tonic_rdma_fabric::{AnyLink, Completion, Link, LinkError, PeerInfo};
use tonic_rdma_memory::{Landing, LandingBuf, Pool};
use tonic_rdma_proto::{Connection, Payload, Settings, Side, Stats, StreamId, StreamMap};

use crate::codec::{Chunk, Methods};
use crate::connection::ConnectionConfig;
use crate::connection::call::stream::StreamIo;
use crate::connection::driver::coarse_clock::CoarseClock;
use crate::connection::receive::give_back::GiveBack;
use crate::connection::receive::landing_wait::LandingWait;
use crate::connection::send::in_flight::InFlight;
use crate::connection::send::recent_lengths::RecentLengths;
use crate::connection::send::write_window::WriteWindow;
use crate::path::Path;
use crate::path::reason::{Reason, ReasonCode};
use crate::telemetry::metrics::ConnectionMeter;
use crate::telemetry::stats::{Copied, Counter, Counters};

/// Runs of a message between its segments up to this long do not count as payload.
const FRAMING: usize = 256;

/// One connection, shared by its driver and its calls.
pub(in crate::connection) struct Shared {
    inner: Mutex<Inner>,
    /// A stream has ended: there may be room for another.
    pub(in crate::connection) stream_room: Arc<Notify>,
    pub(in crate::connection) closed: watch::Sender<Option<Reason>>,
    pub(in crate::connection) peer: PeerInfo,
    /// Messages up to this many bytes, with their header, fit a control slot.
    pub(in crate::connection) eager_limit: usize,
    pub(in crate::connection) methods: Arc<Methods>,
    pub(in crate::connection) calls: Arc<Counters>,
}

/// Life of a connection.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::connection) enum Life {
    Open,
    /// Ended by this side after an error: one CLOSE frame is on its way.
    Closing(Reason),
    /// The queue pair is gone.
    Dead(Reason),
}

pub(in crate::connection) struct Inner {
    pub(in crate::connection) peer: PeerInfo,
    pub(in crate::connection) conn: Connection,
    /// None when the queue pair has been destroyed.
    pub(in crate::connection) link: Option<AnyLink>,
    pub(in crate::connection) life: Life,
    pub(in crate::connection) sends: InFlight,
    /// How much of WRITEs may be in flight.
    pub(in crate::connection) window: WriteWindow,
    /// Whether parts are taken where whole pieces of landing memory are short.
    pub(in crate::connection) landing_wait: LandingWait,
    /// Whether memory is to go back to others.
    pub(in crate::connection) give_back: GiveBack,
    pub(in crate::connection) clock: CoarseClock,
    /// The link copies from any memory while work is queued.
    pub(in crate::connection) any_memory: bool,
    /// The peer is not trusted to leave alone what it has sent.
    pub(in crate::connection) copy_on_delivery: bool,
    pub(in crate::connection) pool: Pool,
    pub(in crate::connection) landing: Landing,
    /// Memory that the peer may write to.
    pub(in crate::connection) granted: Slab<LandingBuf>,
    pub(in crate::connection) streams: StreamMap<StreamIo>,
    /// Streams that the peer opened and nobody serves yet, with their header blocks.
    pub(in crate::connection) opened: VecDeque<(StreamId, Bytes)>,
    pub(in crate::connection) completions: Vec<Completion>,
    /// Received messages are copied here, many to one allocation.
    pub(in crate::connection) received: BytesMut,
    /// The driver's task.
    pub(in crate::connection) driver: Option<Waker>,
    /// It has been woken and has not looked yet.
    pub(in crate::connection) driver_called: bool,
    /// There is more to copy to the peer's memory: the driver goes on when others have had their
    /// turn.
    pub(in crate::connection) unfinished: bool,
    /// Others are to have their turns between the copies.
    pub(in crate::connection) pauses: bool,
    pub(in crate::connection) beside_sent: RecentLengths,
    pub(in crate::connection) beside_received: RecentLengths,
    /// A caller has posted its work itself since the driver last looked.
    pub(in crate::connection) left: u32,
    /// A call waits for a free stream.
    pub(in crate::connection) room_wanted: bool,
    /// The landing account waits for memory.
    pub(in crate::connection) landing_waits: bool,
    /// An error met outside the driver.
    pub(in crate::connection) failed: Option<LinkError>,
    pub(in crate::connection) wakes: SmallVec<[Waker; 4]>,
    pub(in crate::connection) counters: Arc<Counters>,
    pub(in crate::connection) counted: Moved,
    /// What the CPU has copied since the start, eager data apart.
    pub(in crate::connection) copied: Copied,
    pub(in crate::connection) meter: ConnectionMeter,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl Shared {
    pub(in crate::connection) fn new(
        side: Side,
        link: AnyLink,
        pool: Pool,
        peer: Settings,
        options: &ConnectionConfig,
        counters: Arc<Counters>,
        methods: Arc<Methods>,
    ) -> Arc<Self> {
        // tokio's clock, which tests can stop.
        let now = tokio::time::Instant::now().into_std();
        let config = options.proto.clone();
        let conn = match side {
            Side::Client => Connection::client(config, peer, now),
            Side::Server => Connection::server(config, peer, now),
        };
        Arc::new(Shared {
            stream_room: Arc::default(),
            closed: watch::Sender::new(None),
            peer: link.peer().clone(),
            eager_limit: conn.eager_limit(),
            methods,
            calls: counters.clone(),
            inner: Mutex::new(Inner {
                peer: link.peer().clone(),
                conn,
                life: Life::Open,
                sends: InFlight::new(&options.link, options.staging.0, options.staging.1),
                window: WriteWindow::default(),
                landing_wait: LandingWait::default(),
                give_back: GiveBack::default(),
                clock: CoarseClock::new(options.proto.dead_peer),
                any_memory: link.caps().any_memory,
                copy_on_delivery: options.copy_on_delivery,
                landing: pool.landing_up_to(options.landing.min(link.caps().max_landing)),
                pool,
                granted: Slab::new(),
                streams: StreamMap::default(),
                opened: VecDeque::new(),
                completions: Vec::with_capacity(64),
                received: BytesMut::new(),
                driver: None,
                driver_called: false,
                unfinished: false,
                pauses: false,
                beside_sent: RecentLengths::default(),
                beside_received: RecentLengths::default(),
                left: 0,
                room_wanted: false,
                landing_waits: false,
                failed: None,
                wakes: SmallVec::new(),
                counters,
                counted: Moved::default(),
                copied: Copied::default(),
                meter: ConnectionMeter::open(side, Path::of(link.peer())),
                link: Some(link),
            }),
        })
    }

    /// The state. Tasks that were made ready are woken when the guard is dropped, after the lock.
    pub(in crate::connection) fn lock(&self) -> Guard<'_> {
        Guard { inner: Some(self.inner.lock().unwrap_or_else(PoisonError::into_inner)) }
    }
}

/// The lock, held. Wakes after it is released.
pub(in crate::connection) struct Guard<'a> {
    inner: Option<MutexGuard<'a, Inner>>,
}

impl std::ops::Deref for Guard<'_> {
    type Target = Inner;
    #[inline]
    fn deref(&self) -> &Inner {
        match &self.inner {
            Some(inner) => inner,
            None => emptied(),
        }
    }
}

impl std::ops::DerefMut for Guard<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Inner {
        match &mut self.inner {
            Some(inner) => inner,
            None => emptied(),
        }
    }
}

/// The status of a call whose connection has ended for this reason (R7).
pub(in crate::connection) fn ended(reason: &Reason) -> Status {
    let how = match reason.code() {
        ReasonCode::GoAway => "closed",
        _ => "lost",
    };
    Status::unavailable(format!("connection {how}: {reason}"))
}

#[cold]
fn emptied() -> ! {
    unreachable!("the guard is emptied in drop only")
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if self.wakes.is_empty() {
            return;
        }
        if let Some(mut inner) = self.inner.take() {
            let Some(first) = inner.wakes.pop() else { return };
            if inner.wakes.is_empty() {
                drop(inner);
                return first.wake();
            }
            let others = std::mem::take(&mut inner.wakes);
            drop(inner);
            others.into_iter().for_each(Waker::wake);
            first.wake();
        }
    }
}

impl Inner {
    /// The chunk as the protocol takes it, and counted.
    pub(in crate::connection) fn payload(&mut self, chunk: Chunk) -> Payload {
        let eager = chunk.len <= self.conn.eager_limit();
        let mut payload = Payload::new();
        for (at, bytes) in chunk.segments.into_iter().enumerate() {
            // A WRITE can have it as it lies: the device knows the memory, or the link copies from
            // any.
            let framing = chunk.apart && bytes.len() <= FRAMING;
            let in_pool = !eager && !framing && self.pool.resolve(&bytes).is_some();
            let pinned = !eager && (in_pool || self.any_memory);
            if !(eager || framing || in_pool) {
                let len = bytes.len() as u64;
                if !chunk.apart {
                    self.copied.plain_codec += len;
                }
                if !pinned {
                    self.copied.staging += len;
                }
            }
            match chunk.longest == Some(at) {
                true => payload.push_aligned(bytes, pinned),
                false => payload.push(bytes, pinned),
            }
        }
        payload
    }

    pub(in crate::connection) fn wake(&mut self, waker: Option<Waker>) {
        if let Some(waker) = waker {
            self.wakes.push(waker);
        }
    }

    pub(in crate::connection) fn wake_driver(&mut self) {
        if !std::mem::replace(&mut self.driver_called, true) {
            let driver = self.driver.clone();
            self.wake(driver);
        }
    }

    /// Why calls cannot go on, once they cannot.
    pub(in crate::connection) fn end_reason(&self) -> Option<&Reason> {
        match &self.life {
            Life::Open => None,
            Life::Closing(reason) | Life::Dead(reason) => Some(reason),
        }
    }

    /// The status of a call whose connection has ended (R7).
    pub(in crate::connection) fn end_status(&self) -> Option<Status> {
        self.end_reason().map(ended)
    }

    /// Begins the end of the connection: every stream fails, once, and the driver tears it down.
    pub(in crate::connection) fn end(&mut self, life: Life) {
        if matches!(self.life, Life::Dead(_))
            || (self.life != Life::Open && matches!(life, Life::Closing(_)))
        {
            return;
        }
        self.life = life;
        let mut wakes = std::mem::take(&mut self.wakes);
        // In the order of their ids, so that a simulated run can be repeated.
        let mut streams: Vec<_> = self.streams.iter_mut().collect();
        streams.sort_unstable_by_key(|(id, _)| **id);
        for (_, io) in streams {
            wakes.extend(io.recv_waker.take());
            wakes.extend(io.send_waker.take());
        }
        self.wakes = wakes;
        self.wake_driver();
    }

    /// Whether the caller of a stream that has just been opened still waits.
    pub(in crate::connection) fn wants_answer(&self, id: StreamId) -> bool {
        self.end_reason().is_none() && self.streams.get(&id).is_some_and(|io| io.fault.is_none())
    }

    /// The queue pair goes first, then the memory that it could write to (R9).
    pub(in crate::connection) fn destroy(&mut self) {
        self.count();
        self.link = None;
        self.sends.put_back();
        self.granted.clear();
        self.landing.trim();
        self.pool.trim_now();
        self.tell();
        self.meter.close();
    }

    pub(in crate::connection) fn lost(&self, error: &LinkError) -> Reason {
        Reason::new(ReasonCode::LinkLost, format!("{error} ({})", self.peer))
    }

    /// Adds what moved since the last time to the channel's counters.
    pub(in crate::connection) fn count(&mut self) {
        let stats = self.conn.stats();
        if stats.body_bytes() != self.counted.body_bytes() {
            self.counted.bytes(stats, &self.counters);
        }
        if self.copied != self.counted.copied {
            self.counters.fast.add(self.copied - self.counted.copied);
            self.counted.copied = self.copied;
        }
        // No driver does it any more.
        if self.link.is_none() {
            self.tell();
        }
    }

    /// Tells the recorder of metrics what has moved.
    pub(in crate::connection) fn tell(&mut self) {
        self.meter.tell(self.conn.stats(), self.copied);
    }
}

/// What has moved since the start, of what the channel counts.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::connection) struct Moved {
    write_sent: u64,
    eager_sent: u64,
    write_received: u64,
    eager_received: u64,
    long_writes: u64,
    long_writes_in_phase: u64,
    /// Eager data apart.
    copied: Copied,
}

impl Moved {
    /// What has been sent and received.
    fn body_bytes(&self) -> u64 {
        self.write_sent + self.eager_sent + self.write_received + self.eager_received
    }

    /// Adds what has been sent and received since the last time.
    fn bytes(&mut self, now: Stats, counters: &Counters) {
        let add = |counter: &Counter, now: u64, before: &mut u64| {
            let more = now - std::mem::replace(before, now);
            if more > 0 {
                counter.add(more);
            }
            more
        };
        add(&counters.bytes_sent_write, now.write_sent, &mut self.write_sent);
        add(&counters.bytes_received_write, now.write_received, &mut self.write_received);
        add(&counters.long_writes, now.long_writes, &mut self.long_writes);
        add(
            &counters.long_writes_in_phase,
            now.long_writes_in_phase,
            &mut self.long_writes_in_phase,
        );
        let sent = add(&counters.bytes_sent_send, now.eager_sent, &mut self.eager_sent);
        let received =
            add(&counters.bytes_received_send, now.eager_received, &mut self.eager_received);
        if sent + received > 0 {
            counters.fast.eager.add(sent + received);
        }
    }
}
