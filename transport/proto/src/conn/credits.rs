//! Credits in both directions: one for each RECV that the other side has posted (R1, R2).
//!
//! A RECV has one of two sizes: the short size of a connection at rest, or the size of a full slot.
//! Both sides keep credits in the order in which the RECVs were posted, which is also the order in
//! which messages take them. So each credit also has a size: a sender knows the maximum length of
//! its next message, and a receiver knows the length of the RECV that a message took.

use super::recv_queue::{RecvQueue, Run};
use crate::config::Config;
use crate::error::Breach;
use crate::frame::{Composer, Reader};
use crate::hello::PeerSettings;

/// Number of messages after which extra RECVs are wanted again, if there was no memory for them.
const RETRY_AFTER: u32 = 64;

/// Credits that a message returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Returned {
    pub(super) credits: u16,
    /// Whether the credits are for full slots instead of the short RECVs of a connection at rest.
    pub(super) full: bool,
}

impl Returned {
    /// The credits that a received message returns.
    #[inline]
    pub(super) fn by(reader: &Reader) -> Self {
        Returned { credits: reader.credits, full: reader.full }
    }
}

/// The credits of both directions.
#[derive(Debug)]
pub(super) struct Credits {
    /// SENDs that this side may still post.
    available: RecvQueue,
    /// Maximum number of RECVs that the peer may have posted at a time.
    max_peer_recvs: u32,
    /// Bytes of each of the peer's RECVs: of a short RECV, and of a full slot.
    peer_bytes: (u32, u32),
    /// RECVs posted by this side for which the peer has not received credits yet.
    to_return: RecvQueue,
    /// SENDs that the peer may still post with the credits it has received.
    peer_available: RecvQueue,
    /// Bytes of each of this side's RECVs: of a short RECV, and of a full slot.
    bytes: (u32, u32),
    /// Maximum number of RECVs that this side may have posted at a time.
    max_recvs: u32,
    /// Number of extra RECVs that are posted.
    extra: u32,
    /// Maximum of `extra`.
    max_extra: u32,
    /// Whether the peer has run short of credits, or of room in the short RECVs of a connection at
    /// rest.
    peer_short: bool,
    /// Number of messages until more RECVs are wanted again.
    retry_in: u32,
}

impl Credits {
    pub(super) fn new(config: &Config, peer: &PeerSettings) -> Self {
        let bytes = (config.rest_slot_size(), config.slot_size);
        let peer_bytes = (peer.rest_slot_size, peer.slot_size);
        Credits {
            available: RecvQueue::new(peer.recv_slots.into(), peer_bytes.0),
            max_peer_recvs: peer.max_recvs.into(),
            peer_bytes,
            to_return: RecvQueue::new(0, bytes.0),
            peer_available: RecvQueue::new(config.recv_slots.into(), bytes.0),
            bytes,
            max_recvs: config.max_recvs.into(),
            extra: 0,
            max_extra: u32::from(config.max_recvs.saturating_sub(config.recv_slots)),
            peer_short: false,
            retry_in: 0,
        }
    }

    /// The number of RECVs that this side has posted.
    pub(super) fn posted(&self) -> u32 {
        self.peer_available.len() + self.to_return.len()
    }

    /// Whether extra RECVs are posted.
    pub(super) fn has_extra(&self) -> bool {
        self.extra > 0
    }

    /// Records that the peer has waited for credits, or has had to split its output.
    pub(super) fn peer_ran_short(&mut self) {
        self.peer_short = true;
    }

    /// Forgets that the peer has waited, because the connection has become quiet.
    pub(super) fn clear_short(&mut self) {
        self.peer_short = false;
    }

    /// Whether the peer has run short of credits and more RECVs are allowed.
    pub(super) fn wants_more(&self) -> bool {
        self.peer_short && self.retry_in == 0 && self.extra < self.max_extra
    }

    /// Records that `recvs` extra RECVs have been posted; 0 means that there was no memory for
    /// them.
    pub(super) fn add_recvs(&mut self, recvs: u32) {
        let recvs = recvs.min(self.max_recvs.saturating_sub(self.posted()));
        self.to_return.push(Run { recvs, bytes: self.bytes.1 });
        self.extra += recvs;
        self.peer_short = false;
        if recvs == 0 {
            self.retry_in = RETRY_AFTER;
        }
    }

    /// Records that `recvs` short RECVs have been posted again, after they were left out while
    /// extra RECVs were posted.
    pub(super) fn add_rest_recvs(&mut self, recvs: u32) {
        let recvs = recvs.min(self.max_recvs.saturating_sub(self.posted()));
        self.to_return.push(Run { recvs, bytes: self.bytes.0 });
    }

