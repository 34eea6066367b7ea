//! What a round costs its two processes.

use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::Sub;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, bail};

/// What a process has used so far; the difference of two is what it used between.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Nanoseconds on a processor, in the kernel and outside (`/proc/PID/task/TID/schedstat`).
    pub cpu_ns: u64,
    /// Context switches, voluntary and not (`/proc/PID/task/TID/status`).
    pub switches: u64,
    /// Page faults that needed nothing from a disk (`/proc/PID/stat`): most often memory that the
    /// allocator has anew.
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
    /// Of all threads that a process has now.
    ///
    /// # Errors
    /// There is no such process.
    pub fn of(pid: u32) -> anyhow::Result<Usage> {
        let mut usage = Usage::default();
        let tasks = fs::read_dir(format!("/proc/{pid}/task"))
            .with_context(|| format!("process {pid} is gone"))?;
        for task in tasks {
            let path = task?.path();
            // A thread may end between.
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

/// Of one thread. Kernels without `schedstat` have it in ticks of 10 ms only.
fn cpu_ns(task: &Path) -> u64 {
    if let Ok(schedstat) = fs::read_to_string(task.join("schedstat")) {
        return schedstat.split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or(0);
    }
    // User and system time.
    stat_fields(task, 11, 2) * 10_000_000
}

/// The sum of some fields of `stat`, counted from behind the name, which may hold anything in its
/// brackets.
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

/// Counts a process's system calls, with strace, until it is asked for the sum. Slows the process
/// down: rounds that are counted are not timed.
#[derive(Debug)]
pub struct SystemCalls {
    strace: Child,
}

impl SystemCalls {
    /// Begins to count, when strace has attached.
    ///
    /// # Errors
    /// There is no strace, or it may not attach (as an ordinary user under
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
        // Read byte by byte: what comes later is for `sum`.
        let mut reader = BufReader::with_capacity(1, stderr);
        reader.read_line(&mut line)?;
        if !line.contains("attached") {
            let _ = strace.wait();
            bail!("strace: {}", line.trim());
        }
        Ok(SystemCalls { strace })
    }

    /// Ends counting.
    ///
    /// # Errors
    /// strace says nothing that makes sense.
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
            // Percent, seconds, microseconds per call, calls.
            Some(line) => {
                let calls = line.split_whitespace().nth(3).and_then(|calls| calls.parse().ok());
                calls.with_context(|| format!("strace's sum makes no sense: {line}"))
            }
            None => Ok(0),
        }
    }
}
