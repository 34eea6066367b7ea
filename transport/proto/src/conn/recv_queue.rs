//! One end's RECVs, in the order in which they were posted.
//!
//! A device fills RECVs in that order, so both ends know which RECV each message lands in, and how
//! long that RECV is. Consecutive RECVs of one size form a run. A connection has RECVs of two
//! sizes, one for rest and one for load, so a queue has several runs only after a change from one
//! size to the other.

use std::collections::VecDeque;

/// Consecutive RECVs of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) recvs: u32,
    /// Bytes of each RECV of the run.
    pub(super) bytes: u32,
}

/// A queue of runs.
#[derive(Debug, Default)]
pub(super) struct RecvQueue {
    /// The first run, and in most queues the only run. This run is empty only if the queue is
    /// empty.
    front: Run,
    /// The number of RECVs in the runs behind `front`.
    n_behind: u32,
    behind: VecDeque<Run>,
}

impl RecvQueue {
    pub(super) fn new(recvs: u32, bytes: u32) -> Self {
        RecvQueue { front: Run { recvs, bytes }, n_behind: 0, behind: VecDeque::new() }
    }

    /// The number of RECVs.
    #[inline]
    pub(super) fn len(&self) -> u32 {
        self.front.recvs + self.n_behind
    }

    /// Bytes of the first RECV. Meaningless if the queue is empty.
    #[inline]
    pub(super) fn front_bytes(&self) -> u32 {
        self.front.bytes
    }

    /// Appends RECVs.
    #[inline]
    pub(super) fn push(&mut self, run: Run) {
        if self.n_behind == 0 && self.front.bytes == run.bytes {
            self.front.recvs += run.recvs;
        } else {
            self.push_behind(run);
        }
    }

    #[cold]
    fn push_behind(&mut self, run: Run) {
        if run.recvs == 0 {
            return;
        }
        if self.front.recvs == 0 {
            self.front = run;
            return;
        }
        self.n_behind += run.recvs;
        match self.behind.back_mut() {
            Some(back) if back.bytes == run.bytes => back.recvs += run.recvs,
            _ => self.behind.push_back(run),
        }
    }

    /// Removes the first RECV and returns its bytes.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<u32> {
        let bytes = self.front.bytes;
        self.front.recvs = self.front.recvs.checked_sub(1)?;
        if self.front.recvs == 0 && self.n_behind > 0 {
            self.advance();
        }
        Some(bytes)
    }

    /// Removes the last RECV and returns its bytes.
    pub(super) fn pop_back(&mut self) -> Option<u32> {
        let Some(back) = self.behind.back_mut() else {
            self.front.recvs = self.front.recvs.checked_sub(1)?;
            return Some(self.front.bytes);
        };
        self.n_behind -= 1;
        back.recvs -= 1;
        let bytes = back.bytes;
        if back.recvs == 0 {
            self.behind.pop_back();
        }
        Some(bytes)
    }

    /// Removes the first run and returns it. The run is empty if the queue is empty.
    #[inline]
    pub(super) fn take_run(&mut self) -> Run {
        let run = self.front;
        self.front.recvs = 0;
        if self.n_behind > 0 {
            self.advance();
        }
        run
    }

    /// Bytes of each RECV.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> impl Iterator<Item = u32> + '_ {
        let runs = std::iter::once(&self.front).chain(&self.behind);
        runs.flat_map(|run| (0..run.recvs).map(|_| run.bytes))
    }

    /// Replaces the first run, which is used up, by the next.
    #[cold]
    fn advance(&mut self) {
        if let Some(next) = self.behind.pop_front() {
            self.n_behind -= next.recvs;
            self.front = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with the same operations on a queue of single RECVs.
    #[test]
    fn agrees_with_a_plain_queue() {
        for seed in 1..=300_u32 {
            let (mut queue, mut plain) = (RecvQueue::new(3, 1), VecDeque::from([1, 1, 1]));
            let mut x = seed.wrapping_mul(0x9e37_79b9) | 1;
            for _ in 0..400 {
                x ^= x << 13;
                x ^= x >> 17;
                x ^= x << 5;
                match x % 7 {
                    0..=2 => {
                        let run = Run { recvs: x >> 8 & 3, bytes: 1 + (x >> 16 & 1) };
                        queue.push(run);
                        plain.extend((0..run.recvs).map(|_| run.bytes));
                    }
                    3 | 4 => assert_eq!(queue.pop(), plain.pop_front()),
                    5 => assert_eq!(queue.pop_back(), plain.pop_back()),
                    _ => {
                        let run = queue.take_run();
                        assert_eq!(run.recvs == 0, plain.is_empty(), "takes some if there are any");
                        for _ in 0..run.recvs {
                            assert_eq!(plain.pop_front(), Some(run.bytes));
                        }
                        assert!(run.recvs == 0 || plain.front() != Some(&run.bytes), "all of it");
                    }
                }
                assert_eq!(queue.len() as usize, plain.len());
                assert!(queue.bytes().eq(plain.iter().copied()));
                if let Some(first) = plain.front() {
                    assert_eq!(queue.front_bytes(), *first);
                }
            }
        }
    }
}
