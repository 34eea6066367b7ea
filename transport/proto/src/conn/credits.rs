//! Credits in both directions: one for each RECV that the other side has posted (R1, R2).

use crate::config::Config;
use crate::error::Breach;
use crate::hello::Settings;

/// Messages to wait for, after there was no memory for extra RECVs, before more are wanted again.
const RETRY_AFTER: u32 = 64;

/// The credits of both directions.
#[derive(Debug)]
pub(super) struct Credits {
    /// SENDs that this side may still post.
    available: u32,
    /// RECVs that the peer may have posted at a time.
    max_peer_recvs: u32,
    /// RECVs posted by this side for which the peer has not received credits yet.
    to_return: u32,
    /// SENDs that the peer may still post with the credits it has received.
    peer_available: u32,
    /// RECVs that this side may have posted at a time.
    max_recvs: u32,
    /// The peer has run short of credits.
    peer_short: bool,
    /// Messages to wait for before more RECVs are wanted again.
    retry_in: u32,
}

impl Credits {
    pub(super) fn new(config: &Config, peer: &Settings) -> Self {
        Credits {
            available: peer.recv_slots.into(),
            max_peer_recvs: peer.max_recvs.into(),
            to_return: 0,
            peer_available: config.recv_slots.into(),
            max_recvs: config.max_recvs.into(),
            peer_short: false,
            retry_in: 0,
        }
    }

    /// The number of RECVs that this side has posted.
    pub(super) fn posted(&self) -> u32 {
        self.peer_available + self.to_return
    }

    /// Records that the peer has waited for credits.
    pub(super) fn peer_ran_short(&mut self) {
        self.peer_short = true;
    }

    /// Forgets that the peer has waited: the connection has become quiet.
    pub(super) fn clear_short(&mut self) {
        self.peer_short = false;
    }

    /// Whether the peer has run short of credits and more RECVs are allowed.
    pub(super) fn wants_more(&self) -> bool {
        self.peer_short && self.retry_in == 0 && self.posted() < self.max_recvs
    }

    /// Records that `recvs` more RECVs have been posted; 0 means that there was no memory for them.
    pub(super) fn add_recvs(&mut self, recvs: u32) {
        let recvs = recvs.min(self.max_recvs - self.posted());
        self.to_return += recvs;
        self.peer_short = false;
        if recvs == 0 {
            self.retry_in = RETRY_AFTER;
        }
    }

    /// Records that the RECV of the last message is not posted again.
    pub(super) fn remove_recv(&mut self) {
        self.to_return = self.to_return.saturating_sub(1);
    }

    /// Whether a message may be sent. The last credit is reserved for a message that returns
    /// credits. So both sides can never be at zero with nothing in flight: the message that spent a
    /// last credit has returned at least one to the other side.
    pub(super) fn may_send(&self) -> bool {
        self.available >= 2 || (self.available == 1 && self.to_return > 0)
    }

    #[cfg(test)]
    pub(super) fn available(&self) -> u32 {
        self.available
    }

    #[cfg(test)]
    pub(super) fn to_return(&self) -> u32 {
        self.to_return
    }

    /// Whether CLOSE may be sent. It may take the last credit, since no message follows it.
    pub(super) fn may_close(&self) -> bool {
        self.available > 0
    }

    /// Whether a message is due only to return credits, because the peer may run short. It costs a
    /// credit itself, so more than half must have accumulated: otherwise, with few credits, each
    /// such message would cause another one in return.
    pub(super) fn return_due(&self) -> bool {
        self.to_return > self.posted() / 2
    }

    /// Records a SEND. Returns the number of credits that it returns to the peer.
    pub(super) fn sent(&mut self) -> u16 {
        debug_assert!(self.available > 0);
        self.available -= 1;
        let back = std::mem::take(&mut self.to_return);
        self.peer_available += back;
        back as u16
    }

