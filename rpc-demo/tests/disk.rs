//! Large files bypass the page cache if that is possible. Otherwise they go through it. The program
//! says which of the two happened. The tests run over shared memory on the build's file system, and
//! in the guest over a device with its own disk (tests/guest/run --device rxe --disk 1G).

#![allow(clippy::unwrap_used)]

mod common;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

use common::*;
use rustix::fs::OFlags;
use serde_json::Value;
use tempfile::TempDir;

/// The path that the tests use, for TONIC_RDMA.
fn way() -> &'static str {
    if is_over_device() { "verbs,require" } else { "shm,require" }
}

/// A directory on the disk.
fn on_disk() -> TempDir {
    let place = std::env::var_os("GUEST_DISK").unwrap_or(env!("CARGO_TARGET_TMPDIR").into());
    tempfile::tempdir_in(place).unwrap()
}

/// A server whose root lies in `dir`.
fn start(dir: &TempDir) -> Server {
    start_with(dir, false)
}

/// The flag that makes an end lend and borrow.
fn flag(lends: bool) -> Option<&'static str> {
    lends.then_some("--lend")
}

fn start_with(dir: &TempDir, lends: bool) -> Server {
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    let mut command = serve(program(), &root);
    command.arg("--until-eof").args(flag(lends)).env("TONIC_RDMA", way()).stdin(Stdio::piped());
    Server::spawn(command, &root)
}

/// The server's costs so far.
fn spent(server: &mut Server) -> Value {
    server.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    serde_json::from_str(&server.line()).unwrap()
}

fn run<A: AsRef<OsStr>>(server: &Server, args: impl IntoIterator<Item = A>) -> Value {
    let mut command = server.client_command(args);
    json(&ok(command.arg("--json").env("TONIC_RDMA", way()).output().unwrap()))
}

/// Whether the file system supports O_DIRECT, found out without the program.
fn has_direct(dir: &Path) -> bool {
    let probe = dir.join("probe");
    let flags = i32::try_from(OFlags::DIRECT.bits()).unwrap();
    let mut options = File::options();
    let opened = options.write(true).create(true).truncate(true).custom_flags(flags).open(&probe);
    let _ = fs::remove_file(probe);
    opened.is_ok()
}

/// Transfers, in one command, sixty files whose lengths are not whole blocks, and one file in
/// ranges.
#[test]
fn large_files_go_past_the_page_cache() {
    let dir = on_disk();
    let at = |path: &str| dir.path().join(path);
    fs::create_dir(at("tree")).unwrap();
    for n in 0..60 {
        let content = content(1_200_000 + n * 1001, n as u32);
        fs::write(at("tree").join(n.to_string()), content).unwrap();
    }
    fs::write(at("tree/large"), content(21_000_007, 99)).unwrap();
    let mut server = start(&dir);
    let tree = at("tree");
    let put = ["put".as_ref(), tree.as_os_str(), "t".as_ref(), "--jobs=60".as_ref()];
    let put = run(&server, put);
    let after_put = spent(&mut server);
    let copy = at("copy");
    let get = run(&server, ["get".as_ref(), "t".as_ref(), copy.as_os_str(), "--jobs=60".as_ref()]);
    let after_get = spent(&mut server);
    same(&tree, &copy);
    if !has_direct(dir.path()) {
        let reason = put["disk"]["reason"].as_str().unwrap();
        assert!(reason.starts_with("no O_DIRECT: "), "{reason}");
        return;
    }
    // More than half of the bytes must bypass the page cache. The others may go through it: short
    // tails, data for which the pool had no memory, and data copied to the heap because a lot of
    // data waits for the disk.
    let most = number(&put, "bytes") / 2;
    assert!(number(&put["costs"], "direct_read_bytes") > most, "{put}");
    assert!(number(&after_put, "direct_written_bytes") > most, "{after_put}");
    assert!(number(&after_get, "direct_read_bytes") > most, "{after_get}");
    assert!(number(&get["costs"], "direct_written_bytes") > most, "{get}");
}

