//! The resource usage of a process and its limits, which explain why a connection was refused.

use std::fs;

use anyhow::Context as _;

/// The usage of a resource, and its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Use {
    what: &'static str,
    used: u64,
    /// `None` if unlimited.
    limit: Option<u64>,
}

impl Use {
    /// Whether so little is left that the next connection may be refused.
    fn is_spent(&self) -> bool {
        self.limit.is_some_and(|limit| self.used.saturating_mul(100) >= limit.saturating_mul(99))
    }
}

impl std::fmt::Display for Use {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { what, used, limit } = self;
        match limit {
            Some(limit) => write!(f, "{used} of {limit} {what}")?,
            None => write!(f, "{used} {what}")?,
        }
        if self.is_spent() { f.write_str(" (limit reached)") } else { Ok(()) }
    }
}

/// Describes descriptors, mappings and memory of a process with their limits, and marks a limit
/// once 99 % of it is used.
///
/// # Errors
/// The process does not exist.
pub fn describe(pid: u32) -> anyhow::Result<String> {
    let gone = || format!("process {pid} is gone");
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).with_context(gone)?;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).with_context(gone)?;
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).with_context(gone)?;
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).with_context(gone)?.count() as u64;
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse().ok();
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let resident = field(&status, "VmRSS:").unwrap_or(0) >> 10;
    let free = field(&memory, "MemAvailable:").unwrap_or(0) >> 10;
    let uses = [
        Use { what: "descriptors", used: descriptors, limit: soft(&limits, "Max open files") },
        Use {
            what: "mappings",
            used: maps.lines().count() as u64,
            limit: number("/proc/sys/vm/max_map_count"),
        },
        Use {
            what: "KiB pinned",
            used: field(&status, "VmPin:").unwrap_or(0).max(field(&status, "VmLck:").unwrap_or(0)),
            limit: soft(&limits, "Max locked memory").map(|bytes| bytes >> 10),
        },
    ];
    let uses: Vec<String> = uses.iter().map(Use::to_string).collect();
    Ok(format!("{}, {resident} MiB resident, {free} MiB of the machine's free", uses.join(", ")))
}

/// The number that follows `name` at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The soft limit in `/proc/PID/limits`; `None` if unlimited.
fn soft(limits: &str, name: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_is_reached_is_marked() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max locked memory         unlimited            unlimited            bytes     \n\
                      Max open files            20000                20000                files     \n";
        assert_eq!(soft(limits, "Max open files"), Some(20_000));
        assert_eq!(soft(limits, "Max locked memory"), None);
        let descriptors = |used| Use { what: "descriptors", used, limit: Some(20_000) }.to_string();
        assert_eq!(descriptors(19_990), "19990 of 20000 descriptors (limit reached)");
        assert_eq!(descriptors(400), "400 of 20000 descriptors");
        assert_eq!(Use { what: "KiB pinned", used: 7, limit: None }.to_string(), "7 KiB pinned");
    }

    #[test]
    fn this_process_has_its_descriptors() {
        let usage = describe(std::process::id()).unwrap();
        assert!(usage.contains(" descriptors") && usage.contains(" mappings"), "{usage}");
        assert!(super::describe(u32::MAX).is_err());
    }
}
