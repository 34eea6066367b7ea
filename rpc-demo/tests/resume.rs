//! Interrupted transfers. Only complete objects are ever visible, and a resumed transfer sends only
//! the missing part.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use common::*;
use rustix::process::Signal;
use tempfile::TempDir;

/// Bytes of a range in these tests.
const RANGE: u64 = 256 << 10;
const FLAGS: [&str; 5] = ["--range-size", "256KiB", "--jobs", "2", "--json"];
/// Overhead in bytes in addition to contents: headers, names, listings, checksums.
const BESIDE: u64 = 400_000;

struct Dirs(TempDir);

impl Dirs {
    fn new() -> Dirs {
        let dirs = Dirs(scratch());
        for dir in ["root", "two", "here"] {
            fs::create_dir(dirs.at(dir)).unwrap();
        }
        dirs
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }
}

/// Small files, and a large one that is sent last.
fn tree(dir: &Path, small: usize, large: usize) -> u64 {
    fs::create_dir_all(dir.join("a")).unwrap();
    for n in 0..small {
        fs::write(dir.join(format!("a/{n:04}")), content(1000 + n, n as u32)).unwrap();
    }
    fs::write(dir.join("z"), content(large, 77)).unwrap();
    (small * 1000 + small * (small - 1) / 2 + large) as u64
}

/// Allocated bytes of the upload files.
fn received(root: &Path) -> u64 {
    let temp = root.join(".rpc-demo-tmp");
    names(&temp)
        .iter()
        .filter(|name| name.ends_with(".upload"))
        .map(|name| fs::metadata(temp.join(name)).map_or(0, |file| file.blocks() * 512))
        .sum()
}

/// Checks that every object in the store belongs to the tree and is complete. Returns the number of
/// objects.
#[track_caller]
fn only_whole(store: &Path, tree: &Path) -> usize {
    let all = picture(tree);
    let stored: Vec<_> = picture(store).into_iter().filter(|found| found.3.is_some()).collect();
    for (name, _, _, content) in &stored {
        let (.., wanted) = all.iter().find(|found| found.0 == *name).unwrap();
        assert!(content == wanted, "{name} is not whole");
    }
    stored.len()
}

#[track_caller]
fn wire(json: &serde_json::Value, route: &str) -> u64 {
    let ways = ["write_bytes", "lent_bytes", "send_bytes", "tcp_bytes"];
    ways.iter().map(|field| number(&json[route], field)).sum()
}

/// Checks that everything was transferred, and that only the missing part was sent.
#[track_caller]
fn only_the_rest(json: &serde_json::Value, route: &str, all: u64, at_least_kept: u64) {
    let (moved, kept) = (number(json, "moved_bytes"), number(json, "kept_bytes"));
    assert_eq!(moved + kept, all, "{json}");
    assert!(kept >= at_least_kept && moved > 0, "{json}");
    assert!(wire(json, route) < moved + BESIDE, "{json}");
}

