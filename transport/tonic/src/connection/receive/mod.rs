//! Passes received payload from the connection's landing memory to the stream's reader.
//!
//! | file | what |
//! |---|---|
//! | `grant` | grants landing memory to the peer, or refuses it |
//! | `named` | grants buffers that the application has named for replies or requests |
//! | `delays` | when unread data is copied, a message lands in parts, and grants are recalled |
//! | `relieve` | copies unread data, and lets messages land in parts, when these delays are over |
//! | `unread` | the unread part of a received body |

pub(super) mod delays;
pub(super) mod grant;
mod named;
mod relieve;
pub(super) mod unread;

use std::task::Waker;

use slab::Slab;
use tokio::time::Instant;
use tonic_rdma_memory::{
    Landed, Landing, LandingBuf, NamedGrant, NamedRegistration, Pool, Reclaim,
};
use tonic_rdma_proto::{Connection, StreamId};

use crate::connection::receive::delays::{Grace, LandingWait, ReclaimDelay, Relief, Stall};
use crate::connection::receive::unread::PayloadPlace;

/// Memory that the peer may write to.
#[derive(Debug)]
enum Granted {
    Pool(LandingBuf),
    Named(NamedGrant),
}

impl Granted {
    fn is_reclaiming(&self) -> bool {
        matches!(self, Granted::Pool(buf) if buf.is_reclaiming())
    }
}

/// An application buffer that is about to be granted.
#[derive(Debug)]
struct Naming {
    stream: StreamId,
    step: NamingStep,
}

/// Why an application buffer is waiting.
#[derive(Debug)]
enum NamingStep {
    /// The buffer is being registered.
    Registering(NamedRegistration),
    /// The peer is mapping the buffer.
    Mapping(NamedGrant),
}

/// A connection's share of the pool's landing memory, and its waits for more.
#[derive(Debug)]
pub(crate) struct LandingMemory {
    account: Landing,
    /// Memory that the peer may write to.
    granted: Slab<Granted>,
    /// Application buffers that are about to be granted.
    naming: Vec<Naming>,
    /// The wait for memory in one piece. After the wait, messages land in parts.
    wait: LandingWait,
    /// The delay after which unread data is copied, to free landing memory.
    stall: Stall,
    /// The turns that other tasks get before expired delays take effect.
    grace: Grace,
    /// The copies of unread data that the driver still has to make.
    relief: Relief,
    /// When to recall grants, so that other connections get memory.
    reclaim_delay: ReclaimDelay,
    /// Whether the account waits for memory.
    is_short: bool,
    /// Whether a chunk is being created for the account, or an application buffer is about to be
    /// granted. Grants may continue afterwards.
    is_making: bool,
    /// Whether data is copied before delivery, because the peer may change data that it has sent.
    copy_on_delivery: bool,
}

impl LandingMemory {
    /// Creates the landing memory of a connection, which uses at most `max` bytes of `pool`.
    pub(crate) fn new(pool: &Pool, max: usize, copy_on_delivery: bool) -> Self {
        LandingMemory {
            account: pool.landing_up_to(max),
            granted: Slab::new(),
            naming: Vec::new(),
            wait: LandingWait::default(),
            stall: Stall::default(),
            grace: Grace::default(),
            relief: Relief::default(),
            reclaim_delay: ReclaimDelay::default(),
            is_short: false,
            is_making: false,
            copy_on_delivery,
        }
    }

    /// Registers the driver's new waker, which is woken when memory is available.
    pub(crate) fn register_waker(&mut self, waker: &Waker) {
        self.account.register_waker(waker);
    }

    /// Ends a grant, and takes the data that the peer has written to the granted memory.
    pub(crate) fn landed(
        &mut self,
        memory: usize,
        begin: u32,
        len: u32,
    ) -> Option<(Landed, PayloadPlace)> {
        Some(match self.granted.try_remove(memory)? {
            Granted::Pool(buf) => {
                (buf.filled_from(begin as usize, len as usize), PayloadPlace::Landing { begin })
            }
            Granted::Named(buf) => (buf.filled(len as usize).into(), PayloadPlace::Named),
        })
    }

    /// Ends a grant whose memory was not written.
    pub(crate) fn take_back(&mut self, memory: usize) {
        drop(self.granted.try_remove(memory));
    }

    /// The copies of unread data that are still to be made.
    #[inline]
    pub(crate) fn relief(&mut self) -> &mut Relief {
        &mut self.relief
    }

