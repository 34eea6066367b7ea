//! Progress bars on a terminal: one for the whole command, and one for each large file in flight.
//! Nothing is drawn if stderr is not a terminal, or if its cursor cannot be moved.

use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Minimum size in bytes of a file that gets its own bar.
const OWN_BAR: u64 = 4 << 20;

const TOTAL: &str = "{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta} left {msg}";
const ENDLESS: &str = "{spinner} {bytes} {bytes_per_sec} {elapsed} {msg}";
const FILE: &str = "  {msg:26} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta} left";

/// All bars. Messages are printed above the bars.
fn bars() -> &'static MultiProgress {
    static BARS: OnceLock<MultiProgress> = OnceLock::new();
    BARS.get_or_init(|| {
        MultiProgress::with_draw_target(match crate::terminal::draws() {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        })
    })
}

/// Runs `print` while the bars are hidden.
pub(crate) fn aside<T>(print: impl FnOnce() -> T) -> T {
    bars().suspend(print)
}

fn style(template: &str) -> ProgressStyle {
    // An invalid template only affects the appearance, and the test below checks the templates.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// A bar that draws nothing until it is added to [`bars`]. A bar that draws earlier leaves a line
/// that is never cleared.
fn hidden(length: Option<u64>) -> ProgressBar {
    ProgressBar::with_draw_target(length, ProgressDrawTarget::hidden())
}

/// Progress of one command. The bar is removed on drop.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    files: AtomicU64,
}

impl Progress {
    /// Starts the progress of a command. `total` is the number of bytes, if known.
    pub(crate) fn start(total: Option<u64>) -> Progress {
        let bar = bars().add(hidden(total).with_style(style(if total.is_some() {
            TOTAL
        } else {
            ENDLESS
        })));
        bar.enable_steady_tick(Duration::from_millis(250));
        Progress { bar, files: AtomicU64::new(0) }
    }

    /// Starts the progress of a file of `size` bytes; `u64::MAX` if the size is unknown. A file of
    /// at least [`OWN_BAR`] bytes gets its own bar.
    pub(crate) fn file(&self, name: &str, size: u64) -> Bar {
        let own = (OWN_BAR..u64::MAX).contains(&size).then(|| {
            bars().add(hidden(Some(size)).with_style(style(FILE)).with_message(short(name)))
        });
        Bar { all: Some(self.bar.clone()), own }
    }

    /// Records bytes that need not be transferred. These bytes count neither for the rate nor for
    /// the remaining time.
    pub(crate) fn kept(&self, bytes: u64) {
        self.bar.dec_length(bytes);
    }

    /// Records that a file is complete.
    pub(crate) fn file_done(&self) {
        let files = self.files.fetch_add(1, Ordering::Relaxed) + 1;
        if !self.bar.is_hidden() {
            self.bar.set_message(format!("{files} files"));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Progress of one file. Its own bar is removed on drop.
#[derive(Debug)]
pub(crate) struct Bar {
    all: Option<ProgressBar>,
    own: Option<ProgressBar>,
}

impl Bar {
    /// A bar that is never shown.
    pub(crate) fn none() -> Bar {
        Bar { all: None, own: None }
    }

    /// Records transferred bytes.
    pub(crate) fn add(&self, bytes: usize) {
        for bar in [&self.all, &self.own].into_iter().flatten() {
            bar.inc(bytes as u64);
        }
    }

    /// Records bytes of the file that need not be transferred.
    pub(crate) fn kept(&self, bytes: u64) {
        if let Some(own) = &self.own {
            own.dec_length(bytes);
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(own) = &self.own {
            own.finish_and_clear();
            bars().remove(own);
        }
    }
}

/// Returns the last 24 characters of a name, escaped, so that they fit into a bar.
fn short(name: &str) -> String {
    let mut last: Vec<char> = name.chars().rev().take(24).collect();
    last.reverse();
    crate::names::Shown(&last.into_iter().collect::<String>()).to_string()
}

/// Writer for the log: prints each message to stderr above the bars.
pub(crate) struct Aside;

impl Write for Aside {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        aside(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_without_a_terminal() {
        let progress = Progress::start(Some(20 << 20));
        let file = progress.file("a/very/long/name/that/does/not/fit/into/the/line\n", 10 << 20);
        file.add(10);
        file.kept(100);
        progress.kept(1 << 20);
        assert_eq!(progress.bar.position(), 10);
        assert_eq!(progress.bar.length(), Some(19 << 20));
        let own = file.own.as_ref().unwrap();
        assert_eq!((own.position(), own.length()), (10, Some((10 << 20) - 100)));
        assert!(!own.message().contains('\n'));
        assert!(progress.file("small", 10).own.is_none());
    }

    #[test]
    fn templates_parse() {
        for template in [TOTAL, ENDLESS, FILE] {
            ProgressStyle::with_template(template).unwrap();
        }
    }
}
