//! Errors are reported in one line, with a nonzero exit code, and leave no partial file.

#![allow(clippy::unwrap_used)]

mod common;

use std::ffi::OsStr;
use std::fs::{self, File, FileTimes, Permissions};
use std::io::{Seek, SeekFrom, Write};
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use common::*;
use rustix::process::Signal;
use tempfile::TempDir;

/// A root directory, and a directory for the client.
struct Dirs {
    top: TempDir,
}

impl Dirs {
    fn new() -> Dirs {
        let dirs = Dirs { top: scratch() };
        fs::create_dir(dirs.root()).unwrap();
        fs::create_dir(dirs.here()).unwrap();
        dirs
    }

    fn root(&self) -> PathBuf {
        self.top.path().join("root")
    }

    fn here(&self) -> PathBuf {
        self.top.path().join("here")
    }

    fn file(&self, name: &str, length: usize) -> PathBuf {
        let path = self.here().join(name);
        fs::write(&path, content(length, 3)).unwrap();
        path
    }
}

fn put<'a>(file: &'a Path, name: &'a str) -> [&'a OsStr; 3] {
    ["put".as_ref(), file.as_os_str(), name.as_ref()]
}

fn get<'a>(name: &'a str, file: &'a Path) -> [&'a OsStr; 3] {
    ["get".as_ref(), name.as_ref(), file.as_os_str()]
}

/// A running client whose stdin the test holds.
fn spawn(command: &mut Command) -> Child {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// A put in flight: a part is on the server's disk, and stdin is still open.
fn put_under_way(server: &Server, name: &str) -> Child {
    let mut client = spawn(&mut server.client_command(["put", "-", name, "--chunk-size", "64KiB"]));
    client.stdin.as_mut().unwrap().write_all(&content(1 << 20, 5)).unwrap();
    server.writes();
    client
}

/// A sparse file that takes longer to send than any test runs.
fn endless(path: PathBuf) {
    File::create(path).unwrap().set_len(16 << 30).unwrap();
}

/// A get in flight: the client has written more than one range.
fn get_under_way(server: &Server, dirs: &Dirs) -> Child {
    endless(dirs.root().join("big"));
    let mut command = server.client_command(get("big", &dirs.here().join("target")));
    let client = spawn(command.args(["--range-size", "1MiB", "--jobs", "4"]));
    let written = |name: &String| {
        fs::metadata(dirs.here().join(name)).is_ok_and(|file| file.blocks() * 512 > 16 << 20)
    };
    until("the client writes", &dirs.here(), || names(&dirs.here()).iter().any(written));
    client
}

/// Checks that the client's only file is the received part of a large file, kept for --resume, and
/// removes it.
fn only_a_part(dirs: &Dirs) {
    let [part] = names(&dirs.here()).try_into().unwrap();
    assert!(part.starts_with(".rpc-demo-") && part.ends_with(".part"), "{part}");
    fs::remove_file(dirs.here().join(part)).unwrap();
}

#[test]
fn where_no_server_is() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{free}");
    let dirs = Dirs::new();
    let file = dirs.file("file", 1);
    let target = dirs.here().join("target");
    for args in [put(&file, "x").as_slice(), &get("x", &target), &["ls".as_ref()]] {
        let line = failed(program().args(args).args(["--server", &url]).output().unwrap(), 1);
        says(
            &line,
            &[&format!("no server answers at {url}"), "refused", "rpc-demo serve", "--server"],
        );
    }
    let line = failed(program().args(["ls", "--server", &free.to_string()]).output().unwrap(), 1);
    says(&line, &[&url]);
    assert_eq!(names(&dirs.here()), ["file"]);
}

#[test]
fn where_something_else_answers() {
    // Accepts connections, but does not speak HTTP/2.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.and_then(|mut stream| stream.write_all(b"220 smtp.example ESMTP\r\n"));
        }
    });
    failed(program().args(["ls", "--server", &url]).output().unwrap(), 1);
}

