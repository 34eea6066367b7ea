//! Runs the real program over TCP, or over shared memory if RPC_DEMO_TEST_SHM is set. If GUEST_ADDR
//! and GUEST_DEVICE name an address and its device, as in the guest (tests/guest/run --device rxe),
//! the program runs over RDMA.
// Each test program uses only a part of this.
#![allow(dead_code)]

mod events;
#[path = "../../src/pb.rs"]
pub(crate) mod pb;
pub(crate) mod terminal;

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

pub(crate) use events::*;
use tempfile::TempDir;

/// Maximum time that a test waits for an event before it fails as hung.
pub(crate) const HANG: Duration = Duration::from_secs(120);

/// The program with an environment that leaves its log at the default level and restricts it to TCP
/// on every machine.
pub(crate) fn program() -> Command {
    quiet(Command::new(env!("CARGO_BIN_EXE_rpc-demo")))
}

/// `command` with the environment of [`program`].
pub(crate) fn quiet(mut command: Command) -> Command {
    command.env_remove("RUST_LOG").env_remove("RPC_DEMO_SERVER").env_remove("TONIC_RDMA_DEVICE");
    command.env("TONIC_RDMA", "off").stdin(Stdio::null());
    command
}

/// The address to serve on, and its RDMA device if RDMA is to be used.
pub(crate) fn place() -> (String, Option<String>) {
    match std::env::var("GUEST_ADDR") {
        Ok(addr) => (addr, Some(std::env::var("GUEST_DEVICE").unwrap())),
        Err(_) => ("127.0.0.1".to_owned(), None),
    }
}

/// `command`, restricted to RDMA if the tests run over it, or to shared memory if RPC_DEMO_TEST_SHM
/// is set.
pub(crate) fn by_path(mut command: Command) -> Command {
    if place().1.is_some() {
        command.env("TONIC_RDMA", "verbs,require");
    } else if by_shm() {
        command.env("TONIC_RDMA", "shm,require");
    }
    command
}

/// Whether the tests run over an RDMA device.
pub(crate) fn is_over_device() -> bool {
    place().1.is_some()
}

pub(crate) fn by_shm() -> bool {
    std::env::var_os("RPC_DEMO_TEST_SHM").is_some()
}

/// The path in the summary line.
pub(crate) fn path() -> String {
    match place().1 {
        Some(device) => format!("path verbs ({device}, "),
        None if by_shm() => "path shm (".to_owned(),
        None => "0 bytes by RDMA WRITE (0.0 %), path tcp (policy: ".to_owned(),
    }
}

/// A directory on the build's file system, which supports extended attributes, unlike some
/// temporary file systems. In the guest, only a temporary file system is writable.
pub(crate) fn scratch() -> TempDir {
    match place().1 {
        Some(_) => tempfile::tempdir().unwrap(),
        None => tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
    }
}

/// A running server, killed on drop.
pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) url: String,
    pub(crate) root: PathBuf,
    stdout: BufReader<std::process::ChildStdout>,
}

impl Server {
    pub(crate) fn start(root: &Path) -> Server {
        Server::spawn(serve(program(), root), root)
    }

    /// Starts `command`, which must run a server eventually.
    pub(crate) fn spawn(mut command: Command, root: &Path) -> Server {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let Some(rest) = line.strip_prefix("rpc-demo: listening on ") else {
            let mut why = String::new();
            child.stderr.take().unwrap().read_to_string(&mut why).unwrap();
            panic!("the server did not start: {line}{why}");
        };
        let (addr, shown) = rest.trim_end().split_once(", root ").unwrap();
        assert_eq!(shown, root.to_str().unwrap());
        Server { child, url: format!("http://{addr}"), root: root.to_owned(), stdout }
    }

