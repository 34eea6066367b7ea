//! The memory that the ends of a pair lend each other.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use bytes::Bytes;

use super::super::*;
use crate::payload::LentPlace;

/// The memory that both ends have mapped, by address. The owner of a range removes it when the
/// lease has ended.
#[derive(Clone, Debug, Default)]
struct Mapped(Rc<RefCell<BTreeMap<u64, Bytes>>>);

/// One end as an owner of lent memory, and as a reader of the memory that the other end lends.
#[derive(Debug, Default)]
pub(super) struct Loans {
    /// Shared by both ends.
    mapped: Mapped,
    /// Maximum bytes that this end has lent at a time.
    pub(super) limit: usize,
    /// How often each piece is postponed, as if the other end had not mapped its memory.
    pub(super) postpones: usize,
    postponed: usize,
    /// Whether this end keeps the bytes that it was lent.
    pub(super) keeps: bool,
    /// Addresses of this end's leases, by number.
    out: BTreeMap<u32, u64>,
    next: u32,
    /// Leases of the other end that are being read, with the address and the length.
    reading: Vec<(u32, u64, u32)>,
}

impl Loans {
    /// Creates the loans of the two ends of a pair.
    pub(super) fn pair() -> [Loans; 2] {
        let mapped = Mapped::default();
        [0, 1].map(|end: u32| Loans { mapped: mapped.clone(), next: end << 31, ..Loans::default() })
    }

    pub(super) fn lent_bytes(&self) -> usize {
        let mapped = self.mapped.0.borrow();
        self.out.values().filter_map(|addr| mapped.get(addr)).map(Bytes::len).sum()
    }

    /// Decides about the bytes that the connection may lend.
    pub(super) fn lend(&mut self, conn: &mut Connection) {
        conn.retry_lends();
        while let Some((id, bytes)) = conn.poll_lend() {
            let fits = self.lent_bytes() + bytes.len() <= self.limit && conn.may_lend();
            if fits && self.postponed < self.postpones {
                self.postponed += 1;
                conn.postpone_lend();
                continue;
            }
            self.postponed = 0;
            let place = fits.then(|| {
                self.next += 1;
                let (lease, addr) = (self.next, u64::from(self.next) << 32);
                self.mapped.0.borrow_mut().insert(addr, bytes);
                self.out.insert(lease, addr);
                LentPlace { lease, key: 7, addr }
            });
            conn.provide_lent(id, place);
        }
    }

    /// Ends a lease: the owner may use its memory for something else.
    pub(super) fn ended(&mut self, lease: u32) {
        let addr = self.out.remove(&lease).expect("a lease ends once");
        self.mapped.0.borrow_mut().remove(&addr);
    }

    /// Reads bytes that the other end has lent.
    pub(super) fn borrow(&mut self, place: LentPlace, len: u32) -> Bytes {
        let bytes = self.mapped.0.borrow().get(&place.addr).cloned();
        let bytes = bytes.expect("lent memory is there until it is returned");
        assert_eq!(bytes.len(), len as usize);
        self.reading.push((place.lease, place.addr, len));
        bytes
    }

    /// Returns the leases that are not kept.
    pub(super) fn give_back(&mut self, conn: &mut Connection) {
        if self.keeps {
            return;
        }
        for (lease, addr, len) in self.reading.drain(..) {
            let is_there = self.mapped.0.borrow().get(&addr).map(Bytes::len) == Some(len as usize);
            assert!(is_there, "the owner took lease {lease} away while it was read");
            conn.return_lease(lease);
        }
    }

    pub(super) fn assert_clean(&self) {
        assert!(self.out.is_empty() && self.reading.is_empty(), "leases are left: {self:?}");
    }
}
