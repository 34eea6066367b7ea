//! Runs `scale` with few clients and connections and for a short time.

// A failed unwrap is a failed test.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Output};

/// All parts, as short as possible.
const SHORT: [&str; 22] = [
    "--bulk",
    "1,2",
    "--seconds",
    "0.5",
    "--warm-up",
    "0.2",
    "--connections",
    "1,8",
    "--rest",
    "0.3",
    "--settle",
    "0",
    "--streams",
    "0,10",
    "--calls",
    "256",
    "--rounds",
    "2",
    "--limit",
    "900",
    "--contenders",
    "tonic-tcp,tcp,shm",
];

fn scale(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_scale")).args(arguments).output().unwrap()
}

fn said(out: &Output) -> String {
    String::from_utf8_lossy(&[&out.stdout[..], &out.stderr[..]].concat()).into_owned()
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn clients_connections_and_streams_are_measured() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("out.json");
    let bounds = [
        // Counts, and ratios that hold on every machine.
        "--assert=bulk-2:shm:fairness>=0.01",
        "--assert=bulk-1:shm:registrations<=1000",
        "--assert=bulk-2:shm/bulk-1>=0.001",
        "--assert=connections-8:tonic-tcp:descriptors<=1",
        "--assert=connections-8:tonic-tcp:descriptors>=1",
        "--assert=connections-8:shm:descriptors>=2",
        "--assert=connections-8:shm:all-rate/tonic-tcp>=0.001",
    ];
    let paths = ["--json", file.to_str().unwrap(), "--plots", dir.path().to_str().unwrap()];
    let out = scale(&[&SHORT[..], &paths, &bounds].concat());
    let said = said(&out);
    assert!(out.status.success(), "{said}");
    for bound in bounds {
        let row = bound.trim_start_matches("--assert=").split(':').next().unwrap();
        assert!(said.contains(&format!("{row}: ")), "{row}: {said}");
    }
    assert_eq!(said.matches(": kept").count(), bounds.len(), "{said}");

    let json = json(&file);
    let rows = |part: &str| json[part].as_array().unwrap().clone();
    let figure = |value: &serde_json::Value| value.as_f64().unwrap();
    assert_eq!((rows("bulk").len(), rows("connections").len(), rows("streams").len()), (6, 6, 6));
    for row in rows("bulk") {
        assert_eq!(row["rounds"].as_array().unwrap().len(), 2, "{row}");
        for round in row["rounds"].as_array().unwrap() {
            assert!(figure(&round["mb_per_s"]) > 0.0 && figure(&round["cpu_s_per_gb"]) > 0.0);
            assert!((0.0..=1.0).contains(&figure(&round["slowest_to_mean"])), "{row}");
            // A message has 1 MiB.
            assert_eq!(figure(&round["bytes"]), figure(&round["messages"]) * 1_048_576.0);
            // tonic-tcp has no memory statistics, and below only shm has a pool.
            assert_eq!(round["memory"].is_null(), row["contender"] == "tonic-tcp", "{row}");
        }
        assert_eq!(row["pool"].is_u64(), row["contender"] == "shm", "{row}");
    }
    for row in rows("connections") {
        assert_eq!(
            (row["all"].as_array().unwrap().len(), row["one"].as_array().unwrap().len()),
            (2, 2)
        );
        assert!(row["rest_cpu_us_per_s"].is_number() && row["failure"].is_null(), "{row}");
    }
    let notes = json["notes"].to_string();
    assert!(notes.contains("load of the machine") && notes.contains("2 rounds"), "{notes}");
    for name in ["scale-bulk", "scale-all", "scale-one"] {
        let svg = std::fs::read_to_string(dir.path().join(name).with_extension("svg")).unwrap();
        assert!(svg.contains("tonic-tcp") && svg.contains("shm"), "{name}");
    }
}

#[test]
fn a_bound_that_is_broken_fails_the_run() {
    let only = ["--only", "connections", "--assert", "connections-8:tonic-tcp:descriptors<=0"];
    let out = scale(&[&SHORT[..20], &["--contenders", "tonic-tcp"], &only].concat());
    let said = said(&out);
    assert!(!out.status.success(), "{said}");
    let broken = "connections-8: descriptors of tonic-tcp is 1.0000, at most 0 wanted";
    assert!(said.contains(broken) && !said.contains("bulk clients"), "{said}");
}

#[test]
fn what_cannot_run_is_said_and_the_run_goes_on() {
    // No RDMA device has the loopback address.
    let contenders = ["--contenders", "verbs,tonic-tcp", "--only", "bulk,connections"];
    let out = scale(&[&SHORT[..20], &contenders].concat());
    let said = said(&out);
    assert!(!out.status.success(), "{said}");
    for row in ["bulk-1", "bulk-2", "connections-1", "connections-8"] {
        assert!(said.contains(&format!("failed: {row} verbs: cannot start: ")), "{row}: {said}");
    }
    assert!(said.contains("| tonic-tcp ") && said.contains("4 rows failed"), "{said}");
}

#[test]
fn connections_beyond_a_limit_name_it() {
    // 100 descriptors do not suffice for 128 connections in either process.
    let out = Command::new("prlimit")
        .args(["--nofile=100:100", env!("CARGO_BIN_EXE_scale")])
        .args(["--only", "connections", "--contenders", "tonic-tcp", "--connections", "1,128"])
        .args(["--rest", "0", "--settle", "0", "--calls", "256", "--limit", "60"])
        .output()
        .unwrap();
    let said = said(&out);
    assert!(!out.status.success(), "{said}");
    assert!(said.contains("failed: connections-128 tonic-tcp: "), "{said}");
    assert!(said.contains("of 100 descriptors (limit reached)"), "{said}");
}
