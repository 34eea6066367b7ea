//! Chooses the working directory. The directory is in memory if three trees fit there, so that the
//! demonstration measures the transport and not a disk.
//!
//! | flags | choice: the first that is possible |
//! |---|---|
//! | `--dir DIR` | DIR, on any file system |
//! | `--size SIZE` | memory; the directory for temporary files |
//! | neither | memory; memory, with a smaller tree of at least [`WORTHWHILE`]; the directory for temporary files; the same, with a smaller tree; memory, with a still smaller tree |
//!
//! "Memory" is a directory on tmpfs or ramfs: /dev/shm, or the directory for temporary files. The
//! space in this directory is limited by the free space of the file system, and by the memory that
//! this process may still allocate (MemAvailable, and the limits of its control groups).

use std::path::{Path, PathBuf};

use rustix::fs::{Access, StatVfsMountFlags, access, statfs, statvfs};

use crate::cli::size_shown;
use crate::failure::Failure;
use crate::tree::shown;

/// Minimum size of the tree in bytes.
pub(super) const SIZE_MIN: u64 = 1 << 20;
/// Default size of the tree in bytes, if it fits.
pub(super) const SIZE: u64 = 1 << 30;
/// Minimum size in bytes of a tree in memory if a larger tree fits on a disk.
const WORTHWHILE: u64 = 16 << 20;
/// Bytes reserved for the processes, including the transport's buffers, if the files are in memory.
const PROCESSES: u64 = 512 << 20;
/// Bytes reserved for directories and small files.
const BESIDE: u64 = 8 << 20;

/// `f_type` of file systems that keep their files in memory, as in linux/magic.h.
const TMPFS: u64 = 0x0102_1994;
const RAMFS: u64 = 0x8584_58f6;

/// The storage behind a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    Memory,
    /// A disk, a network, or unknown.
    Disk,
}

/// A directory that can be chosen.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub(super) path: PathBuf,
    pub(super) backing: Backing,
    /// The number of bytes that can be written to the directory, or the reason why nothing can be
    /// written.
    pub(super) room: Result<u64, String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chosen {
    pub(super) path: PathBuf,
    pub(super) backing: Backing,
    /// Size of the tree in bytes.
    pub(super) size: u64,
    /// The reason why the preferred directory or size was not chosen. `None` if both were chosen.
    pub(super) why: Option<String>,
}

/// Bytes that three trees of `size` take: the original tree, the server's tree and the fetched
/// tree.
fn need(size: u64) -> u64 {
    size.saturating_mul(3).saturating_add(size / 32).saturating_add(BESIDE)
}

/// The largest power of two, at most [`SIZE`], for which three trees fit into `room`.
fn fitting(room: u64) -> u64 {
    std::iter::successors(Some(SIZE), |size| Some(size / 2))
        .take_while(|size| *size > 0)
        .find(|size| need(*size) <= room)
        .unwrap_or(0)
}

/// Chooses according to `dir` and `size`, which are flags of the command line.
pub(super) fn choose(dir: Option<&Path>, size: Option<u64>) -> Result<Chosen, Failure> {
    let available = memory_available(Path::new("/"));
    match dir {
        Some(dir) => among(&[Candidate::look(dir, available)], Some(size.unwrap_or(SIZE))),
        None => {
            let temporary = std::env::temp_dir();
            let paths = [Path::new("/dev/shm"), &temporary];
            among(&paths.map(|path| Candidate::look(path, available)), size)
        }
    }
}

