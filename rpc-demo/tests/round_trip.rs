//! Fetched data equals the data that was put.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Stdio;

use common::*;

#[test]
fn a_tree_comes_back_the_same() {
    let dir = scratch();
    let at = |path: &str| dir.path().join(path);
    let files = [
        ("empty", 0),
        ("one", 1),
        ("sub/chunk less one", (64 << 10) - 1),
        ("sub/chunk", 64 << 10),
        ("sub/chunk and one", (64 << 10) + 1),
        ("sub/deep/1/2/3/4/5/6/7/8/leaf", 10),
        ("names/ünï 名前 😀", 5),
        ("names/back\\slash..", 6),
        ("names/-dash", 7),
        ("large", 5_000_000),
    ];
    for (seed, (name, length)) in files.into_iter().enumerate() {
        let path = at("tree").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content(length, seed as u32)).unwrap();
    }
    fs::create_dir_all(at("tree/nothing/in/here")).unwrap();
    fs::set_permissions(at("tree/one"), Permissions::from_mode(0o700)).unwrap();
    fs::set_permissions(at("tree/empty"), Permissions::from_mode(0o400)).unwrap();
    fs::create_dir(at("root")).unwrap();

    let server = Server::start(&at("root"));
    let tree = at("tree");
    let put = ok(server.client([
        "put".as_ref(),
        tree.as_os_str(),
        "a/tree".as_ref(),
        "--chunk-size=64KiB".as_ref(),
    ]));
    let bytes: usize = files.iter().map(|(_, length)| length).sum();
    let closing = stdout(&put);
    assert_eq!(closing.lines().count(), 1);
    says(
        closing,
        &[
            "put 'a/tree': ",
            &format!("{bytes} bytes in 10 files, 14 directories, "),
            " GB/s, CRC32C ok, ",
        ],
    );
    says(closing, &[&path()]);
    assert!(!closing.contains("skipped"));

    let copy = at("copy");
    let get = ok(server.client(["get".as_ref(), "a/tree".as_ref(), copy.as_os_str()]));
    says(
        stdout(&get),
        &["get 'a/tree': ", &format!("{bytes} bytes in 10 files, 14 directories, "), "CRC32C ok"],
    );
    assert!(picture(&tree) == picture(&copy), "the trees differ");
    assert_eq!(server.unfinished(), 0);

    // The store holds plain files.
    assert!(picture(&tree) == picture(&at("root/a/tree")), "the store differs");
    let ls = ok(server.client(["ls", "a/tree/sub/"]));
    let expected = "               -  a/tree/sub/\n           65536  a/tree/sub/chunk\n           65537  \
                    a/tree/sub/chunk and one\n           65535  a/tree/sub/chunk less one\n";
    assert!(stdout(&ls).starts_with(expected), "{}", stdout(&ls));
    let all = ok(server.client(["ls"]));
    assert_eq!(stdout(&all).lines().count(), 1 + 1 + 10 + 14);
    says(stdout(&all), &["  a/tree/nothing/in/here/\n", "               0  a/tree/empty\n"]);
    assert!(!stdout(&all).contains("rpc-demo-tmp"));
    let one = ok(server.client(["ls", "a/tree/one"]));
    assert_eq!(stdout(&one), "               1  a/tree/one\n");
}

#[test]
fn one_file_replaces_another() {
    let dir = scratch();
    let at = |path: &str| dir.path().join(path);
    fs::create_dir(at("root")).unwrap();
    let server = Server::start(&at("root"));
    for (round, length) in [100_000, 0, 3_000_001].into_iter().enumerate() {
        fs::write(at("file"), content(length, round as u32)).unwrap();
        let put = ok(server.client(["put".as_ref(), at("file").as_os_str(), "x".as_ref()]));
        says(stdout(&put), &[&format!("put 'x': {length} bytes in 1 file, ")]);
        let get = ok(server.client(["get".as_ref(), "x".as_ref(), at("back").as_os_str()]));
        says(stdout(&get), &[&format!("get 'x': {length} bytes in 1 file, ")]);
        assert!(fs::read(at("file")).unwrap() == fs::read(at("back")).unwrap());
    }
    assert_eq!(names(dir.path()), ["back", "file", "root"]);
    assert_eq!(names(&at("root")), [".rpc-demo-tmp", "x"]);
}

