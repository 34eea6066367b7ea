//! Each example runs to its end, over shared memory and over TCP, and prints the expected lines.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// The program of an example. `cargo test` builds it together with the package's tests, but
/// `cargo test --test examples` does not. A program that is older than its sources fails the test.
fn program(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let program = tests.parent().unwrap().parent().unwrap().join("examples").join(name);
    let built = fs::metadata(&program).and_then(|file| file.modified());
    let sources = fs::read_to_string(program.with_extension("d")).unwrap_or_default();
    let sources = sources.split_once(": ").map_or("", |(_, sources)| sources);
    let current = built.is_ok_and(|built| {
        sources
            .split_whitespace()
            .all(|source| fs::metadata(source).unwrap().modified().unwrap() <= built)
    });
    assert!(
        current,
        "{name} is not built as it is now: run `cargo test -p tonic-rdma` or `cargo build --examples`"
    );
    program
}

/// The output with TONIC_RDMA=`fabrics`.
fn output(name: &str, fabrics: &str) -> String {
    let mut command = Command::new(program(name));
    command.env("TONIC_RDMA", fabrics).env_remove("TONIC_RDMA_DEVICE").env_remove("RUST_LOG");
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} with {fabrics}: {}\n{text}{log}", output.status);
    text
}

/// Runs the example over both paths. Its output must contain all of `lines` in this order, with
/// PATH replaced by the path and its details, and BY by the path alone.
#[track_caller]
fn prints(name: &str, lines: &[&str]) {
    for (fabrics, by, path) in
        [("shm", "shm", "shm (process "), ("off", "tcp", "tcp (policy: TONIC_RDMA=off)")]
    {
        let text = output(name, fabrics);
        let mut rest = text.lines();
        for line in lines {
            let wanted = line.replace("BY", by);
            let found = match wanted.split_once("PATH") {
                Some((before, _)) => rest.any(|line| line.starts_with(&format!("{before}{path}"))),
                None => rest.any(|line| line == wanted),
            };
            assert!(
                found,
                "{name} with {fabrics}: no line {wanted:?}, or not in its place, in:\n{text}"
            );
        }
    }
}

#[test]
fn hello_world() {
    prints(
        "hello_world",
        &[
            "tonic-rdma to tonic-rdma:",
            "  calls go by PATH",
            "  hello world, you came by BY",
            "tonic-rdma to stock tonic:",
            "  hello world, you came by tcp",
            "stock tonic to tonic-rdma:",
            "  hello world, you came by tcp",
        ],
    );
    let text = output("hello_world", "shm");
    assert!(text.contains("  calls go by tcp (peer-not-capable"), "{text}");
}

#[test]
fn streaming() {
    prints(
        "streaming",
        &[
            "calls go by PATH",
            "server streaming: 1000 messages",
            "client streaming: the sum is 500500",
            "both at once: 1024",
            "cancelled",
        ],
    );
}

#[test]
fn tls_tickets() {
    prints(
        "tls_tickets",
        &[
            "with a certificate: hello alice, you came by BY",
            "without one: no ticket, no connection",
        ],
    );
}

#[test]
fn tower_layers() {
    prints(
        "tower_layers",
        &[
            "with the token: hello alice, you came by BY",
            "without it: Unauthenticated by tcp",
            "the layer has seen 2 calls",
        ],
    );
}

#[test]
fn metrics() {
    prints(
        "metrics",
        &[
            "# HELP tonic_rdma_calls_total Calls, by the path they took.",
            "# TYPE tonic_rdma_calls_total counter",
        ],
    );
    for (fabrics, by) in [("shm", "shm"), ("off", "tcp")] {
        let text = output("metrics", fabrics);
        let calls = format!("tonic_rdma_calls_total{{role=\"client\",path=\"{by}\"}} 100");
        assert!(text.lines().any(|line| line == calls), "{text}");
        assert_eq!(text.contains("tonic_rdma_pool_bytes{device=\"shm\""), by == "shm", "{text}");
    }
}

#[test]
fn zero_copy() {
    prints("zero_copy", &["calls go by PATH"]);
    // Once the method is known, only the receipt and the name are copied.
    let text = output("zero_copy", "shm");
    let copied: Vec<&str> = text.lines().filter(|line| line.starts_with("round 4: ")).collect();
    let small = |line: &&str| line.contains(" bytes (eager ") && !line.contains(',');
    assert!(copied.len() == 2 && copied.iter().all(small), "{text}");
}
