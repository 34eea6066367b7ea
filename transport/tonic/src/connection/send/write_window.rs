//! How many bytes of WRITEs are in flight at a time.
//!
//! The window keeps the link busy (bandwidth times delay), and no more: a small message waits
//! behind everything that is posted before it (R13). Neither factor is known. A link that runs dry
//! while payload waits has too small a window; a link that never does may have too large a one.
//!
//! | on | window |
//! |---|---|
//! | completion: nothing is in flight, and payload waits | doubled, up to [`MAX`] |
//! | [`CALM`] completions in a row with some still in flight | reduced by a quarter, down to [`MIN`] |
//! | a message went the same way as SEND while WRITEs were in flight | [`MIN`] |
//!
//! A WRITE at each half of the window reports its completion, so that there is time to post the
//! next half.

/// Bytes: 80 us of 100 Gb/s.
const MIN: usize = 1 << 20;
/// Bytes: 670 us of 100 Gb/s.
const MAX: usize = 8 << 20;
/// Completions without running dry after which the window shrinks.
const CALM: u32 = 64;

#[derive(Debug)]
pub(in crate::connection) struct WriteWindow {
    size: usize,
    calm: u32,
}

impl Default for WriteWindow {
    fn default() -> Self {
        WriteWindow { size: MIN, calm: 0 }
    }
}

impl WriteWindow {
    /// Bytes that may be posted while `writing` bytes are in flight.
    #[inline]
    pub(in crate::connection) fn room(&self, writing: usize) -> usize {
        self.size.saturating_sub(writing)
    }

    /// Bytes after which a WRITE reports its completion.
    #[inline]
    pub(in crate::connection) fn half(&self) -> usize {
        self.size / 2
    }

    /// Bytes of one WRITE, at most: streams take turns, at least four in a window.
    #[inline]
    pub(in crate::connection) fn chunk(&self) -> usize {
        self.size / 4
    }

    /// WRITEs have completed: `writing` bytes are still in flight; `waits`: payload waits for room.
    #[inline]
    pub(in crate::connection) fn completed(&mut self, writing: usize, waits: bool) {
        match (writing, waits) {
            (0, true) => {
                self.size = (self.size * 2).min(MAX);
                self.calm = 0;
            }
            (0, false) => {}
            _ => {
                self.calm += 1;
                if self.calm == CALM {
                    self.size = (self.size / 4 * 3).max(MIN);
                    self.calm = 0;
                }
            }
        }
    }

    /// Small messages share the link with the WRITEs.
    #[inline]
    pub(in crate::connection) fn shared(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_grows_when_the_link_runs_dry_and_shrinks_when_it_does_not() {
        let mut window = WriteWindow::default();
        assert_eq!((window.room(0), window.room(MIN), window.room(MAX)), (MIN, 0, 0));
        window.completed(0, false);
        assert_eq!(window.size, MIN, "there was no more to write");
        for size in [2 << 20, 4 << 20, MAX, MAX] {
            window.completed(0, true);
            assert_eq!((window.size, window.half()), (size, size / 2));
        }
        for _ in 1..CALM {
            window.completed(1, true);
        }
        assert_eq!(window.size, MAX);
        window.completed(1, true);
        assert_eq!(window.size, MAX / 4 * 3);
        for _ in 0..CALM * 32 {
            window.completed(1, true);
        }
        assert_eq!(window.size, MIN, "and no less than that");
    }

    #[test]
    fn small_messages_shrink_the_window_at_once() {
        let mut window = WriteWindow::default();
        window.completed(0, true);
        window.completed(0, true);
        window.shared();
        assert_eq!(window.size, MIN);
    }
}
