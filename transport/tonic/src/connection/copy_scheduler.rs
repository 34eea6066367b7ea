//! Decides when a connection copies payload, and when its copies pause for other work.
//!
//! Some links, such as shared memory, copy payload when a WRITE is queued, within a flush, under
//! the connection's lock. Copying without yielding is faster: freshly encoded data is still in the
//! cache, and one message is complete before the next needs memory. But short messages have to wait
//! for the copies (R13). So copies pause only while short messages travel in the same direction.
//!
//! # Sending
//!
//! | state | event | next state | decision |
//! |---|---|---|---|
//! | Continuous | a flush of the driver | Continuous | copy |
//! | Interleaved(n) | a flush of the driver, after it made a task ready | Yielded(n) | messages only |
//! | Interleaved(n) | another flush of the driver | Interleaved(n) | copy |
//! | Yielded(n) | a flush of the driver | Interleaved(n) | copy |
//! | any | a flush of a call, behind a backlog | the same | messages only |
//! | any | a flush of a call, no backlog | the same | copy |
//! | any | a flush has copied, short bytes have been sent since the last copy | Interleaved([`PIECES`]) or Yielded([`PIECES`]) | |
//! | Interleaved(n), Yielded(n) | a flush has copied, no short bytes were sent | n - 1, Continuous at 0 | |
//!
//! Bytes that a flush leaves to copy are a backlog. After each flush, the driver continues as
//! follows:
//!
//! | state | backlog | decision |
//! |---|---|---|
//! | Continuous | yes | flushes again, until it has flushed [`MAX_FLUSHES`] times in the turn, then yields |
//! | Interleaved, Yielded | yes | yields |
//! | any | no | waits |
//!
//! # One flush
//!
//! | state | event | next state |
//! |---|---|---|
//! | Messages | no message is left to post | Copying, or Over if the flush posts only messages |
//! | Copying | [`MAX_COPY`] bytes were copied, or the peer has sent a message | Over |
//!
//! # Receiving
//!
//! A reader hands on at most [`MAX_READ`] bytes, then yields once. While short messages arrive, the
//! reader checks every [`READ_CHECK`] bytes whether a message is pending. If a message is pending,
//! the reader yields twice: first to the driver, then to the tasks that the driver wakes.

use std::task::{Context, Poll};

use tonic_rdma_fabric::turn;

/// Approximate maximum number of bytes that one flush copies while it holds the connection's lock
/// (R13).
const MAX_COPY: usize = 128 * 1024;
/// Maximum length of one WRITE in bytes. After each WRITE, the flush checks for a message from the
/// peer.
const MAX_WRITE: usize = 32 * 1024;
/// Minimum length in bytes of a WRITE that the protocol cuts off a longer WRITE.
const MIN_WRITE: usize = 16 * 1024;
/// Maximum number of flushes in one turn of the driver while the state is Continuous.
const MAX_FLUSHES: usize = 4;
/// Number of pieces copied after the last short message until copies no longer pause. A piece is 64
/// or 128 KiB, so copying these pieces takes about a millisecond.
const PIECES: u8 = 64;
/// Bytes that a reader hands on before other tasks run.
const MAX_READ: usize = 1 << 20;
/// Bytes that a reader hands on between two checks for a pending message.
const READ_CHECK: usize = 64 * 1024;

/// Whether short messages recently travelled in one direction of a connection.
#[derive(Debug, Default)]
struct Recent {
    /// Bytes of short messages since the connection began.
    short: u64,
    /// Number of pieces until short messages are forgotten. 0 if no short message came recently.
    pieces: u8,
}

impl Recent {
    /// Records that a piece of a long message was copied, or is about to be handed on.
    fn piece(&mut self, short: u64) {
        self.pieces = match short == self.short {
            true => self.pieces.saturating_sub(1),
            false => PIECES,
        };
        self.short = short;
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CopyState {
    Continuous,
    Interleaved,
    Yielded,
}

/// The copy schedule of one connection, protected by its lock.
#[derive(Debug)]
pub(super) struct CopyScheduler {
    state: CopyState,
    sent: Recent,
    received: Recent,
    backlog: bool,
}

/// The driver's next step after a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AfterFlush {
    /// Flush again in the same turn.
    Flush,
    /// Let other tasks run, then flush again.
    Yield,
    /// Nothing is left to copy.
    Wait,
}

impl CopyScheduler {
    #[inline]
    pub(super) fn new() -> Self {
        CopyScheduler {
            state: CopyState::Continuous,
            sent: Recent::default(),
            received: Recent::default(),
            backlog: false,
        }
    }

