//! Fills the guest's small disk. The writes of the server and the client bypass the page cache, and
//! their memory is registered with a device.
//!
//! ```text
//! tests/guest/run --device rxe --disk 256M --env TONIC_RDMA=verbs -- target/.../disk_full-HASH
//! ```

#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::path::Path;
use std::process::Stdio;

use common::*;
use tempfile::TempDir;

/// Two files of this size do not fit on the disk in addition to a file of [`TAKEN`] bytes.
const LEN: usize = 72 << 20;
const TAKEN: usize = 110 << 20;

/// A directory on the disk, and one in memory. The file `taken` is on the disk.
fn places() -> [TempDir; 2] {
    let disk = tempfile::tempdir_in(std::env::var_os("GUEST_DISK").unwrap()).unwrap();
    fs::write(disk.path().join("taken"), content(TAKEN, 1)).unwrap();
    [disk, tempfile::tempdir().unwrap()]
}

fn is_whole(file: &Path) -> bool {
    fs::read(file).unwrap() == content(LEN, 7)
}

/// Two clients put at the same time, and there is room for only one. One or both get the error that
/// the disk is full, and continue once there is room.
#[test]
fn puts_that_fill_the_disk_fail_with_the_reason() {
    let [disk, memory] = places();
    let (root, file) = (disk.path().join("root"), memory.path().join("file"));
    fs::create_dir(&root).unwrap();
    fs::write(&file, content(LEN, 7)).unwrap();
    let server = Server::spawn(by_path(serve(program(), &root)), &root);
    let put = |name: &str| {
        let args = ["put".as_ref(), file.as_os_str(), name.as_ref(), "--resume".as_ref()];
        server.client_command(args)
    };
    let puts = ["a", "b"].map(|name| {
        let mut put = put(name);
        put.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    let mut stored = 0;
    for (put, name) in puts.into_iter().zip(["a", "b"]) {
        let put = put.wait_with_output().unwrap();
        if put.status.success() {
            stored += 1;
            assert!(is_whole(&root.join(name)));
        } else {
            let line = failed(put, 1);
            assert!(line.contains("No space left") || line.contains("room"), "{line}");
            assert!(!root.join(name).exists());
        }
    }
    assert!(stored < 2, "the disk has room for both");
    fs::remove_file(disk.path().join("taken")).unwrap();
    for name in ["a", "b"] {
        ok(put(name).output().unwrap());
        assert!(is_whole(&root.join(name)));
    }
}

/// The disk of a get's target has no room.
#[test]
fn a_get_that_fills_the_disk_fails_with_the_reason() {
    let [disk, memory] = places();
    let root = memory.path().join("root");
    fs::create_dir(&root).unwrap();
    fs::write(root.join("a"), content(LEN, 7)).unwrap();
    let server = Server::spawn(by_path(serve(program(), &root)), &root);
    let more = disk.path().join("more");
    fs::write(&more, content(LEN, 1)).unwrap();
    let target = disk.path().join("copy");
    let get = || server.client_command(["get".as_ref(), "a".as_ref(), target.as_os_str()]).output();
    let line = failed(get().unwrap(), 1);
    assert!(line.contains("No space left") || line.contains("room"), "{line}");
    assert!(!target.exists());
    fs::remove_file(more).unwrap();
    ok(get().unwrap());
    assert!(is_whole(&target));
}
