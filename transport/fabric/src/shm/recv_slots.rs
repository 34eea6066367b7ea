//! RECV slots: where a message lies between its completion and the next post of its slot.
//!
//! | a slot that is | event | becomes |
//! |---|---|---|
//! | Posted | a message | Held, in a buffer that nobody else can write to |
//! | Held | it is posted again | Posted; the buffer is kept for the next message |
//!
//! There are as many buffers as messages have been held at a time: one, where each is read before
//! the next is taken. The one that came back last is the next to be used. A connection at rest
//! keeps none.

use crate::link_config::LinkConfig;

#[derive(Debug)]
enum Slot {
    Posted,
    Held { buffer: Box<[u8]>, len: usize },
}

/// The RECV slots of a link, all of them posted from the start.
#[derive(Debug)]
pub(crate) struct RecvSlots {
    slots: Vec<Slot>,
    slot_size: usize,
    unused: Vec<Box<[u8]>>,
}

impl RecvSlots {
    pub(crate) fn new(config: &LinkConfig) -> RecvSlots {
        let slots = (0..config.recv_slots).map(|_| Slot::Posted).collect();
        RecvSlots { slots, slot_size: config.slot_size as usize, unused: Vec::new() }
    }

    /// Fills a posted slot with a message of `len` bytes. False when it is not posted or cannot
    /// hold `len`.
    #[inline]
    pub(crate) fn fill(&mut self, slot: u32, len: u32, fill: impl FnOnce(&mut [u8])) -> bool {
        let (len, slot_size) = (len as usize, self.slot_size);
        let Some(slot @ Slot::Posted) = self.slots.get_mut(slot as usize) else { return false };
        if len > slot_size {
            return false;
        }
        let mut buffer = self.unused.pop().unwrap_or_else(|| vec![0; slot_size].into());
        fill(&mut buffer[..len]);
        *slot = Slot::Held { buffer, len };
        true
    }

    /// Posts a slot again. False when it is posted already or does not exist.
    #[inline]
    pub(crate) fn post(&mut self, slot: u32) -> bool {
        let Some(slot) = self.slots.get_mut(slot as usize) else { return false };
        match std::mem::replace(slot, Slot::Posted) {
            Slot::Held { buffer, .. } => self.unused.push(buffer),
            Slot::Posted => return false,
        }
        true
    }

    #[inline]
    pub(crate) fn is_posted(&self, slot: u32) -> bool {
        matches!(self.slots.get(slot as usize), Some(Slot::Posted))
    }

    /// What was received; empty for a posted slot.
    #[inline]
    pub(crate) fn get(&self, slot: u32, len: u32) -> &[u8] {
        match self.slots.get(slot as usize) {
            Some(Slot::Held { buffer, len: filled }) => &buffer[..(len as usize).min(*filled)],
            _ => &[],
        }
    }

    /// Frees the buffers that are not in use.
    pub(crate) fn shrink(&mut self) {
        self.unused = Vec::new();
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
            assert_eq!(slots.unused.len(), if round == 2 { 1 } else { 4 }, "{round}");
            slots.shrink();
        }
        assert!((0..4).all(|slot| slots.is_posted(slot)));
    }
}
