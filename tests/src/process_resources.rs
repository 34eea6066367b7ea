//! The system resources of a process, to detect leaks.

use std::time::Duration;

use crate::load::poll_until;

/// Counts of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessResources {
    /// Open descriptors.
    pub fds: usize,
    /// Mappings of memfds, which hold shared memory.
    pub memfd_maps: usize,
    /// Threads of the process.
    pub threads: usize,
    /// KiB of memory that is pinned for devices.
    pub pinned: usize,
}

impl ProcessResources {
    /// The resources of a process, given by its id or as `self`.
    ///
    /// # Panics
    /// The process uses a file in /dev/shm.
    pub fn of(process: &str) -> Self {
        let list = |what| std::fs::read_dir(format!("/proc/{process}/{what}")).unwrap();
        let read = |what| std::fs::read_to_string(format!("/proc/{process}/{what}")).unwrap();
        let maps = read("maps");
        let files = list("fd").filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
        let files: Vec<_> = files.map(|file| file.display().to_string()).collect();
        for line in maps.lines().chain(files.iter().map(String::as_str)) {
            assert!(!line.contains("/dev/shm"), "{process}: {line}");
        }
        let status = read("status");
        let pinned = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap_or("0 kB");
        Self {
            fds: list("fd").count(),
            memfd_maps: maps.lines().filter(|line| line.contains("/memfd:")).count(),
            threads: list("task").count(),
            pinned: pinned.trim().trim_end_matches(" kB").parse().unwrap(),
        }
    }

    /// The minimum of each count, but the maximum of threads: the runtime starts and keeps threads
    /// for blocking work.
    fn or_steady(self, other: Self) -> Self {
        Self {
            fds: self.fds.min(other.fds),
            memfd_maps: self.memfd_maps.min(other.memfd_maps),
            threads: self.threads.max(other.threads),
            pinned: self.pinned.min(other.pinned),
        }
    }

    /// The amount by which each count exceeds that of `before`, by name.
    pub fn excess_over(self, before: Self) -> [(&'static str, usize); 4] {
        [
            ("descriptors", self.fds.saturating_sub(before.fds)),
            ("mappings", self.memfd_maps.saturating_sub(before.memfd_maps)),
            ("threads", self.threads.saturating_sub(before.threads)),
            ("pinned KiB", self.pinned.saturating_sub(before.pinned)),
        ]
    }

    /// Whether no count exceeds that of `limit`.
    pub fn within(self, limit: Self) -> bool {
        self.excess_over(limit).iter().all(|(_, more)| *more == 0)
    }
}

/// Checks one process for leaks, repeatedly.
#[derive(Debug, Default)]
pub struct LeakCheck(Option<ProcessResources>);

impl LeakCheck {
    /// The first call records the resources at rest as the baseline. Later calls wait until the
    /// process has returned to the baseline. `after` is the number of faults so far.
    ///
    /// # Panics
    /// The process holds more than the baseline for longer than [`LIMIT`](crate::load::LIMIT).
    pub async fn check(&mut self, process: &str, after: usize) -> ProcessResources {
        let read = || async { ProcessResources::of(process) };
        let now = match self.0 {
            Some(baseline) => {
                let what =
                    format!("process {process} holds more than {baseline:?} after {after} faults");
                poll_until(&what, read, |now| now.within(baseline)).await
            }
            None => {
                // A single reading could be too high or too low: the library checks the devices
                // once a second.
                let mut steady = ProcessResources::of(process);
                for _ in 0..40 {
                    tokio::time::sleep(Duration::from_millis(30)).await;
                    steady = steady.or_steady(ProcessResources::of(process));
                }
                *self.0.insert(steady)
            }
        };
        eprintln!("process {process} after {after} faults: {now:?} at rest");
        now
    }

    /// The baseline.
    pub fn first(&self) -> Option<ProcessResources> {
        self.0
    }
}
