//! Runs `scripts/check-machine` and `scripts/install-packages` on machines that lack something. The
//! scripts see such a machine through programs of the test, which are first in PATH.

// Test code: a failed unwrap is a failed test.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;
use tonic_rdma_memory::test_util::process::{PTRACE, forbid};

/// A machine with a target directory, a cache and programs of its own.
struct Machine {
    dir: TempDir,
    path: String,
}

impl Machine {
    /// A machine that lacks nothing, on whose file systems 100 GiB are free.
    fn new() -> Self {
        Self::whose_kernel_decides_on_ptrace().with("perl", "exit 0")
    }

    /// Like [`new`](Self::new), but whether ptrace(2) is allowed depends on this process.
    fn whose_kernel_decides_on_ptrace() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
        Self { dir, path }.with_free(100 << 10)
    }

    fn with(self, program: &str, text: &str) -> Self {
        let file = self.dir.path().join(program);
        fs::write(&file, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    fn with_free(self, mib: u64) -> Self {
        let kib = mib << 10;
        self.with("df", &format!("echo Filesystem; echo /dev/sda {kib} 0 {kib} 0% /"))
    }

    /// Runs a script, and returns whether it succeeded, and its messages.
    fn run(&self, script: &str, target: &str) -> (bool, String) {
        let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let out = Command::new(checkout.join("scripts").join(script))
            .arg(target)
            .env("PATH", &self.path)
            .env("CARGO_TARGET_DIR", self.dir.path().join("target"))
            .env("XDG_CACHE_HOME", self.dir.path().join("cache"))
            .env_remove("TONIC_RDMA_KERNEL")
            .env_remove("TONIC_RDMA_GUEST_TMPDIR")
            .output()
            .unwrap();
        (out.status.success(), String::from_utf8(out.stderr).unwrap())
    }

    /// Runs a script, which must fail and say all of this.
    fn refuses(&self, script: &str, target: &str, says: &[&str]) {
        let (ok, said) = self.run(script, target);
        assert!(!ok, "{said}");
        for text in says {
            assert!(said.contains(text), "{text:?} is not in: {said}");
        }
    }
}

const WITHOUT_GUEST: &str = "these run: make test-source test-native test-sim";

#[test]
fn a_machine_that_lacks_nothing_passes() {
    for target in ["test", "test-all", "demo"] {
        let (ok, said) = Machine::new().run("check-machine", target);
        assert!(ok && said.is_empty(), "{target}: {said}");
    }
}

#[test]
fn no_room_on_the_disk() {
    let machine = Machine::new().with_free(100);
    for (target, needs) in [("test", 15000), ("test-all", 39000)] {
        let room =
            format!("has 100 MiB free, and 'make {target}' needs {needs} more, 3000 of them");
        let memory = "100 MiB free, and the memory of two guests takes 4200";
        let cure = "TONIC_RDMA_GUEST_TMPDIR";
        let says = [&room, "set CARGO_TARGET_DIR", memory, cure, WITHOUT_GUEST];
        machine.refuses("check-machine", target, &says);
    }
    machine.refuses("check-machine", "demo", &["'make demo' needs 3500 more", "make room"]);
    // Room for what is compiled, but not for the kernel in addition.
    Machine::new().with_free(13_000).refuses("check-machine", "test", &["needs 15000 more"]);
}

#[test]
fn another_system() {
    let machine = Machine::new().with("uname", "echo Darwin arm64");
    machine.refuses("check-machine", "test", &["this is Darwin arm64", WITHOUT_GUEST]);
}

#[test]
fn no_ptrace() {
    let machine = Machine::whose_kernel_decides_on_ptrace();
    let thread = std::thread::spawn(move || {
        forbid(PTRACE).unwrap();
        machine.refuses("check-machine", "test", &["ptrace(2)", "SYS_PTRACE", WITHOUT_GUEST]);
    });
    thread.join().unwrap();
}

#[test]
fn no_network_for_apt() {
    let machine = Machine::new()
        .with("dpkg-query", "exit 1")
        .with("apt-get", "echo 'Could not resolve deb.debian.org' >&2; exit 100")
        .with("id", "echo 0");
    let says = ["could not install: gcc", "Could not resolve", "without a network", "these run"];
    let says = [&says[..], &["test-source test-native test-sim", "linux-source-6.1"]].concat();
    machine.refuses("install-packages", "test", &says);
}

#[test]
fn neither_root_nor_sudo() {
    let mut machine = Machine::new()
        .with("dpkg-query", "exit 1")
        .with("apt-get", "exit 0")
        .with("sort", "exit 0")
        .with("id", "echo 1000");
    machine.path = machine.dir.path().display().to_string();
    machine.refuses("install-packages", "build", &["no sudo; as root run: apt-get install gcc"]);
}

#[test]
fn a_system_without_apt() {
    let mut machine = Machine::new();
    machine.path = machine.dir.path().display().to_string();
    let says = ["not found: cc make", "not Debian or Ubuntu", "gcc libc6-dev make"];
    machine.refuses("install-packages", "build", &says);
}
