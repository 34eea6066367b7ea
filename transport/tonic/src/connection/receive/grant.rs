//! Grants landing memory for the data that the peer wants to write.

use tonic_rdma_fabric::{Link, Shared};
use tonic_rdma_memory::{LandingBuf, LogThrottle, RegisterError, throttled};
use tonic_rdma_proto::{Connection, GrantMemory, LandingWant, StreamId, WantKey};

use crate::connection::call::streams::Streams;
use crate::connection::driver::handle::ReadyTasks;
use crate::connection::lifecycle::Lifecycle;
use crate::connection::receive::{Granted, LandingMemory};
use crate::connection::send::link_io::LinkIo;
use crate::path::from_error;
use crate::path::reason::ReasonCode;

/// Number of places behind the first stream in the queue for landing memory. While the first stream
/// waits, the wants at these places may be granted.
const MAX_BEHIND: usize = 8;
/// Length in bytes of the longest chunk that has room for several pieces.
const LONGEST_CHUNK: usize = 4 << 20;
/// Throttles log lines about memory that cannot be registered, because a peer decides how often
/// memory is needed.
static UNREGISTERED: LogThrottle = LogThrottle::new();

/// Why a stream gets no landing memory, if waiting would not help.
#[derive(Debug, thiserror::Error)]
enum NoLanding {
    #[error(transparent)]
    Unregistered(#[from] RegisterError),
    /// The peer cannot map the memory, so it cannot write to the memory.
    #[error("the peer cannot map landing memory of this end: it may be out of descriptors")]
    NotTaken,
}

/// The parts of a connection that granting needs.
pub(crate) struct Granter<'a> {
    pub(crate) landing: &'a mut LandingMemory,
    pub(crate) conn: &'a mut Connection,
    pub(crate) link: &'a mut LinkIo,
    pub(crate) streams: &'a mut Streams,
    pub(crate) lifecycle: &'a mut Lifecycle,
    pub(crate) tasks: &'a mut ReadyTasks,
}