/// Chooses among `candidates`. `asked` is the requested size of the tree, if any.
pub(super) fn among(candidates: &[Candidate], asked: Option<u64>) -> Result<Chosen, Failure> {
    let full = asked.unwrap_or(SIZE);
    let of = |backing| candidates.iter().filter(move |candidate| candidate.backing == backing);
    let fits =
        |candidate: &&Candidate| candidate.room.as_ref().is_ok_and(|room| *room >= need(full));
    let chosen = |candidate: &Candidate, size, why| {
        Ok(Chosen { path: candidate.path.clone(), backing: candidate.backing, size, why })
    };
    if let Some(found) = of(Backing::Memory).find(fits) {
        return chosen(found, full, None);
    }
    let lacks = |candidate: &Candidate| candidate.lacks(full);
    let why = match of(Backing::Memory).map(lacks).collect::<Vec<_>>() {
        lacking if lacking.is_empty() => "no directory in memory".to_owned(),
        lacking => lacking.join("; "),
    };
    // Returns the candidate with the most space, and the size of the tree that fits there. Returns
    // `None` if that size is below `least`, or if a size was requested.
    let smaller = |backing, least| {
        let sized = of(backing).filter_map(|candidate| {
            let size = candidate.room.as_ref().map_or(0, |room| fitting(*room));
            (size >= least).then_some((candidate, size))
        });
        sized.max_by_key(|(_, size)| *size).filter(|_| asked.is_none())
    };
    if let Some((found, size)) = smaller(Backing::Memory, WORTHWHILE) {
        return chosen(found, size, Some(why));
    }
    if let Some(found) = of(Backing::Disk).find(fits) {
        return chosen(found, full, Some(why));
    }
    if let Some((found, size)) =
        smaller(Backing::Disk, SIZE_MIN).or_else(|| smaller(Backing::Memory, SIZE_MIN))
    {
        let lacking: Vec<_> = candidates.iter().map(lacks).collect();
        return chosen(found, size, Some(lacking.join("; ")));
    }
    let least = asked.unwrap_or(SIZE_MIN);
    let lacking: Vec<_> = candidates.iter().map(|candidate| candidate.lacks(least)).collect();
    let cure = "name another directory with --dir, or a smaller tree with --size";
    Err(Failure::new("there is no place to work in", lacking.join("; "), cure))
}

impl Candidate {
    /// Examines a directory. `available` is the memory in bytes that may still be allocated, if
    /// known.
    pub(super) fn look(path: &Path, available: Option<u64>) -> Candidate {
        let backing = match statfs(path).map(|stat| stat.f_type as u64 & u64::from(u32::MAX)) {
            Ok(TMPFS | RAMFS) => Backing::Memory,
            _ => Backing::Disk,
        };
        let room = room(path).map(|room| match (backing, available) {
            (Backing::Memory, Some(available)) => room.min(available.saturating_sub(PROCESSES)),
            _ => room,
        });
        Candidate { path: path.to_owned(), backing, room }
    }

    /// Says why three trees of `size` bytes do not fit, or why nothing can be written to the
    /// directory.
    fn lacks(&self, size: u64) -> String {
        let path = shown(&self.path);
        match &self.room {
            Ok(room) => {
                format!(
                    "three trees of {} need {} bytes, {path} has {room}",
                    size_shown(size),
                    need(size)
                )
            }
            Err(why) => format!("{path}: {why}"),
        }
    }
}

/// Returns how many bytes can be written to a directory, or the reason why nothing can be written.
fn room(path: &Path) -> Result<u64, String> {
    let said = |error: rustix::io::Errno| std::io::Error::from(error).to_string();
    let stat = statvfs(path).map_err(said)?;
    if stat.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Err("mounted read-only".to_owned());
    }
    access(path, Access::WRITE_OK | Access::EXEC_OK).map_err(said)?;
    // Some network file systems, and ramfs, report no figures at all.
    Ok(if stat.f_blocks == 0 { u64::MAX } else { stat.f_bavail.saturating_mul(stat.f_frsize) })
}