    /// Returns the driver's next flush. `woke` says that the driver has made a task ready in this
    /// turn. In the state Interleaved, the next copy then waits once for that task.
    #[inline]
    pub(super) fn driver_flush(&mut self, woke: bool) -> Flush {
        self.state = match (self.state, woke) {
            (CopyState::Continuous, _) => CopyState::Continuous,
            (CopyState::Interleaved, true) => CopyState::Yielded,
            (CopyState::Interleaved, false) | (CopyState::Yielded, _) => CopyState::Interleaved,
        };
        Flush::new(if self.state == CopyState::Yielded { 0 } else { MAX_COPY })
    }

    /// Returns a call's next flush, which copies only this call's data, never an earlier
    /// transfer's.
    #[inline]
    pub(super) fn call_flush(&self) -> Flush {
        Flush::new(if self.backlog { 0 } else { MAX_COPY })
    }

    /// Returns a flush that copies even if there is a backlog. It serves the driver's timers, its
    /// grace turns and the end of a connection, where a copy delays no call.
    #[inline]
    pub(super) fn full_flush(&self) -> Flush {
        Flush::new(MAX_COPY)
    }

    /// Records that a flush begins. [`flushed`](Self::flushed) then records the backlog that the
    /// flush leaves.
    #[inline]
    pub(super) fn flush_begins(&mut self) {
        self.backlog = false;
    }

    /// Records that a flush has ended. `short` is the number of bytes of short messages sent since
    /// the connection began. `waits` says whether bytes wait to be written.
    #[inline]
    pub(super) fn flushed(&mut self, flush: &Flush, short: u64, waits: bool) {
        if flush.copied > 0 {
            self.sent.piece(short);
            self.state = match (self.sent.pieces, self.state) {
                (0, _) => CopyState::Continuous,
                (_, CopyState::Continuous) => CopyState::Interleaved,
                (_, state) => state,
            };
        }
        self.backlog = flush.state == FlushState::Over && waits;
    }

    /// Whether bytes wait for another flush to copy them.
    #[inline]
    pub(super) fn has_backlog(&self) -> bool {
        self.backlog
    }

    /// The driver's next step after the `n`th flush of a turn, counted from 1.
    #[inline]
    pub(super) fn next(&self, n: usize) -> AfterFlush {
        match (self.backlog, self.state) {
            (false, _) => AfterFlush::Wait,
            (true, CopyState::Continuous) if n < MAX_FLUSHES => AfterFlush::Flush,
            (true, _) => AfterFlush::Yield,
        }
    }

