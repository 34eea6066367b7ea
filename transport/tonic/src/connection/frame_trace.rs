//! The frame trace: at the target `tonic_rdma::frames`, one line for each message and frame that a
//! connection sends or receives, and for each WRITE that it sends. docs/protocol.md describes the
//! trace.
//!
//! The trace shows kinds, flags, fields and lengths. The trace shows no payload, header fields or
//! texts, because they may be secret. While the trace is off, a message costs one check of a
//! static.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use tonic_rdma_proto::Write;
use tonic_rdma_proto::frame::Reader;

/// Identifies the connection in the trace. Each process numbers its connections from 1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FrameTrace {
    connection: u64,
}

macro_rules! line {
    ($self:ident, $($text:tt)*) => {
        tracing::trace!(target: "tonic_rdma::frames", connection = $self.connection, $($text)*)
    };
}

impl FrameTrace {
    /// Assigns the next number.
    pub(crate) fn new() -> Self {
        static CONNECTIONS: AtomicU64 = AtomicU64::new(1);
        FrameTrace { connection: CONNECTIONS.fetch_add(1, Ordering::Relaxed) }
    }

    /// Whether the trace is on. While the trace is off, this method costs one check of a static.
    #[inline]
    pub(crate) fn is_on() -> bool {
        tracing::enabled!(target: "tonic_rdma::frames", tracing::Level::TRACE)
    }

    /// Logs a message that is about to be sent.
    #[cold]
    pub(crate) fn sent(self, message: &[u8]) {
        self.message("sent", Bytes::copy_from_slice(message));
    }

    /// Logs a message that was received.
    #[cold]
    pub(crate) fn received(self, message: &Bytes) {
        self.message("received", message.clone());
    }

    /// Logs a WRITE that is about to be posted. The peer's trace does not show the WRITE.
    #[cold]
    pub(crate) fn wrote(self, write: &Write) {
        let Write { src, addr, rkey, .. } = write;
        line!(self, "sent WRITE rkey={rkey:#x} address={addr:#x} data={}B", src.len());
    }

    fn message(self, direction: &'static str, message: Bytes) {
        let len = message.len();
        let mut frames = match Reader::new(message) {
            Ok(frames) => frames,
            Err(breach) => return line!(self, "{direction} message len={len}: {breach}"),
        };
        let waited = if frames.waited { " WAITED" } else { "" };
        let full = if frames.full { " FULL" } else { "" };
        let credits = frames.credits;
        line!(self, "{direction} message{waited}{full} credits={credits} len={len}");
        loop {
            match frames.next_frame() {
                Ok(Some(frame)) => line!(self, "{direction} {frame}"),
                Ok(None) => return,
                Err(breach) => return line!(self, "{direction} breach: {breach}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _};
    use std::sync::Arc;

    use tonic_rdma_source_rules::golden::Golden;

    use super::*;

    /// The lines of the trace in a document.
    fn sample(document: &str) -> Vec<&str> {
        let lines = document.lines().map(str::trim);
        lines.filter(|line| line.starts_with("TRACE tonic_rdma::frames: ")).collect()
    }

    /// Checks that a document shows exactly the lines that `trace` prints.
    fn assert_shows(document: &str, trace: impl FnOnce(FrameTrace)) {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .without_time()
            .with_ansi(false)
            .with_writer(file.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            assert!(FrameTrace::is_on());
            trace(FrameTrace { connection: 1 });
        });
        let (mut file, mut printed) = (&*file, String::new());
        file.rewind().unwrap();
        file.read_to_string(&mut printed).unwrap();
        assert_eq!(sample(document), printed.lines().map(str::trim).collect::<Vec<_>>());
    }

    #[test]
    fn the_documents_show_what_the_trace_prints() {
        let golden = Golden::parse(include_str!("../../../proto/golden/frames.txt"));
        let message = |name| Bytes::from(golden.case(name).bytes());
        assert_shows(include_str!("../../../../docs/protocol.md"), |trace| {
            trace.sent(&message("CALL/request"));
            trace.received(&message("CALL/response"));
            let src = Bytes::from_static(&[7; 64 << 10]);
            trace.wrote(&Write { src, pinned: true, addr: 0x7fff_0000_1000, rkey: 2 });
        });
        assert_shows(include_str!("../../../../docs/troubleshooting.md"), |trace| {
            trace.sent(&message("CALL/request-again"));
        });
    }
}