#[test]
fn what_has_no_size_beforehand_is_stored_too() {
    let dir = scratch();
    let at = |path: &str| dir.path().join(path);
    fs::create_dir(at("root")).unwrap();
    let server = Server::start(&at("root"));

    let content = content(2_500_000, 7);
    let mut put = server.client_command(["put", "-", "piped"]);
    let mut child = put.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut pipe = child.stdin.take().unwrap();
    for part in content.chunks(100_003) {
        pipe.write_all(part).unwrap();
    }
    drop(pipe);
    let output = ok(child.wait_with_output().unwrap());
    says(stdout(&output), &["put 'piped': 2500000 bytes in 1 file, "]);
    assert!(fs::read(at("root/piped")).unwrap() == content);

    // The file's reported size is 0, but it has content.
    ok(server.client(["put", "/proc/self/status", "proc"]));
    says(&fs::read_to_string(at("root/proc")).unwrap(), &["Name:", "State:"]);
}

/// The peak memory of a process in bytes.
fn peak(process: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn a_file_is_never_held_whole() {
    const BLOCKS: usize = 512;
    const SIZE: u64 = (BLOCKS as u64) << 20;
    let dir = scratch();
    let at = |path: &str| dir.path().join(path);
    fs::create_dir(at("root")).unwrap();
    let server = Server::start(&at("root"));
    let before = peak(server.child.id());

    let mut put = server.client_command(["put", "-", "large"]);
    let mut client = put.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut pipe = client.stdin.take().unwrap();
    let block = content(1 << 20, 11);
    for _ in 0..BLOCKS {
        pipe.write_all(&block).unwrap();
    }
    // The client has read everything but the contents of the pipe, and still runs.
    let held = peak(client.id());
    drop(pipe);
    ok(client.wait_with_output().unwrap());
    // Over shared memory, this figure includes data that waits at the server for the disk, because
    // the client has mapped that data.
    assert!(held < SIZE / 4, "the client held {held} bytes");

    let get = ok(server.client(["get".as_ref(), "large".as_ref(), at("back").as_os_str()]));
    says(stdout(&get), &[&format!("{SIZE} bytes in 1 file")]);
    assert_eq!(fs::metadata(at("back")).unwrap().len(), SIZE);
    let held = peak(server.child.id()) - before;
    assert!(held < SIZE / 4, "the server held {held} bytes");
}

#[test]
fn links_and_special_files_are_left_out_and_counted() {
    let dir = scratch();
    let at = |path: &str| dir.path().join(path);
    fs::create_dir_all(at("tree/sub")).unwrap();
    fs::create_dir(at("root")).unwrap();
    fs::write(at("tree/sub/file"), "text").unwrap();
    symlink("file", at("tree/sub/link")).unwrap();
    let pipe = at("tree/pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();

    let server = Server::start(&at("root"));
    let put = ok(server.client(["put".as_ref(), at("tree").as_os_str(), "t".as_ref()]));
    says(stdout(&put), &["4 bytes in 1 file, 1 directory, 2 skipped, "]);
    says(
        str::from_utf8(&put.stderr).unwrap(),
        &["sub/link is a symbolic link", "pipe is a special file"],
    );

    // The same in the other direction, for a link created directly under the root.
    symlink("file", at("root/t/sub/link")).unwrap();
    let ls = ok(server.client(["ls", "t"]));
    says(stdout(&ls), &["?  t/sub/link (a symbolic link)"]);
    let get = ok(server.client(["get".as_ref(), "t".as_ref(), at("copy").as_os_str()]));
    says(stdout(&get), &["4 bytes in 1 file, 1 directory, 1 skipped, "]);
    assert_eq!(names(&at("copy/sub")), ["file"]);
    let line =
        failed(server.client(["get".as_ref(), "t/sub/link".as_ref(), at("l").as_os_str()]), 1);
    says(&line, &["t/sub/link", "a symbolic link"]);
}

#[test]
fn of_writers_at_once_one_wins_whole() {
    let dir = scratch();
    let at = |path: &str| dir.path().join(path);
    fs::create_dir(at("root")).unwrap();
    let server = Server::start(&at("root"));
    let versions: Vec<_> = (0..6).map(|seed| content(1_500_000, seed)).collect();
    let mut clients = Vec::new();
    for (n, version) in versions.iter().enumerate() {
        let file = at(&format!("file{n}"));
        fs::write(&file, version).unwrap();
        let mut put =
            server.client_command(["put".as_ref(), file.as_os_str(), "same/name".as_ref()]);
        clients.push(put.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    }
    for client in clients {
        ok(client.wait_with_output().unwrap());
    }
    ok(server.client(["get".as_ref(), "same/name".as_ref(), at("back").as_os_str()]));
    assert!(versions.contains(&fs::read(at("back")).unwrap()));
    assert_eq!(server.unfinished(), 0);
}
