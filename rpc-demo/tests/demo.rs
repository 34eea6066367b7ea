//! The demonstration: its comparison, its working directory, and its cleanup.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use common::*;
use rustix::process::Signal;

/// A demonstration over the best path that every host has, shared memory.
fn demo(args: &[&str]) -> Command {
    let mut demo = program();
    demo.env("TONIC_RDMA", "shm").arg("demo").args(args);
    demo
}

/// The figures in a row of the table.
#[track_caller]
fn row(said: &str, name: &str) -> Vec<f64> {
    let of = |line: &str| -> Option<Vec<f64>> {
        let cells = line
            .strip_prefix('│')?
            .strip_suffix('│')?
            .trim()
            .strip_prefix(name)?
            .split_whitespace();
        cells.map(|cell| cell.parse().ok()).collect()
    };
    said.lines().find_map(of).unwrap_or_else(|| panic!("no row '{name}' in\n{said}"))
}

#[track_caller]
fn works_in(said: &str) -> PathBuf {
    let line = said.lines().find_map(|line| line.strip_prefix("demo: working in ")).unwrap();
    PathBuf::from(line.trim_end_matches(", which is kept"))
}

#[test]
fn it_compares_tcp_the_best_path_and_a_copy() {
    let dir = scratch();
    // The codec shows tonic the length of each message that is longer than any before, and more
    // parallel jobs make more such messages.
    let args = ["--size", "64MiB", "--rounds", "1", "--jobs", "3", "--dir"];
    // Files go through the page cache on every file system, and payload goes by WRITE, so the
    // number of copies is known.
    let mut demo = demo(&args);
    demo.env("RPC_DEMO_NO_DIRECT", "1");
    let output = ok(demo.arg(dir.path()).output().unwrap());
    let said = stdout(&output);
    says(said, &["demo: generated 67108864 bytes in ", ", came back identical", " % of put and "]);
    let [tcp, shm] = ["tcp", "shm"].map(|name| row(said, name));
    assert_eq!((tcp.len(), shm.len()), (6, 6), "{said}");
    assert!(tcp.iter().chain(&shm).all(|figure| *figure > 0.0), "{said}");
    // Reading a file, transferring it, protecting it from its sender and writing it are one copy
    // each. The bytes that show tonic the lengths of messages are added to these. TCP copies into
    // one socket, out of the other, and to assemble messages.
    for copied in &shm[4..] {
        assert!((4.0..=4.3).contains(copied), "{said}");
    }
    for copied in &tcp[4..] {
        assert!((4.9..=5.5).contains(copied), "{said}");
    }
    let [factor, beside_cp] = ["shm : tcp", "shm : cp -r"].map(|name| row(said, name));
    assert!(factor.len() == 6 && factor[4..].iter().all(|factor| *factor < 0.9), "{said}");
    assert_eq!(beside_cp.len(), 6);
    // The kernel makes plain copies between the files.
    assert!(said.lines().any(|line| line.contains("│ cp -r ") && line.contains("1.00")), "{said}");
    assert!(
        said.lines().filter(|line| line.starts_with('│')).all(|line| line.chars().count() < 80)
    );
    assert!(names(dir.path()).is_empty(), "{:?}", names(dir.path()));
}

#[test]
fn where_tcp_is_the_best_it_says_why() {
    let dir = scratch();
    let args = ["demo", "--size", "1MiB", "--rounds", "2", "--keep", "--dir"];
    let output = ok(program().args(args).arg(dir.path()).output().unwrap());
    let said = stdout(&output);
    says(
        said,
        &["round 2 of 2", "no better path than TCP here: path tcp (policy: TONIC_RDMA=off)"],
    );
    assert_eq!(row(said, "tcp").len(), 6);
    assert!(!said.contains(": tcp "), "a factor between a path and itself: {said}");
    // The trees of the last round are kept.
    let kept = works_in(said);
    assert_eq!(kept.parent(), Some(dir.path()));
    assert_eq!(names(&kept), ["copy", "root", "source"]);
    assert!(picture(&kept.join("source")) == picture(&kept.join("copy")));
}

#[test]
fn it_works_in_memory_where_there_is_some() {
    let dir = scratch();
    let mut demo = demo(&["--size", "2MiB", "--rounds", "1"]);
    let output = ok(demo.env("TMPDIR", dir.path()).output().unwrap());
    let said = stdout(&output);
    let place = works_in(said);
    // The demonstration uses exactly one of the two directories, and says so if it is on a disk.
    let in_memory = place.starts_with("/dev/shm/");
    assert!(in_memory || place.starts_with(dir.path()), "{said}");
    let on_disk = said.contains("files on a disk, so the disk counts: ");
    assert!(!(in_memory && on_disk), "{said}");
    assert!(!place.exists(), "{}", place.display());
}

