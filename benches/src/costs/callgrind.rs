//! Runs a scenario under callgrind.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::{fs, iter};

use anyhow::{Context as _, bail, ensure};
use tempfile::TempDir;

use super::meter::{COUNTED, Counts};
use super::scenario::Scenario;

/// Source of a library that gives the counted process a deterministic clock and randomness.
const FIXED: &str = include_str!("fixed.c");

/// A directory to run scenarios in.
#[derive(Debug)]
pub struct Callgrind {
    dir: TempDir,
    fixed: PathBuf,
}

impl Callgrind {
    /// Checks the tools and builds the library.
    ///
    /// # Errors
    /// valgrind or the C compiler is missing (`scripts/install-packages bench` installs both), or
    /// files cannot be written.
    pub fn new() -> anyhow::Result<Self> {
        valgrind_version()?;
        let dir = tempfile::tempdir().context("cannot make a directory for counts")?;
        let (source, fixed) = (dir.path().join("fixed.c"), dir.path().join("fixed.so"));
        fs::write(&source, FIXED)?;
        let mut cc = Command::new("cc");
        cc.args(["-O2", "-Wall", "-shared", "-fPIC", "-o"]).arg(&fixed).arg(&source);
        run_checked(&mut cc)?;
        Ok(Self { dir, fixed })
    }

    /// Counts one scenario by running this program with `--run NAME`.
    ///
    /// # Errors
    /// The scenario fails, or callgrind counted nothing.
    pub fn count(&self, scenario: &Scenario) -> anyhow::Result<Counts> {
        let profile = self.profile(scenario)?;
        let output = profile.output;
        let mut counts: Counts = serde_json::from_slice(&output.stdout)
            .with_context(|| format!("{}: no counts, but: {}", scenario.name, text(&output)))?;
        let times =
            counts.remove("times").context("a scenario does not say how often it was run")?;
        let warm_up = counts.remove("warm_up").unwrap_or(0.0);
        let totals = totals(&profile.file)?;
        for (event, name, times) in
            [("Ir", "instructions", times), ("sysCount", "system_calls", times + warm_up)]
        {
            let total =
                totals.get(event).with_context(|| format!("callgrind counts no {event}"))?;
            counts.insert(name.to_owned(), *total as f64 / times);
        }
        ensure!(totals["Ir"] > 0, "{}: callgrind did not see {COUNTED}", scenario.name);
        Ok(counts)
    }

    /// The functions in which a scenario's instructions are executed, as printed by
    /// `callgrind_annotate`.
    ///
    /// # Errors
    /// The errors of [`count`](Self::count), or `callgrind_annotate`, a part of valgrind, is
    /// missing.
    pub fn annotate(&self, scenario: &Scenario, inclusive: bool) -> anyhow::Result<String> {
        let profile = self.profile(scenario)?;
        let mut annotate = Command::new("callgrind_annotate");
        annotate
            .arg(format!("--inclusive={}", if inclusive { "yes" } else { "no" }))
            .arg(&profile.file);
        Ok(String::from_utf8_lossy(&run_checked(&mut annotate)?.stdout).into_owned())
    }

    fn profile(&self, scenario: &Scenario) -> anyhow::Result<Profile> {
        let file = self.dir.path().join(format!("{}.callgrind", scenario.name));
        let mut command = Command::new("valgrind");
        command
            .args(["--tool=callgrind", "--quiet", "--collect-atstart=no", "--collect-systime=yes"])
            .arg(format!("--toggle-collect={COUNTED}"))
            .arg(format!("--callgrind-out-file={}", file.display()))
            .arg(std::env::current_exe()?)
            .args(["--run", scenario.name])
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("LD_PRELOAD", &self.fixed)
            // `rep movsb` would count as one instruction per byte.
            .env("GLIBC_TUNABLES", "glibc.cpu.x86_rep_movsb_threshold=1073741824")
            .stdin(Stdio::null());
        let output = run_checked(&mut command).with_context(|| scenario.name)?;
        Ok(Profile { output, file })
    }
}

struct Profile {
    output: Output,
    file: PathBuf,
}

/// The totals of a callgrind file, by event. Instructions are counted for the measured work alone.
/// System calls are counted in the functions that run the measured work, including its warm-up.
fn totals(file: &Path) -> anyhow::Result<BTreeMap<String, u64>> {
    let text =
        fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let line = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.with_context(|| format!("callgrind wrote no {name}"))
    };
    // callgrind leaves out zeros at the end.
    let totals = line("totals: ")?.split_whitespace().chain(iter::repeat("0"));
    line("events: ")?
        .split_whitespace()
        .zip(totals)
        .map(|(name, total)| {
            let total =
                total.parse().with_context(|| format!("callgrind counts {total} {name}"))?;
            Ok((name.to_owned(), total))
        })
        .collect()
}

/// Runs a command that must succeed.
fn run_checked(command: &mut Command) -> anyhow::Result<Output> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| {
        format!("cannot run {name}: install it, on Debian and Ubuntu with scripts/install-packages bench")
    })?;
    if !output.status.success() {
        bail!("{name} failed, {}: {}", output.status, text(&output));
    }
    Ok(output)
}

fn text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&both).trim().to_owned()
}

/// The environment on which counts depend in addition to the code: compiler, C library, valgrind,
/// and architecture.
///
/// # Errors
/// valgrind is missing.
pub fn toolchain() -> anyhow::Result<String> {
    let libc = run_checked(Command::new("getconf").arg("GNU_LIBC_VERSION"));
    let libc = libc.map_or_else(|_| "another libc".to_owned(), |out| text(&out));
    Ok([env!("BUILT_BY"), &libc, &valgrind_version()?, std::env::consts::ARCH].join(", "))
}

fn valgrind_version() -> anyhow::Result<String> {
    Ok(text(&run_checked(Command::new("valgrind").arg("--version"))?))
}
