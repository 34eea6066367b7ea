//! The order in which streams write.
//!
//! Messages of about the same length are written one after the other. So the receiver works on the
//! first message while the second is written. With many messages of one length, the mean time of a
//! transfer is about half of what it would be if all streams took turns. A short message still
//! overtakes a long message, at the next WRITE. A long message ends later than it would if all
//! streams took turns, by at most the time in which its own bytes are written.
//!
//! The order is weighted fair queueing by message, with equal weights. The virtual clock counts the
//! bytes that each stream would have written if all streams took turns. The message that would end
//! first by that clock is written first. The algorithm is from Demers, Keshav and Shenker,
//! "Analysis and simulation of a fair queueing algorithm", SIGCOMM 1989. Unlike in that algorithm,
//! a message in progress is interrupted for a message that would end earlier.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A stream that can write. The fields are compared in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct WriteTurn {
    /// When the stream's message would end, by the virtual clock.
    finish: u64,
    /// Orders turns that would end at the same time.
    number: u64,
    key: usize,
}

/// The streams with a WRITE to hand out.
#[derive(Debug, Default)]
pub(super) struct WriteOrder {
    /// The streams whose source is staged, and the streams whose source is pinned.
    queues: [BinaryHeap<Reverse<WriteTurn>>; 2],
    /// The index of the queue whose turn it is.
    turn: usize,
    /// The virtual clock, in bytes.
    clock: u64,
    /// The number of the next turn.
    number: u64,
}

impl WriteOrder {
    /// When a message of `len` bytes that can be written from now on would end, by the virtual
    /// clock.
    pub(super) fn finish(&self, len: u64) -> u64 {
        self.clock.saturating_add(len)
    }

    /// Adds a stream, which must not be in any queue. A stream with a `finish` of 0 goes before all
    /// others.
    pub(super) fn push(&mut self, key: usize, pinned: bool, finish: u64) {
        let turn = WriteTurn { finish, number: self.number, key };
        self.number += 1;
        self.queues[usize::from(pinned)].push(Reverse(turn));
    }

    /// The first stream of a queue.
    pub(super) fn first(&self, queue: usize) -> Option<usize> {
        self.queues[queue].peek().map(|Reverse(turn)| turn.key)
    }

    /// Removes the first stream of a queue.
    pub(super) fn pop(&mut self, queue: usize) {
        self.queues[queue].pop();
    }

    /// Removes a stream from its queue.
    pub(super) fn remove(&mut self, key: usize) {
        for queue in &mut self.queues {
            queue.retain(|Reverse(turn)| turn.key != key);
        }
    }

    /// The indices of the two queues, beginning with the queue whose turn it is. Staged and pinned
    /// sources alternate, so that neither waits for the other's room.
    pub(super) fn turns(&self) -> [usize; 2] {
        [self.turn, 1 - self.turn]
    }

    /// Records that the first stream of a queue writes `len` bytes.
    pub(super) fn wrote(&mut self, queue: usize, len: usize) {
        self.turn = 1 - queue;
        let streams = self.queues[0].len() + self.queues[1].len();
        self.clock = self.clock.saturating_add(len as u64 / streams.max(1) as u64);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queues.iter().all(BinaryHeap::is_empty)
    }

    /// Whether any stream with a staged source waits.
    pub(super) fn has_staged(&self) -> bool {
        !self.queues[0].is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE: u64 = 32 << 10;

    /// Writes messages, each on a stream of its own, in WRITEs of 32 KiB. Returns the number of
    /// bytes written of each message. A message is its length and the number of written bytes at
    /// which it arrives.
    fn run(messages: &[(u64, u64)], until: impl Fn(&[u64]) -> bool) -> Vec<u64> {
        let mut order = WriteOrder::default();
        let mut written = vec![0; messages.len()];
        let mut arrived = 0;
        while !until(&written) {
            let total: u64 = written.iter().sum();
            while let Some((at, len)) = messages.get(arrived)
                && *at <= total
            {
                order.push(arrived, true, order.finish(*len));
                arrived += 1;
            }
            let key = order.first(1).unwrap();
            let len = (messages[key].1 - written[key]).min(WRITE);
            order.wrote(1, len as usize);
            written[key] += len;
            if written[key] == messages[key].1 {
                order.pop(1);
            }
        }
        written
    }

    #[test]
    fn messages_of_one_length_go_one_after_the_other() {
        let written = run(&[(0, 1 << 20); 8], |written| written[2] > 0);
        assert_eq!(written, [1 << 20, 1 << 20, WRITE, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_short_message_overtakes_long_ones() {
        let mut messages = vec![(0, 16 << 20); 8];
        messages.push((20 << 20, 1 << 20));
        let written = run(&messages, |written| written[8] == 1 << 20);
        assert_eq!(written.iter().sum::<u64>(), 21 << 20, "it waits for no more than a WRITE");
    }

    /// Short messages keep arriving. Compared with taking turns, the long message ends later by at
    /// most the time in which its own bytes are written.
    #[test]
    fn a_long_message_does_not_starve() {
        const SHORT: u64 = 1 << 20;
        const LONG: u64 = 16 * SHORT;
        for others in [1, 2, 7, 63] {
            let mut order = WriteOrder::default();
            order.push(0, true, order.finish(LONG));
            let mut written = vec![0; others + 1];
            while written[0] < LONG {
                let ready: Vec<usize> = order.queues[1].iter().map(|a| a.0.key).collect();
                for key in (1..=others).filter(|key| !ready.contains(key)) {
                    order.push(key, true, order.finish(SHORT));
                }
                let key = order.first(1).unwrap();
                order.wrote(1, WRITE as usize);
                written[key] += WRITE;
                if key > 0 && written[key].is_multiple_of(SHORT) {
                    order.pop(1);
                }
            }
            let total: u64 = written.iter().sum();
            assert!(total <= (others as u64 + 1) * LONG + LONG, "{others}: {written:?}");
        }
    }

    #[test]
    fn staged_and_pinned_sources_alternate() {
        let mut order = WriteOrder::default();
        order.push(3, false, order.finish(1 << 20));
        order.push(4, true, order.finish(1));
        assert!(order.has_staged() && !order.is_empty());
        let mut turns = Vec::new();
        for _ in 0..4 {
            let [queue, _] = order.turns();
            turns.extend(order.first(queue));
            order.wrote(queue, 4096);
        }
        assert_eq!(turns, [3, 4, 3, 4]);
        order.remove(3);
        assert!(!order.has_staged() && order.first(1) == Some(4));
        order.push(5, true, 0);
        assert_eq!(order.first(1), Some(5), "what the peer has recalled");
        order.pop(1);
        order.remove(4);
        assert!(order.is_empty());
    }
}
