//! Processes that `compare` and its agent start. If a process fails, the reason is kept.
//!
//! A process that fails writes the reason to stderr. The lines of stderr are passed on as they
//! arrive. The last line is kept for the table, because the exit code alone explains nothing.

use std::io::Write as _;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Time limit for the rest of stderr after the process has ended. The limit is reached only if a
/// child of the process keeps stderr open.
const REST: Duration = Duration::from_secs(10);

/// A process whose stdout is a pipe. The process is killed on drop.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    id: u32,
    last_line: Arc<Mutex<String>>,
    passing_on: Option<JoinHandle<()>>,
}

impl Process {
    /// Starts a process, and passes on its stderr.
    ///
    /// # Errors
    /// The program cannot be executed.
    pub(crate) fn start(mut command: Command, stdin: Stdio) -> anyhow::Result<Self> {
        command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().with_context(|| {
            format!("cannot start {}", command.as_std().get_program().display())
        })?;
        let id = child.id().context("the process is gone")?;
        let stderr = child.stderr.take().context("no pipe from a process")?;
        let last_line = Arc::default();
        let passing_on = Some(tokio::spawn(pass_on(stderr, Arc::clone(&last_line))));
        Ok(Self { child, id, last_line, passing_on })
    }

    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// Takes the pipe to stdin, if [`start`](Self::start) made a pipe and nobody has taken it.
    pub(crate) fn stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// Takes the lines of stdout.
    ///
    /// # Errors
    /// The lines were already taken.
    pub(crate) fn lines(&mut self) -> anyhow::Result<Lines<BufReader<ChildStdout>>> {
        let stdout = self.child.stdout.take().context("no pipe from a process")?;
        Ok(BufReader::new(stdout).lines())
    }

    /// Whether the process has ended.
    ///
    /// # Errors
    /// The state of the process cannot be read.
    pub(crate) fn has_ended(&mut self) -> anyhow::Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Waits until the process ends, and returns the last line of its stderr with its exit code.
    ///
    /// # Errors
    /// The state of the process cannot be read.
    pub(crate) async fn reason_of_end(&mut self) -> anyhow::Result<String> {
        let status = self.child.wait().await?;
        if let Some(passing_on) = self.passing_on.take() {
            let _ = timeout(REST, passing_on).await;
        }
        let last_line = self.last_line.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(match last_line.as_str() {
            "" => status.to_string(),
            reason => format!("{reason} ({status})"),
        })
    }

    /// Kills the process.
    ///
    /// # Errors
    /// The system refuses to kill it.
    pub(crate) async fn kill(&mut self) -> anyhow::Result<()> {
        Ok(self.child.kill().await?)
    }
}

/// Copies lines to this process's stderr until the pipe ends, and keeps the last line.
async fn pass_on(stderr: ChildStderr, last_line: Arc<Mutex<String>>) {
    let mut stderr = BufReader::new(stderr);
    let mut line = Vec::new();
    while stderr.read_until(b'\n', &mut line).await.is_ok_and(|read| read > 0) {
        // This process's stderr may have no reader.
        let _ = std::io::stderr().write_all(&line);
        let text = String::from_utf8_lossy(&line);
        let text = text.trim();
        // The note that Rust prints after the message of a panic is not the reason.
        if !text.is_empty() && !text.starts_with("note: ") {
            text.clone_into(&mut last_line.lock().unwrap_or_else(PoisonError::into_inner));
        }
        line.clear();
    }
}
