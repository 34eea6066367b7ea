//! A server of the scripted service in a process of its own: this program, executed again.
//!
//! Lines on the child's stdin and stdout stand for what a test and its handlers otherwise share:
//!
//! | to the child | meaning |
//! |---|---|
//! | `open NAME` | [`Probe::open`] |
//! | `stop`, `abort` | what [`Server`](super::Server) does with a server in this process |
//! | `ask N sync`, `ask N copied`, `ask N pools` | a question; the answer comes behind every event before it |
//!
//! | from the child | meaning |
//! |---|---|
//! | `addr ADDR` | it serves there |
//! | `event NAME`, `call PATH METHOD` | [`Probe::report`], a line of the [`PathLog`] |
//! | `ended`, `ended ERROR` | the server has ended |
//! | `answer N TEXT` | to question N |
//!
//! The child ends with its stdin.

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

/// Names the fabric to a child.
pub(super) const VARIABLE: &str = "TONIC_RDMA_TEST_SERVE";
/// A child that has not answered by then hangs: it takes milliseconds.
const ANSWER: Duration = Duration::from_secs(60);

/// A server's process. It is killed with its [`TestEnv`](super::TestEnv).
#[derive(Clone, Debug)]
pub struct Remote(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    child: Mutex<Child>,
    stdin: Mutex<ChildStdin>,
    heard: Arc<Heard>,
    killed: AtomicBool,
}

/// What the child has said, besides events.
#[derive(Debug)]
struct Heard {
    /// Who waits for an answer; `None` once the child has no more to say.
    asked: Mutex<Option<HashMap<u64, std_mpsc::Sender<String>>>>,
    ended: watch::Sender<Option<Result<(), String>>>,
}

impl Remote {
    /// Starts a server over `fabric`, whose events go to `probe` and whose calls go to `log`.
    pub(crate) fn start(fabric: Fabric, probe: &Probe, log: &PathLog) -> (Self, SocketAddr) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(VARIABLE, fabric.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let heard = Arc::new(Heard {
            asked: Mutex::new(Some(HashMap::new())),
            ended: watch::Sender::new(None),
        });
        let remote = Remote(Arc::new(Inner {
            child: Mutex::new(child),
            stdin: Mutex::new(stdin),
            heard: Arc::clone(&heard),
            killed: AtomicBool::new(false),
        }));
        let (bound, addr) = std_mpsc::channel();
        let (events, calls) = (probe.clone(), log.clone());
        thread::spawn(move || heard.listen(stdout, &bound, &events, &calls));
        let addr = addr
            .recv_timeout(ANSWER)
            .unwrap_or_else(|e| unreachable!("no address from the server's process: {e}"));
        (remote, addr)
    }

    fn say(&self, line: &str) {
        // One that is gone hears nothing, which its pipe tells to those who ask.
        let _ = writeln!(self.0.stdin.lock().unwrap(), "{line}");
    }

    /// Asks for a graceful end.
    pub(crate) fn stop(&self) {
        self.say("stop");
    }

    /// Ends the server at once, as the drop of one in this process does. The process stays, to tell
    /// of its pools.
    pub(crate) fn abort(&self) {
        self.say("abort");
    }

    /// Waits until the server has ended.
    pub(crate) async fn ended(&self) {
        let mut ended = self.0.heard.ended.subscribe();
        ended.wait_for(Option::is_some).await.unwrap().clone().unwrap().unwrap();
    }

    /// Kills the process, by SIGKILL, if it has not ended, and waits for its end.
    pub fn kill(&self) {
        self.0.killed.store(true, Ordering::Relaxed);
        let mut child = self.0.child.lock().unwrap();
        // Fails for one that has ended.
        let _ = child.kill();
        let _ = child.wait();
    }

    /// The answer to a question; `None` when the process has ended, and everything it said before
    /// is known.
    fn ask(&self, question: &str) -> Option<String> {
        let (sender, answer) = std_mpsc::channel();
        let n = {
            let mut asked = self.0.heard.asked.lock().unwrap();
            let asked = asked.as_mut()?;
            // Answered ones are taken out, so that a number may return.
            let n = (0..).find(|n| !asked.contains_key(n)).unwrap();
            asked.insert(n, sender);
            n
        };
        self.say(&format!("ask {n} {question}"));
        match answer.recv_timeout(ANSWER) {
            Ok(answer) => Some(answer),
            Err(std_mpsc::RecvTimeoutError::Disconnected) => None,
            Err(std_mpsc::RecvTimeoutError::Timeout) => {
                unreachable!("the server's process does not answer {question:?}")
            }
        }
    }

    /// What the server has copied of the calls over its fast path, of all reasons, of short
    /// messages, and by a plain codec.
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

    /// Fails unless every byte of the pools over there has come back. Call it when clients are
    /// gone.
    pub(crate) fn pools_are_whole(&self) {
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
        self.say(&format!("open {gate}"));
    }

    fn sync(&self) {
        self.ask("sync");
    }
}

impl Heard {
    fn listen(
        &self,
        stdout: ChildStdout,
        bound: &std_mpsc::Sender<SocketAddr>,
        probe: &Probe,
        log: &PathLog,
    ) {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
            match word {
                // Nobody waits when the test has failed meanwhile.
                "addr" => drop(bound.send(rest.parse().unwrap())),
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
                    let sender = self
                        .asked
                        .lock()
                        .unwrap()
                        .as_mut()
                        .and_then(|asked| asked.remove(&n.parse().unwrap()));
                    let _ = sender.unwrap().send(text.to_owned());
                }
                _ => unreachable!("the server's process says {line:?}"),
            }
        }
        self.asked.lock().unwrap().take();
        self.ended.send_if_modified(|ended| {
            let new = ended.is_none();
            ended.get_or_insert_with(|| Err("the server's process ended by itself".to_owned()));
            new
        });
    }
}
