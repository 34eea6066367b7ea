//! Credits: one for each RECV that the peer has posted (R1, R2).

use crate::config::Config;
use crate::error::Breach;
use crate::hello::Settings;

/// Messages after which RECVs are asked for again that could not be had.
const PATIENCE: u32 = 64;

/// Both directions of the account.
#[derive(Debug)]
pub(super) struct Credits {
    /// SENDs that this side may still post.
    ours: u32,
    /// RECVs that the peer may have posted at once.
    peer_most: u32,
    /// RECVs posted here that the peer does not know of yet.
    to_return: u32,
    /// SENDs that the peer may still post, as far as it was told.
    theirs: u32,
    /// RECVs that may be posted here at once.
    most: u32,
    /// The peer has run short of credits.
    short: bool,
    /// Messages to wait for before more RECVs are wanted.
    patience: u32,
}

impl Credits {
    pub(super) fn new(config: &Config, peer: &Settings) -> Self {
        Credits {
            ours: peer.recv_slots.into(),
            peer_most: peer.max_recvs.into(),
            to_return: 0,
            theirs: config.recv_slots.into(),
            most: config.max_recvs.into(),
            short: false,
            patience: 0,
        }
    }

    /// RECVs posted here.
    pub(super) fn posted(&self) -> u32 {
        self.theirs + self.to_return
    }

    /// The peer says that it has waited for credits.
    pub(super) fn ran_short(&mut self) {
        self.short = true;
    }

    /// The connection is at rest: what the peer was short of is past.
    pub(super) fn rested(&mut self) {
        self.short = false;
    }

    /// The peer has run short of credits, and there may be more RECVs.
    pub(super) fn wants_more(&self) -> bool {
        self.short && self.patience == 0 && self.posted() < self.most
    }

    /// So many more RECVs have been posted; 0 when there is no memory for them.
    pub(super) fn more(&mut self, recvs: u32) {
        let recvs = recvs.min(self.most - self.posted());
        self.to_return += recvs;
        self.short = false;
        if recvs == 0 {
            self.patience = PATIENCE;
        }
    }

    /// The RECV of the last message has not been posted again.
    pub(super) fn fewer(&mut self) {
        self.to_return = self.to_return.saturating_sub(1);
    }

    /// The last credit is kept for a message that returns credits: with both sides at zero and
    /// nothing on the way, the message that spent the last credit has given the other side at least
    /// one.
    pub(super) fn may_send(&self) -> bool {
        self.ours >= 2 || (self.ours == 1 && self.to_return > 0)
    }

    #[cfg(test)]
    pub(super) fn ours(&self) -> u32 {
        self.ours
    }

    #[cfg(test)]
    pub(super) fn to_return(&self) -> u32 {
        self.to_return
    }

    /// The last message of all needs no answer.
    pub(super) fn may_close(&self) -> bool {
        self.ours > 0
    }

    /// Enough has gathered that the peer may run short: a message only to return credits is due. It
    /// takes a credit itself, so with few of them half would not do: each such message would have
    /// another one follow.
    pub(super) fn return_due(&self) -> bool {
        self.to_return > self.posted() / 2
    }

    /// Books one SEND; returns the credits that it gives back.
    pub(super) fn sent(&mut self) -> u16 {
        debug_assert!(self.ours > 0);
        self.ours -= 1;
        let back = std::mem::take(&mut self.to_return);
        self.theirs += back;
        back as u16
    }

    /// Books one message from the peer, whose slot has been reposted.
    pub(super) fn received(&mut self, returned: u16) -> Result<(), Breach> {
        if self.theirs == 0 {
            return Err(Breach::NoCredit);
        }
        self.theirs -= 1;
        self.to_return += 1;
        self.patience = self.patience.saturating_sub(1);
        let room = self.peer_most - self.ours;
        if u32::from(returned) > room {
            return Err(Breach::CreditOverflow { returned: returned.into(), room });
        }
        self.ours += u32::from(returned);
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
    fn more_are_wanted_when_the_peer_runs_short() {
        let (mut a, mut b) = (credits(4, 12), credits(4, 12));
        assert!(!b.wants_more());
        b.ran_short();
        assert!(b.wants_more());
        b.more(0);
        for _ in 0..PATIENCE {
            b.ran_short();
            assert!(!b.wants_more(), "there were none");
            a.received(b.sent()).unwrap();
            b.received(a.sent()).unwrap();
        }
        assert!(b.wants_more());
        b.more(8);
        assert_eq!((b.posted(), b.sent()), (12, 9));
        b.ran_short();
        assert!(!b.wants_more(), "as many as there may be");
    }

    #[test]
    fn what_is_not_posted_again_is_not_returned() {
        let (mut a, mut b) = (credits(4, 12), credits(4, 12));
        b.more(8);
        a.received(b.sent()).unwrap();
        assert_eq!(a.ours(), 12);
        for left in (4..12).rev() {
            b.received(a.sent()).unwrap();
            b.fewer();
            assert_eq!(b.posted(), left);
        }
        a.received(b.sent()).unwrap();
        assert_eq!(a.ours(), 4);
        // And there may be more again.
        b.more(8);
        a.received(b.sent()).unwrap();
        assert_eq!(
            (a.ours(), a.received(9)),
            (12, Err(Breach::CreditOverflow { returned: 9, room: 0 }))
        );
    }

    /// Two sides that send whenever they may, with one message at a time on the way, never both
    /// stop.
    #[test]
    fn never_both_stuck() {
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
