//! Runs `compare` with few calls.

use std::process::{Child, Command};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A row of each kind of call.
const ROWS: [&str; 6] =
    ["latency-64", "rate-64-x1", "rate-64-x64-c64", "up-64KiB-x8", "stream-64KiB", "beside-64MiB"];

#[test]
fn a_contender_that_fails_is_shown_and_the_run_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("out.json");
    // No RDMA device has the loopback address, so this contender cannot use its intended path.
    let out = Command::new(env!("CARGO_BIN_EXE_compare"))
        .args([
            "--contenders",
            "tonic-tcp,verbs,tonic-unix,shm,memcpy-hot",
            "--allocators",
            "glibc",
        ])
        .args(["--rows", "full", "--only", &ROWS.join(","), "--divide", "1000", "--rounds", "1"])
        .args(["--counts", "--limit", "900"])
        .args(["--json".as_ref(), json.as_os_str(), "--plots".as_ref(), dir.path().as_os_str()])
        .output()
        .unwrap();
    let said = [&out.stdout[..], &out.stderr[..]].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(!out.status.success(), "{said}");
    assert!(said.contains("failed: latency-64 verbs: "), "{said}");
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let cell = |row: &str, contender: &str| {
        let cells = json["results"].as_array().unwrap();
        cells
            .iter()
            .find(|cell| cell["row"] == row && cell["contender"] == contender)
            .unwrap()
            .clone()
    };
    for row in ROWS {
        for contender in ["tonic-tcp", "tonic-unix", "shm"] {
            assert!(cell(row, contender)["failure"].is_null(), "{row} {contender}: {said}");
            assert!(
                cell(row, contender)["median"].as_f64().unwrap() > 0.0,
                "{row} {contender}: {said}"
            );
        }
        assert!(cell(row, "verbs")["failure"].is_string(), "{row}");
    }
    // memcpy-hot copies, and supports no calls.
    assert!(cell("up-64KiB-x8", "memcpy-hot")["median"].is_f64());
    assert!(cell("latency-64", "memcpy-hot")["median"].is_null());
    // TCP copies each byte into the message, into the kernel, out of it, and out of the message.
    // Shared memory copies it once, or twice until the client has learnt that the server's stub
    // uses the codec. Without optimization, moves are also copies.
    let copies = |contender| cell("up-64KiB-x8", contender)["copies"].as_f64().unwrap();
    assert!(
        copies("tonic-tcp") >= 4.0 && (1.0..copies("tonic-tcp") / 1.5).contains(&copies("shm")),
        "{said}"
    );
    assert!(dir.path().join("latency.svg").exists() && dir.path().join("rate.svg").exists());
}

#[test]
fn a_neighbour_that_fails_is_shown_and_fails_nothing() {
    let out = Command::new(env!("CARGO_BIN_EXE_compare"))
        .args(["--contenders", "tonic-tcp,rdma-io-tonic,ruapc", "--neighbours", "/bin/false"])
        .args([
            "--only",
            "latency",
            "--divide",
            "100",
            "--rounds",
            "1",
            "--limit",
            "900",
            "--allocators",
            "glibc",
        ])
        .output()
        .unwrap();
    let said = [&out.stdout[..], &out.stderr[..]].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(out.status.success(), "{said}");
    for contender in ["rdma-io-tonic", "ruapc"] {
        assert!(
            said.contains(&format!("failed: latency-64 {contender}: the server did not start")),
            "{said}"
        );
    }
}

#[test]
fn a_server_that_does_not_start_says_why_in_the_table() {
    let compare = |arguments: &[&str]| {
        let out = Command::new(env!("CARGO_BIN_EXE_compare")).args(arguments).output().unwrap();
        assert!(!out.status.success());
        [out.stdout, out.stderr].map(|said| String::from_utf8(said).unwrap())
    };
    // No RDMA device has the loopback address. The cause depends on whether rdma-core is installed.
    let [_, reason] = compare(&["--serve", "raw-verbs"]);
    let reason = reason.trim_end();
    let (advice, cause) = reason.split_once("): ").expect(reason);
    assert!(advice.contains("at 127.0.0.1 (--addr takes an address of an RDMA device"), "{reason}");
    assert!(!cause.is_empty(), "{reason}");

    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let at = free.to_string();
    let agent = Command::new(env!("CARGO_BIN_EXE_compare")).args(["--agent", &at]).spawn();
    let _agent = Agent(agent.unwrap());
    let run = [
        "--contenders",
        "tonic-tcp,raw-verbs",
        "--allocators",
        "glibc",
        "--only",
        "latency-64",
        "--divide",
        "1000",
        "--rounds",
        "1",
    ];
    let in_table = format!(
        "failed: latency-64 raw-verbs: the server did not start: {reason} (exit status: 1)\n"
    );
    for servers_at in [&[][..], &["--servers-at", &at]] {
        let [table, errors] = compare(&[&run, servers_at].concat());
        assert!(table.contains(&in_table), "{table}\n{errors}");
        let first = format!("raw-verbs: the server did not start: {reason} (exit status: 1)\n");
        assert!(errors.contains(&first), "{errors}");
    }
}

