//! Acknowledged data has been synced. If a sync fails, the command also fails. strace injects the
//! failures. `tests/guest/suite` runs these tests on this machine. They need strace.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::process::{Command, Output};

use common::*;
use tempfile::TempDir;

/// A server in which each sync of `path`, relative to its root, fails.
struct Broken {
    server: Server,
    dir: TempDir,
}

impl Broken {
    fn start(path: &str, more: &[&str]) -> Broken {
        let dir = scratch();
        let root = dir.path().join("root");
        fs::create_dir(&root).unwrap();
        // With -D, strace is not the parent: killing the child kills the server.
        let mut command = quiet(Command::new("strace"));
        command.args([
            "-D",
            "-f",
            "-qq",
            "-e",
            "trace=fsync,fdatasync",
            "-e",
            "inject=fsync,fdatasync:error=EIO",
        ]);
        command.arg("-P").arg(if path.is_empty() { root.clone() } else { root.join(path) });
        command.arg("-o").arg(dir.path().join("log")).arg(env!("CARGO_BIN_EXE_rpc-demo"));
        let mut command = serve(command, &root);
        command.args(more);
        Broken { server: Server::spawn(command, &root), dir }
    }

    fn put(&self, length: Option<usize>, name: &str) -> Output {
        let source = self.dir.path().join("source");
        match length {
            Some(length) => fs::write(&source, content(length, 1)).unwrap(),
            None => fs::create_dir(&source).unwrap(),
        }
        let args = [
            "put".as_ref(),
            source.as_os_str(),
            name.as_ref(),
            "--range-size".as_ref(),
            "64KiB".as_ref(),
        ];
        self.server.client(args)
    }
}

/// Seccomp refuses io_uring, as in most containers. Files go through the page cache, and the final
/// line says why.
#[test]
fn without_io_uring_files_go_through_the_page_cache() {
    for error in ["EPERM", "ENOSYS"] {
        let dir = scratch();
        let at = |path: &str| dir.path().join(path);
        fs::create_dir(at("root")).unwrap();
        fs::write(at("file"), content(9_000_001, 1)).unwrap();
        let strace = || {
            let mut command = quiet(Command::new("strace"));
            command.args(["-D", "-f", "-qq", "-e", "trace=io_uring_setup", "-e"]);
            command.arg(format!("inject=io_uring_setup:error={error}"));
            command.arg("-o").arg(at("log")).arg(env!("CARGO_BIN_EXE_rpc-demo"));
            command
        };
        let mut command = serve(strace(), &at("root"));
        command.env("TONIC_RDMA", "shm,require");
        let server = Server::spawn(command, &at("root"));
        let run = |args: [&std::ffi::OsStr; 3]| {
            let mut command = strace();
            command.env("TONIC_RDMA", "shm,require").env("RPC_DEMO_SERVER", &server.url);
            json(&ok(command.args(args).arg("--json").output().unwrap()))
        };
        let put = run(["put".as_ref(), at("file").as_ref(), "x".as_ref()]);
        let get = run(["get".as_ref(), "x".as_ref(), at("copy").as_ref()]);
        for summary in [put, get] {
            let reason = summary["disk"]["reason"].as_str().unwrap();
            assert!(reason.starts_with("no io_uring: "), "{reason}");
            assert_eq!(number(&summary["disk"], "direct_bytes"), 0, "{summary}");
        }
        assert!(fs::read(at("copy")).unwrap() == fs::read(at("file")).unwrap());
    }
}

/// The path whose sync fails, the length in bytes of the object to put (`None` for a directory),
/// and the name to put it under. Temporary files are numbered consecutively. The first number goes
/// to the file with which the server probes the file system.
const PUTS: [(&str, Option<usize>, &str); 7] = [
    // The content of a small object and of a large object, which arrives in ranges. The objects do
    // not have their names yet.
    (".rpc-demo-tmp/1.part", Some(1000), "name"),
    (".rpc-demo-tmp/c4bcadba8e631b86-200000-1.upload", Some(200_000), "name"),
    // The directory entry of the object.
    ("", Some(1000), "name"),
    ("", Some(200_000), "name"),
    ("a/b", Some(1000), "a/b/name"),
    // The entry of a directory that was created for the object.
    ("a", Some(1000), "a/b/name"),
    // Mode and modification time of a directory.
    ("name", None, "name"),
];

#[test]
fn a_put_is_acknowledged_when_all_is_on_the_disk() {
    for (path, length, name) in PUTS {
        let broken = Broken::start(path, &[]);
        let line = failed(broken.put(length, name), 1);
        says(&line, &["Input/output error"]);
        if path.starts_with('.') {
            assert_eq!(
                names(&broken.server.root),
                [".rpc-demo-tmp"],
                "it is shown, and may be lost"
            );
        }
    }
}

#[test]
fn so_is_what_is_removed() {
    for (path, name) in [("", "name"), ("", "a"), ("a", "a/name")] {
        let broken = Broken::start(path, &[]);
        fs::write(broken.server.root.join("name"), "").unwrap();
        fs::create_dir(broken.server.root.join("a")).unwrap();
        fs::write(broken.server.root.join("a/name"), "").unwrap();
        let line = failed(broken.server.client(["rm", "-r", name]), 1);
        says(&line, &["Input/output error"]);
    }
}

#[test]
fn without_syncing_nothing_of_this_is_asked_of_the_disk() {
    for (path, length, name) in PUTS {
        let broken = Broken::start(path, &["--no-sync"]);
        ok(broken.put(length, name));
        ok(broken.server.client(["rm", "-r", name]));
        assert_eq!(fs::read_to_string(broken.dir.path().join("log")).unwrap(), "");
    }
}