#[test]
fn addresses_and_flags_that_cannot_be_used() {
    for bad in ["", "http://", "::::", "ftp://host/x", "http://ho st", "https://127.0.0.1:1"] {
        let line = failed(program().args(["ls", "--server", bad]).output().unwrap(), 2);
        says(&line, &["not a server address", "http://127.0.0.1:50051"]);
    }
    let bad: [&[&str]; 16] = [
        &[],
        &["--jsn"],
        &["ls", "--jsn"],
        &["get", "name", "path", "--jobs", "0"],
        &["put", "file", "name", "--range-size", "1KiB"],
        &["bench", "--sizes", "4KiB,1GiB"],
        &["completions", "cobol"],
        &["rm"],
        &["fetch"],
        &["ls", "--nonsense"],
        &["put", "file"],
        &["put", "file", "name", "--chunk-size", "4MiB"],
        &["put", "file", "name", "--chunk-size", "many"],
        &["serve"],
        &["serve", "--root", ".", "--addr", "here"],
        &["demo", "--size", "99999999TiB"],
    ];
    for args in bad {
        let line = failed(program().args(args).output().unwrap(), 2);
        says(&line, &["see `rpc-demo", "--help`"]);
    }
    let line = failed(program().arg("ls").env("RUST_LOG", "a=b=c").output().unwrap(), 2);
    says(&line, &["RUST_LOG=a=b=c"]);
    let dirs = Dirs::new();
    let root = dirs.root();
    let serve = ["serve", "--addr", "127.0.0.1:0", "--root", root.to_str().unwrap()];
    for args in [&["ls"][..], &serve, &["demo"], &["bench"], &["put", "/dev/null", "x"]] {
        let line = failed(program().args(args).env("TONIC_RDMA", "maybe").output().unwrap(), 2);
        says(&line, &["TONIC_RDMA=\"maybe\"", "`auto`", "unset"]);
    }
}

#[test]
fn a_root_that_cannot_be_served() {
    let dirs = Dirs::new();
    let file = dirs.file("file", 1);
    let missing = dirs.here().join("missing");
    for (root, why) in [(&missing, "mkdir -p"), (&file, "is not a directory")] {
        let line = failed(serve(program(), root).output().unwrap(), 1);
        says(&line, &["cannot serve", root.to_str().unwrap(), why]);
    }
    let mut first = Server::start(&dirs.root());
    let line = failed(serve(program(), &dirs.root()).output().unwrap(), 1);
    says(&line, &["another rpc-demo already serves", dirs.root().to_str().unwrap()]);
    let taken = first.url.strip_prefix("http://").unwrap();
    let mut second = program();
    second.args(["serve", "--addr", taken, "--root"]).arg(dirs.here());
    says(&failed(second.output().unwrap(), 1), &["cannot listen on", taken, "--addr"]);
    // A killed server does not block the next one.
    first.signal(Signal::KILL);
    first.wait();
    Server::start(&dirs.root());
}

#[test]
fn what_is_not_there_or_not_a_file() {
    let dirs = Dirs::new();
    let server = Server::start(&dirs.root());
    let (file, target) = (dirs.file("file", 10), dirs.here().join("target"));
    says(&failed(server.client(get("no/such", &target)), 1), &["'no/such'", "rpc-demo ls"]);
    says(&failed(server.client(["ls", "no/such"]), 1), &["'no/such'"]);
    let missing = dirs.here().join("missing");
    says(&failed(server.client(put(&missing, "x")), 1), &["missing", "check the path"]);

    ok(server.client(put(&file, "file")));
    ok(server.client(put(&dirs.here(), "dir")));
    says(
        &failed(server.client(put(&file, "file/x")), 1),
        &["'file/x'", "a part of the name is a file"],
    );
    says(
        &failed(server.client(put(&file, "dir")), 1),
        &["'dir'", "there is a directory of that name"],
    );
    says(&failed(server.client(put(&dirs.here(), "file")), 1), &["'file'"]);
    says(&failed(server.client(get("file", &dirs.here())), 1), &["here", "is a directory"]);
    says(&failed(server.client(get("file", &dirs.here().join("no/such"))), 1), &["no/such"]);
    says(&failed(server.client(get("dir", &file)), 1), &["file"]);
    assert_eq!(names(&dirs.here()), ["file"]);
    assert_eq!(names(&dirs.root()), [".rpc-demo-tmp", "dir", "file"]);
    assert_eq!(server.unfinished(), 0);
}

#[test]
fn a_file_that_cannot_be_read_half_way() {
    let dirs = Dirs::new();
    let server = Server::start(&dirs.root());
    // Any user can open this file, but nothing is mapped at its beginning.
    let line = failed(server.client(["put", "/proc/self/mem", "x"]), 1);
    says(&line, &["cannot read /proc/self/mem"]);
    server.drops_all();
    assert_eq!(names(&dirs.root()), [".rpc-demo-tmp"]);
}

