//! Grants: landing memory for what the peer wants to write.

use tonic::Status;
use tonic_rdma_fabric::Link;
use tonic_rdma_memory::{LandingBuf, LogThrottle, RegisterError, throttled};
use tonic_rdma_proto::{CloseCode, GrantMemory, LandingWant, ResetCode, StreamId, WantKey};

use crate::connection::receive::landing::Granted;
use crate::connection::state::{ConnectionState, Life};
use crate::path::from_error;
use crate::path::reason::Reason;

/// Streams whose shorter wants are granted while the first waits for landing memory.
const MAX_BEHIND: usize = 8;
/// Lines about memory that cannot be registered: a peer decides how often some is wanted.
static UNREGISTERED: LogThrottle = LogThrottle::new();

impl ConnectionState {
    /// Grants the landing memory that the protocol wants, from this connection's account.
    #[inline]
    pub(in crate::connection) fn grant(&mut self) {
        // Nobody writes any more. The protocol does not know of the link's end, and its streams may
        // still want memory.
        if matches!(self.life, Life::Dead(_)) {
            return;
        }
        self.landing.account.collect();
        self.landing.limit_standing(&mut self.conn);
        let mut done = self.grant_wanted();
        while self.grant_named() {
            done = self.grant_wanted();
        }
        self.landing.is_making =
            self.landing.account.is_making() || !self.landing.naming.is_empty();
        if done && std::mem::take(&mut self.landing.is_short) {
            // Other connections need not make room any more. It may have begun to wait just now,
            // for a stream whose want what was granted behind it has used up.
            self.landing.account.stop_waiting();
            self.landing.progresses();
        }
    }

    /// False when there is no memory for a stream that wants some.
    fn grant_wanted(&mut self) -> bool {
        while let Some(want) = self.conn.poll_landing() {
            if want.key == WantKey::Standing {
                self.grant_standing(want);
                continue;
            }
            let parts = self.landing.wait.takes_parts()
                || !self.landing.account.may_have(want.want as usize);
            match self.land(want, if parts { want.min } else { want.want }) {
                // There may be memory for a part where there is none for the whole.
                Err(_) if !parts && want.min < want.want => self.landing.wait.impossible(),
                Ok(Some(len)) => {
                    self.landing.progresses();
                    if len == want.want {
                        self.landing.wait.whole();
                    }
                }
                Ok(None) => {
                    self.landing.is_short = true;
                    // The driver is woken when memory is freed, or a chunk is made.
                    if self.landing.account.is_pending() {
                        self.landing.progresses();
                    } else {
                        self.wait_for_memory(!parts);
                    }
                    if self.grant_behind() {
                        // Asks for the first again, so that the account waits for what it wants.
                        continue;
                    }
                    return false;
                }
                Err(error) => self.cannot_land(want.key, &error),
            }
        }
        true
    }

    /// There is no memory for a stream, which wants a whole piece or not.
    fn wait_for_memory(&mut self, wants_whole: bool) {
        // A stream needs it more than a standing grant that is unused.
        self.conn.recall_standing();
        let begins = wants_whole && self.landing.wait.short();
        if self.landing.stall.begin() || begins {
            self.wake_driver();
        }
    }

    /// Gives a standing grant, if there is memory that nobody else has a claim to. If a chunk is
    /// made for it, the driver is woken and grants again.
    fn grant_standing(&mut self, want: LandingWant) {
        let found = self.landing.account.alloc_spare(want.want as usize);
        match found.map(|buf| buf.map(|buf| self.provide(want, buf))) {
            Ok(Some(_)) => {}
            Ok(None) => self.conn.pause_standing(),
            Err(error) => self.cannot_land(want.key, &error),
        }
    }

    /// Grants shorter wants behind the first one, which waits. True when one was granted.
    fn grant_behind(&mut self) -> bool {
        let mut granted = false;
        for place in 1..=MAX_BEHIND {
            let Some(want) = self.conn.landing_behind(place) else { break };
            let Some(want) = want else { continue };
            let found = self.landing.account.alloc_meanwhile(want.want as usize);
            match found.map(|buf| buf.and_then(|buf| self.provide(want, buf))) {
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

    /// Grants a want, or at least `min` bytes of it, and returns the length. None: there is no
    /// memory.
    fn land(&mut self, want: LandingWant, min: u32) -> Result<Option<u32>, RegisterError> {
        let buf = self.landing.account.alloc(want.want as usize, min as usize)?;
        Ok(buf.and_then(|buf| self.provide(want, buf)))
    }

    /// Grants this memory for a want, and returns the length. None: the link has failed.
    fn provide(&mut self, want: LandingWant, buf: LandingBuf) -> Option<u32> {
        if let Some(link) = &mut self.link
            && let Err(error) = link.share(buf.rkey())
        {
            self.driver.fail(error);
            self.wake_driver();
            return None;
        }
        let len = want.want.min(u32::try_from(buf.capacity()).unwrap_or(u32::MAX));
        let (addr, rkey) = (buf.addr(), buf.rkey());
        let key = self.landing.granted.insert(Granted::Pool(buf));
        self.conn.provide_landing(want.key, GrantMemory { key, addr, rkey, len });
        Some(len)
    }

    fn cannot_land(&mut self, key: WantKey, error: &RegisterError) {
        match key {
            WantKey::Stream(id) => self.refuse_bulk(id, error),
            WantKey::Standing => {
                throttled!(in UNREGISTERED, warn, %error, "no standing grants: landing memory cannot be registered");
                self.conn.recall_standing();
            }
        }
    }

    /// Refuses the message of a stream: there is no memory for it, and waiting would bring none.
    fn refuse_bulk(&mut self, id: StreamId, error: &RegisterError) {
        if let Err(limit) = self.pool.may_land() {
            // Nor is there memory for any other message: calls go on over TCP.
            let text = format!("no landing memory: {limit}");
            self.conn.close(CloseCode::Resources, &text);
            let code = from_error::pool(&limit).code();
            return self.end(Life::Closing(Reason::new(code, text)));
        }
        throttled!(in UNREGISTERED, warn, %error, stream = %id, "landing memory cannot be registered; the call fails");
        let status =
            Status::resource_exhausted(format!("no memory to receive the message: {error}"));
        self.conn.reset(id, ResetCode::ENHANCE_YOUR_CALM);
        self.fail_stream(id, status);
    }
}
