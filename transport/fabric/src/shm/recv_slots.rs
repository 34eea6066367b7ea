//! RECV slots, which hold a message between its completion and the next post of its slot.
//!
//! | a slot that is | event | becomes |
//! |---|---|---|
//! | Posted | a message arrives | Held, in a private buffer |
//! | Held | it is posted again | Posted; the buffer is kept for the next message |
//!
//! The buffers belong to a thread, and serve all connections of that thread. The buffer that came
//! back last is used next, because it is in the cache. A message is usually read before the next
//! message is taken, so one buffer serves thousands of connections.

use std::cell::RefCell;

use crate::link_config::LinkConfig;

/// Maximum number of buffers that a thread keeps.
const MAX_SPARE: usize = 4;

thread_local! {
    static SPARE: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
}

/// Takes a buffer of this length, with arbitrary contents.
fn take_buffer(len: usize) -> Box<[u8]> {
    let spare = SPARE.try_with(|spare| {
        let mut spare = spare.borrow_mut();
        let at = spare.iter().rposition(|buffer| buffer.len() == len)?;
        Some(spare.remove(at))
    });
    spare.ok().flatten().unwrap_or_else(|| vec![0; len].into())
}

/// Keeps a buffer for the next message, if the thread has fewer than [`MAX_SPARE`].
fn put_buffer(buffer: Box<[u8]>) {
    // If the thread is ending, the buffer is freed instead.
    let _ = SPARE.try_with(|spare| {
        let mut spare = spare.borrow_mut();
        if spare.len() < MAX_SPARE {
            spare.push(buffer);
        }
    });
}

#[derive(Debug)]
enum RecvSlot {
    Posted,
    Held { buffer: Box<[u8]>, len: usize },
}

/// The RECV slots of a link, which are all posted from the start.
#[derive(Debug)]
pub(crate) struct RecvSlots {
    slots: Vec<RecvSlot>,
    slot_size: usize,
}

impl RecvSlots {
    pub(crate) fn new(config: &LinkConfig) -> RecvSlots {
        let slots = (0..config.recv_slots).map(|_| RecvSlot::Posted).collect();
        RecvSlots { slots, slot_size: config.slot_size as usize }
    }

    /// Fills a posted slot with a message of `len` bytes. Returns false if the slot is not posted
    /// or cannot hold `len` bytes.
    #[inline]
    pub(crate) fn fill(&mut self, slot: u32, len: u32, fill: impl FnOnce(&mut [u8])) -> bool {
        let (len, slot_size) = (len as usize, self.slot_size);
        let Some(slot @ RecvSlot::Posted) = self.slots.get_mut(slot as usize) else { return false };
        if len > slot_size {
            return false;
        }
        let mut buffer = take_buffer(slot_size);
        fill(&mut buffer[..len]);
        *slot = RecvSlot::Held { buffer, len };
        true
    }

    /// Posts a slot again. Returns false if the slot is posted already or does not exist.
    #[inline]
    pub(crate) fn post(&mut self, slot: u32) -> bool {
        let Some(slot) = self.slots.get_mut(slot as usize) else { return false };
        match std::mem::replace(slot, RecvSlot::Posted) {
            RecvSlot::Held { buffer, .. } => put_buffer(buffer),
            RecvSlot::Posted => return false,
        }
        true
    }

    #[inline]
    pub(crate) fn is_posted(&self, slot: u32) -> bool {
        matches!(self.slots.get(slot as usize), Some(RecvSlot::Posted))
    }

    /// The received bytes, or an empty slice for a posted slot.
    #[inline]
    pub(crate) fn get(&self, slot: u32, len: u32) -> &[u8] {
        match self.slots.get(slot as usize) {
            Some(RecvSlot::Held { buffer, len: filled }) => &buffer[..(len as usize).min(*filled)],
            _ => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_go_from_posted_to_held_and_back() {
        let config = LinkConfig { recv_slots: 4, slot_size: 64, ..LinkConfig::default() };
        let mut slots = RecvSlots::new(&config);
        assert!(!slots.post(0) && !slots.post(4), "all are posted");
        assert!(!slots.fill(4, 1, |_| ()) && !slots.fill(0, 65, |_| ()));
        for round in 0..3 {
            for slot in 0..4 {
                assert!(slots.get(slot, 64).is_empty());
                assert!(slots.fill(slot, slot * 8, |bytes| bytes.fill(slot as u8 + round)));
                assert!(!slots.fill(slot, 1, |_| ()), "it is held");
                assert_eq!(slots.get(slot, 64), vec![slot as u8 + round; slot as usize * 8]);
                assert_eq!(slots.get(slot, 3).len(), 3.min(slot as usize * 8));
                assert!(!slots.is_posted(slot) && (round < 2 || slots.post(slot)));
            }
            assert!((0..4).all(|slot| round == 2 || slots.post(slot)));
        }
        assert!((0..4).all(|slot| slots.is_posted(slot)));
    }

    /// The number of buffers does not depend on the number of connections, or on the number of
    /// messages that each connection has held at a time.
    #[test]
    fn a_thread_has_few_buffers() {
        let kept = || SPARE.with_borrow(|spare| spare.len());
        let config = |slot_size| LinkConfig { recv_slots: 16, slot_size, ..LinkConfig::default() };
        let mut links: Vec<_> = (0..100).map(|n| RecvSlots::new(&config(64 << (n % 2)))).collect();
        for links in links.chunks_mut(2) {
            for slots in &mut *links {
                assert!(slots.fill(3, 64, |bytes| bytes.fill(7)) && slots.post(3));
            }
            assert_eq!(kept(), 2, "one of each length");
        }
        for slots in &mut links {
            assert!((0..16).all(|slot| slots.fill(slot, 1, |bytes| bytes.fill(8))));
            assert!((0..16).all(|slot| slots.post(slot)));
            assert!(kept() <= MAX_SPARE);
        }
        // The buffer still contains bytes of another connection.
        assert!(links[0].fill(0, 2, |bytes| bytes.copy_from_slice(b"ab")));
        assert_eq!(links[0].get(0, 64), b"ab");
    }
}