/// Runs as a user without permission to read everything: root becomes nobody, and other users stay
/// the same.
fn ordinary(program: &Path) -> Command {
    let mut command = quiet(Command::new(program));
    if rustix::process::geteuid().is_root() {
        command.uid(65534).gid(65534);
    }
    command
}

#[test]
fn a_file_without_permission() {
    // A directory and a program that any user can access.
    let top =
        tempfile::Builder::new().permissions(Permissions::from_mode(0o755)).tempdir().unwrap();
    let at = |name: &str| top.path().join(name);
    let copy = at("rpc-demo");
    fs::copy(env!("CARGO_BIN_EXE_rpc-demo"), &copy).unwrap();
    for dir in ["root", "here"] {
        fs::create_dir(at(dir)).unwrap();
        fs::set_permissions(at(dir), Permissions::from_mode(0o777)).unwrap();
    }
    let server = Server::spawn(serve(ordinary(&copy), &at("root")), &at("root"));
    let client = |args: &[&OsStr]| {
        ordinary(&copy).args(args).args(["--server", &server.url]).output().unwrap()
    };

    let secret = at("here/secret");
    fs::write(&secret, "secret").unwrap();
    fs::set_permissions(&secret, Permissions::from_mode(0o000)).unwrap();
    says(
        &failed(client(&put(&secret, "x")), 1),
        &["here/secret", "ermission denied", "check the permissions"],
    );
    says(&failed(client(&put(&at("here"), "tree")), 1), &["here/secret", "ermission denied"]);

    fs::write(at("here/open"), "open").unwrap();
    ok(client(&put(&at("here/open"), "closed")));
    ok(client(&put(&at("here/open"), "dir/file")));
    fs::set_permissions(at("root/closed"), Permissions::from_mode(0o000)).unwrap();
    let line = failed(client(&get("closed", &at("here/back"))), 1);
    says(&line, &["'closed'", "ermission denied", "under the server's root"]);
    assert!(!at("here/back").exists());

    // A directory that cannot be listed makes a tree incomplete. The error is reported before
    // anything is fetched.
    fs::set_permissions(at("root/dir"), Permissions::from_mode(0o000)).unwrap();
    says(&failed(client(&["ls".as_ref(), "dir".as_ref()]), 1), &["'dir'", "ermission denied"]);
    fs::set_permissions(at("root/dir"), Permissions::from_mode(0o755)).unwrap();
    ok(client(&put(&at("here/open"), "dir/sub/file")));
    fs::set_permissions(at("root/dir/sub"), Permissions::from_mode(0o000)).unwrap();
    says(&failed(client(&get("dir", &at("here/back"))), 1), &["'dir/sub'", "ermission denied"]);
    assert!(!at("here/back").exists());
    let ls = client(&["ls".as_ref()]);
    assert_eq!(ls.status.code(), Some(1));
    says(stdout(&ls), &["  dir/file\n", "  closed\n"]);

    // A directory without write permission, on either side.
    fs::set_permissions(at("root/dir"), Permissions::from_mode(0o555)).unwrap();
    says(&failed(client(&put(&at("here/open"), "dir/new")), 1), &["'dir/new'", "ermission denied"]);
    fs::set_permissions(at("here"), Permissions::from_mode(0o555)).unwrap();
    says(
        &failed(client(&get("dir/file", &at("here/back"))), 1),
        &["here/back", "ermission denied"],
    );
    assert_eq!(server.unfinished(), 0);
    // Allows an ordinary user to remove the directory.
    for path in ["here", "root/dir", "root/dir/sub"] {
        fs::set_permissions(at(path), Permissions::from_mode(0o777)).unwrap();
    }
}

/// The program with a disk of 2 MiB at `dir`. If the system allows it, the disk is in the program's
/// own mount namespace (`true`). Otherwise the program has a limit on file sizes, which every user
/// can set in units of 512 bytes.
fn on_a_small_disk(dir: &Path) -> (Command, bool) {
    let alone = ["--user", "--map-root-user", "--mount", "sh", "-c"];
    let mount = "mount -t tmpfs -o size=2m tiny \"$1\"";
    let trial = Command::new("unshare").args(alone).arg(mount).arg("sh").arg(dir).output();
    let possible = trial.is_ok_and(|trial| trial.status.success());
    let (mut command, prepare) = match possible {
        true => (quiet(Command::new("unshare")), mount),
        false => (quiet(Command::new("sh")), "ulimit -f 4096"),
    };
    command
        .args(&alone[if possible { 0 } else { 4 }..])
        .arg(format!("{prepare} && shift && exec \"$@\""));
    command.arg("sh").arg(dir).arg(env!("CARGO_BIN_EXE_rpc-demo"));
    (command, possible)
}

