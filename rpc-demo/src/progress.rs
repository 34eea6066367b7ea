//! The bar on a terminal: bytes, rate, time left. Nothing is drawn elsewhere.

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;
use std::time::Duration;

/// All bars, so that messages can be printed beside them.
fn bars() -> &'static MultiProgress {
    static BARS: OnceLock<MultiProgress> = OnceLock::new();
    BARS.get_or_init(|| {
        let terminal = io::stderr().is_terminal();
        let target = if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        MultiProgress::with_draw_target(target)
    })
}

/// Prints something while the bar is out of the way.
pub(crate) fn aside<T>(print: impl FnOnce() -> T) -> T {
    bars().suspend(print)
}

/// Progress of one command. The bar goes away when this is dropped.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// `total` in bytes, where known.
    pub(crate) fn start(total: Option<u64>) -> Progress {
        let template = match total {
            Some(_) => "{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta} left {msg}",
            None => "{spinner} {bytes} {bytes_per_sec} {elapsed} {msg}",
        };
        // A template that cannot be parsed costs its looks only; the test below keeps it good.
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::no_length().with_style(style);
        if let Some(total) = total {
            bar.set_length(total);
        }
        let bar = bars().add(bar);
        bar.enable_steady_tick(Duration::from_millis(250));
        Progress(bar)
    }

    /// Names the file that is under way.
    pub(crate) fn file(&self, name: &str) {
        let short: String = {
            let mut last: Vec<char> = name.chars().rev().take(24).collect();
            last.reverse();
            last.into_iter().collect()
        };
        self.0.set_message(crate::names::Shown(&short).to_string());
    }

    /// So many bytes more.
    pub(crate) fn add(&self, bytes: usize) {
        self.0.inc(bytes as u64);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// stderr for the log: each message is written beside the bar.
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
        let progress = Progress::start(Some(10));
        progress.file("a/very/long/name/that/does/not/fit/into/the/line\n");
        progress.add(10);
        assert_eq!(progress.0.position(), 10);
        assert!(!progress.0.message().contains('\n'));
    }

    #[test]
    fn templates_parse() {
        for template in [
            "{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta} left {msg}",
            "{spinner} {bytes} {bytes_per_sec} {elapsed} {msg}",
        ] {
            ProgressStyle::with_template(template).unwrap();
        }
    }
}
