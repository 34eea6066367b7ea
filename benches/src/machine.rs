//! The environment on which results depend in addition to the code: processor, kernel, C library
//! and allocator.

use std::process::Command;
use std::{fmt, fs};

use serde::{Deserialize, Serialize};

use crate::allocator::Allocator;

/// The machine, and the settings of the measured processes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    /// The model name. On x86 it includes family and model, by which glibc selects a memcpy.
    pub processor: String,
    /// Number of processors that this process may use.
    pub processors: usize,
    /// `uname -sr`.
    pub kernel: String,
    /// Name and version of the C library.
    pub c_library: String,
    /// Allocators of the measured processes, with versions or settings.
    pub allocators: Vec<String>,
    /// `GLIBC_TUNABLES` and the variables of glibc's malloc that are set.
    pub environment: Vec<String>,
}

/// Placeholder for facts that the system does not report.
const UNKNOWN: &str = "unknown";

impl Machine {
    /// Describes this machine and these allocators.
    ///
    /// # Errors
    /// The program of an allocator is missing.
    pub fn here(allocators: &[Allocator]) -> anyhow::Result<Self> {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let uname = rustix::system::uname();
        let kernel =
            format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy());
        let allocators = allocators.iter().map(|allocator| allocator.description());
        Ok(Self {
            processor: processor(&info),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            kernel,
            c_library: c_library(),
            allocators: allocators.collect::<Result<_, _>>()?,
            environment: std::env::vars()
                .filter(|(name, _)| affects_c_library(name))
                .map(|(n, v)| format!("{n}={v}"))
                .collect(),
        })
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { processor, processors, kernel, c_library, allocators, environment } = self;
        let allocators = allocators.join(" / ");
        write!(
            f,
            "{processor}, {processors} processors, {kernel}, {c_library}, allocator: {allocators}"
        )?;
        environment.iter().try_for_each(|set| write!(f, ", {set}"))
    }
}

/// Whether a variable affects how the C library copies or allocates.
fn affects_c_library(name: &str) -> bool {
    name == "GLIBC_TUNABLES" || (name.starts_with("MALLOC_") && name.ends_with('_'))
}

/// The first processor in /proc/cpuinfo.
fn processor(info: &str) -> String {
    let of = |wanted: &str| {
        info.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            (name.trim() == wanted).then(|| value.trim())
        })
    };
    // aarch64 reports only numbers.
    let numbers = |names: &[&str]| {
        let found = names.iter().filter_map(|name| Some(format!("{name} {}", of(name)?)));
        found.collect::<Vec<_>>().join(", ")
    };
    match of("model name") {
        Some(model) => format!("{model} ({})", numbers(&["cpu family", "model"])),
        None => Some(numbers(&["CPU implementer", "CPU part"]))
            .filter(|n| !n.is_empty())
            .unwrap_or(UNKNOWN.to_owned()),
    }
}

/// The C library as getconf(1) reports it. On musl, getconf does not report it.
fn c_library() -> String {
    let output = Command::new("getconf")
        .arg("GNU_LIBC_VERSION")
        .output()
        .ok()
        .filter(|output| output.status.success());
    output.map_or_else(
        || UNKNOWN.to_owned(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_named_by_what_there_is() {
        let x86 = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC 7B13\n\nprocessor\t: 1\nmodel name\t: x\n";
        assert_eq!(processor(x86), "AMD EPYC 7B13 (cpu family 25, model 1)");
        assert_eq!(
            processor("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"),
            "CPU implementer 0x41, CPU part 0xd40"
        );
        assert_eq!(processor(""), "unknown");
    }

    #[test]
    fn what_changes_the_c_library_is_told() {
        assert!(["GLIBC_TUNABLES", "MALLOC_TOP_PAD_"].iter().all(|name| affects_c_library(name)));
        assert!(!affects_c_library("MALLOC_CONF") && !affects_c_library("PATH"));
        let here = Machine::here(&[Allocator::Glibc, Allocator::GlibcTuned]).unwrap();
        assert!(
            here.to_string()
                .contains("allocator: the C library's / the C library's with MALLOC_TRIM"),
            "{here}"
        );
        assert!(
            here.kernel.starts_with("Linux ") && here.to_string().contains(&here.processor),
            "{here}"
        );
    }
}
