//! The frame trace shows the frames of a call, and nothing of their content.

#![cfg(feature = "shm")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::io;
use std::sync::{Arc, Mutex};

use common::{Blob, Fabric, Which, World};
use tracing_subscriber::EnvFilter;

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The lines of the trace with this filter during a call over shared memory. Both ends run on this
/// thread.
async fn trace_of_a_call(filter: &str, data: &'static [u8]) -> Vec<String> {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter))
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let world = World::new(Fabric::Shm, Which::Ours).await;
    let reply = world.client(Which::Ours).echo(Blob::of(data.into())).await.unwrap();
    assert_eq!(reply.data, data);
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    text.lines().filter(|line| line.contains("tonic_rdma::frames")).map(str::to_owned).collect()
}

/// The number of lines that contain all of these words.
fn count(lines: &[String], words: &[&str]) -> usize {
    lines.iter().filter(|line| words.iter().all(|word| line.contains(word))).count()
}

#[tokio::test]
async fn the_frames_of_a_call_are_seen_at_both_ends() {
    let lines = trace_of_a_call("tonic_rdma::frames=trace", b"a secret of the payload").await;
    for direction in ["sent", "received"] {
        // The call has one request, and one response with trailers.
        let end = |frame| count(&lines, &[direction, frame, "stream=1", "END"]);
        assert_eq!((end("HEADERS"), end("DATA")), (1, 1), "{direction}: {lines:#?}");
        assert_eq!(count(&lines, &[direction, "HEADERS", "stream=1", "block="]), 3, "{lines:#?}");
        assert_eq!(count(&lines, &[direction, "DATA", "stream=1", "data="]), 2, "{lines:#?}");
        assert!(count(&lines, &[direction, "message", "credits=", "len="]) >= 2, "{lines:#?}");
    }
    let connections = |line: &String| {
        let (_, number) = line.split_once("connection=").unwrap();
        number.chars().take_while(char::is_ascii_digit).collect::<String>()
    };
    let connections: std::collections::BTreeSet<String> = lines.iter().map(connections).collect();
    assert_eq!(connections.len(), 2, "the ends of one connection: {lines:#?}");
    for secret in ["secret", "Echo", "grpc-status", "application/grpc"] {
        assert_eq!(count(&lines, &[secret]), 0, "{lines:#?}");
    }
}

#[tokio::test]
async fn another_filter_shows_no_frames() {
    for filter in ["trace,tonic_rdma::frames=off", "info", "tonic_rdma::frames=debug"] {
        let lines = trace_of_a_call(filter, b"data").await;
        assert!(lines.is_empty(), "{filter}: {lines:#?}");
    }
}