#[test]
fn a_client_whose_disk_is_full() {
    let dirs = Dirs::new();
    let large = dirs.file("large", 8 << 20);
    let server = Server::start(&dirs.root());
    ok(server.client(put(&large, "large")));
    let small = dirs.top.path().join("small");
    fs::create_dir(&small).unwrap();
    for range in ["1MiB", "64MiB"] {
        let (command, possible) = on_a_small_disk(&small);
        let mut command = by_path(command);
        command.args(get("large", &small.join("target"))).args([
            "--server",
            &server.url,
            "--range-size",
            range,
        ]);
        let line = failed(command.output().unwrap(), 1);
        let cure = if possible { "free some space" } else { "limit on file sizes" };
        says(&line, &["cannot write ", "small/target", cure]);
        assert!(!small.join("target").exists());
    }
}

#[test]
fn a_server_whose_disk_is_full() {
    let dirs = Dirs::new();
    let (small, large) = (dirs.file("small", 100_000), dirs.file("large", 8 << 20));
    let root = dirs.root();
    let (command, possible) = on_a_small_disk(&root);
    let command = serve(command, &root);
    let server = Server::spawn(command, &root);

    ok(server.client(put(&small, "small")));
    let before = stdout(&ok(server.client(["ls"]))).to_owned();
    // The length is unknown in advance, so the error occurs during the transfer.
    for _ in 0..3 {
        let mut client = server.client_command(["put", "-", "large"]);
        let output = client.stdin(File::open(&large).unwrap()).output().unwrap();
        let line = failed(output, 1);
        says(
            &line,
            &[
                "cannot put stdin as 'large'",
                "cannot write 'large'",
                if possible { "free some space" } else { "limit on file sizes" },
            ],
        );
        // The server frees the space of the failed put, so the next round starts from the same
        // state.
        let began = Instant::now();
        while !server.client(put(&small, "again")).status.success() {
            assert!(began.elapsed() < HANG, "the server keeps what it cannot use");
        }
    }
    let line = failed(server.client(put(&large, "large")), 1);
    says(&line, &["cannot write 'large'"]);
    let after = stdout(&ok(server.client(["ls"]))).to_owned();
    assert_eq!(after, format!("{:>16}  again\n{before}", 100_000));
}

/// Runs the program with a limit on the size of files in bytes, which makes writes fail without a
/// full disk.
fn limited(bytes: usize) -> Command {
    let mut command = quiet(Command::new("sh"));
    command.args(["-c", "ulimit -f \"$0\" && exec \"$@\""]).arg((bytes / 512).to_string());
    command.arg(env!("CARGO_BIN_EXE_rpc-demo"));
    command
}

#[test]
fn a_file_larger_than_the_limit() {
    let dirs = Dirs::new();
    let large = dirs.file("large", 8 << 20);
    // Shared memory counts as a file, so these calls use TCP even if the tests run over shared
    // memory.
    let tcp = |mut command: Command| {
        if by_shm() {
            command.env("TONIC_RDMA", "off");
        }
        command
    };
    let mut server = Server::spawn(tcp(serve(limited(1 << 20), &dirs.root())), &dirs.root());
    let line = failed(tcp(server.client_command(put(&large, "large"))).output().unwrap(), 1);
    says(&line, &["cannot write 'large'", "limit on file sizes"]);
    server.drops_all();
    assert_eq!(names(&dirs.root()), [".rpc-demo-tmp"]);
    // SIGXFSZ did not end the server.
    ok(tcp(server.client_command(["ls"])).output().unwrap());
    server.signal(Signal::TERM);
    assert!(server.wait().0.success());

    let server = Server::start(&dirs.root());
    ok(server.client(put(&large, "large")));
    let target = dirs.here().join("target");
    let client = limited(1 << 20);
    let line = failed(
        tcp(by_path(client))
            .args(get("large", &target))
            .args(["--server", &server.url])
            .output()
            .unwrap(),
        1,
    );
    says(&line, &["cannot write ", "here/target", "limit on file sizes"]);
    assert_eq!(names(&dirs.here()), ["large"]);
}

