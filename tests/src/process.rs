//! Child processes of a test: the test's own program, with its role in an environment variable.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader as StdReader};
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::runtime::Runtime;
use tonic_rdma::Context;

use crate::codec::{self, CodecKind};
use crate::load::with_timeout;
use crate::process_resources::ProcessResources;

/// The environment variable with the role and its arguments, separated by spaces.
const ROLE: &str = "TONIC_RDMA_TEST_ROLE";

/// The role of this process and its arguments; `None` in the test's own process.
pub fn role() -> Option<Vec<String>> {
    let role = std::env::var(ROLE).ok()?;
    Some(role.split(' ').map(str::to_owned).collect())
}

/// A runtime of two workers whose stubs use this codec. A process uses a single codec, because the
/// library remembers the codec of each method.
pub fn runtime(codec: CodecKind) -> Runtime {
    runtime_of(codec, 2)
}

/// A [`runtime`] with this number of workers.
pub fn runtime_of(codec: CodecKind, workers: usize) -> Runtime {
    codec::set_thread_codec(codec);
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(workers)
        .thread_keep_alive(std::time::Duration::from_millis(20))
        .on_thread_start(move || codec::set_thread_codec(codec))
        .enable_all()
        .build()
        .unwrap()
}

/// The name of a codec: zero-copy for an even number, and plain for an odd number.
pub fn codec_name(n: usize) -> &'static str {
    if n.is_multiple_of(2) { "zero-copy" } else { "plain" }
}

/// Returns the codec with this name, and panics if the name is unknown.
#[allow(clippy::panic)]
pub fn codec_from_name(name: &str) -> CodecKind {
    match name {
        "zero-copy" => CodecKind::ZeroCopy,
        "plain" => CodecKind::Plain,
        _ => panic!("{ROLE}: no codec {name:?}"),
    }
}

/// Bytes of the pools that connections or received messages use.
pub async fn in_use(context: &Context) -> usize {
    let stats = context.pool_stats().await;
    stats.iter().map(|(_, stats)| stats.in_use_bytes() + stats.leased).sum()
}

/// A child process of this program. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    child: Child,
    stdin: ChildStdin,
    stdout: Lines<BufReader<ChildStdout>>,
    stderr_text: Arc<Mutex<String>>,
}

impl Process {
    /// Starts a process, directly or through a command that executes another one (`prlimit
    /// --memlock=65536`). Its standard error is recorded, and also copied to this process's
    /// standard error.
    pub fn start(wrapper: &str, role: &str) -> Self {
        let program = std::env::current_exe().unwrap();
        let mut words = wrapper.split_whitespace().map(OsStr::new).chain([program.as_os_str()]);
        let mut child = Command::new(words.next().unwrap_or_default())
            .args(words)
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let stderr = child.stderr.take().unwrap().into_owned_fd().unwrap();
        let stderr_text = Arc::new(Mutex::new(String::new()));
        let (text, name) =
            (Arc::clone(&stderr_text), role.split(' ').next().unwrap_or_default().to_owned());
        std::thread::spawn(move || {
            for line in StdReader::new(std::fs::File::from(stderr)).lines().map_while(Result::ok) {
                eprintln!("{name}: {line}");
                let mut text = text.lock().unwrap();
                text.push_str(&line);
                text.push('\n');
            }
        });
        Self { child, stdin, stdout: BufReader::new(stdout).lines(), stderr_text }
    }

    /// The next line of the child's standard output.
    ///
    /// # Panics
    /// The child has ended, or prints nothing for [`LIMIT`](crate::load::LIMIT).
    pub async fn read_line(&mut self) -> String {
        with_timeout("a line of another process", self.stdout.next_line())
            .await
            .unwrap()
            .expect("the process has ended")
    }

    /// Sends a line, and returns the child's answer.
    pub async fn ask(&mut self, question: &str) -> String {
        self.stdin.write_all(format!("{question}\n").as_bytes()).await.unwrap();
        self.read_line().await
    }

    /// The child's answer to `pools`: see [`in_use`].
    pub async fn in_use(&mut self) -> usize {
        self.ask("pools").await.parse().unwrap()
    }

    /// The process id.
    pub fn id(&self) -> String {
        self.child.id().expect("the process has ended").to_string()
    }

    /// The system resources of the child.
    pub fn resources(&self) -> ProcessResources {
        ProcessResources::of(&self.id())
    }

    /// The number of lines on the child's standard error that contain this text.
    pub fn stderr_lines_with(&self, text: &str) -> usize {
        self.stderr_text.lock().unwrap().lines().filter(|line| line.contains(text)).count()
    }

    /// Kills the child with SIGKILL.
    ///
    /// # Panics
    /// The child has already ended.
    pub async fn kill(mut self) {
        assert_eq!(self.child.try_wait().unwrap(), None, "it ended before it was killed");
        self.child.kill().await.unwrap();
    }
}