/// Returns how many bytes of memory this process may still allocate, which is the minimum of the
/// bytes that the system and the process's control groups have left. Returns `None` if neither
/// figure is known. `root` is the parent of /proc and /sys.
pub(super) fn memory_available(root: &Path) -> Option<u64> {
    let read = |path: &Path| std::fs::read_to_string(root.join(path)).ok();
    let number = |path: &Path| read(path)?.trim().parse::<u64>().ok();
    let system = read(Path::new("proc/meminfo")).and_then(|text| {
        let line =
            text.lines().find_map(|line| line.strip_prefix("MemAvailable:").map(str::to_owned))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    });
    let groups = read(Path::new("proc/self/cgroup")).unwrap_or_default();
    let groups = groups.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        match rest.split_once(':')? {
            ("", path) => Some((path, "sys/fs/cgroup", ["memory.max", "memory.current"])),
            ("memory", path) => {
                let files = ["memory.limit_in_bytes", "memory.usage_in_bytes"];
                Some((path, "sys/fs/cgroup/memory", files))
            }
            _ => None,
        }
    });
    // The limit of each group up to the root applies.
    let limits = groups.flat_map(|(path, mount, [limit, usage])| {
        Path::new(path.trim_start_matches('/'))
            .ancestors()
            .filter_map(move |group| {
                let group = Path::new(mount).join(group);
                let limit = number(&group.join(limit))?;
                let usage = number(&group.join(usage))?;
                // Pages of the page cache can be reclaimed.
                let stat = read(&group.join("memory.stat")).unwrap_or_default();
                let pages =
                    stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse().ok());
                Some(limit.saturating_sub(usage.saturating_sub(pages.unwrap_or(0))))
            })
            .collect::<Vec<_>>()
    });
    system.into_iter().chain(limits).min()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;

    fn candidate(path: &str, backing: Backing, room: Result<u64, &str>) -> Candidate {
        Candidate { path: path.into(), backing, room: room.map_err(str::to_owned) }
    }

    fn shm(room: Result<u64, &str>) -> Candidate {
        candidate("/dev/shm", Backing::Memory, room)
    }

    fn tmp(room: Result<u64, &str>) -> Candidate {
        candidate("/tmp", Backing::Disk, room)
    }

    fn chosen(candidates: &[Candidate], asked: Option<u64>) -> (String, u64, Option<String>) {
        let Chosen { path, size, why, .. } = among(candidates, asked).unwrap();
        (path.to_str().unwrap().to_owned(), size, why)
    }

    #[test]
    fn memory_that_holds_three_trees_is_taken() {
        let both = [shm(Ok(12 * GIB)), tmp(Ok(100 * GIB))];
        assert_eq!(chosen(&both, None), ("/dev/shm".to_owned(), GIB, None));
        assert_eq!(chosen(&both, Some(3 * GIB)), ("/dev/shm".to_owned(), 3 * GIB, None));
        assert_eq!(chosen(&[tmp(Ok(0)), shm(Ok(need(GIB)))], None).0, "/dev/shm");
        // The directory for temporary files may also be in memory.
        let second = [shm(Ok(64 * MIB)), candidate("/tmp", Backing::Memory, Ok(12 * GIB))];
        assert_eq!(chosen(&second, None), ("/tmp".to_owned(), GIB, None));
    }

    #[test]
    fn a_small_dev_shm_gets_a_smaller_tree_and_says_so() {
        let (path, size, why) = chosen(&[shm(Ok(64 * MIB)), tmp(Ok(100 * GIB))], None);
        assert_eq!((path.as_str(), size), ("/dev/shm", 16 * MIB));
        let why = why.unwrap();
        assert!(
            why.contains("three trees of 1 GiB") && why.contains("/dev/shm has 67108864"),
            "{why}"
        );
        // A requested size is not reduced.
        let (path, size, why) = chosen(&[shm(Ok(64 * MIB)), tmp(Ok(100 * GIB))], Some(GIB));
        assert_eq!((path.as_str(), size), ("/tmp", GIB));
        assert!(why.unwrap().contains("/dev/shm has 67108864"));
    }

    #[test]
    fn without_memory_it_is_the_directory_for_temporary_files() {
        let (path, size, why) = chosen(&[tmp(Ok(100 * GIB))], None);
        assert_eq!(
            (path.as_str(), size, why.as_deref()),
            ("/tmp", GIB, Some("no directory in memory"))
        );
        let missing = candidate("/dev/shm", Backing::Disk, Err("No such file or directory"));
        assert_eq!(chosen(&[missing, tmp(Ok(100 * GIB))], None).0, "/tmp");
        let (path, _, why) = chosen(&[shm(Err("mounted read-only")), tmp(Ok(100 * GIB))], None);
        assert_eq!((path.as_str(), why.as_deref()), ("/tmp", Some("/dev/shm: mounted read-only")));
        // A disk is preferred to memory that holds almost nothing, and a small disk to no space.
        let (path, size, _) = chosen(&[shm(Ok(20 * MIB)), tmp(Ok(GIB))], None);
        assert_eq!((path.as_str(), size), ("/tmp", 256 * MIB));
        let (path, size, why) = chosen(&[shm(Ok(20 * MIB)), tmp(Err("Permission denied"))], None);
        assert_eq!((path.as_str(), size), ("/dev/shm", 2 * MIB));
        assert!(why.unwrap().contains("/tmp: Permission denied"));
    }

    #[test]
    fn nowhere_is_an_error_that_names_each_place() {
        let error =
            among(&[shm(Ok(MIB)), tmp(Err("mounted read-only"))], None).unwrap_err().to_string();
        for part in ["/dev/shm has 1048576", "/tmp: mounted read-only", "--dir", "--size"] {
            assert!(error.contains(part), "{part}: {error}");
        }
        let error = among(&[tmp(Ok(GIB))], Some(u64::MAX / 2)).unwrap_err().to_string();
        assert!(error.contains("/tmp has 1073741824"), "{error}");
    }

    #[test]
    fn three_trees_fit_where_it_says_so() {
        for room in [0, BESIDE, need(MIB), need(MIB) - 1, 64 * MIB, 5 * GIB, u64::MAX] {
            let size = fitting(room);
            assert!(size == 0 || need(size) <= room, "{room}");
            assert!(size == SIZE || need(size.max(1) * 2) > room, "{room}");
        }
    }

    #[test]
    fn real_directories_are_looked_at() {
        let dir = tempfile::tempdir().unwrap();
        let here = Candidate::look(dir.path(), Some(PROCESSES + 5));
        match here.backing {
            Backing::Memory => assert!(here.room.unwrap() <= 5),
            Backing::Disk => assert!(here.room.unwrap() > 0),
        }
        let missing = Candidate::look(&dir.path().join("missing"), None);
        assert!(missing.room.unwrap_err().contains("No such file"));
    }

    #[test]
    fn limits_of_control_groups_count() {
        let made = |files: &[(&str, &str)]| {
            let root = tempfile::tempdir().unwrap();
            for (path, text) in files {
                let path = root.path().join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            memory_available(root.path())
        };
        let system = ("proc/meminfo", "MemTotal:  16384 kB\nMemAvailable:    8192 kB\n");
        let group = ("proc/self/cgroup", "0::/a/b\n");
        assert_eq!(made(&[]), None);
        assert_eq!(made(&[system]), Some(8 * MIB));
        let unlimited = [
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.current", "1\n"),
        ];
        assert_eq!(made(&[system, group, unlimited[0], unlimited[1]]), Some(8 * MIB));
        // The parent group has the lower limit.
        let above = [
            ("sys/fs/cgroup/a/memory.max", "1000000\n"),
            ("sys/fs/cgroup/a/memory.current", "700000\n"),
            ("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 200000\n"),
        ];
        let all: Vec<_> = [system, group].into_iter().chain(unlimited).chain(above).collect();
        assert_eq!(made(&all), Some(500_000));
        // A container sees its own group as the root.
        let own = [
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "3000\n"),
            ("sys/fs/cgroup/memory.current", "1000\n"),
        ];
        assert_eq!(made(&[system, own[0], own[1], own[2]]), Some(2000));
        let old = [
            ("proc/self/cgroup", "5:cpu:/x\n4:memory:/x\n"),
            ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "4000\n"),
            ("sys/fs/cgroup/memory/x/memory.usage_in_bytes", "1000\n"),
        ];
        assert_eq!(made(&[system, old[0], old[1], old[2]]), Some(3000));
    }
}
