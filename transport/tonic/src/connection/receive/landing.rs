//! The landing memory of a connection.

use slab::Slab;
use tonic_rdma_memory::{Landing, LandingBuf, NamedGrant, NamedRegistration, Pool, Reclaim};
use tonic_rdma_proto::{Connection, StreamId};

use crate::connection::receive::landing_wait::LandingWait;
use crate::connection::receive::reclaim::ReclaimDelay;
use crate::connection::receive::relief::Relief;
use crate::connection::receive::stall::{Grace, Stall};

/// Memory that the peer may write to.
#[derive(Debug)]
pub(crate) enum Granted {
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
pub(crate) struct Naming {
    pub(crate) stream: StreamId,
    pub(crate) step: NamingStep,
}

/// What a buffer of the application waits for.
#[derive(Debug)]
pub(crate) enum NamingStep {
    /// That it is registered.
    Registering(NamedRegistration),
    /// That the peer has mapped it.
    Mapping(NamedGrant),
}

/// What a connection has of the pool's landing memory, and waits for.
#[derive(Debug)]
pub(crate) struct LandingMemory {
    pub(crate) account: Landing,
    /// Memory that the peer may write to.
    pub(crate) granted: Slab<Granted>,
    /// Buffers of the application that are about to be granted.
    pub(crate) naming: Vec<Naming>,
    /// Whether messages land in parts where memory in one piece is short.
    pub(crate) wait: LandingWait,
    /// How long no stream has got memory that wants some.
    pub(crate) stall: Stall,
    /// Before delays end.
    pub(crate) grace: Grace,
    /// What follows from the end of [`stall`](Self::stall).
    pub(crate) relief: Relief,
    /// Whether memory is to go back to other connections.
    pub(crate) reclaim_delay: ReclaimDelay,
    /// The account waits for memory.
    pub(crate) is_short: bool,
    /// The account has a chunk made: then grants may go on.
    pub(crate) is_making: bool,
    /// The peer is not trusted to leave alone what it has sent.
    pub(crate) copy_on_delivery: bool,
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

    /// Sets how much the peer may be granted in advance: half of this connection's share. The rest
    /// is for what it requests.
    #[inline]
    pub(crate) fn limit_standing(&self, conn: &mut Connection) {
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
    pub(crate) fn progresses(&mut self) {
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
    pub(crate) fn recall_reclaimed(&mut self, conn: &mut Connection, now: tokio::time::Instant) {
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
