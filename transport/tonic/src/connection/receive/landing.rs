//! The landing memory of a connection.

use std::task::Waker;

use slab::Slab;
use tokio::time::Instant;
use tonic_rdma_memory::{
    Landed, Landing, LandingBuf, NamedGrant, NamedRegistration, Pool, Reclaim,
};
use tonic_rdma_proto::{Connection, StreamId};

use crate::connection::receive::landing_wait::LandingWait;
use crate::connection::receive::reclaim::ReclaimDelay;
use crate::connection::receive::stall::{Grace, Relief, Stall};
use crate::connection::receive::unread::PayloadPlace;

/// Memory that the peer may write to.
#[derive(Debug)]
pub(super) enum Granted {
    /// Of the pool.
    Pool(LandingBuf),
    /// Of the application.
    Named(NamedGrant),
}

impl Granted {
    fn is_reclaiming(&self) -> bool {
        matches!(self, Granted::Pool(buf) if buf.is_reclaiming())
    }
}

/// A buffer of the application that is about to be granted.
#[derive(Debug)]
pub(super) struct Naming {
    pub(super) stream: StreamId,
    pub(super) step: NamingStep,
}

/// What a buffer of the application waits for.
#[derive(Debug)]
pub(super) enum NamingStep {
    /// That it is registered.
    Registering(NamedRegistration),
    /// That the peer has mapped it.
    Mapping(NamedGrant),
}

/// What a connection has of the pool's landing memory, and waits for.
#[derive(Debug)]
pub(crate) struct LandingMemory {
    pub(super) account: Landing,
    /// Memory that the peer may write to.
    pub(super) granted: Slab<Granted>,
    /// Buffers of the application that are about to be granted.
    pub(super) naming: Vec<Naming>,
    /// Whether messages land in parts where memory in one piece is short.
    pub(super) wait: LandingWait,
    /// How long no stream has got memory that wants some.
    pub(super) stall: Stall,
    /// Before delays end.
    pub(super) grace: Grace,
    /// What follows from the end of [`stall`](Self::stall).
    pub(super) relief: Relief,
    /// Whether memory is to go back to other connections.
    pub(super) reclaim_delay: ReclaimDelay,
    /// The account waits for memory.
    pub(super) is_short: bool,
    /// The account has a chunk made: then grants may go on.
    pub(super) is_making: bool,
    /// The peer is not trusted to leave alone what it has sent.
    pub(super) copy_on_delivery: bool,
}

impl LandingMemory {
    /// At most `max` bytes of `pool`.
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

    /// The driver's task runs with another waker: woken when there is memory.
    pub(crate) fn register_waker(&mut self, waker: &Waker) {
        self.account.register_waker(waker);
    }

    /// What the peer has written to memory that it was granted, and where it lies. The grant ends.
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

    /// A grant has ended with nothing written.
    pub(crate) fn take_back(&mut self, memory: usize) {
        drop(self.granted.try_remove(memory));
    }

    /// The copies that are still to be made of what nobody reads.
    #[inline]
    pub(crate) fn relief(&mut self) -> &mut Relief {
        &mut self.relief
    }

    /// Whether what lands is copied before it is read.
    #[inline]
    pub(crate) fn copies_on_delivery(&self) -> bool {
        self.copy_on_delivery
    }

    /// Whether grants wait for memory, or for a chunk that is being made.
    #[inline]
    pub(crate) fn waits(&self) -> bool {
        self.is_short || self.is_making
    }

    /// Whether the driver has to run again soon.
    #[inline]
    pub(crate) fn runs_soon(&self) -> bool {
        self.grace.is_running() || self.relief.is_running()
    }

    /// When the first of the delays ends.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let delays = [&self.wait.0, &self.reclaim_delay.0, &self.stall.0];
        delays.iter().filter_map(|delay| delay.deadline()).min()
    }

    /// Whether there is a deadline that the driver has not taken. Takes them.
    pub(crate) fn has_new_deadline(&mut self) -> bool {
        // Asks each: asking takes its deadline.
        let wait = self.wait.0.has_new_deadline();
        let reclaim_delay = self.reclaim_delay.0.has_new_deadline();
        let stall = self.stall.0.has_new_deadline();
        wait || reclaim_delay || stall
    }

    /// Nothing has landed for a while: chunks that are free go back to the pool.
    pub(crate) fn trim(&mut self) {
        self.account.trim();
    }

    /// Sets how much the peer may be granted in advance: half of this connection's share. The rest
    /// is for what it requests.
    #[inline]
    pub(super) fn limit_standing(&self, conn: &mut Connection) {
        if conn.gives_standing() {
            conn.limit_standing(self.account.share() as u64 / 2);
        }
    }

    /// A stream has ended: its buffer need not wait for a peer that maps nothing.
    #[inline]
    pub(crate) fn forget_naming(&mut self, stream: StreamId) {
        if !self.naming.is_empty() {
            self.naming.retain(|naming| naming.stream != stream);
        }
    }

    /// A stream has landing memory, or none wants any.
    #[inline]
    pub(super) fn progresses(&mut self) {
        // A chunk that goes back may still be in the way.
        if !self.reclaim_delay.0.is_over() {
            self.stall.end();
        }
    }

    /// Gives back what exceeds the share of this connection while another claims memory: standing
    /// grants first, then chunks that are idle, then those with grants that have to be recalled.
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
            // What nobody reads is in the way.
            self.stall.begin();
        }
    }

    /// Recalls the grants that are in the way of connections that wait, if it is time to.
    pub(crate) fn recall_reclaimed(&mut self, conn: &mut Connection, now: Instant) {
        if self.reclaim_delay.0.expire(now) {
            let granted = &self.granted;
            conn.recall_grants(|key| granted.get(key).is_some_and(Granted::is_reclaiming));
        }
    }

    /// Everything goes back to the pool, and other connections make no room any more. This one may
    /// stay for long, as handles of its streams keep it.
    pub(crate) fn release(&mut self) {
        self.granted.clear();
        self.naming.clear();
        self.account.stop_waiting();
        self.account.trim();
        self.is_short = false;
        self.is_making = false;
    }
}