#[test]
fn an_object_that_rotted_on_the_disk() {
    let dirs = Dirs::new();
    let file = dirs.file("file", 300_000);
    let server = Server::start(&dirs.root());
    ok(server.client(put(&file, "dir/object")));
    ok(server.client(put(&file, "dir/another")));
    let target = dirs.here().join("target");
    ok(server.client(get("dir/object", &target)));
    fs::remove_file(&target).unwrap();

    let stored = dirs.root().join("dir/object");
    let times = fs::metadata(&stored).unwrap();
    let mut raw = File::options().write(true).open(&stored).unwrap();
    raw.seek(SeekFrom::Start(200_000)).unwrap();
    raw.write_all(b"rot").unwrap();
    raw.set_times(FileTimes::new().set_modified(times.modified().unwrap())).unwrap();
    let line = failed(server.client(get("dir/object", &target)), 1);
    says(
        &line,
        &[
            "cannot get 'dir/object' as ",
            "here/target",
            "is damaged on the server's disk",
            "put it again",
        ],
    );
    assert_eq!(names(&dirs.here()), ["file"]);
    let tree = dirs.here().join("tree");
    let mut one_by_one = server.client_command(get("dir", &tree));
    let line = failed(one_by_one.args(["--jobs", "1"]).output().unwrap(), 1);
    says(&line, &["'dir/object'", "is damaged"]);
    assert_eq!(names(&tree), ["another"]);
    // The same holds for a get in ranges, although no single range can reveal the damage.
    let mut ranges = server.client_command(get("dir/object", &target));
    let line = failed(ranges.args(["--range-size", "64KiB"]).output().unwrap(), 1);
    says(&line, &["'dir/object'", "is damaged on the server's disk"]);
    assert_eq!(names(&dirs.here()), ["file", "tree"]);

    // An edited file with a new modification time is served as it is.
    raw.set_times(
        FileTimes::new()
            .set_modified(times.modified().unwrap() + std::time::Duration::from_nanos(1)),
    )
    .unwrap();
    ok(server.client(get("dir/object", &target)));
    assert!(fs::read(&target).unwrap() == fs::read(&stored).unwrap());
}

#[test]
fn a_server_that_is_killed_during_a_put() {
    let dirs = Dirs::new();
    let mut server = Server::start(&dirs.root());
    let mut client = put_under_way(&server, "half");
    // The client's stdin stays open, and the client must not wait for it.
    let _stdin = client.stdin.take();
    server.signal(Signal::KILL);
    server.wait();
    wait(&mut client);
    let line = failed(client.wait_with_output().unwrap(), 1);
    says(
        &line,
        &["cannot put stdin as 'half'", "connection to the server was lost", "repeat the command"],
    );

    // The leftover is not visible, and the next server removes it.
    assert_eq!(server.unfinished(), 1);
    assert_eq!(names(&dirs.root()), [".rpc-demo-tmp"]);
    let mut next = Server::start(&dirs.root());
    assert_eq!(next.unfinished(), 0);
    assert_eq!(stdout(&ok(next.client(["ls"]))), "");
    next.signal(Signal::INT);
    let (status, log) = next.wait();
    assert!(status.success());
    says(&log, &["removed 1 unfinished files"]);
}

#[test]
fn a_server_that_is_killed_during_a_get() {
    let dirs = Dirs::new();
    let mut server = Server::start(&dirs.root());
    let mut client = get_under_way(&server, &dirs);
    server.signal(Signal::KILL);
    server.wait();
    wait(&mut client);
    let line = failed(client.wait_with_output().unwrap(), 1);
    says(
        &line,
        &["cannot get 'big' as ", "here/target", "connection to the server was lost", "--resume"],
    );
    only_a_part(&dirs);
}

#[test]
fn a_client_that_is_interrupted() {
    let dirs = Dirs::new();
    let server = Server::start(&dirs.root());
    for (ours, shown) in [(Signal::INT, "SIGINT"), (Signal::TERM, "SIGTERM")] {
        let mut client = put_under_way(&server, "half");
        let _stdin = client.stdin.take();
        signal(&client, ours);
        wait(&mut client);
        says(&failed(client.wait_with_output().unwrap(), 1), &["interrupted", shown]);
        server.drops_all();

        let mut client = get_under_way(&server, &dirs);
        signal(&client, ours);
        wait(&mut client);
        says(&failed(client.wait_with_output().unwrap(), 1), &["interrupted", shown, "--resume"]);
        only_a_part(&dirs);
    }
    assert_eq!(names(&dirs.root()), [".rpc-demo-tmp", "big"]);
}

#[test]
fn a_client_that_is_killed() {
    let dirs = Dirs::new();
    let server = Server::start(&dirs.root());
    let mut client = put_under_way(&server, "half");
    client.kill().unwrap();
    client.wait().unwrap();
    server.drops_all();
    assert_eq!(names(&dirs.root()), [".rpc-demo-tmp"]);
}

