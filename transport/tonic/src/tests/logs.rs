//! What is logged on this thread while a test runs.

use std::{
    io,
    sync::{Arc, Mutex},
};
use tracing_subscriber::fmt::MakeWriter;

#[derive(Clone, Default)]
struct Buffer(Arc<Mutex<Vec<u8>>>);

impl io::Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Buffer {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// Captures until it is dropped.
pub(super) struct Logs {
    buffer: Buffer,
    _guard: tracing::subscriber::DefaultGuard,
}

impl Logs {
    pub(super) fn capture() -> Self {
        let buffer = Buffer::default();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::INFO)
            .with_ansi(false)
            .with_writer(buffer.clone())
            .finish();
        Self { _guard: tracing::subscriber::set_default(subscriber), buffer }
    }

    pub(super) fn lines_with(&self, text: &str) -> Vec<String> {
        let bytes = self.buffer.0.lock().unwrap();
        let all = String::from_utf8_lossy(&bytes);
        all.lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
    }
}