    /// Records that the RECV of the last message is not posted again.
    pub(super) fn remove_recv(&mut self) {
        if self.to_return.pop_back() == Some(self.bytes.1) {
            self.extra = self.extra.saturating_sub(1);
        }
    }

    /// Whether a message may be sent. The last credit is reserved for a message that returns
    /// credits. So the two sides never both run out of credits with nothing in flight: a message
    /// that spends its sender's last credit returns at least one credit to the receiver.
    pub(super) fn may_send(&self) -> bool {
        let available = self.available.len();
        available >= 2 || (available == 1 && self.to_return.len() > 0)
    }

    /// Maximum length of the next message in bytes, given that there is a credit for it.
    pub(super) fn max_len(&self) -> usize {
        self.available.front_bytes() as usize
    }

    /// Whether the next message lands in a RECV that is shorter than a full slot.
    pub(super) fn is_next_short(&self) -> bool {
        self.available.front_bytes() < self.peer_bytes.1
    }

    /// SENDs that this side may still post.
    pub(super) fn available(&self) -> u32 {
        self.available.len()
    }

    /// SENDs that the peer may still post with the credits it has received.
    pub(super) fn peer_available(&self) -> u32 {
        self.peer_available.len()
    }

    #[cfg(test)]
    pub(super) fn to_return(&self) -> u32 {
        self.to_return.len()
    }