#[test]
fn a_server_that_is_told_to_stop_lets_transfers_finish() {
    let dirs = Dirs::new();
    let mut server = Server::start(&dirs.root());
    let mut client = put_under_way(&server, "whole");
    server.signal(Signal::TERM);
    server.is_deaf();
    client.stdin.as_mut().unwrap().write_all(b"the end").unwrap();
    let output = ok(client.wait_with_output().unwrap());
    says(stdout(&output), &["put 'whole': 1048583 bytes in 1 file"]);
    assert!(server.wait().0.success());
    assert_eq!(fs::metadata(dirs.root().join("whole")).unwrap().len(), (1 << 20) + 7);
}

#[test]
fn a_server_that_is_told_twice_stops_at_once() {
    let dirs = Dirs::new();
    let mut server = Server::start(&dirs.root());
    let mut client = put_under_way(&server, "half");
    let _stdin = client.stdin.take();
    server.signal(Signal::TERM);
    server.is_deaf();
    server.signal(Signal::TERM);
    let (status, log) = server.wait();
    assert_eq!(status.code(), Some(1));
    says(&log, &["stopped with transfers in flight"]);
    wait(&mut client);
    failed(client.wait_with_output().unwrap(), 1);
    assert_eq!(names(&dirs.root()), [".rpc-demo-tmp"]);
    assert_eq!(server.unfinished(), 0);
}

#[test]
fn a_file_that_changes_while_it_is_put() {
    let dirs = Dirs::new();
    let server = Server::start(&dirs.root());
    let (file, target) = (dirs.here().join("file"), dirs.root().join("file"));
    // The file grows or shrinks after its length was announced and long before its end is read.
    let before = 1 << 29;
    for (after, why) in [
        (before + 4, "it grew past the 536870912 bytes"),
        (1 << 20, " of the 536870912 bytes it had"),
    ] {
        File::create(&file).unwrap().set_len(before).unwrap();
        let client = spawn(&mut server.client_command(put(&file, "file")));
        server.writes();
        File::options().write(true).open(&file).unwrap().set_len(after).unwrap();
        let line = failed(client.wait_with_output().unwrap(), 1);
        says(&line, &["here/file as 'file': it ", why, "when nothing writes to it"]);
        server.drops_all();
        assert!(!target.exists());
    }
}

#[test]
fn rdma_that_is_required_and_cannot_be_had() {
    let dirs = Dirs::new();
    let mut command = serve(program(), &dirs.root());
    command.env("TONIC_RDMA", "verbs");
    let server = Server::spawn(command, &dirs.root());
    let file = dirs.file("file", 10);
    // A device that does not exist, so that RDMA fails even on machines with devices.
    let mut client = server.client_command(put(&file, "x"));
    client
        .arg("--require-rdma")
        .env("TONIC_RDMA", "verbs")
        .env("TONIC_RDMA_DEVICE", "no-such-device");
    let line = failed(client.output().unwrap(), 1);
    says(&line, &["no RDMA to ", "no-", "leave out --require-rdma"]);
    // Without the flag, the missing device causes a warning with a cure, and the transfer uses TCP.
    let mut client = server.client_command(put(&file, "y"));
    client.env("TONIC_RDMA", "verbs").env("TONIC_RDMA_DEVICE", "no-such-device");
    let output = ok(client.output().unwrap());
    says(str::from_utf8(&output.stderr).unwrap(), &["WARN", "no-"]);
    says(stdout(&output), &["path tcp (no-"]);
    assert!(!dirs.root().join("x").exists());

    // Shared memory, which both ends have, does not count as RDMA either.
    drop(server);
    let mut server = serve(program(), &dirs.root());
    server.env_remove("TONIC_RDMA");
    let server = Server::spawn(server, &dirs.root());
    let mut client = server.client_command(put(&file, "z"));
    client
        .arg("--require-rdma")
        .env_remove("TONIC_RDMA")
        .env("TONIC_RDMA_DEVICE", "no-such-device");
    let line = failed(client.output().unwrap(), 1);
    says(&line, &["no RDMA to ", "no-", "use shared memory or TCP"]);
    assert!(!dirs.root().join("z").exists());
    let mut client = server.client_command(put(&file, "z"));
    client.env_remove("TONIC_RDMA");
    says(stdout(&ok(client.output().unwrap())), &["path shm"]);
}