fn spawn(server: &Server, args: &[&str]) -> Child {
    let mut command = server.client_command(args);
    command.args(FLAGS).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn a_server_that_is_killed_has_only_whole_objects_and_put_goes_on() {
    let dirs = Dirs::new();
    let (tree_at, root) = (dirs.at("here/tree"), dirs.at("root"));
    let all = tree(&tree_at, 300, 96 << 20);
    let put = ["put", tree_at.to_str().unwrap(), "t"];

    // The server is killed once during the small files, and once during the large one.
    let mut server = Server::start(&root);
    let client = spawn(&server, &put);
    until("some files are there", &root, || {
        fs::read_dir(root.join("t/a")).is_ok_and(|dir| dir.count() > 20)
    });
    server.signal(Signal::KILL);
    server.wait();
    says(
        &failed(client.wait_with_output().unwrap(), 1),
        &["connection to the server was lost", "--resume"],
    );
    assert!(only_whole(&root.join("t"), &tree_at) > 20);

    let mut server = Server::start(&root);
    let client = spawn(&server, &["put", tree_at.to_str().unwrap(), "t", "--resume"]);
    until("a part of the large one is there", &root, || received(&root) > 16 * RANGE);
    server.signal(Signal::KILL);
    server.wait();
    failed(client.wait_with_output().unwrap(), 1);
    // The other job may still have been sending the last small file.
    let whole = only_whole(&root.join("t"), &tree_at);
    assert!((299..=300).contains(&whole), "{whole} of 300 small files");

    let server = Server::start(&root);
    let had = received(&root);
    assert!(had > 16 * RANGE, "what a killed server has received is kept");
    assert!(!root.join("t/z").exists());
    let put = json(&ok(spawn(&server, &["put", tree_at.to_str().unwrap(), "t", "--resume"])
        .wait_with_output()
        .unwrap()));
    // Two ranges may have been in flight.
    only_the_rest(&put, "route", all, had - 2 * RANGE);
    assert_eq!(number(&put, "kept_files"), whole as u64);
    same(&tree_at, &root.join("t"));
    assert_eq!(server.unfinished(), 0);
}

#[test]
fn a_client_that_is_killed_goes_on_where_it_was() {
    let dirs = Dirs::new();
    let (file, root) = (dirs.at("here/file"), dirs.at("root"));
    let all = 96 << 20;
    fs::write(&file, content(all, 5)).unwrap();
    let server = Server::start(&root);
    for attempt in 0.. {
        let name = format!("file{attempt}");
        let put = ["put", file.to_str().unwrap(), &name];
        let mut client = spawn(&server, &put);
        until("a part of it is there", &root, || received(&root) > 16 * RANGE);
        client.kill().unwrap();
        client.wait().unwrap();
        // The same server still has the upload open: the client takes it over.
        let had = received(&root);
        let resumed =
            spawn(&server, &[put.as_slice(), &["--resume"]].concat()).wait_with_output().unwrap();
        let resumed = json(&ok(resumed));
        assert!(fs::read(&file).unwrap() == fs::read(root.join(&name)).unwrap());
        assert_eq!(server.unfinished(), 0);
        // If the test looked too late, the upload was already complete, so the test tries again.
        if had < all as u64 || attempt == 9 {
            return only_the_rest(&resumed, "route", all as u64, had - 2 * RANGE);
        }
    }
}

#[test]
fn what_was_received_is_checked_before_it_is_kept() {
    let dirs = Dirs::new();
    let (file, root) = (dirs.at("here/file"), dirs.at("root"));
    let all = 64 << 20;
    fs::write(&file, content(all, 5)).unwrap();
    let mut server = Server::start(&root);
    let put = ["put", file.to_str().unwrap(), "file"];
    let client = spawn(&server, &put);
    until("a part of it is there", &root, || received(&root) > 16 * RANGE);
    server.signal(Signal::KILL);
    server.wait();
    failed(client.wait_with_output().unwrap(), 1);
    // Corrupts one stored range, and changes the local file in another range that is stored as
    // well.
    let temp = root.join(".rpc-demo-tmp");
    let part = names(&temp).into_iter().find(|name| name.ends_with(".upload")).unwrap();
    let part = File::options().write(true).open(temp.join(part)).unwrap();
    part.write_all_at(b"rot", 10).unwrap();
    let changed = File::options().write(true).open(&file).unwrap();
    changed.write_all_at(b"new", RANGE + 10).unwrap();

    let server = Server::start(&root);
    let resumed =
        spawn(&server, &[put.as_slice(), &["--resume"]].concat()).wait_with_output().unwrap();
    only_the_rest(&json(&ok(resumed)), "route", all as u64, 10 * RANGE);
    assert!(fs::read(&file).unwrap() == fs::read(root.join("file")).unwrap());
}

#[test]
fn get_goes_on_after_both_ends_were_killed() {
    let dirs = Dirs::new();
    let (root, copy) = (dirs.at("root"), dirs.at("here/copy"));
    let all = tree(&root.join("t"), 100, 96 << 20);
    let server = Server::start(&root);
    let get = ["get", "t", copy.to_str().unwrap()];
    let part = |dir: &Path| {
        let found = fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap());
        let parts =
            found.filter(|entry| entry.file_name().to_str().unwrap().starts_with(".rpc-demo-"));
        // The file may be renamed at this moment.
        parts.map(|entry| entry.metadata().map_or(0, |file| file.blocks() * 512)).sum::<u64>()
    };
    // Small files are sent in parallel with the large one, and the last small file may arrive late.
    let whole = |dir: &Path| {
        let found = fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap().file_name());
        found.filter(|name| !name.to_str().unwrap().starts_with('.')).count()
    };
    let mut client = spawn(&server, &get);
    until("a part of the large one is there, and the small ones", copy.parent().unwrap(), || {
        part(&copy) > 16 * RANGE && whole(&copy.join("a")) == 100
    });
    client.kill().unwrap();
    client.wait().unwrap();
    assert!(only_whole(&copy.join("a"), &root.join("t/a")) == 100);
    assert!(!copy.join("z").exists());
    let had = part(&copy);
    drop(server);

    let server = Server::start(&root);
    let resumed =
        spawn(&server, &[get.as_slice(), &["--resume"]].concat()).wait_with_output().unwrap();
    let resumed = json(&ok(resumed));
    only_the_rest(&resumed, "route", all, had - 2 * RANGE);
    assert_eq!(number(&resumed, "kept_files"), 100);
    same(&root.join("t"), &copy);
    assert_eq!(names(&copy), ["a", "z"], "nothing is left beside it");

    // Without the flag everything is sent again.
    let again = json(&ok(spawn(&server, &get).wait_with_output().unwrap()));
    assert_eq!((number(&again, "moved_bytes"), number(&again, "kept_bytes")), (all, 0));
}

