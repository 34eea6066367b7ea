//! Runs the program on any machine. Its exit codes agree with its output, and it names wrong input.

#![allow(clippy::unwrap_used)]

use std::net::TcpListener;
use std::process::{Command, Output};

use serde_json::Value;

fn doctor(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tonic-rdma-doctor"));
    command.args(args).env_remove("TONIC_RDMA").env_remove("TONIC_RDMA_POOL");
    command
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

/// Requires exit code 2, and one line on stderr that contains each of `parts`.
fn unknown(output: &Output, parts: &[&str]) {
    let text = std::str::from_utf8(&output.stderr).unwrap();
    assert_eq!((output.status.code(), text.lines().count()), (Some(2), 1), "{text}");
    for part in parts {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}

#[test]
fn the_exit_code_and_both_forms_say_the_same() {
    let output = doctor(&["--json"]).output().unwrap();
    assert_eq!(stdout(&output).lines().count(), 1);
    let found: Value = serde_json::from_str(stdout(&output)).unwrap();
    let rdma = found["rdma"].as_bool().unwrap();
    assert_eq!(output.status.code(), Some(if rdma { 0 } else { 1 }), "{found}");
    assert_eq!(found["host"]["os"], std::env::consts::OS);
    assert!(found["host"].get("rdma_namespaces").is_some(), "{found}");

    let output = doctor(&[]).output().unwrap();
    assert_eq!(output.status.code(), Some(if rdma { 0 } else { 1 }));
    assert!(stdout(&output).contains("network namespaces"), "{}", stdout(&output));
    let last = stdout(&output).lines().last().unwrap();
    assert_eq!(last.starts_with("RDMA would be used"), rdma, "{last}");
}

#[test]
fn a_policy_of_the_user_is_named_with_its_cure() {
    let output = doctor(&[]).env("TONIC_RDMA", "off").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = stdout(&output);
    assert!(text.contains("In the way") && text.contains("unset TONIC_RDMA"), "{text}");
    assert_eq!(text.lines().last(), Some("RDMA would not be used: policy: TONIC_RDMA=off"));
}

#[test]
fn a_wrong_input_is_code_2_and_one_line() {
    unknown(&doctor(&["--peer", "ftp://x"]).output().unwrap(), &["ftp://x", "http://10.0.0.1"]);
    unknown(&doctor(&["--peer", "https://x"]).output().unwrap(), &["TLS", "tonic_rdma::diagnose"]);
    unknown(&doctor(&["--peer", "a b\u{1b}[2J"]).output().unwrap(), &["\\u{1b}", "--peer"]);
    let output = doctor(&[]).env("TONIC_RDMA", "maybe").output().unwrap();
    unknown(&output, &["TONIC_RDMA=\"maybe\"", "auto"]);
    let output = doctor(&[]).env("TONIC_RDMA_POOL", "much").output().unwrap();
    unknown(&output, &["TONIC_RDMA_POOL=\"much\""]);
}

#[test]
fn without_a_server_the_host_is_reported_nevertheless() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", closed.local_addr().unwrap());
    drop(closed);
    let output = doctor(&["--json", "--peer", &url]).output().unwrap();
    let found: Value = serde_json::from_str(stdout(&output)).unwrap();
    assert!(found["peer"]["error"].as_str().unwrap().contains("refused"), "{found}");
    unknown(&output, &["no server answers", &url, "--peer"]);
}

#[test]
#[cfg(target_os = "linux")]
fn an_answer_that_cannot_be_written_is_no_answer() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = doctor(&["--json"]).stdout(full).output().unwrap();
    unknown(&output, &["cannot write to stdout"]);
}
