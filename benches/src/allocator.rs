//! The allocators that the processes of a contender use.
//!
//! A program's allocator is linked into it, so mimalloc needs a separate program. Apart from the
//! allocator, this program is the same.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::str::FromStr;
use std::{fmt, fs};

use anyhow::{Context as _, bail, ensure};
use clap::{Parser, ValueEnum};

use crate::contender::Contender;
use crate::role::{Placement, Role};

/// The implementation of `malloc`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, ValueEnum)]
pub enum Allocator {
    /// The C library's, as configured by the environment
    #[default]
    Glibc,
    /// The C library's, configured to keep freed memory
    GlibcTuned,
    /// mimalloc, which keeps freed memory for a second
    Mimalloc,
}

/// Settings with which glibc keeps freed memory. The first is the number of free bytes at the end
/// of the heap above which glibc returns memory to the kernel. The second is the number of bytes by
/// which the heap grows. The third is the size at which an allocation gets its own mapping, which
/// glibc limits to 32 MiB.
pub const TUNED: [(&str, &str); 3] = [
    ("MALLOC_TRIM_THRESHOLD_", "268435456"),
    ("MALLOC_TOP_PAD_", "67108864"),
    ("MALLOC_MMAP_THRESHOLD_", "33554432"),
];

impl Allocator {
    /// The name on the command line and in the results.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Environment variables for the processes.
    pub fn environment(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::GlibcTuned => &TUNED,
            Self::Glibc | Self::Mimalloc => &[],
        }
    }

    /// The counterpart of `program` that is linked to this allocator. `neighbour` says whether
    /// `program` runs contenders from other projects.
    ///
    /// # Errors
    /// The counterpart was not built, or is older than its sources.
    pub fn program(self, program: &Path, neighbour: bool) -> anyhow::Result<PathBuf> {
        let name = match (self, neighbour) {
            (Self::Glibc | Self::GlibcTuned, _) => return Ok(program.to_owned()),
            (Self::Mimalloc, true) => "neighbours-mimalloc",
            (Self::Mimalloc, false) => "role-mimalloc",
        };
        // Test programs lie one directory below the other programs.
        let candidates = program.ancestors().skip(1).take(2).map(|directory| directory.join(name));
        let build = "build all programs: cargo build --release -p benches --bins, and benches/neighbours if those take part";
        let Some(found) = candidates.into_iter().find(|path| path.is_file()) else {
            bail!("{} runs in {name}, which is not beside {}; {build}", self, program.display());
        };
        if let Some(source) = newer_source(&found)? {
            bail!("{} is older than {}; {build}", found.display(), source.display());
        }
        Ok(found)
    }

    /// The allocator's name and version, as its program reports them.
    ///
    /// # Errors
    /// The program is missing.
    pub fn description(self) -> anyhow::Result<String> {
        Ok(match self {
            Self::Glibc => "the C library's".to_owned(),
            Self::GlibcTuned => {
                let set = TUNED.map(|(name, value)| format!("{name}={value}")).join(" ");
                format!("the C library's with {set}")
            }
            Self::Mimalloc => {
                let program = self.program(&std::env::current_exe()?, false)?;
                let output = Command::new(&program).arg("--allocator").output();
                let output =
                    output.with_context(|| format!("cannot start {}", program.display()))?;
                ensure!(output.status.success(), "{}: {}", program.display(), output.status);
                String::from_utf8(output.stdout)?.trim().to_owned()
            }
        })
    }
}

impl fmt::Display for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}

/// Returns a source file that is newer than `program`. The sources are those in cargo's dependency
/// file next to the program. Without this file, returns `None`. The check is needed because `cargo
/// run` rebuilds only the program that it runs.
fn newer_source(program: &Path) -> anyhow::Result<Option<PathBuf>> {
    let Ok(noted) = fs::read_to_string(program.with_extension("d")) else { return Ok(None) };
    let built = fs::metadata(program)?.modified()?;
    let sources = noted
        .lines()
        .next()
        .and_then(|line| line.split_once(": "))
        .map_or("", |(_, sources)| sources);
    // A space in a name is escaped by a backslash.
    let sources = sources.replace("\\ ", "\0");
    let changed = |path: &PathBuf| {
        fs::metadata(path).and_then(|m| m.modified()).is_ok_and(|time| time > built)
    };
    Ok(sources.split(' ').map(|source| PathBuf::from(source.replace('\0', " "))).find(changed))
}

/// A contender, and the allocator of its processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// The transport under test.
    pub contender: Contender,
    /// The allocator of the contender's processes.
    pub allocator: Allocator,
}