    /// Bytes of each RECV that this side has a credit for.
    #[cfg(test)]
    pub(super) fn available_bytes(&self) -> impl Iterator<Item = u32> + '_ {
        self.available.bytes()
    }

    /// Bytes of each RECV for which credits have not been returned.
    #[cfg(test)]
    pub(super) fn to_return_bytes(&self) -> impl Iterator<Item = u32> + '_ {
        self.to_return.bytes()
    }

    /// Whether CLOSE may be sent. CLOSE may take the last credit, because no message follows CLOSE.
    pub(super) fn may_close(&self) -> bool {
        self.available.len() > 0
    }

    /// Whether a message is due only to return credits, because the peer may run short. Such a
    /// message costs a credit itself, so more than half of all credits must have accumulated.
    /// Otherwise, with few credits, each such message would cause another message in return.
    pub(super) fn return_due(&self) -> bool {
        self.to_return.len() > self.posted() / 2
    }

    /// Begins a message in the slot, which is no longer than the RECV that it will land in.
    #[inline]
    pub(super) fn composer<'a>(&self, slot: &'a mut [u8]) -> Composer<'a> {
        let limit = slot.len().min(self.max_len());
        Composer::new(&mut slot[..limit])
    }

    /// Completes a message: spends a credit, and writes the message header, which carries the
    /// credits that are due to the peer. Returns the length of the message.
    pub(super) fn finish(&mut self, mut message: Composer<'_>) -> usize {
        let Returned { credits, full } = self.sent();
        if full {
            message.full();
        }
        message.finish(credits)
    }

    /// Records a SEND. Returns the credits that the SEND carries to the peer. All of them are for
    /// RECVs of one size. If credits for RECVs of the other size are also due, a later message
    /// carries them.
    #[inline]
    pub(super) fn sent(&mut self) -> Returned {
        let spent = self.available.pop();
        debug_assert!(spent.is_some());
        let back = self.to_return.take_run();
        self.peer_available.push(back);
        Returned { credits: back.recvs as u16, full: back.bytes > self.bytes.0 }
    }

    /// Records a message of `len` bytes from the peer. The caller must already have posted the
    /// message's RECV again (R1), unless `Connection::recv_gone` follows.
    ///
    /// # Errors
    /// [`Breach::NoCredit`], [`Breach::LongerThanItsRecv`], [`Breach::CreditOverflow`].
    #[inline]
    pub(super) fn received(&mut self, returned: Returned, len: usize) -> Result<(), Breach> {
        let Some(bytes) = self.peer_available.pop() else { return Err(Breach::NoCredit) };
        self.to_return.push(Run { recvs: 1, bytes });
        self.retry_in = self.retry_in.saturating_sub(1);
        if len > bytes as usize {
            return Err(Breach::LongerThanItsRecv { len, recv: bytes });
        }
        let recvs = u32::from(returned.credits);
        let room = self.max_peer_recvs.saturating_sub(self.available.len());
        if recvs > room {
            return Err(Breach::CreditOverflow { returned: recvs, room });
        }
        let (rest, full) = self.peer_bytes;
        self.available.push(Run { recvs, bytes: if returned.full { full } else { rest } });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Returned = Returned { credits: 0, full: false };

    /// Creates credits with `slots` RECVs at each side, which may grow to `most` RECVs.
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
        c.received(NONE, 0).unwrap();
        assert!(c.may_send());
        assert_eq!(c.sent().credits, 1);
        assert!(!c.may_send());
    }

    #[test]
    fn breaches() {
        let mut c = credits(4, 4);
        for _ in 0..4 {
            c.received(NONE, 0).unwrap();
        }
        assert_eq!(c.received(NONE, 0), Err(Breach::NoCredit));
        let mut c = credits(4, 4);
        assert_eq!(
            c.received(Returned { credits: 1, full: false }, 0),
            Err(Breach::CreditOverflow { returned: 1, room: 0 })
        );
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
            a.received(b.sent(), 9).unwrap();
            b.received(a.sent(), 9).unwrap();
        }
        assert!(b.wants_more());
        b.add_recvs(8);
        assert_eq!((b.posted(), b.sent().credits), (12, 9));
        b.peer_ran_short();
        assert!(!b.wants_more(), "as many as there may be");
    }

    #[test]
    fn removed_recvs_return_no_credits() {
        let (mut a, mut b) = (credits(4, 12), credits(4, 12));
        b.add_recvs(8);
        a.received(b.sent(), 9).unwrap();
        assert_eq!(a.available(), 12);
        for left in (4..12).rev() {
            b.received(a.sent(), 9).unwrap();
            b.remove_recv();
            assert_eq!(b.posted(), left);
        }
        a.received(b.sent(), 9).unwrap();
        assert_eq!(a.available(), 4);
        // Once the RECV is gone, more RECVs are allowed again.
        b.add_recvs(8);
        a.received(b.sent(), 9).unwrap();
        assert_eq!(
            (a.available(), a.received(Returned { credits: 9, full: false }, 9)),
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
                // One side sends until it may not send any more, then the other side.
                let (x, y) = if round % 2 == 0 { (&mut a, &mut b) } else { (&mut b, &mut a) };
                let mut n = 0;
                while x.may_send() {
                    let back = x.sent();
                    y.received(back, 9).unwrap();
                    n += 1;
                    assert!(n <= 4 * u32::from(slots));
                }
                assert!(x.may_send() || y.may_send(), "{x:?} {y:?}");
            }
        }
    }

    /// Under load the RECVs become long, and at rest they become short again. The sender knows the
    /// length of every RECV in between.
    #[test]
    fn both_sides_know_the_size_of_each_recv() {
        let config = Config {
            slot_size: 4096,
            rest_slot_size: 1024,
            recv_slots: 6,
            max_recvs: 14,
            ..Config::default()
        };
        let mut ends = [(); 2].map(|()| Credits::new(&config, &config.settings()));
        let [a, b] = &mut ends;
        assert_eq!((a.max_len(), a.is_next_short()), (1024, true));
        b.peer_ran_short();
        b.add_recvs(8);
        assert!(!b.wants_more() && b.has_extra());
        // The short RECVs are left out as they are used. The first message back returns credits of
        // one size.
        b.received(a.sent(), 1024).unwrap();
        b.remove_recv();
        assert_eq!(b.posted(), 13);
        let back = b.sent();
        assert_eq!(back, Returned { credits: 8, full: true });
        a.received(back, 9).unwrap();
        for _ in 0..5 {
            assert_eq!(a.max_len(), 1024);
            b.received(a.sent(), 1024).unwrap();
            b.remove_recv();
        }
        assert_eq!((a.max_len(), a.is_next_short()), (4096, false));
        assert_eq!((b.posted(), a.available()), (8, 8));
        // At rest the short RECVs are posted again, and the long RECVs are removed.
        b.add_rest_recvs(6);
        let back = b.sent();
        assert_eq!(back, Returned { credits: 6, full: false });
        a.received(back, 9).unwrap();
        for left in (0..8).rev() {
            assert_eq!((a.max_len(), b.has_extra()), (4096, true));
            b.received(a.sent(), 4096).unwrap();
            b.remove_recv();
            assert_eq!(b.posted(), 6 + left);
        }
        assert_eq!((a.max_len(), b.has_extra(), a.available()), (1024, false, 6));
        // Receive a message that is longer than its RECV.
        assert_eq!(
            b.received(a.sent(), 1025),
            Err(Breach::LongerThanItsRecv { len: 1025, recv: 1024 })
        );
    }
}