impl Granter<'_> {
    /// Grants landing memory from this connection's account for all wants of the protocol.
    pub(crate) fn grant(&mut self) {
        // Grant nothing on a dead link. The protocol does not know that the link is dead, and its
        // streams may still want memory.
        if self.lifecycle.is_dead() {
            return;
        }
        self.landing.account.collect();
        self.landing.limit_standing(self.conn);
        let mut done = self.grant_wanted();
        while self.grant_named() {
            done = self.grant_wanted();
        }
        self.landing.is_making =
            self.landing.account.is_making() || !self.landing.naming.is_empty();
        if done && std::mem::take(&mut self.landing.is_short) {
            // Other connections need not make room any more. The account may have begun to wait
            // just now, for a stream whose want a later grant has met.
            self.landing.account.stop_waiting();
            self.landing.progresses();
        }
    }

    /// Grants the current wants of the protocol. Returns false if a stream wants memory and gets
    /// none.
    fn grant_wanted(&mut self) -> bool {
        while let Some(want) = self.next_want() {
            if want.key == WantKey::Standing {
                self.grant_standing(want);
                continue;
            }
            let parts = self.landing.wait.takes_parts()
                || !self.landing.account.may_have(want.want as usize);
            match self.land(want, if parts { want.min } else { want.want }) {
                // Try parts, because memory for a part may be available although memory for the
                // whole message is not.
                Err(_) if !parts && want.min < want.want => self.landing.wait.impossible(),
                Ok(Some(len)) => {
                    self.landing.progresses();
                    if len == want.want {
                        self.landing.wait.whole();
                    }
                }
                Ok(None) => {
                    self.landing.is_short = true;
                    // No delay is needed while memory is pending: the driver is woken when memory
                    // is freed or a chunk is created.
                    if self.landing.account.is_pending() {
                        self.landing.progresses();
                    } else {
                        self.wait_for_memory(!parts);
                    }
                    if self.grant_behind() {
                        // Ask for the first want again, so that the account waits for it.
                        continue;
                    }
                    return false;
                }
                Err(error) => self.cannot_land(want.key, &error),
            }
        }
        true
    }

    /// Returns the protocol's next want of landing memory. If all streams together have a lot of
    /// unread data, streams that no reader waits for are skipped.
    fn next_want(&mut self) -> Option<LandingWant> {
        self.conn.poll_landing(|id| self.streams.is_awaited(id))
    }

    /// Called when a stream cannot get memory now: recalls the standing grants and starts the delay
    /// `Stall`. Also starts the delay `LandingWait` if the stream wants a whole piece
    /// (`wants_whole`).
    fn wait_for_memory(&mut self, wants_whole: bool) {
        // Recall the standing grants, because the stream needs their memory more than an unused
        // grant does.
        self.conn.recall_standing();
        let begins = wants_whole && self.landing.wait.short();
        if self.landing.stall.begin() || begins {
            self.tasks.wake_driver();
        }
    }

    /// Gives a standing grant, if memory is free that no other connection claims. If a chunk has to
    /// be created, the driver is woken afterwards and grants again.
    fn grant_standing(&mut self, want: LandingWant) {
        let found = self.landing.account.alloc_spare(want.want as usize);
        match self.provide_found(want, found) {
            Ok(Some(_)) => {}
            Ok(None) => self.conn.pause_standing(),
            Err(error) => self.cannot_land(want.key, &error),
        }
    }

    /// Grants those wants behind the first want for which memory is free, while the first want
    /// waits. Returns true if a want was granted.
    fn grant_behind(&mut self) -> bool {
        let mut granted = false;
        for place in 1..=MAX_BEHIND {
            let Some(want) = self.conn.landing_behind(place) else { break };
            let Some(want) = want else { continue };
            let found = self.landing.account.alloc_meanwhile(want.want as usize);
            match self.provide_found(want, found) {
                Ok(len) => {
                    granted |= len.is_some();
                    if len.is_some() {
                        self.landing.progresses();
                    }
                }
                Err(error) => self.cannot_land(want.key, &error),
            }
        }
        granted
    }

    /// Grants a want, or at least `min` bytes of it, and returns the length. Returns `None` if no
    /// memory is available.
    fn land(&mut self, want: LandingWant, min: u32) -> Result<Option<u32>, NoLanding> {
        let (most, min) = (want.want as usize, min as usize);
        let mut found = self.landing.account.alloc(most, min);
        let chunk = self.link.pool.config().chunk;
        if let Err(error) = &found
            && error.len() > chunk.max(LONGEST_CHUNK)
            && min < most
        {
            // A chunk of the usual length may still be possible, because it needs less memory.
            found = self.landing.account.alloc(chunk.max(min), min);
        }
        self.provide_found(want, found)
    }

    fn provide_found(
        &mut self,
        want: LandingWant,
        found: Result<Option<LandingBuf>, RegisterError>,
    ) -> Result<Option<u32>, NoLanding> {
        match found? {
            Some(buf) => self.provide(want, buf),
            None => Ok(None),
        }
    }

    /// Grants this memory for a want, and returns the length. `None` if the link has failed.
    fn provide(&mut self, want: LandingWant, buf: LandingBuf) -> Result<Option<u32>, NoLanding> {
        match self.link.get_mut().map(|link| link.share(buf.rkey())) {
            None | Some(Ok(Shared::Yes)) => {}
            Some(Ok(Shared::Asked | Shared::No)) => return Err(NoLanding::NotTaken),
            Some(Err(error)) => {
                self.tasks.fail(error);
                return Ok(None);
            }
        }
        let len = want.want.min(u32::try_from(buf.capacity()).unwrap_or(u32::MAX));
        let (addr, rkey) = (buf.addr(), buf.rkey());
        let key = self.landing.granted.insert(Granted::Pool(buf));
        self.conn.provide_landing(want.key, GrantMemory { key, addr, rkey, len });
        // One message can ask for dozens of grants (R20).
        self.tasks.work += 1;
        Ok(Some(len))
    }

    fn cannot_land(&mut self, key: WantKey, error: &NoLanding) {
        match key {
            WantKey::Stream(id) => self.refuse_bulk(id, error),
            WantKey::Standing => {
                throttled!(in UNREGISTERED, warn, %error, "no standing grants: landing memory cannot be registered");
                self.conn.recall_standing();
            }
        }
    }

    /// Makes the peer send a stream's messages by control messages, which need no landing memory,
    /// because waiting would not make memory available. If this end is the cause, new calls take
    /// another path until this end has memory again (R21).
    fn refuse_bulk(&mut self, id: StreamId, error: &NoLanding) {
        throttled!(in UNREGISTERED, warn, %error, stream = %id, "no landing memory; messages come by control messages");
        self.conn.decline_landing(id);
        let NoLanding::Unregistered(error) = error else { return };
        if self.lifecycle.is_leaving() {
            return;
        }
        let reason = match self.link.pool.may_land() {
            // The pool's error means that no other message can have memory either.
            Err(limit) => from_error::pool(&limit),
            Ok(()) => from_error::landing(error, ReasonCode::ProcessLimit),
        };
        self.link.pool.cannot_land();
        self.lifecycle.leave(reason, self.conn, self.tasks);
    }
}