#[test]
fn contenders_take_part_with_both_allocators() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("out.json");
    let out = Command::new(env!("CARGO_BIN_EXE_compare"))
        .args([
            "--contenders",
            "tonic-tcp,shm-plain,memcpy-hot",
            "--rows",
            "full",
            "--only",
            "up-16MiB-x8",
        ])
        .args(["--divide", "1000", "--rounds", "3", "--limit", "900", "--json"])
        .arg(&json)
        .args(["--assert", "up-16MiB-x8:shm-plain+mimalloc/tonic-tcp+mimalloc>=0.01"])
        // mimalloc keeps all freed memory, so the result does not depend on the speed of the
        // machine.
        .env("MIMALLOC_PURGE_DELAY", "-1")
        .output()
        .unwrap();
    let said = [&out.stdout[..], &out.stderr[..]].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(out.status.success(), "{said}");
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    assert!(json["machine"]["allocators"][1].as_str().unwrap().starts_with("mimalloc "), "{said}");
    let cells: Vec<_> = json["results"].as_array().unwrap().iter().collect();
    let who: Vec<_> =
        cells.iter().map(|c| (c["contender"].as_str().unwrap(), c["allocator"].as_str())).collect();
    let (glibc, mimalloc) = (Some("glibc"), Some("mimalloc"));
    let both = |allocator| [("tonic-tcp", allocator), ("shm-plain", allocator)];
    let expected = [&both(glibc)[..], &[("memcpy-hot", None)], &both(mimalloc)].concat();
    assert_eq!(who, expected);
    // A message has 4096 pages. glibc maps most of them again for each message over TCP. Over
    // shared memory, the number depends on which buffers are freed first. mimalloc keeps them.
    let faults = |cell: &serde_json::Value| cell["page_faults_per_call"].as_f64().unwrap();
    assert!(faults(cells[0]) > 1000.0, "{said}");
    for kept in [cells[3], cells[4]] {
        assert!(faults(kept) < faults(cells[0]) / 4.0, "{said}");
    }
}

#[test]
fn neighbours_want_their_program() {
    let compare = |arguments: &[&str]| {
        let mut compare = Command::new(env!("CARGO_BIN_EXE_compare"));
        let out =
            compare.args(["--contenders", "tonic-tcp,ruapc"]).args(arguments).output().unwrap();
        assert!(!out.status.success());
        String::from_utf8(out.stderr).unwrap()
    };
    let said = compare(&[]);
    assert!(said.contains("ruapc runs in its own program: build benches/neighbours"), "{said}");
    let said = compare(&["--neighbours", "/nonexistent/neighbours"]);
    assert!(said.contains("/nonexistent/neighbours, which does not exist: build"), "{said}");
}

/// Ends the agent, whatever the result of the test.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn servers_run_where_their_agent_does_and_end_with_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("out.json");
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let at = free.to_string();
    let compare = || Command::new(env!("CARGO_BIN_EXE_compare"));
    let agent = Agent(compare().args(["--agent", &at]).spawn().unwrap());
    let out = compare()
        .args(["--servers-at", &at, "--contenders", "tonic-tcp,tcp-plain,memcpy-hot"])
        .args(["--allocators", "glibc", "--rows", "full", "--only", "rate-64-x64"])
        .args(["--divide", "1000", "--rounds", "1", "--json"])
        .arg(&json)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&[&out.stdout[..], &out.stderr[..]].concat()).into_owned();
    assert!(out.status.success() && said.contains("the server is on another host"), "{said}");
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    for contender in ["tonic-tcp", "tcp-plain"] {
        let cells = json["results"].as_array().unwrap();
        let cell = cells
            .iter()
            .find(|cell| cell["row"] == "rate-64-x64" && cell["contender"] == contender)
            .unwrap();
        assert!(cell["median"].as_f64().unwrap() > 0.0, "{cell}");
        // The processor time of the server that the agent has started is also measured.
        assert!(cell["server_cpu_us_per_call"].as_f64().unwrap() > 0.0, "{cell}");
    }
    // The kernel still lists ended processes that the agent has not collected yet.
    let children = format!("/proc/{0}/task/{0}/children", agent.0.id());
    for id in std::fs::read_to_string(children).unwrap().split_whitespace() {
        let id = Pid::from_raw(id.parse().unwrap()).unwrap();
        let Ok(server) = pidfd_open(id, PidfdFlags::empty()) else { continue };
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        let ended = poll(&mut [PollFd::new(&server, PollFlags::IN)], Some(&limit)).unwrap();
        assert_eq!(ended, 1, "a server goes on without its client");
    }
}
