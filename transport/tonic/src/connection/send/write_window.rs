//! How many bytes of WRITEs are in flight at a time.
//!
//! The window keeps the link busy (bandwidth times delay), and no more: a small message waits
//! behind everything that is posted before it (R13). Neither factor is known. A link that runs dry
//! while payload waits has too small a window; a link that never does may have too large a one.
//!
//! | on | window |
//! |---|---|
//! | completion: nothing is in flight, and payload waits | doubled, up to [`MAX`] |
//! | [`CALM`] completions in a row with some still in flight | reduced by a quarter; [`FIRST`] at least |
//! | a message went the same way as SEND while WRITEs were in flight | what the link carries in [`WAIT`] |
//!
//! What the link carries is told by the completions while it is busy. A fast link keeps a large
//! window beside small messages, which wait for as long behind it as behind a small one of a slow
//! link.
//!
//! A WRITE at each half of the window reports its completion, so that there is time to post the
//! next half.

use std::time::{Duration, Instant};

/// How long a small message waits behind WRITEs, about.
const WAIT: Duration = Duration::from_micros(80);
/// Bytes, as long as it is not known what the link carries: [`WAIT`] of 100 Gb/s.
const FIRST: usize = 1 << 20;
/// Bytes beside small messages, at least: four WRITEs of 64 KiB.
const MIN: usize = 256 << 10;
/// Bytes: 670 us of 100 Gb/s.
const MAX: usize = 8 << 20;
/// What the link carries is measured over: completions may be seen late, and several at a time.
const SPAN: Duration = Duration::from_micros(500);
/// [`SPAN`] in [`WAIT`]s, or a little more.
const SPANS: usize = SPAN.as_micros().div_ceil(WAIT.as_micros()) as usize;
/// Completions without running dry after which the window shrinks.
const CALM: u32 = 64;

#[derive(Debug)]
pub(crate) struct WriteWindow {
    size: usize,
    calm: u32,
    /// Since when there have been WRITEs in flight, and the bytes of those that have completed.
    busy: Option<(Instant, usize)>,
    /// Bytes that the link carries in [`WAIT`]; 0: not known.
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

    /// Bytes after which a WRITE reports its completion.
    #[inline]
    pub(crate) fn half(&self) -> usize {
        self.size / 2
    }

    /// Bytes of one WRITE, at most: streams take turns, at least four in a window.
    #[inline]
    pub(crate) fn chunk(&self) -> usize {
        self.size / 4
    }

    /// WRITEs of `done` bytes have completed now: `writing` bytes are still in flight; `waits`:
    /// payload waits for room. Tells the time only where it matters: that may be a system call.
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
            // What completes first was in flight for longer than is known.
            self.busy = (writing > 0).then(|| (now(), 0));
            return;
        };
        let bytes = bytes + done;
        self.busy = (writing > 0).then_some((since, bytes));
        // It has hardly been that long yet, unless the link has become slow: a burst tells, or as
        // many bytes as it carried before.
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

    /// Small messages share the link with the WRITEs.
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

    /// A link that carries `rate` bytes in a microsecond for a while, half a window at a time.
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
        // 400, 100, 25 and 5 Gb/s.
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

    /// The time may be a system call.
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
        // 25 Gb/s, of which two halves of a window are seen at a time, one behind the other.
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
