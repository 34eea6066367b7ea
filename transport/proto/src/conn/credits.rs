//! Credits: one for each RECV that the peer has posted (R1, R2).

use crate::error::Breach;

/// Both directions of the account.
#[derive(Debug)]
pub(super) struct Credits {
    /// SENDs that this side may still post.
    ours: u32,
    /// RECV slots of the peer.
    peer_slots: u32,
    /// RECV slots reposted here that the peer does not know of yet.
    to_return: u32,
    /// SENDs that the peer may still post, as far as it was told.
    theirs: u32,
    /// RECV slots here.
    slots: u32,
}

impl Credits {
    pub(super) fn new(slots: u16, peer_slots: u16) -> Self {
        Credits {
            ours: peer_slots.into(),
            peer_slots: peer_slots.into(),
            to_return: 0,
            theirs: slots.into(),
            slots: slots.into(),
        }
    }

    /// The last credit is kept for a message that returns credits: with both sides at zero and nothing on
    /// the way, the message that spent the last credit has given the other side at least one.
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

    /// Enough has gathered that the peer may run short: a message only to return credits is due.
    pub(super) fn return_due(&self) -> bool {
        self.to_return >= self.slots / 2
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
        let spent = self.peer_slots - self.ours;
        if u32::from(returned) > spent {
            return Err(Breach::CreditOverflow { returned: returned.into(), spent });
        }
        self.ours += u32::from(returned);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_credit_only_returns_credits() {
        let mut c = Credits::new(4, 4);
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
        let mut c = Credits::new(4, 4);
        for _ in 0..4 {
            c.received(0).unwrap();
        }
        assert_eq!(c.received(0), Err(Breach::NoCredit));
        let mut c = Credits::new(4, 4);
        assert_eq!(c.received(1), Err(Breach::CreditOverflow { returned: 1, spent: 0 }));
    }

    /// Two sides that send whenever they may, with one message at a time on the way, never both stop.
    #[test]
    fn never_both_stuck() {
        for slots in [4, 5, 32] {
            let (mut a, mut b) = (Credits::new(slots, slots), Credits::new(slots, slots));
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
