//! Counts the bytes that processes copy, with a library that is loaded before libc (`copies.c`).
//!
//! The library counts copies by memcpy and memmove, and bytes that system calls move into and out
//! of the kernel. It counts neither the kernel's copies for a device (Soft-RoCE and Soft-iWARP copy
//! every byte) nor short copies by plain instructions.

use std::fs;
use std::ops::Sub;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use tempfile::TempDir;

const SOURCE: &str = include_str!("copies.c");

/// The library, and the counts of the processes that load it.
#[derive(Debug)]
pub struct Copies {
    _dir: TempDir,
    library: PathBuf,
    counts: PathBuf,
}

/// Bytes copied so far. The difference between two values is the number of bytes copied between the
/// two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Bytes copied by memcpy and memmove.
    pub memory: u64,
    /// Bytes copied into and out of the kernel.
    pub kernel: u64,
}

impl Sub for Copied {
    type Output = Copied;
    fn sub(self, before: Copied) -> Copied {
        Copied { memory: self.memory - before.memory, kernel: self.kernel - before.kernel }
    }
}

impl Copies {
    /// Compiles the library that counts.
    ///
    /// # Errors
    /// There is no C compiler (`scripts/install-packages bench` installs one).
    pub fn new() -> anyhow::Result<Self> {
        let dir = tempfile::tempdir().context("cannot make a directory for counts")?;
        let at = |name: &str| dir.path().join(name);
        let (source, library, counts) = (at("copies.c"), at("copies.so"), at("counts"));
        fs::write(&source, SOURCE)?;
        fs::write(&counts, [0; 16])?;
        let mut cc = Command::new("cc");
        cc.args(["-O2", "-Wall", "-fno-builtin", "-shared", "-fPIC", "-o"])
            .arg(&library)
            .arg(&source);
        let made = cc.arg("-ldl").stdin(Stdio::null()).output().context("cannot run cc")?;
        ensure!(made.status.success(), "cc: {}", String::from_utf8_lossy(&made.stderr).trim());
        Ok(Self { _dir: dir, library, counts })
    }

    /// Environment variables that make a process count.
    pub fn environment(&self) -> [(&'static str, PathBuf); 3] {
        [
            ("LD_PRELOAD", self.library.clone()),
            ("TONIC_RDMA_BENCH_COPIES", self.counts.clone()),
            // Makes the transport use memcpy for all copies (`memory::copy`), because memcpy is
            // counted.
            ("GLIBC_TUNABLES", "glibc.cpu.x86_rep_movsb_threshold=1073741824".into()),
        ]
    }

    /// Reads the current counts.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&self) -> anyhow::Result<Copied> {
        let bytes = fs::read(&self.counts).context("cannot read the counts")?;
        let word = |at: usize| bytes.get(at..at + 8)?.try_into().ok().map(u64::from_ne_bytes);
        let (memory, kernel) = word(0).zip(word(8)).context("the file of counts is cut off")?;
        Ok(Copied { memory, kernel })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_reads_and_writes_is_counted() {
        let copies = Copies::new().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, vec![7; 1 << 20]).unwrap();
        let run = |program: &str| {
            let before = copies.read().unwrap();
            let mut command = Command::new(program);
            command.arg(&file).envs(copies.environment()).stdout(Stdio::piped());
            let out = command.output().unwrap().stdout;
            (out.len(), copies.read().unwrap() - before)
        };
        // cat reads and writes the file.
        let (out, copied) = run("cat");
        assert_eq!(out, 1 << 20);
        assert!((2 << 20..(2 << 20) + 65536).contains(&copied.kernel), "{copied:?}");
        let (_, copied) = run("true");
        assert!(copied.kernel < 65536, "{copied:?}");
    }
}