/// Starts a demonstration and waits until its server runs. Returns the process and its stdout, its
/// working directory, and the server's process ID.
fn under_way(mut demo: Command) -> (Child, BufReader<ChildStdout>, PathBuf, u32) {
    let mut demo = demo.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(demo.stdout.take().unwrap());
    let mut said = String::new();
    while !said.contains("\ndemo: server at ") {
        assert!(stdout.read_line(&mut said).unwrap() > 0, "it ended: {said}");
    }
    let server = said.trim_end().rsplit_once(' ').unwrap().1.parse().unwrap();
    (demo, stdout, works_in(&said), server)
}

#[test]
fn one_that_is_interrupted_leaves_nothing() {
    let dir = scratch();
    let here = || {
        let mut demo = demo(&["--size", "256MiB", "--dir"]);
        demo.arg(dir.path());
        demo
    };
    for signal in [Signal::INT, Signal::TERM] {
        // The second demonstration works in memory if there is space, because leaked files would
        // stay allocated there.
        for demo in [here(), demo(&["--size", "64MiB"])] {
            let (mut demo, _stdout, place, server) = under_way(demo);
            // A client has begun to put.
            until("the tree is put", &place, || {
                fs::read_dir(place.join("root/.rpc-demo-tmp")).is_ok_and(|temp| temp.count() > 1)
            });
            common::signal(&demo, signal);
            assert_eq!(wait(&mut demo).code(), Some(1));
            assert!(!place.exists(), "{signal:?}: {}", place.display());
            ends(server);
        }
        assert!(names(dir.path()).is_empty(), "{:?}", names(dir.path()));
    }

    // A killed demonstration cannot remove its files, but its server still ends.
    let (mut demo, _stdout, _, server) = under_way(here());
    demo.kill().unwrap();
    demo.wait().unwrap();
    ends(server);
}

#[test]
fn what_comes_back_altered_fails_it() {
    let dir = scratch();
    let mut demo = demo(&["--size", "64MiB", "--rounds", "1", "--dir"]);
    demo.arg(dir.path());
    let (mut demo, mut stdout, place, _) = under_way(demo);
    let stored = place.join("root/demo/half.bin");
    until("the largest file is stored", &place, || stored.exists());
    let file = File::options().write(true).open(&stored).unwrap();
    file.write_all_at(b"altered", 1 << 20).unwrap();
    drop(file);
    assert_eq!(wait(&mut demo).code(), Some(1));
    let (mut said, mut log) = (String::new(), String::new());
    stdout.read_to_string(&mut said).unwrap();
    demo.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    says(&log, &["half.bin", "rpc-demo: "]);
    assert!(
        !said.contains("GB/s, get") && !said.contains('│'),
        "figures of what went wrong: {said}"
    );
    assert!(names(dir.path()).is_empty(), "{:?}", names(dir.path()));
}

#[test]
fn one_that_fails_cleans_up_too() {
    let dir = scratch();
    let failing = |more: &[&str]| {
        let mut demo = program();
        // A device that does not exist.
        demo.env("TONIC_RDMA", "verbs").env("TONIC_RDMA_DEVICE", "no-such-device");
        demo.args(["demo", "--size", "1MiB", "--dir"]).arg(dir.path()).args(more).output().unwrap()
    };
    let output = failing(&["--require-rdma"]);
    assert_eq!(output.status.code(), Some(1));
    let log = String::from_utf8(output.stderr).unwrap();
    says(&log, &["no RDMA to http://", "no-", "rpc-demo: the demo's put failed: exit status: 1"]);
    assert!(names(dir.path()).is_empty());

    // An address reserved for documentation, which no host has. The failure comes before anything
    // is created.
    let line = failed(failing(&["--addr", "192.0.2.1:0"]), 1);
    says(&line, &["cannot listen on 192.0.2.1:0", "--addr"]);

    let demo =
        |args: &[&str], dir: &Path| failed(program().args(args).arg(dir).output().unwrap(), 1);
    let line = demo(&["demo", "--size", "9999TiB", "--dir"], dir.path());
    says(&line, &["three trees of 9999 TiB need", "--size"]);
    let line = demo(&["demo", "--size", "1MiB", "--dir"], &dir.path().join("missing"));
    says(&line, &["missing", "No such file", "--dir"]);
    let line = failed(program().args(["demo", "--size", "1KiB"]).output().unwrap(), 2);
    says(&line, &["1MiB at least"]);
}
