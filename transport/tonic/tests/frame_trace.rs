//! The frame trace shows the frames of a call, and nothing of their content.

#![cfg(feature = "shm")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
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

/// The lines of the trace with this filter during a call. Both ends run on this thread.
async fn trace_of_a_call(fabric: Fabric, filter: &str, data: Bytes) -> Vec<String> {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter))
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let world = World::new(fabric, Which::Ours).await;
    let reply = world.client(Which::Ours).echo(Blob::of(data.clone())).await.unwrap();
    assert_eq!(reply.data, data);
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    text.lines().filter(|line| line.contains("tonic_rdma::frames")).map(str::to_owned).collect()
}

/// The number of lines that contain all of these words.
fn count(lines: &[String], words: &[&str]) -> usize {
    lines.iter().filter(|line| words.iter().all(|word| line.contains(word))).count()
}

/// The number in a field of a line, whether it is hexadecimal or a length.
fn number(line: &str, field: &str) -> u64 {
    let mut fields = line.split(' ').filter_map(|part| part.split_once('='));
    let value = fields.find(|(name, _)| *name == field).map(|(_, value)| value);
    let value = value.unwrap_or_else(|| panic!("no {field} in {line}"));
    match value.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).unwrap(),
        None => value.trim_end_matches('B').parse().unwrap(),
    }
}

/// The lines of one kind in one direction, without what differs between the ends.
fn frames(lines: &[String], direction: &str, kind: &str) -> Vec<String> {
    let begin = format!(" {direction} {kind} ");
    let frame = |line: &String| {
        let (_, rest) = line.split_once(&begin)?;
        Some(rest.split(" connection=").next()?.to_owned())
    };
    let mut frames: Vec<String> = lines.iter().filter_map(frame).collect();
    frames.sort();
    frames
}

async fn the_frames_of_a_call_are_seen_at_both_ends(fabric: Fabric) {
    let secret = Bytes::from_static(b"a secret of the payload");
    let lines = trace_of_a_call(fabric, "tonic_rdma::frames=trace", secret).await;
    for direction in ["sent", "received"] {
        // The call has one request, and one response with trailers.
        let end = |frame| count(&lines, &[direction, frame, "stream=1", "END"]);
        assert_eq!((end("HEADERS"), end("DATA")), (1, 1), "{direction}: {lines:#?}");
        let blocks = count(&lines, &[direction, "HEADERS", "stream=1", "block="]);
        assert_eq!(blocks, 3, "{lines:#?}");
        assert_eq!(count(&lines, &[direction, "DATA", "stream=1", "data="]), 2, "{lines:#?}");
        assert!(count(&lines, &[direction, "message", "credits=", "len="]) >= 2, "{lines:#?}");
    }
    let connections: BTreeSet<u64> = lines.iter().map(|line| number(line, "connection")).collect();
    assert_eq!(connections.len(), 2, "the ends of one connection: {lines:#?}");
    for secret in ["secret", "Echo", "grpc-status", "application/grpc"] {
        assert_eq!(count(&lines, &[secret]), 0, "{lines:#?}");
    }
}

#[tokio::test]
async fn a_call_over_shared_memory_is_seen_at_both_ends() {
    the_frames_of_a_call_are_seen_at_both_ends(Fabric::Shm).await;
}

#[tokio::test]
async fn a_call_over_the_simulated_fabric_is_seen_at_both_ends() {
    the_frames_of_a_call_are_seen_at_both_ends(Fabric::Sim).await;
}

/// The request and the reply are longer than a standing grant.
async fn long_messages_show_requests_grants_writes_and_dones(fabric: Fabric) {
    const LEN: usize = 4 << 20;
    let data = vec![7; LEN].into();
    let lines = trace_of_a_call(fabric, "tonic_rdma::frames=trace", data).await;
    for kind in ["REQUEST", "GRANT", "DONE"] {
        let (sent, received) = (frames(&lines, "sent", kind), frames(&lines, "received", kind));
        assert!(received.len() >= 2, "{kind} in both directions: {lines:#?}");
        // A standing grant may still be on its way when the call ends.
        let is_of_call = |frame: &&String| number(frame, "stream") != 0;
        assert!(
            sent.iter().filter(is_of_call).eq(received.iter().filter(is_of_call)),
            "{kind}: {lines:#?}"
        );
    }
    assert_eq!(count(&lines, &["received WRITE"]), 0, "only the sender sees a WRITE");
    let of = |connection: u64, begin: &str| -> Vec<&String> {
        let own = lines.iter().filter(|line| number(line, "connection") == connection);
        own.filter(|line| line.contains(begin)).collect()
    };
    let connections: BTreeSet<u64> = lines.iter().map(|line| number(line, "connection")).collect();
    for connection in connections {
        let writes = of(connection, " sent WRITE ");
        let grants = of(connection, " received GRANT ");
        for write in &writes {
            let (at, len) = (number(write, "address"), number(write, "data"));
            let is_granted = grants.iter().any(|grant| {
                let begin = number(grant, "address");
                let end = begin + number(grant, "len");
                let same_key = number(grant, "rkey") == number(write, "rkey");
                same_key && begin <= at && at + len <= end
            });
            assert!(is_granted, "{write}: {grants:#?}");
        }
        let sum = |lines: &[&String], field| -> u64 {
            lines.iter().map(|line| number(line, field)).sum()
        };
        let written = sum(&writes, "data");
        assert_eq!(written, sum(&of(connection, " sent DONE "), "len"), "{lines:#?}");
        assert!(written > LEN as u64 * 9 / 10, "{written} of {LEN} bytes: {lines:#?}");
    }
}

#[tokio::test]
async fn long_messages_over_shared_memory_show_their_writes() {
    long_messages_show_requests_grants_writes_and_dones(Fabric::Shm).await;
}

#[tokio::test]
async fn long_messages_over_the_simulated_fabric_show_their_writes() {
    long_messages_show_requests_grants_writes_and_dones(Fabric::Sim).await;
}

#[tokio::test]
async fn another_filter_shows_no_frames() {
    for filter in ["trace,tonic_rdma::frames=off", "info", "tonic_rdma::frames=debug"] {
        let lines = trace_of_a_call(Fabric::Shm, filter, Bytes::from_static(b"data")).await;
        assert!(lines.is_empty(), "{filter}: {lines:#?}");
    }
}
