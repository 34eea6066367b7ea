//! Trees with many files, large files, modes and times, from files to a server, between servers,
//! and back.

#![allow(clippy::unwrap_used)]

mod common;

use std::ffi::OsStr;
use std::fs::{self, File, FileTimes, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use common::*;
use tempfile::TempDir;

/// Two roots, and a directory for the client.
struct Dirs(TempDir);

impl Dirs {
    fn new() -> Dirs {
        let dirs = Dirs(scratch());
        for dir in ["one", "two", "here"] {
            fs::create_dir(dirs.at(dir)).unwrap();
        }
        dirs
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }
}

fn args<'a>(verb: &'a str, paths: &[&'a Path], flags: &'a [&'a str]) -> Vec<&'a OsStr> {
    let paths = paths.iter().map(|path| path.as_os_str());
    std::iter::once(verb.as_ref())
        .chain(paths)
        .chain(flags.iter().map(|flag| flag.as_ref()))
        .collect()
}

/// A sparse file with some islands of content.
fn sparse(path: &Path, length: u64, seed: u32) {
    let file = File::create(path).unwrap();
    file.set_len(length).unwrap();
    for (n, at) in (0..length).step_by(9 << 20).enumerate() {
        file.write_all_at(&content(50_000, seed + n as u32), at).unwrap();
    }
    file.write_all_at(&content(1000, seed), length - 1000).unwrap();
}

#[test]
fn ten_thousand_small_files_and_some_large_ones() {
    let dirs = Dirs::new();
    let tree = dirs.at("here/tree");
    for dir in 0..100 {
        let dir = tree.join(format!("{:02}/{:02}", dir / 10, dir % 10));
        fs::create_dir_all(&dir).unwrap();
        for file in 0..100 {
            let name = format!("{file:02} ü");
            fs::write(dir.join(name), content(file * 17, file as u32)).unwrap();
        }
    }
    let large = 3;
    for n in 0..large {
        sparse(&tree.join(format!("large-{n}")), (40 << 20) + 12_345 * n, n as u32);
    }
    let bytes: u64 =
        100 * (0..100).map(|file| file * 17).sum::<u64>() + large * (40 << 20) + 12_345 * 3;

    let server = Server::start(&dirs.at("one"));
    let put =
        ok(server.client(args("put", &[&tree, "a/tree".as_ref()], &["--jobs", "16", "--json"])));
    let put = json(&put);
    assert_eq!((number(&put, "files"), number(&put, "directories")), (10_000 + large, 110));
    assert_eq!((number(&put, "bytes"), number(&put, "moved_bytes")), (bytes, bytes));
    assert_eq!(server.unfinished(), 0);

    let copy = dirs.at("here/copy");
    let get = json(&ok(server.client(args("get", &["a/tree".as_ref(), &copy], &["--json"]))));
    assert_eq!((number(&get, "files"), number(&get, "bytes")), (10_000 + large, bytes));
    same(&tree, &copy);

    // Nothing is missing, so nothing is transferred again.
    for direction in [
        args("put", &[&tree, "a/tree".as_ref()], &[]),
        args("get", &["a/tree".as_ref(), &copy], &[]),
    ] {
        let again = server.client_command(direction).args(["--resume", "--json"]).output().unwrap();
        let again = json(&ok(again));
        assert_eq!((number(&again, "moved_bytes"), number(&again, "kept_bytes")), (0, bytes));
        assert_eq!(number(&again, "kept_files"), 10_000 + large);
    }
    same(&tree, &copy);

    let ls = ok(server.client(["ls", "a/tree", "--json"]));
    assert_eq!(stdout(&ls).lines().count() as u64, 10_000 + large + 111);
    let rm = json(&ok(server.client(["rm", "a/tree", "--recursive", "--json"])));
    assert_eq!((number(&rm, "files"), number(&rm, "bytes")), (10_000 + large, bytes));
    assert_eq!(names(&dirs.at("one")), [".rpc-demo-tmp", "a"]);
    assert_eq!(server.unfinished(), 0);
}

#[test]
fn modes_and_times_come_back() {
    let dirs = Dirs::new();
    let tree = dirs.at("here/tree");
    fs::create_dir_all(tree.join("closed/sub")).unwrap();
    fs::create_dir_all(tree.join("empty")).unwrap();
    let times = [
        UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789),
        UNIX_EPOCH,
        UNIX_EPOCH - Duration::new(1000, 5000),
        UNIX_EPOCH + Duration::from_secs(4_000_000_000),
    ];
    for (n, mode) in [0o777, 0o400, 0o666, 0o640].into_iter().enumerate() {
        for (name, length) in [("small", 10), ("large", 300_000)] {
            let path = tree.join(format!("closed/sub/{name}-{mode:o}"));
            fs::write(&path, content(length, mode)).unwrap();
            File::open(&path).unwrap().set_times(FileTimes::new().set_modified(times[n])).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        }
    }
    for (dir, mode, n) in [("closed/sub", 0o555, 0), ("closed", 0o500, 2), ("empty", 0o777, 3)] {
        let path = tree.join(dir);
        File::open(&path).unwrap().set_times(FileTimes::new().set_modified(times[n])).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    }
    let (one, two) = (Server::start(&dirs.at("one")), Server::start(&dirs.at("two")));
    let ranges = ["--range-size", "64KiB"];
    let copy = dirs.at("here/copy");
    // In the second round, both sides already have directories without write permission.
    for _ in 0..2 {
        ok(one.client(args("put", &[&tree, "t".as_ref()], &ranges)));
        let mut cp =
            one.client_command(["cp", "--from", &one.url, "--to", &two.url, "t", "deep/t"]);
        ok(cp.args(ranges).output().unwrap());
        ok(two.client(args("get", &["deep/t".as_ref(), &copy], &ranges)));
        same(&tree, &dirs.at("one/t"));
        same(&tree, &dirs.at("two/deep/t"));
        same(&tree, &copy);
    }
    // If the content is the same, mode and modification time are still updated, and the CRC32C
    // stays known.
    let file = tree.join("closed/sub/small-777");
    fs::set_permissions(&file, Permissions::from_mode(0o700)).unwrap();
    File::open(&file).unwrap().set_times(FileTimes::new().set_modified(times[1])).unwrap();
    let put = json(&ok(one.client(args("put", &[&tree, "t".as_ref()], &["--resume", "--json"]))));
    assert_eq!((number(&put, "moved_bytes"), number(&put, "kept_files")), (0, 8));
    same(&tree, &dirs.at("one/t"));
    let get = json(&ok(one.client(args("get", &["t".as_ref(), &copy], &["--resume", "--json"]))));
    assert_eq!((number(&get, "moved_bytes"), number(&get, "kept_files")), (0, 8));
    same(&tree, &copy);
    for top in [&tree, &copy, &dirs.at("one/t"), &dirs.at("two/deep/t")] {
        for dir in ["closed", "closed/sub"] {
            fs::set_permissions(top.join(dir), Permissions::from_mode(0o700)).unwrap();
        }
    }
}

#[test]
fn several_things_go_into_a_directory() {
    let dirs = Dirs::new();
    let server = Server::start(&dirs.at("one"));
    fs::create_dir(dirs.at("here/dir")).unwrap();
    fs::write(dirs.at("here/dir/x"), "1").unwrap();
    fs::write(dirs.at("here/file"), "22").unwrap();
    let (dir, file) = (dirs.at("here/dir"), dirs.at("here/file"));
    let put = ok(server.client(args("put", &[&dir, &file, "into".as_ref()], &[])));
    says(stdout(&put), &["put 'into': 3 bytes in 2 files, "]);
    ok(server.client(args("put", &[&file, "other/".as_ref()], &[])));
    ok(server.client(args("put", &[&file, "/".as_ref()], &[])));
    let ls = ok(server.client(["ls"]));
    let listed: Vec<_> =
        stdout(&ls).lines().map(|line| line.split_whitespace().last().unwrap()).collect();
    assert_eq!(
        listed,
        ["file", "into/", "into/dir/", "into/dir/x", "into/file", "other/", "other/file"]
    );

    let (back, single) = (dirs.at("here/back"), dirs.at("here/back/new/"));
    ok(server.client(args("get", &["into/dir".as_ref(), "file".as_ref(), &back], &[])));
    assert_eq!(names(&back), ["dir", "file"]);
    ok(server.client(args("get", &["file".as_ref(), &single], &[])));
    assert_eq!(names(&single), ["file"]);

    let line = failed(server.client(args("put", &[&file, &file, "x".as_ref()], &[])), 2);
    says(&line, &["two of them would get the name 'x/file'"]);
    let line =
        failed(server.client(args("get", &["file".as_ref(), "into/file".as_ref(), &back], &[])), 2);
    says(&line, &["two of them would get the name 'file'"]);
    failed(server.client(["put", "-", "x/"]), 2);
}

#[test]
fn from_server_to_server() {
    let dirs = Dirs::new();
    let tree = dirs.at("here/tree");
    fs::create_dir_all(tree.join("sub/empty")).unwrap();
    for (name, length) in
        [("none", 0), ("small", 1000), ("sub/middle", 100_000), ("sub/large", 3_000_000)]
    {
        fs::write(tree.join(name), content(length, length as u32)).unwrap();
    }
    let bytes = 3_101_000;
    let (one, two) = (Server::start(&dirs.at("one")), Server::start(&dirs.at("two")));
    ok(one.client(args("put", &[&tree, "tree".as_ref()], &[])));
    let cp = |more: &[&str]| {
        let mut command = one.client_command(["cp", "--from", &one.url, "--to", &two.url]);
        command.args(["--range-size", "256KiB", "--json"]).args(more).output().unwrap()
    };
    let first = json(&ok(cp(&["tree", "new/tree"])));
    assert_eq!((number(&first, "bytes"), number(&first, "moved_bytes")), (bytes, bytes));
    assert_eq!((number(&first, "files"), number(&first, "directories")), (4, 2));
    for way in ["from", "to"] {
        let route = &first[way];
        let all: u64 = ["write_bytes", "lent_bytes", "send_bytes", "tcp_bytes"]
            .iter()
            .map(|field| number(route, field))
            .sum();
        // Payload of the messages: contents and some overhead.
        assert!((bytes..bytes + 20_000).contains(&all), "{way}: {route}");
    }
    same(&dirs.at("one/tree"), &dirs.at("two/new/tree"));
    // One file differs.
    fs::write(dirs.at("two/new/tree/small"), "other").unwrap();
    let again = json(&ok(cp(&["tree", "new/tree", "--resume"])));
    assert_eq!((number(&again, "moved_bytes"), number(&again, "kept_files")), (1000, 3));
    same(&dirs.at("one/tree"), &dirs.at("two/new/tree"));

    ok(cp(&["tree/small", "tree/none", "several"]));
    assert_eq!(names(&dirs.at("two/several")), ["none", "small"]);
    says(&failed(cp(&["missing", "x"]), 1), &["cannot copy 'missing' as 'x'", "rpc-demo ls"]);
    // On the same server, under another name.
    ok(one.client(["cp", "--from", &one.url, "tree/small", "tree/twin"]));
    assert_eq!(fs::read(dirs.at("one/tree/twin")).unwrap(), fs::read(tree.join("small")).unwrap());
    for target in ["tree", "tree/below"] {
        let line = failed(one.client(["cp", "--from", &one.url, "tree", target]), 2);
        says(&line, &["copied into itself"]);
    }
    let line = failed(
        one.client(["cp", "--from", &one.url, "--to", "http://127.0.0.1:1", "tree", "t"]),
        1,
    );
    says(&line, &["no server answers at http://127.0.0.1:1"]);
}

#[test]
fn over_shared_memory_little_is_copied() {
    let dirs = Dirs::new();
    let file = dirs.at("here/file");
    let bytes = 96 << 20;
    sparse(&file, bytes, 3);
    let shm = |mut command: std::process::Command| {
        command.env("TONIC_RDMA", "shm,require");
        command
    };
    let one = Server::spawn(shm(serve(program(), &dirs.at("one"))), &dirs.at("one"));
    let two = Server::spawn(shm(serve(program(), &dirs.at("two"))), &dirs.at("two"));
    let run = |args: &[&OsStr]| {
        json(&ok(shm(one.client_command(args)).args(["--json", "--jobs", "4"]).output().unwrap()))
    };
    let little = |route: &serde_json::Value| {
        assert_eq!((&route["path"], number(route, "tcp_bytes")), (&"shm".into(), 0), "{route}");
        let (written, lent) = (number(route, "write_bytes"), number(route, "lent_bytes"));
        assert!(written + lent >= bytes, "{route}");
        // How much is copied depends on timing, but most of the data is never copied.
        assert!(number(route, "copied_bytes") < bytes / 4, "{route}");
    };
    little(&run(&args("put", &[&file, "x".as_ref()], &[]))["route"]);
    let cp =
        run(&args("cp", &["x".as_ref(), "y".as_ref()], &["--from", &one.url, "--to", &two.url]));
    little(&cp["from"]);
    little(&cp["to"]);
    let back = dirs.at("here/back");
    little(&run(&args("get", &["x".as_ref(), &back], &[]))["route"]);
    assert!(fs::read(&file).unwrap() == fs::read(&back).unwrap());
    assert!(fs::read(&file).unwrap() == fs::read(dirs.at("two/y")).unwrap());
}