    /// The next line that the server prints.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line
    }

    /// Waits until the server accepts no more connections.
    pub(crate) fn is_deaf(&self) {
        until_deaf(self.url.strip_prefix("http://").unwrap());
    }

    /// Runs a client until it ends.
    pub(crate) fn client<A: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = A>) -> Output {
        self.client_command(args).output().unwrap()
    }

    pub(crate) fn client_command<A: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = A>,
    ) -> Command {
        let mut command = by_path(program());
        command.env("RPC_DEMO_SERVER", &self.url).args(args);
        command
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        self::signal(&self.child, signal);
    }

    /// The number of incomplete files.
    pub(crate) fn unfinished(&self) -> usize {
        fs::read_dir(self.temp()).unwrap().count() - 1
    }

    /// The directory of incomplete files.
    pub(crate) fn temp(&self) -> PathBuf {
        self.root.join(".rpc-demo-tmp")
    }

    /// Waits until the server has begun to write a file.
    pub(crate) fn writes(&self) {
        until("the server writes", &self.temp(), || self.unfinished() == 1);
    }

    /// Waits until there are no incomplete files.
    pub(crate) fn drops_all(&self) {
        until("the server drops what is not whole", &self.temp(), || self.unfinished() == 0);
    }

    /// Waits until the server ends, and returns its exit status and stderr.
    pub(crate) fn wait(&mut self) -> (ExitStatus, String) {
        let status = wait(&mut self.child);
        let mut log = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        (status, log)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `command` with the arguments that make it serve `root` on a free port.
pub(crate) fn serve(mut command: Command, root: &Path) -> Command {
    command.arg("serve").arg("--addr").arg(format!("{}:0", place().0)).arg("--root").arg(root);
    by_path(command)
}

pub(crate) fn signal(child: &Child, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_child(child), signal).unwrap();
}

pub(crate) fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

/// Checks that the command succeeded.
#[track_caller]
pub(crate) fn ok(output: Output) -> Output {
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {log}", output.status);
    output
}

/// Checks that the command failed with `code` and one error line, and returns that line. Warnings
/// may precede it.
#[track_caller]
pub(crate) fn failed(output: Output, code: i32) -> String {
    let log = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        output.status.code(),
        Some(code),
        "{log}{}",
        String::from_utf8_lossy(&output.stdout)
    );
    let lines: Vec<_> = log.lines().filter(|line| !line.trim_start().starts_with("WARN")).collect();
    assert_eq!(lines.len(), 1, "not one line: {log}");
    assert!(lines[0].starts_with("rpc-demo: "), "{log}");
    assert!(output.stdout.is_empty(), "a closing line after a failure");
    lines[0].to_owned()
}

/// Checks that `text` contains all `parts`.
#[track_caller]
pub(crate) fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "'{part}' is not in: {text}");
    }
}

/// The JSON object that a command printed.
#[track_caller]
pub(crate) fn json(output: &Output) -> serde_json::Value {
    serde_json::from_str(stdout(output)).unwrap()
}

#[track_caller]
pub(crate) fn number(json: &serde_json::Value, field: &str) -> u64 {
    json[field].as_u64().unwrap_or_else(|| panic!("{field} in {json}"))
}

/// A path, its mode and modification time, and for a file its content.
pub(crate) type Found = (String, u32, std::time::SystemTime, Option<Vec<u8>>);

/// Everything below a directory.
pub(crate) fn picture(dir: &Path) -> Vec<Found> {
    let mut found = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(next) = todo.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            let shown = path.strip_prefix(dir).unwrap().to_str().unwrap().to_owned();
            let metadata = fs::metadata(&path).unwrap();
            let content = metadata.is_file().then(|| fs::read(&path).unwrap());
            let mode = metadata.permissions().mode() & 0o777;
            found.push((shown, mode, metadata.modified().unwrap(), content));
            if metadata.is_dir() {
                todo.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Checks that both directories are equal, including modes and modification times.
#[track_caller]
pub(crate) fn same(left: &Path, right: &Path) {
    let (left, right) = (picture(left), picture(right));
    assert_eq!(left.len(), right.len());
    for (left, right) in left.iter().zip(&right) {
        assert_eq!((&left.0, left.1, left.2), (&right.0, right.1, right.2));
        assert!(left.3 == right.3, "the content of {}", left.0);
    }
}

/// Names in a directory, sorted.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Bytes in which every error of order or length is visible.
pub(crate) fn content(length: usize, seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state as u8
        })
        .collect()
}