    /// Records a message from the peer, whose RECV has been posted again.
    ///
    /// # Errors
    /// [`Breach::NoCredit`], [`Breach::CreditOverflow`].
    pub(super) fn received(&mut self, returned: u16) -> Result<(), Breach> {
        if self.peer_available == 0 {
            return Err(Breach::NoCredit);
        }
        self.peer_available -= 1;
        self.to_return += 1;
        self.retry_in = self.retry_in.saturating_sub(1);
        let room = self.max_peer_recvs - self.available;
        if u32::from(returned) > room {
            return Err(Breach::CreditOverflow { returned: returned.into(), room });
        }
        self.available += u32::from(returned);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With `slots` RECVs at either side, that may become `most`.
    fn credits(slots: u16, most: u16) -> Credits {
        let config = Config { recv_slots: slots, max_recvs: most, ..Config::default() };
        Credits::new(&config, &config.settings())
    }

    #[test]
    fn the_last_credit_only_returns_credits() {
        let mut c = credits(4, 4);
        for _ in 0..3 {
            assert!(c.may_send());
            c.sent();
        }
        assert!(!c.may_send());
        c.received(0).unwrap();
        assert!(c.may_send());
        assert_eq!(c.sent(), 1);
        assert!(!c.may_send());
    }

    #[test]
    fn breaches() {
        let mut c = credits(4, 4);
        for _ in 0..4 {
            c.received(0).unwrap();
        }
        assert_eq!(c.received(0), Err(Breach::NoCredit));
        let mut c = credits(4, 4);
        assert_eq!(c.received(1), Err(Breach::CreditOverflow { returned: 1, room: 0 }));
    }

    #[test]
    fn more_recvs_are_wanted_when_the_peer_runs_short() {
        let (mut a, mut b) = (credits(4, 12), credits(4, 12));
        assert!(!b.wants_more());
        b.peer_ran_short();
        assert!(b.wants_more());
        b.add_recvs(0);
        for _ in 0..RETRY_AFTER {
            b.peer_ran_short();
            assert!(!b.wants_more(), "there were none");
            a.received(b.sent()).unwrap();
            b.received(a.sent()).unwrap();
        }
        assert!(b.wants_more());
        b.add_recvs(8);
        assert_eq!((b.posted(), b.sent()), (12, 9));
        b.peer_ran_short();
        assert!(!b.wants_more(), "as many as there may be");
    }

    #[test]
    fn removed_recvs_return_no_credits() {
        let (mut a, mut b) = (credits(4, 12), credits(4, 12));
        b.add_recvs(8);
        a.received(b.sent()).unwrap();
        assert_eq!(a.available(), 12);
        for left in (4..12).rev() {
            b.received(a.sent()).unwrap();
            b.remove_recv();
            assert_eq!(b.posted(), left);
        }
        a.received(b.sent()).unwrap();
        assert_eq!(a.available(), 4);
        // And there may be more again.
        b.add_recvs(8);
        a.received(b.sent()).unwrap();
        assert_eq!(
            (a.available(), a.received(9)),
            (12, Err(Breach::CreditOverflow { returned: 9, room: 0 }))
        );
    }

    /// Two sides that send whenever they may, with one message at a time in flight, never both
    /// stop.
    #[test]
    fn both_sides_are_never_stuck_at_once() {
        for slots in [4, 5, 32] {
            let (mut a, mut b) = (credits(slots, slots), credits(slots, slots));
            for round in 0..1000 {
                // One side talks until it may not, then the other.
                let (x, y) = if round % 2 == 0 { (&mut a, &mut b) } else { (&mut b, &mut a) };
                let mut n = 0;
                while x.may_send() {
                    let back = x.sent();
                    y.received(back).unwrap();
                    n += 1;
                    assert!(n <= 4 * u32::from(slots));
                }
                assert!(x.may_send() || y.may_send(), "{x:?} {y:?}");
            }
        }
    }
}
