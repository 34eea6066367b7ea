//! What a process holds of the system: the measure of leaks.

use std::time::Duration;

use crate::load::until;

/// Counts of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessResources {
    /// Open descriptors.
    pub fds: usize,
    /// Mappings of files without a name, which is how memory is shared.
    pub memfd_maps: usize,
    /// Threads.
    pub threads: usize,
    /// KiB that devices have pinned.
    pub pinned: usize,
}

impl ProcessResources {
    /// By a process, `self` or its number. Fails if there is anything of it in /dev/shm.
    pub fn by(process: &str) -> Self {
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

    /// Of each the lower count; of threads the higher: one for blocking work comes and stays.
    fn or_steady(self, other: Self) -> Self {
        Self {
            fds: self.fds.min(other.fds),
            memfd_maps: self.memfd_maps.min(other.memfd_maps),
            threads: self.threads.max(other.threads),
            pinned: self.pinned.min(other.pinned),
        }
    }

    /// What there is more of than there was, by name.
    pub fn beyond(self, before: Self) -> [(&'static str, usize); 4] {
        [
            ("descriptors", self.fds.saturating_sub(before.fds)),
            ("mappings", self.memfd_maps.saturating_sub(before.memfd_maps)),
            ("threads", self.threads.saturating_sub(before.threads)),
            ("pinned KiB", self.pinned.saturating_sub(before.pinned)),
        ]
    }

    /// No more of anything.
    pub fn within(self, limit: Self) -> bool {
        self.beyond(limit).iter().all(|(_, more)| *more == 0)
    }
}

/// The checkpoints of one process.
#[derive(Debug, Default)]
pub struct Watch(Option<ProcessResources>);

impl Watch {
    /// The first time notes what is held at rest, `after` so many faults. From then on fails if it
    /// does not come back to that.
    pub async fn check(&mut self, process: &str, after: usize) -> ProcessResources {
        let read = || async { ProcessResources::by(process) };
        let now = match self.0 {
            Some(measure) => {
                let what =
                    format!("process {process} holds more than {measure:?} after {after} faults");
                until(&what, read, |now| now.within(measure)).await
            }
            None => {
                // That of a moment could be too much, for good, or too little: the library looks at
                // the devices once a second.
                let mut steady = ProcessResources::by(process);
                for _ in 0..40 {
                    tokio::time::sleep(Duration::from_millis(30)).await;
                    steady = steady.or_steady(ProcessResources::by(process));
                }
                *self.0.insert(steady)
            }
        };
        eprintln!("process {process} after {after} faults: {now:?} at rest");
        now
    }

    /// What it was the first time.
    pub fn first(&self) -> Option<ProcessResources> {
        self.0
    }
}