impl Variant {
    /// All combinations, ordered by allocator. Contenders that allocate nothing appear once, with
    /// the default allocator.
    pub fn all(contenders: &[Contender], allocators: &[Allocator]) -> Vec<Variant> {
        let with = |(at, allocator): (usize, &Allocator)| {
            let allocator = *allocator;
            contenders.iter().filter(move |contender| at == 0 || contender.allocates()).map(
                move |contender| {
                    let allocator =
                        if contender.allocates() { allocator } else { Allocator::default() };
                    Variant { contender: *contender, allocator }
                },
            )
        };
        allocators.iter().enumerate().flat_map(with).collect()
    }

    /// The index in `all` of the variant to compare with: the first contender, with the same
    /// allocator if present.
    pub fn baseline(self, all: &[Variant]) -> usize {
        let first = |variant: &Variant| {
            variant.contender == all[0].contender && variant.allocator == self.allocator
        };
        all.iter().position(first).unwrap_or(0)
    }
}

impl From<Contender> for Variant {
    fn from(contender: Contender) -> Self {
        Variant { contender, allocator: Allocator::default() }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.allocator {
            Allocator::Glibc => f.pad(&self.contender.name()),
            allocator => f.pad(&format!("{}+{allocator}", self.contender)),
        }
    }
}

impl FromStr for Variant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (contender, allocator) = text.split_once('+').unwrap_or((text, "glibc"));
        Ok(Variant {
            contender: ValueEnum::from_str(contender, false)?,
            allocator: ValueEnum::from_str(allocator, false)?,
        })
    }
}

#[derive(Parser, Debug)]
#[command(version, about = "A process of a contender: compare starts it", long_about = None)]
struct Args {
    /// Print the allocator of this program
    #[arg(long)]
    allocator: bool,
    #[command(flatten)]
    placement: Placement,
    #[command(flatten)]
    role: Role,
}

/// The main function of a program whose allocator is `allocator`.
pub fn main(program: &str, allocator: &str) -> ExitCode {
    let args = Args::parse();
    if args.allocator {
        println!("{allocator}");
        return ExitCode::SUCCESS;
    }
    crate::exit::exit(program, args.role.start(&args.placement))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    #[test]
    fn those_who_allocate_take_part_with_each_allocator() {
        let contenders = [Contender::TonicTcp, Contender::Shm, Contender::MemcpyHot];
        let all = Variant::all(&contenders, &[Allocator::Glibc, Allocator::Mimalloc]);
        let names: Vec<_> = all.iter().map(Variant::to_string).collect();
        assert_eq!(names, ["tonic-tcp", "shm", "memcpy-hot", "tonic-tcp+mimalloc", "shm+mimalloc"]);
        assert_eq!(
            all.iter().map(|variant| variant.baseline(&all)).collect::<Vec<_>>(),
            [0, 0, 0, 3, 3]
        );
        for variant in all {
            assert_eq!(variant.to_string().parse(), Ok(variant));
        }
        assert!("shm+musl".parse::<Variant>().is_err() && "+mimalloc".parse::<Variant>().is_err());

        let only = Variant::all(&contenders, &[Allocator::Mimalloc]);
        let names: Vec<_> = only.iter().map(Variant::to_string).collect();
        assert_eq!(names, ["tonic-tcp+mimalloc", "shm+mimalloc", "memcpy-hot"]);
        assert_eq!(only[2].baseline(&only), 0);
    }

    #[test]
    fn a_program_that_is_older_than_its_sources_is_not_run() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let program = |name: &str| Allocator::Mimalloc.program(&at(name), false);
        let error = program("compare").unwrap_err().to_string();
        assert!(
            error.starts_with("mimalloc runs in role-mimalloc, which is not beside "),
            "{error}"
        );
        for file in ["role-mimalloc", "a b.rs", "c.rs"] {
            fs::write(at(file), "").unwrap();
        }
        assert_eq!(program("compare").unwrap(), at("role-mimalloc"));
        assert_eq!(program("deps/a-test").unwrap(), at("role-mimalloc"));
        assert!(Allocator::Mimalloc.program(&at("neighbours"), true).is_err());
        assert_eq!(Allocator::GlibcTuned.program(&at("compare"), false).unwrap(), at("compare"));

        let source = at("a b.rs").display().to_string().replace(' ', "\\ ");
        let noted =
            format!("{}: {} {source}\n", at("role-mimalloc").display(), at("c.rs").display());
        fs::write(at("role-mimalloc.d"), noted).unwrap();
        let date = |file: &str, ahead: u64| {
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + ahead);
            fs::File::options().write(true).open(at(file)).unwrap().set_modified(time).unwrap();
        };
        date("a b.rs", 0);
        date("c.rs", 1);
        date("role-mimalloc", 2);
        assert!(program("compare").is_ok());
        date("a b.rs", 3);
        let error = program("compare").unwrap_err().to_string();
        assert!(
            error.contains("role-mimalloc is older than ") && error.contains("a b.rs;"),
            "{error}"
        );
    }
}
