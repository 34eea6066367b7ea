//! Limits the bytes of WRITEs in flight.
//!
//! The window should be just large enough to keep the link busy (bandwidth times delay), because a
//! small message waits behind all bytes that were posted before it (R13). Bandwidth and delay are
//! not known. If a link runs dry while payload waits, its window is too small. If a link never runs
//! dry, its window may be too large.
//!
//! | on | window |
//! |---|---|
//! | a completion leaves nothing in flight while payload waits | doubled, up to [`MAX`] |
//! | [`CALM`] completions have left WRITEs in flight since a row of this table last applied | three quarters of its size, but at least [`FIRST`] |
//! | a SEND with a short message was posted while WRITEs were in flight | the bytes that the link carries in [`WAIT`] |
//!
//! The completions of a busy link show how much the link carries. A fast link therefore keeps a
//! large window even with small messages. A small message waits as long behind a fast link's large
//! window as behind a slow link's small window.
//!
//! After each half of the window, a WRITE reports its completion. So the next half can be posted
//! while the link still works on the other half.

use std::time::{Duration, Instant};

/// Approximate time that a small message waits behind WRITEs.
const WAIT: Duration = Duration::from_micros(80);
/// Window in bytes until the link's bandwidth is known: [`WAIT`] at 100 Gb/s.
const FIRST: usize = 1 << 20;
/// Minimum window in bytes if there are small messages: four WRITEs of 64 KiB.
const MIN: usize = 256 << 10;
/// Maximum window in bytes: 670 us at 100 Gb/s.
const MAX: usize = 8 << 20;
/// The time over which bandwidth is measured. A shorter time would not suffice, because completions
/// may be seen late, and several at a time.
const SPAN: Duration = Duration::from_micros(500);
/// The number of [`WAIT`]s in a [`SPAN`], rounded up.
const SPANS: usize = SPAN.as_micros().div_ceil(WAIT.as_micros()) as usize;
/// Number of completions without running dry after which the window shrinks.
const CALM: u32 = 64;

#[derive(Debug)]
pub(crate) struct WriteWindow {
    size: usize,
    calm: u32,
    /// When the current measurement began, and the number of bytes that have completed since then.
    /// `None` while nothing is measured.
    busy: Option<(Instant, usize)>,
    /// Bytes that the link carries in [`WAIT`]. 0 if unknown.
    carries: usize,
}

impl Default for WriteWindow {
    fn default() -> Self {
        WriteWindow { size: FIRST, calm: 0, busy: None, carries: 0 }
    }
}

impl WriteWindow {
    /// Bytes that may be posted while `writing` bytes are in flight.
    #[inline]
    pub(crate) fn room(&self, writing: usize) -> usize {
        self.size.saturating_sub(writing)
    }

    /// Number of bytes after which a WRITE reports its completion.
    #[inline]
    pub(crate) fn half(&self) -> usize {
        self.size / 2
    }

    /// Maximum bytes of one WRITE. A window has room for four such WRITEs, so that shorter
    /// transfers can go in between.
    #[inline]
    pub(crate) fn chunk(&self) -> usize {
        self.size / 4
    }

    /// Records that WRITEs of `done` bytes have completed, and `writing` bytes are still in flight.
    /// `waits` says whether payload waits for room. Calls `now` only if the time is needed, because
    /// `now` may be a system call.
    #[inline]
    pub(crate) fn completed(
        &mut self,
        done: usize,
        writing: usize,
        waits: bool,
        now: impl FnOnce() -> Instant,
    ) {
        self.measure(done, writing, now);
        match (writing, waits) {
            (0, true) => {
                self.size = (self.size * 2).min(MAX);
                self.calm = 0;
            }
            (0, false) => {}
            _ => {
                self.calm += 1;
                if self.calm == CALM {
                    self.size = (self.size / 4 * 3).max(FIRST);
                    self.calm = 0;
                }
            }
        }
    }

    fn measure(&mut self, done: usize, writing: usize, now: impl FnOnce() -> Instant) {
        let Some((since, bytes)) = self.busy else {
            // Start to measure here, and do not count this completion, because it covers work whose
            // start time is unknown.
            self.busy = (writing > 0).then(|| (now(), 0));
            return;
        };
        let bytes = bytes + done;
        self.busy = (writing > 0).then_some((since, bytes));
        // Return while the link is busy and has not yet completed the bytes that it carries in a
        // `SPAN`, by the last measurement.
        if writing > 0 && bytes / SPANS < self.carries {
            return;
        }
        let now = now();
        let took = now.saturating_duration_since(since);
        if took >= SPAN {
            let carried = bytes as u128 * WAIT.as_nanos() / took.as_nanos();
            let carried = carried.min(MAX as u128) as usize;
            self.carries = match self.carries {
                0 => carried,
                before => before / 2 + carried / 2,
            };
            self.busy = self.busy.map(|_| (now, 0));
        }
    }