    /// Bytes of the pool that the connection holds.
    pub(crate) fn leased(&self) -> usize {
        self.account.leased()
    }

    /// Bytes that the peer may write to.
    pub(crate) fn granted(&self) -> usize {
        let bytes = |granted: &Granted| match granted {
            Granted::Pool(buf) => buf.capacity(),
            Granted::Named(buf) => buf.capacity(),
        };
        self.granted.iter().map(|(_, granted)| bytes(granted)).sum()
    }

    /// Whether landed data is copied before it is read.
    #[inline]
    pub(crate) fn copies_on_delivery(&self) -> bool {
        self.copy_on_delivery
    }

    /// Whether grants wait for memory, for a chunk that is being created, or for an application
    /// buffer.
    #[inline]
    pub(crate) fn waits(&self) -> bool {
        self.is_short || self.is_making
    }

    /// Whether the driver has to run again soon.
    #[inline]
    pub(crate) fn runs_soon(&self) -> bool {
        self.grace.is_running() || self.relief.is_running()
    }

    /// When the first delay ends.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let delays = [&self.wait.0, &self.reclaim_delay.0, &self.stall.0];
        delays.iter().filter_map(|delay| delay.deadline()).min()
    }

    /// Returns true if a deadline exists that the driver has not taken, and marks all deadlines as
    /// taken.
    pub(crate) fn has_new_deadline(&mut self) -> bool {
        // Ask each delay, because asking marks its deadline as taken.
        let wait = self.wait.0.has_new_deadline();
        let reclaim_delay = self.reclaim_delay.0.has_new_deadline();
        let stall = self.stall.0.has_new_deadline();
        wait || reclaim_delay || stall
    }

    /// Returns free chunks to the pool, after nothing has landed for a while.
    pub(crate) fn trim(&mut self) {
        self.account.trim();
    }

    /// Limits standing grants to half of this connection's share. The other half is for requests.
    #[inline]
    fn limit_standing(&self, conn: &mut Connection) {
        if conn.gives_standing() {
            conn.limit_standing(self.account.share() as u64 / 2);
        }
    }

    /// Gives up the buffer of a stream that has ended, without waiting until the buffer is
    /// registered, or mapped by the peer.
    #[inline]
    pub(crate) fn forget_naming(&mut self, stream: StreamId) {
        if !self.naming.is_empty() {
            self.naming.retain(|naming| naming.stream != stream);
        }
    }

    /// Records that a stream got landing memory, that memory is pending, or that no stream lacks
    /// memory.
    #[inline]
    fn progresses(&mut self) {
        // Once the reclaim delay is over, let the stall continue: unread data may still occupy a
        // chunk that is to be returned.
        if !self.reclaim_delay.0.is_over() {
            self.stall.end();
        }
    }

    /// Returns memory above the connection's share while another connection claims memory. Standing
    /// grants are returned first, then idle chunks, then chunks whose grants have to be recalled.
    #[inline]
    pub(crate) fn enforce_share(&mut self, conn: &mut Connection) {
        let wanted = self.account.others_claim();
        if !wanted && self.reclaim_delay.0.is_idle() {
            return;
        }
        let reclaim = self.account.enforce_share();
        if reclaim != Reclaim::None {
            self.limit_standing(conn);
            conn.recall_excess_standing();
            self.account.return_reclaimed();
        }
        self.reclaim_delay.chosen(reclaim);
        if reclaim == Reclaim::None {
            conn.memory_is_unwanted();
        }
        if self.reclaim_delay.0.is_over() {
            // The grants are recalled, so only unread data still occupies the memory. Start the
            // delay after which this data is copied.
            self.stall.begin();
        }
    }

    /// Recalls the grants that block waiting connections, if the delay is over.
    pub(crate) fn recall_reclaimed(&mut self, conn: &mut Connection, now: Instant) {
        if self.reclaim_delay.0.expire(now) {
            let granted = &self.granted;
            conn.recall_grants(|key| granted.get(key).is_some_and(Granted::is_reclaiming));
        }
    }

    /// Returns all memory that no reader holds to the pool, and ends the claims on other
    /// connections. The drop of the connection would come too late, because handles of its streams
    /// may keep the connection alive for a long time.
    pub(crate) fn release(&mut self) {
        self.granted.clear();
        self.naming.clear();
        self.account.stop_waiting();
        self.account.trim();
        self.is_short = false;
        self.is_making = false;
    }
}
