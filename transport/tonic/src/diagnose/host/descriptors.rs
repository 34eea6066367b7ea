//! Reads the limit and use of descriptors.

use crate::diagnose::host::system_files::{SystemFiles, number};
use crate::diagnose::report::DescriptorsReport;
use crate::server::{DESCRIPTORS, MAX_CONNECTIONS};

/// This process's limit on descriptors, and the number that it uses. `None` if `/proc` does not
/// contain the limit.
pub(in crate::diagnose) fn descriptors(files: &SystemFiles) -> Option<DescriptorsReport> {
    // `Max open files            1024                 524288               files`
    let limits = files.read("/proc/self/limits")?;
    let rest = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    let limit = |word: &str| match word {
        "unlimited" => Some(None),
        word => number(word).map(Some),
    };
    let mut words = rest.split_whitespace();
    let (soft, hard) = (limit(words.next()?)?, limit(words.next()?)?);
    let in_use = files.list("/proc/self/fd").len() as u64;
    let wanted = (MAX_CONNECTIONS * DESCRIPTORS) as u64 + in_use;
    Some(DescriptorsReport { soft, hard, in_use, wanted })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(limits: &str) -> Option<DescriptorsReport> {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("proc/self");
        std::fs::create_dir_all(own.join("fd")).unwrap();
        std::fs::write(own.join("limits"), limits).unwrap();
        for fd in 0..4 {
            std::fs::write(own.join(format!("fd/{fd}")), "").unwrap();
        }
        descriptors(&SystemFiles::at(dir.path()))
    }

    #[test]
    fn limits_are_read_and_what_is_malformed_is_nothing() {
        let text = "Limit                     Soft Limit           Hard Limit           Units\n\
                    Max open files            1024                 unlimited            files\n";
        let found = of(text).unwrap();
        assert_eq!((found.soft, found.hard, found.in_use), (Some(1024), None, 4));
        assert_eq!(found.wanted, 4096 * 3 + 4);
        for bad in ["", "Max open files", "Max open files 12", "Max open files many 12 files"] {
            assert_eq!(of(bad), None, "{bad}");
        }
        assert!(descriptors(&SystemFiles::real()).is_some_and(|own| own.in_use > 2));
    }
}