    /// Records that a reader is about to hand on a piece. `short` is the number of bytes of short
    /// messages received since the connection began. Returns true if the reader must check for a
    /// pending message.
    #[inline]
    pub(super) fn interleaves_reads(&mut self, short: u64) -> bool {
        self.received.piece(short);
        self.received.pieces > 0
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FlushState {
    Messages,
    Copying,
    Over,
}

/// The limits of one flush, and the bytes that it has copied.
#[derive(Debug)]
pub(super) struct Flush {
    state: FlushState,
    max: usize,
    copied: usize,
}

impl Flush {
    fn new(max: usize) -> Self {
        Flush { state: FlushState::Messages, max, copied: 0 }
    }

    /// Maximum length of the next WRITE in bytes.
    #[inline]
    pub(super) fn room(&self) -> usize {
        match self.state {
            FlushState::Copying => (self.max - self.copied).clamp(MIN_WRITE, MAX_WRITE),
            FlushState::Messages | FlushState::Over => 0,
        }
    }

    /// Number of bytes copied.
    #[inline]
    pub(super) fn bytes(&self) -> usize {
        self.copied
    }

    /// Moves to the flush's next state, because the protocol has nothing more to post in the
    /// current state. Returns true if the next state has more room.
    #[inline]
    pub(super) fn advance(&mut self) -> bool {
        let copies = self.state == FlushState::Messages && self.max > 0;
        match (self.state, copies) {
            (FlushState::Messages, true) => self.state = FlushState::Copying,
            (FlushState::Messages, false) => self.state = FlushState::Over,
            (FlushState::Copying | FlushState::Over, _) => {}
        }
        copies
    }

    /// Records that `len` bytes were copied. `pending` says that the peer has sent a message.
    #[inline]
    pub(super) fn copied(&mut self, len: usize, pending: bool) {
        self.copied += len;
        if pending || self.copied >= self.max {
            self.state = FlushState::Over;
        }
    }
}

/// Decides when one reader yields, and when it checks for a pending message.
#[derive(Debug)]
pub(super) struct ReadPace {
    /// Number of operations to charge before the next piece (R20).
    uncharged: usize,
    /// Number of bytes handed on since other tasks last ran.
    handed: usize,
    /// The value of `handed` at which to check again for a pending message.
    check_at: usize,
    /// How many times to yield to other tasks before the next piece.
    yields: u8,
}

impl ReadPace {
    #[inline]
    pub(super) fn new() -> Self {
        ReadPace { uncharged: 0, handed: 0, check_at: READ_CHECK, yields: 0 }
    }

    /// Whether to ask the connection for a pending message before the next piece.
    #[inline]
    pub(super) fn is_check_due(&self) -> bool {
        self.handed >= self.check_at
    }

    /// Records the result of a check.
    #[inline]
    pub(super) fn checked(&mut self, pending: bool) {
        self.yields = match pending {
            true => 2,
            false => u8::from(self.handed >= MAX_READ),
        };
        if self.yields > 0 {
            self.handed = 0;
        }
        self.check_at = self.handed + READ_CHECK;
    }

    /// Whether the reader yields now.
    #[inline]
    pub(super) fn yields(&mut self) -> bool {
        let yields = self.yields > 0;
        self.yields = self.yields.saturating_sub(1);
        yields
    }

    /// Records that `len` bytes were handed on.
    #[inline]
    pub(super) fn handed_on(&mut self, len: usize) {
        self.handed += len;
        self.uncharged += 1 + turn::copies(len);
    }

    /// Charges the pieces that were handed on. Returns `Pending` if other tasks should run before
    /// the next piece.
    #[inline]
    pub(super) fn charge(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        turn::charge(cx, &mut self.uncharged)
    }

    /// Resets the pace, because the reader waits for more data and other tasks run in any case.
    #[inline]
    pub(super) fn waits(&mut self) {
        (self.handed, self.check_at) = (0, READ_CHECK);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::{Instant, advance};

    use super::*;

    /// Advances tokio's clock by the time in which a link copies `len` bytes at 8 bytes per
    /// nanosecond.
    async fn copy(len: usize) {
        advance(Duration::from_nanos(len as u64 / 8)).await;
    }

    /// A sender with a transfer of `left` bytes and a short message of 100 bytes whenever one is
    /// due. Records how long short messages wait.
    struct Sender {
        scheduler: CopyScheduler,
        left: usize,
        short: u64,
        due: Vec<Instant>,
        waited: Vec<Duration>,
        yields: usize,
    }

    impl Sender {
        fn new(left: usize, due: impl IntoIterator<Item = Instant>) -> Self {
            let mut due: Vec<_> = due.into_iter().collect();
            due.reverse();
            let scheduler = CopyScheduler::new();
            Sender { scheduler, left, short: 0, due, waited: Vec::new(), yields: 0 }
        }

        fn is_due(&self) -> bool {
            self.due.last().is_some_and(|due| *due <= Instant::now())
        }

        async fn flush(&mut self, mut flush: Flush) {
            self.scheduler.flush_begins();
            while self.is_due() {
                self.waited.extend(self.due.pop().map(|due| due.elapsed()));
                self.short += 100;
            }
            flush.advance();
            while self.left > 0 && flush.room() > 0 {
                let len = flush.room().min(self.left);
                copy(len).await;
                self.left -= len;
                flush.copied(len, false);
            }
            self.scheduler.flushed(&flush, self.short, self.left > 0);
        }

        /// Runs the driver until nothing is left. Short messages that become due during a flush are
        /// sent at the beginning of the next flush.
        async fn run(&mut self) {
            'turns: loop {
                for n in 1.. {
                    let flush = self.scheduler.driver_flush(false);
                    self.flush(flush).await;
                    match self.scheduler.next(n) {
                        AfterFlush::Flush => continue,
                        AfterFlush::Yield => break,
                        AfterFlush::Wait => break 'turns,
                    }
                }
                self.yields += 1;
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_transfer_by_itself_yields_once_in_four_flushes() {
        let mut sender = Sender::new(64 << 20, []);
        sender.run().await;
        assert_eq!(sender.yields, (64 << 20) / (MAX_COPY * MAX_FLUSHES) - 1);
    }

    #[tokio::test(start_paused = true)]
    async fn beside_short_messages_it_yields_after_each_flush() {
        let start = Instant::now();
        let due = (0..200).map(|n| start + Duration::from_micros(40) * n);
        let mut sender = Sender::new(64 << 20, due);
        sender.run().await;
        assert_eq!(sender.waited.len(), 200);
        // The scheduler did not expect the first message. All later messages wait for at most one
        // flush.
        let one_flush = Duration::from_nanos(MAX_COPY as u64 / 8);
        assert!(
            sender.waited[1..].iter().all(|waited| *waited <= one_flush),
            "{:?}",
            sender.waited
        );
        assert!(sender.yields >= (64 << 20) / MAX_COPY - 2 * MAX_FLUSHES);
    }

    #[tokio::test(start_paused = true)]
    async fn short_messages_are_forgotten_after_64_pieces() {
        let mut sender = Sender::new(64 << 20, [Instant::now()]);
        sender.run().await;
        let interleaved = usize::from(PIECES);
        let rest = (64 << 20) / MAX_COPY - interleaved;
        let continuous = rest.div_ceil(MAX_FLUSHES);
        assert!(sender.yields.abs_diff(interleaved + continuous) <= 2, "{}", sender.yields);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_was_woken_waits_for_no_copy_once() {
        let mut sender = Sender::new(8 << 20, [Instant::now()]);
        let flush = sender.scheduler.driver_flush(true);
        assert_eq!(flush.max, MAX_COPY, "no short messages so far");
        sender.flush(flush).await;
        for _ in 0..3 {
            let flush = sender.scheduler.driver_flush(true);
            assert_eq!(flush.max, 0);
            sender.flush(flush).await;
            assert_eq!(sender.scheduler.next(1), AfterFlush::Yield);
            let flush = sender.scheduler.driver_flush(true);
            assert_eq!(flush.max, MAX_COPY, "once only: a peer that always wakes stops no copy");
            sender.flush(flush).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn calls_copy_for_themselves_only() {
        let mut sender = Sender::new(1 << 20, []);
        let flush = sender.scheduler.call_flush();
        sender.flush(flush).await;
        assert!(sender.scheduler.has_backlog());
        let left = sender.left;
        let flush = sender.scheduler.call_flush();
        sender.flush(flush).await;
        assert_eq!(sender.left, left);
        assert!(sender.scheduler.has_backlog());
    }

    #[test]
    fn a_flush_posts_messages_first_and_ends() {
        let mut flush = Flush::new(MAX_COPY);
        assert_eq!(flush.room(), 0);
        assert!(flush.advance());
        assert!(!flush.advance(), "nothing to copy is no reason to ask for ever");
        let mut pieces = 0;
        while flush.room() > 0 {
            assert!((MIN_WRITE..=MAX_WRITE).contains(&flush.room()));
            flush.copied(flush.room() - 1000, false);
            pieces += 1;
        }
        assert_eq!((pieces, flush.state), (5, FlushState::Over));
    }

    #[test]
    fn a_message_of_the_peer_ends_a_flush() {
        let mut flush = Flush::new(MAX_COPY);
        flush.advance();
        flush.copied(1, true);
        assert_eq!((flush.room(), flush.state), (0, FlushState::Over));
    }

    #[test]
    fn a_flush_of_messages_is_over_when_they_are_posted() {
        let mut flush = Flush::new(0);
        assert_eq!(flush.state, FlushState::Messages);
        assert!(!flush.advance());
        assert_eq!((flush.room(), flush.state, flush.copied), (0, FlushState::Over, 0));
    }

    #[test]
    fn readers_yield_after_a_mebibyte_or_to_a_pending_message() {
        let mut pace = ReadPace::new();
        let mut handed = 0;
        while !pace.yields() {
            pace.handed_on(16 * 1024);
            handed += 16 * 1024;
            if pace.is_check_due() {
                pace.checked(false);
            }
        }
        assert_eq!(handed, MAX_READ);
        assert!(!pace.yields(), "once");
        pace.handed_on(READ_CHECK);
        assert!(pace.is_check_due());
        pace.checked(true);
        assert!(pace.yields() && pace.yields() && !pace.yields(), "twice");
        pace.handed_on(READ_CHECK - 1);
        pace.waits();
        pace.handed_on(READ_CHECK - 1);
        assert!(!pace.is_check_due());
    }

    #[test]
    fn reads_interleave_for_64_pieces_after_a_short_message() {
        let mut scheduler = CopyScheduler::new();
        assert!(!scheduler.interleaves_reads(0), "none yet");
        for short in [10, 20] {
            let checks = (0..200).filter(|_| scheduler.interleaves_reads(short)).count();
            assert_eq!(checks, usize::from(PIECES));
        }
    }

    /// A peer may cut a body into pieces of one byte, and a driver on another thread may deliver
    /// them as fast as they are read.
    #[tokio::test]
    async fn short_pieces_end_a_readers_turn() {
        let (mut pace, mut turns, mut pieces) = (ReadPace::new(), Vec::new(), 0);
        std::future::poll_fn(|cx| {
            let before = pieces;
            while pieces < 1000 && pace.charge(cx).is_ready() {
                pieces += 1;
                pace.handed_on(1);
            }
            turns.push(pieces - before);
            if pieces < 1000 { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        assert!(turns.len() > 7 && turns.iter().all(|turn| *turn <= 129), "{turns:?}");
    }
}
