//! The calls that wait because the peer allows no more streams.
//!
//! | a call that | on | becomes |
//! |---|---|---|
//! | begins | a stream is free, and no call waits for it | open |
//! | begins | no stream is free, or other calls wait | waiting |
//! | waits | a stream ends, and no call has waited longer | admitted: a free stream is kept for it |
//! | is admitted | its task runs | open |
//! | waits or is admitted | it is cancelled | gone: its stream goes to the next call |
//!
//! Each stream that ends wakes one call. If it woke all of them, a client with more and more calls
//! would spend its time on waking calls that find no stream.

use std::collections::{BTreeSet, VecDeque};
use std::task::Waker;

/// The waiting calls of a connection, which have ascending numbers.
#[derive(Debug, Default)]
pub(crate) struct StreamRoom {
    waiting: VecDeque<(u64, Waker)>,
    admitted: BTreeSet<u64>,
    next: u64,
}

impl StreamRoom {
    /// Whether a call that begins may open a stream, if the peer allows `free` more streams.
    #[inline]
    pub(crate) fn has_room(&self, free: usize) -> bool {
        self.waiting.is_empty() && self.admitted.len() < free
    }

    /// Whether calls wait for a stream.
    #[inline]
    pub(crate) fn is_wanted(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Adds a call, and returns its number.
    pub(crate) fn join(&mut self, waker: &Waker) -> u64 {
        let number = self.next;
        self.next += 1;
        self.waiting.push_back((number, waker.clone()));
        number
    }

    /// Whether the call has been admitted, and may open its stream now. Otherwise `waker` is woken
    /// when the call is admitted.
    pub(crate) fn take(&mut self, number: u64, waker: &Waker) -> bool {
        if self.admitted.remove(&number) {
            return true;
        }
        if let Ok(at) = self.waiting.binary_search_by_key(&number, |(number, _)| *number) {
            self.waiting[at].1.clone_from(waker);
        }
        false
    }

    /// Removes a call that was cancelled.
    pub(crate) fn leave(&mut self, number: u64) {
        if !self.admitted.remove(&number)
            && let Ok(at) = self.waiting.binary_search_by_key(&number, |(number, _)| *number)
        {
            self.waiting.remove(at);
        }
    }

    /// Admits calls, if the peer allows `free` more streams, and returns the next task to wake.
    pub(crate) fn admit(&mut self, free: usize) -> Option<Waker> {
        if self.admitted.len() >= free {
            return None;
        }
        let (number, waker) = self.waiting.pop_front()?;
        self.admitted.insert(number);
        Some(waker)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    fn admit(room: &mut StreamRoom, free: usize) -> usize {
        std::iter::from_fn(|| room.admit(free)).map(Waker::wake).count()
    }

    #[test]
    fn each_free_stream_wakes_the_call_that_has_waited_longest() {
        let (mut room, woken) = (StreamRoom::default(), Arc::new(Woken::default()));
        let waker = Waker::from(woken.clone());
        assert!(room.has_room(1) && !room.has_room(0) && !room.is_wanted());
        let calls: Vec<u64> = (0..1000).map(|_| room.join(&waker)).collect();
        assert!(room.is_wanted() && !room.has_room(1), "a call that begins waits as well");
        assert_eq!(admit(&mut room, 2), 2);
        assert_eq!(admit(&mut room, 2), 0, "the streams are kept for these two");
        assert!(!room.take(calls[2], &waker) && room.take(calls[1], &waker));
        assert!(room.take(calls[0], &waker) && !room.take(calls[0], &waker), "once");
        // The first waits and the second is admitted when they are cancelled.
        room.leave(calls[3]);
        assert_eq!(admit(&mut room, 1), 1);
        room.leave(calls[2]);
        assert_eq!(admit(&mut room, 1), 1);
        assert!(room.take(calls[4], &waker));
        assert_eq!(admit(&mut room, usize::MAX), 995);
        assert_eq!(woken.0.load(Relaxed), 999);
        assert!(!room.is_wanted() && !room.has_room(995) && room.has_room(996));
    }

    #[test]
    fn a_call_is_woken_by_its_last_waker() {
        let mut room = StreamRoom::default();
        let wakers = [(); 2].map(|()| Arc::new(Woken::default()));
        let [before, now] = [0, 1].map(|n: usize| Waker::from(wakers[n].clone()));
        let call = room.join(&before);
        assert!(!room.take(call, &now));
        assert_eq!(admit(&mut room, 1), 1);
        assert_eq!([0, 1].map(|n: usize| wakers[n].0.load(Relaxed)), [0, 1]);
    }
}
