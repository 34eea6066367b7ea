//! Generates the tree. The same size and seed give the same tree.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};

use crate::failure::Failure;
use crate::progress::{Bar, Progress};
use crate::tree::shown;

/// Bytes generated at a time.
const BLOCK: usize = 1 << 20;
/// Number of files of medium size, which share the remaining bytes.
const MIDDLE: u64 = 12;

/// The seed of the tree, and the path and size of each file.
pub(super) struct Plan {
    seed: u64,
    files: Vec<(String, u64)>,
}

impl Plan {
    /// Plans a tree of `size` bytes. One file has half of the bytes. Then come special cases:
    /// empty, tiny and deeply nested files, unusual names, and sizes around the sizes of chunks and
    /// pages. Files of medium size make up the rest.
    pub(super) fn new(size: u64, seed: u64) -> Plan {
        let mut files = vec![("half.bin".to_owned(), size / 2), ("empty.bin".to_owned(), 0)];
        files.extend((0..32).map(|n| (format!("tiny/{n:02}.bin"), n * n + 1)));
        let deep: Vec<String> = (1..=16).map(|level| format!("level-{level}")).collect();
        files.push((format!("deep/{}/leaf.bin", deep.join("/")), 12_345));
        files.push(("names/ünïcode and spaces 名前.bin".to_owned(), 4_321));
        let mut left = size - files.iter().map(|(_, size)| size).sum::<u64>().min(size);
        for edge in [4 << 10, 64 << 10, 1 << 20, 4 << 20] {
            for size in [edge - 1, edge, edge + 1] {
                // A small tree leaves out the large special cases.
                if size < left / 8 {
                    files.push((format!("edges/{size}.bin"), size));
                    left -= size;
                }
            }
        }
        for n in 0..MIDDLE {
            let share = left / (MIDDLE - n);
            files.push((format!("middle/{n:02}.bin"), share));
            left -= share;
        }
        Plan { seed, files }
    }

    /// Bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, size)| size).sum()
    }

    pub(super) fn files(&self) -> usize {
        self.files.len()
    }

    /// Writes the tree and an additional empty directory. Fails as soon as `stop` is set.
    pub(super) fn write(&self, dir: &Path, stop: &AtomicBool) -> Result<(), Failure> {
        let progress = Progress::start(Some(self.bytes()));
        let empty = dir.join("empty-directory");
        fs::create_dir_all(&empty)
            .map_err(|error| Failure::io(format!("cannot make {}", shown(&empty)), &error))?;
        for (name, size) in &self.files {
            let path = dir.join(name);
            let bar = progress.file(name, *size);
            self.file(&path, name, *size, stop, &bar)
                .map_err(|error| Failure::io(format!("cannot write {}", shown(&path)), &error))?;
        }
        Ok(())
    }

    fn file(
        &self,
        path: &Path,
        name: &str,
        size: u64,
        stop: &AtomicBool,
        bar: &Bar,
    ) -> io::Result<()> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        let mut file = File::create_new(path)?;
        let mut random = SmallRng::seed_from_u64(
            self.seed.rotate_left(32) ^ u64::from(crc32c::crc32c(name.as_bytes())),
        );
        let mut block = vec![0; BLOCK];
        let mut left = size;
        while left > 0 {
            if stop.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let length = usize::try_from(left).map_or(BLOCK, |left| left.min(BLOCK));
            let Some(part) = block.get_mut(..length) else { break };
            random.fill_bytes(part);
            file.write_all(part)?;
            bar.add(length);
            left -= length as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Tree;

    #[test]
    fn has_the_size_that_was_asked_for() {
        for size in [1 << 20, (1 << 20) + 7, 100_000_000, 1 << 30, u64::MAX / 8] {
            let plan = Plan::new(size, 1);
            assert_eq!(plan.bytes(), size);
            assert_eq!(plan.files[0].1, size / 2);
        }
        assert_eq!(Plan::new(1 << 30, 1).files[0], ("half.bin".to_owned(), 512 << 20));
    }

    #[test]
    fn is_the_same_for_the_same_seed() {
        let dir = tempfile::tempdir().unwrap();
        let crcs = |name: &str, seed| -> Vec<u32> {
            let plan = Plan::new(1 << 20, seed);
            let at = dir.path().join(name);
            plan.write(&at, &AtomicBool::new(false)).unwrap();
            assert_eq!(Tree::walk(&at).unwrap().bytes(), 1 << 20);
            plan.files
                .iter()
                .map(|(file, _)| crc32c::crc32c(&fs::read(at.join(file)).unwrap()))
                .collect()
        };
        let first = crcs("a", 1);
        assert_eq!(first, crcs("b", 1));
        assert_ne!(first, crcs("c", 2));
    }

    #[test]
    fn stops_when_told() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Plan::new(1 << 20, 1).write(dir.path(), &AtomicBool::new(true)).is_err());
    }
}
