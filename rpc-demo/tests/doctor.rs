//! `rpc-demo doctor` on any machine. Its output can be parsed, and its exit codes are correct.

#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/fields.rs"]
mod fields;

use std::process::{Command, Output, Stdio};

use common::*;
use serde_json::Value;

fn doctor() -> Command {
    let mut command = program();
    command.env_remove("TONIC_RDMA").arg("doctor");
    command
}

/// Parses the doctor's JSON, which must be exactly one line.
fn json(output: &Output) -> Value {
    let text = stdout(output);
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(text).unwrap()
}

/// Checks that exit code and JSON agree, and returns the JSON.
fn verdict(output: &Output) -> Value {
    let found = json(output);
    let rdma = found["rdma"].as_bool().unwrap();
    assert_eq!(output.status.code(), Some(if rdma { 0 } else { 1 }), "{found}");
    assert_eq!(found["reason"].is_null(), rdma, "{found}");
    let blocks =
        found["findings"].as_array().unwrap().iter().any(|finding| finding["blocks"] == true);
    assert_eq!(blocks, !rdma, "{found}");
    fields::are_documented(&found);
    found
}

#[test]
fn says_what_there_is() {
    let found = verdict(&doctor().arg("--json").output().unwrap());
    assert_eq!(found["host"]["os"], std::env::consts::OS);
    assert_eq!(found["settings"]["policy"], "auto");
    assert!(found["memlock"]["needed"].as_u64().unwrap() > 2 << 20);
    assert_eq!(found["modules"].as_array().unwrap()[0]["name"], "ib_core");
    assert!(found["peer"].is_null());
}

#[test]
fn each_finding_has_a_reason_code_and_a_cure() {
    let output = doctor().arg("--json").env("TONIC_RDMA", "off").output().unwrap();
    let found = verdict(&output);
    assert_eq!(found["reason"]["code"], "policy");
    let first = &found["findings"][0];
    assert_eq!((&first["code"], &first["blocks"]), (&Value::from("policy"), &Value::from(true)));
    assert_eq!(first["cures"][0]["command"], "unset TONIC_RDMA");
}

#[test]
fn people_get_tables_and_the_verdict_last() {
    let output = doctor().env("TONIC_RDMA", "off").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = stdout(&output);
    says(
        text,
        &["rdma-core", "Pinned memory", "In the way", "policy: TONIC_RDMA=off", "unset TONIC_RDMA"],
    );
    let last = text.lines().last().unwrap();
    assert_eq!(last, "RDMA would not be used: policy: TONIC_RDMA=off");
}

#[test]
fn a_peer_on_this_host_is_reached_by_shared_memory_and_measured() {
    let root = scratch();
    let mut serve = serve(program(), root.path());
    serve.env_remove("TONIC_RDMA");
    let server = Server::spawn(serve, root.path());
    let output = doctor().args(["--json", "--peer", &server.url]).output().unwrap();
    let found = verdict(&output);
    let peer = &found["peer"];
    assert!(["shm", "verbs"].contains(&peer["path"].as_str().unwrap()), "{peer}");
    for path in ["tcp", "fast"] {
        assert!(peer[path]["latency_median_us"].as_f64().unwrap() > 0.0, "{peer}");
        assert!(peer[path]["upload_mib_s"].as_f64().unwrap() > 0.0, "{peer}");
    }
    assert_eq!(peer["not_bare"], Value::Null, "{peer}");
    assert!(peer["bare"]["latency_median_us"].as_f64().unwrap() > 0.0, "{peer}");
    let rates = peer["rates"].as_array().unwrap();
    assert!(!rates.is_empty(), "{peer}");
    for rates in rates {
        for way in ["bare_per_s", "fast_per_s", "tcp_per_s"] {
            assert!(rates[way].as_f64().unwrap() > 0.0, "{rates}");
        }
    }
    assert_eq!(peer["steps"][0]["name"], "TCP connection");
    assert_eq!(peer["steps"][1]["name"], "Offer");
    let output = doctor().args(["--peer", &server.url]).output().unwrap();
    says(
        stdout(&output),
        &[
            "offers shm",
            "MiB/s",
            "a call takes",
            "them take the WRITE",
            "tonic-rdma-build",
            "tonic::transport::{Channel, Endpoint}",
        ],
    );
    let last = stdout(&output).lines().last().unwrap();
    assert!(last.starts_with("Calls to http://"), "{last}");
}

#[test]
fn a_peer_that_stays_on_tcp_says_why() {
    let root = scratch();
    let server = Server::spawn(serve(program(), root.path()), root.path());
    let output = doctor().args(["--json", "--peer", &server.url]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let found = verdict(&output);
    assert_eq!(
        found["reason"],
        serde_json::json!({"code": "policy", "side": "peer", "detail": "switched off at the server"})
    );
    assert_eq!(found["peer"]["path"], "tcp");
    assert!(found["peer"]["tcp"]["upload_mib_s"].as_f64().unwrap() > 0.0);
    assert!(found["peer"]["fast"].is_null());
}

#[test]
fn what_cannot_be_told_is_code_2_and_one_line() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", closed.local_addr().unwrap());
    drop(closed);
    let output = doctor().args(["--json", "--peer", &url]).output().unwrap();
    // The report on this host is complete although the peer is unreachable.
    assert!(json(&output)["peer"]["error"].as_str().unwrap().contains("refused"));
    let output = Output { stdout: Vec::new(), ..output };
    says(&failed(output, 2), &["no server answers", &url, "--peer"]);

    for (args, said) in
        [(&["--peer", "ftp://x"][..], "not a server address"), (&["--jsn"], "--json")]
    {
        says(&failed(doctor().args(args).output().unwrap(), 2), &[said]);
    }
    let output = doctor().env("TONIC_RDMA", "maybe").output().unwrap();
    says(&failed(output, 2), &["TONIC_RDMA=\"maybe\"", "auto"]);
    // If the result cannot be written, the diagnosis has failed.
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = doctor().arg("--json").stdout(full).output().unwrap();
    says(&failed(output, 2), &["cannot write to stdout"]);
}

#[test]
fn an_interrupted_doctor_has_not_said_no() {
    // Accepts a connection, and sends nothing.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let mut command = doctor();
    command.args(["--peer", &url]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let client = command.spawn().unwrap();
    let _held = listener.accept().unwrap();
    signal(&client, rustix::process::Signal::INT);
    says(&failed(client.wait_with_output().unwrap(), 2), &["interrupted", "SIGINT"]);
}