#[test]
fn cp_goes_on_after_its_target_was_killed() {
    let dirs = Dirs::new();
    let (root, two) = (dirs.at("root"), dirs.at("two"));
    let all = tree(&root.join("t"), 50, 96 << 20);
    let one = Server::start(&root);
    let cp = |to: &Server, more: &[&str]| {
        spawn(
            &one,
            &[["cp", "--from", &one.url, "--to", &to.url, "t", "t"].as_slice(), more].concat(),
        )
    };
    let mut server = Server::start(&two);
    let client = cp(&server, &[]);
    until("a part of the large one is there", &two, || received(&two) > 16 * RANGE);
    server.signal(Signal::KILL);
    server.wait();
    says(&failed(client.wait_with_output().unwrap(), 1), &["cannot copy 't/", "was lost"]);
    only_whole(&two.join("t"), &root.join("t"));
    let had = received(&two);

    let server = Server::start(&two);
    let resumed = json(&ok(cp(&server, &["--resume"]).wait_with_output().unwrap()));
    only_the_rest(&resumed, "to", all, had - 2 * RANGE);
    only_the_rest(&resumed, "from", all, had - 2 * RANGE);
    same(&root.join("t"), &two.join("t"));
}

#[test]
fn a_put_that_begins_anew_removes_what_another_left() {
    let dirs = Dirs::new();
    let (file, root) = (dirs.at("here/file"), dirs.at("root"));
    fs::write(&file, content(96 << 20, 5)).unwrap();
    let mut server = Server::start(&root);
    let put = ["put", file.to_str().unwrap(), "file"];
    let client = spawn(&server, &put);
    until("a part of it is there", &root, || received(&root) > 4 * RANGE);
    server.signal(Signal::KILL);
    server.wait();
    failed(client.wait_with_output().unwrap(), 1);

    // A server that keeps no uploads removes the part at its start.
    let other = dirs.at("two/root");
    assert!(
        std::process::Command::new("cp")
            .arg("-r")
            .arg(&root)
            .arg(&other)
            .status()
            .unwrap()
            .success()
    );
    let mut command = serve(program(), &other);
    let mut strict = Server::spawn(
        {
            command.args(["--keep-uploads", "0"]);
            command
        },
        &other,
    );
    assert_eq!(strict.unfinished(), 0);
    strict.signal(Signal::TERM);
    says(&strict.wait().1, &["removed 1 unfinished files"]);

    let server = Server::start(&root);
    assert_eq!(server.unfinished(), 1);
    let again = json(&ok(spawn(&server, &put).wait_with_output().unwrap()));
    assert_eq!(number(&again, "kept_bytes"), 0);
    assert_eq!(server.unfinished(), 0);
}
