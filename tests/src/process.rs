//! Processes of a test's own program: it is started again, and an environment variable says what to
//! be.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader as StdReader};
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::runtime::Runtime;
use tonic_rdma::Context;

use crate::codec::{self, Which};
use crate::load::bounded;
use crate::process_resources::ProcessResources;

/// Names the role, and what it needs to know, in words.
const ROLE: &str = "TONIC_RDMA_TEST_ROLE";

/// The words of this process' role; `None` when it is the test itself.
pub fn role() -> Option<Vec<String>> {
    let role = std::env::var(ROLE).ok()?;
    Some(role.split(' ').map(str::to_owned).collect())
}

/// A runtime whose stubs use this codec. A process has one: a method is known by it.
pub fn runtime(codec: Which) -> Runtime {
    codec::use_here(codec);
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_keep_alive(std::time::Duration::from_millis(20))
        .on_thread_start(move || codec::use_here(codec))
        .enable_all()
        .build()
        .unwrap()
}

/// Each codec in turn.
pub fn codec_name(n: usize) -> &'static str {
    if n.is_multiple_of(2) { "zero-copy" } else { "plain" }
}

/// The codec of that name.
#[allow(clippy::panic)]
pub fn codec_of(name: &str) -> Which {
    match name {
        "zero-copy" => Which::ZeroCopy,
        "plain" => Which::Plain,
        _ => panic!("{ROLE}: no codec {name:?}"),
    }
}

/// Bytes of the pools that are in use, by connections or by what arrived over them.
pub async fn in_use(context: &Context) -> usize {
    let stats = context.pool_stats().await;
    stats.iter().map(|(_, stats)| stats.in_use_bytes() + stats.leased).sum()
}

/// A process of this program. It is killed when it is dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    stdin: ChildStdin,
    stdout: Lines<BufReader<ChildStdout>>,
    said: Arc<Mutex<String>>,
}

impl Process {
    /// Starts it, through a command that executes another one (`prlimit --memlock=65536`), or
    /// through none. Its standard error is repeated on this process', and kept.
    pub fn start(through: &str, role: &str) -> Self {
        let program = std::env::current_exe().unwrap();
        let mut words = through.split_whitespace().map(OsStr::new).chain([program.as_os_str()]);
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
        let said = Arc::new(Mutex::new(String::new()));
        let (heard, name) =
            (Arc::clone(&said), role.split(' ').next().unwrap_or_default().to_owned());
        std::thread::spawn(move || {
            for line in StdReader::new(std::fs::File::from(stderr)).lines().map_while(Result::ok) {
                eprintln!("{name}: {line}");
                let mut heard = heard.lock().unwrap();
                heard.push_str(&line);
                heard.push('\n');
            }
        });
        Self { child, stdin, stdout: BufReader::new(stdout).lines(), said }
    }

    /// The next line of its standard output.
    pub async fn line(&mut self) -> String {
        bounded("a line of another process", self.stdout.next_line())
            .await
            .unwrap()
            .expect("the process has ended")
    }

    /// Its answer to a line.
    pub async fn ask(&mut self, question: &str) -> String {
        self.stdin.write_all(format!("{question}\n").as_bytes()).await.unwrap();
        self.line().await
    }

    /// Its answer to `pools`: see [`in_use`].
    pub async fn in_use(&mut self) -> usize {
        self.ask("pools").await.parse().unwrap()
    }

    /// Its number.
    pub fn id(&self) -> String {
        self.child.id().expect("the process has ended").to_string()
    }

    /// What it holds.
    pub fn holds(&self) -> ProcessResources {
        ProcessResources::by(&self.id())
    }

    /// Lines of its standard error with this in them.
    pub fn times_said(&self, text: &str) -> usize {
        self.said.lock().unwrap().lines().filter(|line| line.contains(text)).count()
    }

    /// SIGKILL.
    pub async fn kill(mut self) {
        assert_eq!(self.child.try_wait().unwrap(), None, "it ended before it was killed");
        self.child.kill().await.unwrap();
    }
}
