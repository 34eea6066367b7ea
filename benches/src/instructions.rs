//! Counts instructions of processes with hardware counters (`perf_event_open`), where available.

use std::{fs, io};

use anyhow::Context as _;
use perf_event::events::{Event, Hardware};
use perf_event::{Builder, Counter};

/// A counter for each thread of a process. Threads that such a thread starts inherit its counter.
#[derive(Debug)]
pub struct Instructions {
    counters: Vec<Counter>,
    /// Whether instructions in the kernel are included.
    pub kernel: bool,
}

impl Instructions {
    /// Counts the current and future threads of a process, including instructions in the kernel if
    /// counting them is allowed.
    ///
    /// # Errors
    /// The machine has no such counters (most virtual machines), or
    /// `/proc/sys/kernel/perf_event_paranoid` forbids them.
    pub fn of(pid: u32) -> anyhow::Result<Self> {
        Self::events(pid, Hardware::INSTRUCTIONS)
    }

    fn events(pid: u32, event: impl Event + Clone) -> anyhow::Result<Self> {
        let with = |kernel: bool| -> io::Result<Self> {
            let mut counters = Vec::new();
            for task in fs::read_dir(format!("/proc/{pid}/task"))? {
                let Some(tid) = task?.file_name().to_str().and_then(|tid| tid.parse().ok()) else {
                    continue;
                };
                let mut builder = Builder::new(event.clone());
                builder.observe_pid(tid).inherit(true).exclude_kernel(!kernel).enabled(true);
                counters.push(builder.build()?);
            }
            Ok(Self { counters, kernel })
        };
        with(true).or_else(|_| with(false)).context("this machine does not count instructions")
    }

    /// The count so far.
    ///
    /// # Errors
    /// A counter cannot be read.
    pub fn read(&mut self) -> anyhow::Result<u64> {
        let mut sum = 0;
        for counter in &mut self.counters {
            sum += counter.read()?;
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use perf_event::events::Software;

    use super::*;

    #[test]
    fn all_threads_are_counted_also_those_to_come() {
        // Uses a software clock instead of instructions, which few virtual machines count.
        let busy =
            || std::hint::black_box((0..20_000_000u64).fold(0, |a, b| std::hint::black_box(a ^ b)));
        let mut clock = match Instructions::events(std::process::id(), Software::TASK_CLOCK) {
            Ok(clock) => clock,
            // The clock may also be unavailable, for example in a container that forbids the system
            // call. Then the error must be the one that `compare` prints.
            Err(error) => {
                assert!(format!("{error:#}").contains("does not count"), "{error:#}");
                return;
            }
        };
        let before = clock.read().unwrap();
        std::thread::spawn(busy).join().unwrap();
        assert!(
            clock.read().unwrap() > before + 100_000,
            "a thread that came later was not counted"
        );
    }
}
