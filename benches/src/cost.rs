//! The costs of a round in its two processes.

use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::Sub;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

/// The processor time, context switches and page faults of a process so far. The difference between
/// two values is the usage between the times at which they were read.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Processor time in nanoseconds, user and kernel (`/proc/PID/task/TID/schedstat`).
    pub cpu_ns: u64,
    /// Voluntary and involuntary context switches (`/proc/PID/task/TID/status`).
    pub switches: u64,
    /// Minor page faults (`/proc/PID/stat`), which are mostly due to memory newly mapped by the
    /// allocator.
    pub faults: u64,
}

impl Sub for Usage {
    type Output = Usage;
    fn sub(self, before: Usage) -> Usage {
        Usage {
            cpu_ns: self.cpu_ns.saturating_sub(before.cpu_ns),
            switches: self.switches.saturating_sub(before.switches),
            faults: self.faults.saturating_sub(before.faults),
        }
    }
}

impl Usage {
    /// Reads the totals of all current threads of a process.
    ///
    /// # Errors
    /// The process does not exist.
    pub fn of(pid: u32) -> anyhow::Result<Usage> {
        let mut usage = Usage::default();
        let tasks = fs::read_dir(format!("/proc/{pid}/task"))
            .with_context(|| format!("process {pid} is gone"))?;
        for task in tasks {
            let path = task?.path();
            // A thread may have ended in the meantime.
            let Ok(status) = fs::read_to_string(path.join("status")) else { continue };
            usage.cpu_ns += cpu_ns(&path);
            let switches = status.lines().filter_map(|line| line.split_once("_ctxt_switches:"));
            usage.switches +=
                switches.filter_map(|(_, n)| n.trim().parse::<u64>().ok()).sum::<u64>();
        }
        usage.faults = stat_fields(Path::new(&format!("/proc/{pid}")), 7, 1);
        Ok(usage)
    }
}

/// The processor time of one thread. Kernels without `schedstat` report it in ticks of 10 ms.
fn cpu_ns(task: &Path) -> u64 {
    if let Ok(schedstat) = fs::read_to_string(task.join("schedstat")) {
        return schedstat.split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or(0);
    }
    // User and system time.
    stat_fields(task, 11, 2) * 10_000_000
}

/// The sum of `count` fields of `stat`. Fields are counted from the field after the name. The name
/// is in parentheses and may contain any character.
fn stat_fields(directory: &Path, first: usize, count: usize) -> u64 {
    let stat = fs::read_to_string(directory.join("stat")).unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    fields
        .split_whitespace()
        .skip(first)
        .take(count)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum()
}

/// Counts a process's system calls with strace. strace slows the process down, so counted rounds
/// are not timed.
#[derive(Debug)]
pub struct SystemCalls {
    strace: Child,
}

impl SystemCalls {
    /// Starts counting, and returns once strace has attached.
    ///
    /// # Errors
    /// strace is not installed, or not allowed to attach (for ordinary users under
    /// `kernel.yama.ptrace_scope` 1).
    pub fn of(pid: u32) -> anyhow::Result<SystemCalls> {
        let mut strace = Command::new("strace")
            .args(["-f", "-c", "-p", &pid.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start strace")?;
        let Some(stderr) = strace.stderr.as_mut() else { bail!("no pipe from strace") };
        let mut line = String::new();
        // The line is read without buffering, because `sum` reads the later output.
        let mut reader = BufReader::with_capacity(1, stderr);
        reader.read_line(&mut line)?;
        if !line.contains("attached") {
            let _ = strace.wait();
            bail!("strace: {}", line.trim());
        }
        Ok(SystemCalls { strace })
    }

    /// Stops counting, and returns the number of calls.
    ///
    /// # Errors
    /// The output of strace cannot be parsed.
    pub fn sum(self) -> anyhow::Result<u64> {
        let SystemCalls { strace } = self;
        let pid = i32::try_from(strace.id()).ok().and_then(rustix::process::Pid::from_raw);
        let pid = pid.context("strace has no process id")?;
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)
            .context("cannot end strace")?;
        let stderr = strace.wait_with_output()?.stderr;
        let text = String::from_utf8_lossy(&stderr);
        let total = text.lines().rev().find(|line| line.trim_end().ends_with(" total"));
        match total {
            // The columns are percent, seconds, microseconds per call and calls.
            Some(line) => {
                let calls = line.split_whitespace().nth(3).and_then(|calls| calls.parse().ok());
                calls.with_context(|| format!("strace's sum makes no sense: {line}"))
            }
            None => Ok(0),
        }
    }
}