/// After a first transfer, from which tonic knows the lengths of the messages, lent data gets from
/// the client's disk to the server's without a copy by a processor. Data that a device has written
/// is copied once, before it is checked.
#[test]
fn no_processor_copies_what_is_lent() {
    let [lent, written, settled] = put_counted([true, true]);
    if is_over_device() {
        assert_eq!((lent, written >= LEN as u64), (0, true), "{written} bytes by RDMA WRITE");
        assert_eq!(settled, LEN as u64);
    } else {
        assert!(lent >= LEN as u64 && written == 0, "{lent} bytes lent, {written} written");
        assert_eq!(settled, 0);
    }
}

/// If an end does not lend and borrow, all long payload is sent by WRITE. The server copies data
/// before it checks it, unless it trusts its clients, as a server with `--lend` trusts its own
/// host.
#[test]
fn unless_both_ends_lend_all_is_written() {
    for lends in [[false, false], [true, false], [false, true]] {
        let [lent, written, settled] = put_counted(lends);
        assert_eq!((lent, written >= LEN as u64), (0, true), "{lends:?}: {written} written");
        let is_trusting = lends[1] && !is_over_device();
        assert_eq!(settled, if is_trusting { 0 } else { LEN as u64 }, "{lends:?}");
    }
}

const LEN: usize = 64 << 20;

/// Puts a file of [`LEN`] bytes, and checks that the transport has copied it at neither end.
/// `lends` says whether the client has `--lend`, and whether the server has. Returns the bytes that
/// the server was lent, those written to its landing memory, and those that it copied to check
/// them.
fn put_counted(lends: [bool; 2]) -> [u64; 3] {
    let dir = on_disk();
    if !has_direct(dir.path()) {
        panic!("{} has no O_DIRECT", dir.path().display());
    }
    let file = dir.path().join("file");
    fs::write(&file, content(LEN, 5)).unwrap();
    let mut server = start_with(&dir, lends[1]);
    let put = |server: &Server| {
        let all =
            ["--range-size=64MiB", "--jobs=1"].into_iter().chain(flag(lends[0])).map(OsStr::new);
        run(server, ["put".as_ref(), file.as_os_str(), "x".as_ref()].into_iter().chain(all))
    };
    // The first put shows tonic the lengths of the messages: see docs/zero-copy.md.
    put(&server);
    let before = spent(&mut server);
    let client = put(&server);
    let after = spent(&mut server);
    let by = |field| number(&after, field) - number(&before, field);
    let cached = number(&client["disk"], "cached_bytes");
    assert_eq!(number(&client["disk"], "direct_bytes") + cached, LEN as u64, "{client}");
    // Only a last message of less than 64 KiB may go through the page cache. Such a message exists
    // if 64 MiB is not a multiple of the message size.
    let ends = [cached, by("file_written_bytes")];
    assert!(ends.iter().all(|end| *end < 64 << 10), "{ends:?} bytes through the page cache");
    assert_eq!(by("direct_written_bytes") + by("file_written_bytes"), LEN as u64);
    // The transport copies only message heads and digests.
    let copied = by("copied_bytes");
    assert!(copied < LEN as u64 / 1000, "{copied} of {LEN} bytes copied by the server");
    assert_eq!(number(&client["route"]["copied"], "staging"), 0, "{client}");
    let [lent, written] = ["lent_bytes", "write_bytes"].map(|way| number(&client["route"], way));
    [lent, written, by("settled_bytes")]
}

/// The summary also reports bytes that go through the page cache because messages are short.
#[test]
fn short_messages_are_a_reason() {
    let dir = on_disk();
    let (file, copy) = (dir.path().join("file"), dir.path().join("copy"));
    fs::write(&file, content(3_000_000, 1)).unwrap();
    let server = start(&dir);
    let chunk = ["--chunk-size=16KiB"].map(OsStr::new);
    let put = ["put".as_ref(), file.as_os_str(), "x".as_ref()];
    let get = ["get".as_ref(), "x".as_ref(), copy.as_os_str()];
    for args in [put, get] {
        let done = run(&server, args.into_iter().chain(chunk));
        let (direct, cached) = (&done["disk"]["direct_bytes"], &done["disk"]["cached_bytes"]);
        assert_eq!((direct.as_u64(), cached.as_u64()), (Some(0), Some(3_000_000)), "{done}");
        let reason = done["disk"]["reason"].as_str().unwrap();
        assert!(reason.ends_with("messages of less than 64 KiB"), "{reason}");
    }
}

