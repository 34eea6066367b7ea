//! A server of the scripted service in a separate process, which executes this program again.
//!
//! Lines on the child's stdin and stdout replace the state that a test otherwise shares with its
//! handlers:
//!
//! | to the child | meaning |
//! |---|---|
//! | `open NAME` | [`Probe::open`] |
//! | `stop`, `abort` | shut down gracefully, or drop the server |
//! | `ask N sync`, `ask N copied`, `ask N pools` | a question; its answer follows all earlier events |
//!
//! | from the child | meaning |
//! |---|---|
//! | `addr ADDR` | the server listens there |
//! | `event NAME`, `call PATH METHOD` | [`Probe::report`], a line of the [`PathLog`] |
//! | `ended`, `ended ERROR` | the server has ended |
//! | `answer N TEXT` | to question N |
//!
//! The child ends when its stdin closes.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc as std_mpsc};
use std::thread;
use std::time::Duration;

use tokio::sync::watch;
use tonic_rdma::{Copied, Path};

use crate::fabric::Fabric;
use crate::paths::{PathLog, RecordedCall};
use crate::probe::{Probe, RemoteProbe};

/// The environment variable that tells a child its fabric.
pub(super) const VARIABLE: &str = "TONIC_RDMA_TEST_SERVE";
/// A child that has not answered within this time hangs: an answer takes milliseconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// A server's process. It is killed when its [`TestEnv`](super::TestEnv) is dropped.
#[derive(Clone, Debug)]
pub struct Remote(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    child: Mutex<Child>,
    stdin: Mutex<ChildStdin>,
    state: Arc<ChildState>,
    killed: AtomicBool,
}

/// The state of the child that this process knows in addition to its events.
#[derive(Debug)]
struct ChildState {
    /// The recipients of answers. `None` once the child has closed its stdout.
    pending_answers: Mutex<Option<HashMap<u64, std_mpsc::Sender<String>>>>,
    ended: watch::Sender<Option<Result<(), String>>>,
}

impl Remote {
    /// Starts a server over `fabric` that reports its events to `probe` and its calls to `log`.
    pub(crate) fn start(fabric: Fabric, probe: &Probe, log: &PathLog) -> (Self, SocketAddr) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(VARIABLE, fabric.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let state = Arc::new(ChildState {
            pending_answers: Mutex::new(Some(HashMap::new())),
            ended: watch::Sender::new(None),
        });
        let remote = Remote(Arc::new(Inner {
            child: Mutex::new(child),
            stdin: Mutex::new(stdin),
            state: Arc::clone(&state),
            killed: AtomicBool::new(false),
        }));
        let (addr_tx, addr) = std_mpsc::channel();
        let (events, calls) = (probe.clone(), log.clone());
        thread::spawn(move || state.read_lines(stdout, &addr_tx, &events, &calls));
        let addr = addr
            .recv_timeout(ANSWER_TIMEOUT)
            .unwrap_or_else(|e| unreachable!("no address from the server's process: {e}"));
        (remote, addr)
    }

    fn send_line(&self, line: &str) {
        // If this fails, the child has ended, and the reader of its stdout reports that.
        let _ = writeln!(self.0.stdin.lock().unwrap(), "{line}");
    }

    /// Starts a graceful shutdown.
    pub(crate) fn stop(&self) {
        self.send_line("stop");
    }

    /// Drops the server at once. The process stays, to report its pools.
    pub(crate) fn abort(&self) {
        self.send_line("abort");
    }

    /// Waits until the server has ended.
    pub(crate) async fn ended(&self) {
        let mut ended = self.0.state.ended.subscribe();
        ended.wait_for(Option::is_some).await.unwrap().clone().unwrap().unwrap();
    }

    /// Kills the process with SIGKILL if it has not ended, and waits for its end.
    pub fn kill(&self) {
        self.0.killed.store(true, Ordering::Relaxed);
        let mut child = self.0.child.lock().unwrap();
        // This fails if the child has ended already.
        let _ = child.kill();
        let _ = child.wait();
    }

    /// Asks a question and returns the answer. `None` if the process has ended and all its output
    /// has been read.
    fn ask(&self, question: &str) -> Option<String> {
        let (sender, answer) = std_mpsc::channel();
        let n = {
            let mut pending_answers = self.0.state.pending_answers.lock().unwrap();
            let pending_answers = pending_answers.as_mut()?;
            // Answered questions are removed, so numbers are reused.
            let n = (0..).find(|n| !pending_answers.contains_key(n)).unwrap();
            pending_answers.insert(n, sender);
            n
        };
        self.send_line(&format!("ask {n} {question}"));
        match answer.recv_timeout(ANSWER_TIMEOUT) {
            Ok(answer) => Some(answer),
            Err(std_mpsc::RecvTimeoutError::Disconnected) => None,
            Err(std_mpsc::RecvTimeoutError::Timeout) => {
                unreachable!("the server's process does not answer {question:?}")
            }
        }
    }

    /// The bytes that the server has copied for calls over its fast path.
    pub(crate) fn copied(&self) -> Copied {
        let answer =
            self.ask("copied").unwrap_or_else(|| unreachable!("the server's process has ended"));
        let mut figures = answer.split(' ').map(|figure| figure.parse().unwrap());
        let mut next = || figures.next().unwrap();
        let mut copied = Copied::default();
        copied.eager = next();
        copied.staging = next();
        copied.joined = next();
        copied.pressure = next();
        copied.plain_codec = next();
        copied.learning = next();
        copied
    }

    /// Checks that every byte of the child's pools has been returned. Call it after the clients are
    /// closed.
    pub(crate) fn assert_pools_returned(&self) {
        if self.0.killed.load(Ordering::Relaxed) {
            return;
        }
        self.abort();
        match self.ask("pools").as_deref() {
            Some("whole") => {}
            Some(other) => unreachable!("in the server's process: {other}"),
            None => unreachable!("the server's process ended by itself"),
        }
    }
}

impl RemoteProbe for Remote {
    fn open(&self, gate: &str) {
        self.send_line(&format!("open {gate}"));
    }

    fn sync(&self) {
        self.ask("sync");
    }
}

impl ChildState {
    fn read_lines(
        &self,
        stdout: ChildStdout,
        addr_tx: &std_mpsc::Sender<SocketAddr>,
        probe: &Probe,
        log: &PathLog,
    ) {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
            match word {
                // The receiver is gone if the test has failed in the meantime.
                "addr" => drop(addr_tx.send(rest.parse().unwrap())),
                "event" => probe.report(rest),
                "call" => {
                    let (path, method) = rest.split_once(' ').unwrap();
                    let fast = match path {
                        "shm" => Some(Path::Shm),
                        "tcp" => None,
                        other => unreachable!("a call over {other}"),
                    };
                    log.record(RecordedCall { method: method.to_owned(), fast });
                }
                "ended" if rest.is_empty() => drop(self.ended.send_replace(Some(Ok(())))),
                "ended" => drop(self.ended.send_replace(Some(Err(rest.to_owned())))),
                "answer" => {
                    let (n, text) = rest.split_once(' ').unwrap();
                    let sender =
                        self.pending_answers.lock().unwrap().as_mut().and_then(|pending_answers| {
                            pending_answers.remove(&n.parse().unwrap())
                        });
                    let _ = sender.unwrap().send(text.to_owned());
                }
                _ => unreachable!("the server's process says {line:?}"),
            }
        }
        self.pending_answers.lock().unwrap().take();
        self.ended.send_if_modified(|ended| {
            let new = ended.is_none();
            ended.get_or_insert_with(|| Err("the server's process ended by itself".to_owned()));
            new
        });
    }
}
