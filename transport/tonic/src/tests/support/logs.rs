//! Captures the log lines of this thread during a test.
//!
//! One subscriber serves the whole test program and passes each line to the thread that logged it.
//! Separate subscribers would disable each other's log lines, because the `tracing` crate caches
//! for all threads whether a line is enabled.

use std::cell::RefCell;
use std::io;
use std::sync::Once;

use tracing_subscriber::fmt::MakeWriter;

thread_local! {
    static LINES: RefCell<Option<Vec<u8>>> = const { RefCell::new(None) };
}

struct ToThread;

impl io::Write for ToThread {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LINES.with_borrow_mut(|lines| {
            if let Some(lines) = lines {
                lines.extend_from_slice(bytes);
            }
        });
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for ToThread {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        Self
    }
}

/// Captures log lines until it is dropped.
pub(crate) struct Logs(());

impl Logs {
    pub(crate) fn capture() -> Self {
        static SUBSCRIBER: Once = Once::new();
        SUBSCRIBER.call_once(|| {
            let subscriber = tracing_subscriber::fmt()
                .with_max_level(tracing::Level::INFO)
                .with_ansi(false)
                .with_writer(ToThread)
                .finish();
            tracing::subscriber::set_global_default(subscriber).unwrap();
        });
        LINES.set(Some(Vec::new()));
        Self(())
    }

    pub(crate) fn lines_with(&self, text: &str) -> Vec<String> {
        LINES.with_borrow(|lines| {
            let all = String::from_utf8_lossy(lines.as_deref().unwrap_or_default()).into_owned();
            all.lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
        })
    }
}

impl Drop for Logs {
    fn drop(&mut self) {
        LINES.set(None);
    }
}