    /// Sets the window to the bytes that the link carries in [`WAIT`], because small messages share
    /// the link with the WRITEs.
    #[inline]
    pub(crate) fn shared(&mut self) {
        self.size = if self.carries == 0 { FIRST } else { self.carries.clamp(MIN, MAX) };
        self.calm = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_grows_when_the_link_runs_dry_and_shrinks_when_it_does_not() {
        let now = Instant::now();
        let mut window = WriteWindow::default();
        assert_eq!((window.room(0), window.room(FIRST), window.room(MAX)), (FIRST, 0, 0));
        window.completed(1, 0, false, || now);
        assert_eq!(window.size, FIRST, "there was no more to write");
        for size in [2 << 20, 4 << 20, MAX, MAX] {
            window.completed(1, 0, true, || now);
            assert_eq!((window.size, window.half()), (size, size / 2));
        }
        for _ in 1..CALM {
            window.completed(1, 1, true, || now);
        }
        assert_eq!(window.size, MAX);
        window.completed(1, 1, true, || now);
        assert_eq!(window.size, MAX / 4 * 3);
        for _ in 0..CALM * 32 {
            window.completed(1, 1, true, || now);
        }
        assert_eq!(window.size, FIRST, "and no less than that");
    }

    /// Runs a link that carries `rate` bytes per microsecond for a while, half a window at a time.
    fn after(rate: usize, window: &mut WriteWindow, now: &mut Instant) -> usize {
        window.completed(1, 1, true, || *now);
        for _ in 0..4000 {
            let half = window.half();
            *now += Duration::from_nanos((half * 1000 / rate) as u64);
            window.completed(half, half, true, || *now);
            window.shared();
        }
        window.size
    }

    #[test]
    fn small_messages_wait_as_long_on_any_link() {
        let (mut window, mut now) = (WriteWindow::default(), Instant::now());
        window.completed(1, 0, true, || now);
        window.shared();
        assert_eq!(window.size, FIRST, "nothing is known yet");
        // Bandwidths of 400, 100, 25 and 5 Gb/s.
        for (rate, expected) in [(50_000, 4_000_000), (12_500, 1_000_000), (3125, MIN), (625, MIN)]
        {
            let size = after(rate, &mut window, &mut now);
            assert!(size.abs_diff(expected) <= expected / 50, "{size} at {rate} bytes/us");
        }
        assert!(after(50_000, &mut window, &mut now) > 3_900_000, "a slow link has become fast");
    }

    #[test]
    fn time_without_writes_is_not_the_links() {
        let (mut window, mut now) = (WriteWindow::default(), Instant::now());
        after(12_500, &mut window, &mut now);
        window.completed(FIRST, 0, false, || now);
        let before = window.carries;
        for _ in 0..10 {
            now += Duration::from_secs(3600);
            window.completed(FIRST, FIRST, false, || now);
            now += SPAN / 2;
            window.completed(FIRST, 0, false, || now);
        }
        assert_eq!(window.carries, before);
    }

    #[test]
    fn bursts_tell_that_a_link_has_become_slow() {
        let (mut window, mut now) = (WriteWindow::default(), Instant::now());
        after(50_000, &mut window, &mut now);
        window.completed(FIRST, 0, false, || now);
        for _ in 0..20 {
            window.completed(FIRST, FIRST, false, || now);
            now += Duration::from_micros((FIRST / 625) as u64);
            window.completed(FIRST, 0, false, || now);
        }
        assert!(window.carries < 51_000, "{}", window.carries);
    }

    /// Asking for the time may be a system call.
    #[test]
    fn a_busy_link_is_asked_for_the_time_once_in_a_span() {
        let (mut window, mut now) = (WriteWindow::default(), Instant::now());
        after(12_500, &mut window, &mut now);
        let (mut asked, begin) = (0, now);
        for _ in 0..4000 {
            now += Duration::from_micros(10);
            window.completed(125_000, FIRST, true, || {
                asked += 1;
                now
            });
        }
        let spans = (now - begin).as_micros() / SPAN.as_micros();
        assert!((spans / 2..=spans * 3 / 2).contains(&asked), "{asked} in {spans} spans");
    }

    #[test]
    fn completions_that_are_seen_late_are_measured_with_those_behind_them() {
        let (mut window, mut now) = (WriteWindow::default(), Instant::now());
        window.completed(1, 1, true, || now);
        // At 25 Gb/s, the completions of two halves of a window are seen 1 us apart.
        for _ in 0..400 {
            let half = window.half();
            now += Duration::from_nanos((half * 2 * 1000 / 3125) as u64 - 1000);
            window.completed(half, half, true, || now);
            now += Duration::from_nanos(1000);
            window.completed(half, half, true, || now);
            window.shared();
            assert!(window.size <= FIRST, "{}", window.size);
        }
        assert!(window.carries < MIN * 11 / 10, "{}", window.carries);
    }
}