#[test]
fn tmpfs_and_no_direct_go_through_the_page_cache_and_say_so() {
    for (dir, flag, reason) in [
        (tempfile::tempdir_in("/dev/shm").unwrap(), None, "tmpfs"),
        (on_disk(), Some("--no-direct"), "--no-direct"),
    ] {
        let file = dir.path().join("file");
        fs::write(&file, content(3_000_000, 1)).unwrap();
        let server = start(&dir);
        let args = ["put".as_ref(), file.as_os_str(), "x".as_ref()];
        let put = run(&server, args.into_iter().chain(flag.map(OsStr::new)));
        assert!(put["disk"]["reason"].as_str().unwrap().contains(reason), "{put}");
        assert_eq!(number(&put["disk"], "direct_bytes"), 0);
        let mut command = server.client_command(args.into_iter().chain(flag.map(OsStr::new)));
        let closing = ok(command.env("TONIC_RDMA", way()).output().unwrap());
        says(stdout(&closing), &["files 0.0 % by O_DIRECT (page cache: ", reason]);
    }
}

/// RLIMIT_MEMLOCK leaves no room to register buffers with io_uring, so they are used unregistered.
#[test]
fn without_room_in_memlock_it_works_as_well() {
    let dir = on_disk();
    let file = dir.path().join("file");
    fs::write(&file, content(9_000_000, 1)).unwrap();
    let server = start(&dir);
    let client = server.client_command(["put".as_ref(), file.as_os_str(), "x".as_ref()]);
    let mut command = Command::new("prlimit");
    command.arg("--memlock=65536:65536");
    // The limit does not apply to root.
    if rustix::process::geteuid().is_root() {
        command.args(["setpriv", "--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock"]);
    }
    command.arg(client.get_program()).args(client.get_args());
    let command = quiet(command)
        .env("TONIC_RDMA", way())
        .arg("--json")
        .arg("--server")
        .arg(&server.url)
        .output();
    let put = json(&ok(command.unwrap()));
    assert_eq!(number(&put["disk"], "direct_bytes") > 0, has_direct(dir.path()), "{put}");
    assert!(fs::read(server.root.join("x")).unwrap() == fs::read(&file).unwrap());
}

/// Bytes of the server's incomplete files.
fn received(server: &Server) -> u64 {
    let files = fs::read_dir(server.temp()).into_iter().flatten();
    files.filter_map(|file| Some(file.ok()?.metadata().ok()?.len())).sum()
}

/// A file is cut, grows, or is replaced while it is sent. The result is an error or the complete
/// content of one of the two files, never a part.
#[test]
fn files_that_change_meanwhile_are_errors_or_whole() {
    let dir = on_disk();
    let file = dir.path().join("file");
    let (old, new) = (content(30_000_000, 1), content(30_000_000, 2));
    let server = start(&dir);
    for round in 0..12 {
        fs::write(&file, &old).unwrap();
        let mut put = server.client_command(["put".as_ref(), file.as_os_str(), "x".as_ref()]);
        put.env("TONIC_RDMA", way()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut put = put.spawn().unwrap();
        // The change comes at the start in some rounds, and after the server has received a part of
        // the file in others.
        let part = old.len() as u64 * (round / 3) / 4;
        while put.try_wait().unwrap().is_none() && received(&server) < part {
            std::thread::yield_now();
        }
        match round % 3 {
            0 => File::options().write(true).open(&file).unwrap().set_len(100_001).unwrap(),
            1 => {
                let grows = File::options().write(true).open(&file).unwrap();
                grows.write_all_at(b"more", old.len() as u64).unwrap();
            }
            _ => {
                fs::write(dir.path().join("new"), &new).unwrap();
                fs::rename(dir.path().join("new"), &file).unwrap();
            }
        }
        let put = put.wait_with_output().unwrap();
        if put.status.success() {
            let stored = fs::read(server.root.join("x")).unwrap();
            let grown = [&old[..], b"more"].concat();
            let wholes = [&old[..], &new[..], &grown[..], &old[..100_001]];
            assert!(wholes.contains(&&stored[..]), "{round}: {} bytes", stored.len());
        } else {
            failed(put, 1);
        }
        server.drops_all();
    }
}
