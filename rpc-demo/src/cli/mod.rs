//! The command line.

mod addr;
mod completions;
mod size;
mod usage;

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueHint, value_parser};
pub(crate) use completions::completions;
pub(crate) use size::{CHUNK, CHUNK_MAX, CHUNK_MIN, shown as size_shown};
pub(crate) use usage::parse;

/// A small object store over RDMA, and over TCP where there is none.
#[derive(Debug, Parser)]
#[command(name = "rpc-demo", version, max_term_width = 120)]
#[command(after_help = "\
Try it:
  rpc-demo demo                                  about 1 GiB there and back, over TCP and the best path
  rpc-demo serve --root /srv/store               serve a directory on 127.0.0.1:50051
  rpc-demo put photos disk.img backup/           store a directory and a file below 'backup'
  rpc-demo ls backup --long                      what is there
  rpc-demo get backup/photos copy --resume       fetch it; after an interruption, what is missing

Exit codes: 0 done, 1 it failed, 2 the command line or a variable is wrong; the doctor has its own.
Environment: TONIC_RDMA=auto|off|require|shm|verbs and TONIC_RDMA_DEVICE=NAME choose the path, RUST_LOG the messages.")]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Say more on stderr; twice for still more. RUST_LOG overrides it.
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub(crate) verbose: u8,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve the files of a directory.
    Serve(Serve),
    /// Store files and directories, or what comes on stdin.
    Put(Put),
    /// Fetch objects and directories.
    Get(Get),
    /// List objects: all, one, or those below a directory.
    Ls(Ls),
    /// Tell all about one object or directory.
    Stat(Stat),
    /// Remove objects, and directories with --recursive.
    Rm(Rm),
    /// Copy objects and directories from one server to another.
    Cp(Cp),
    /// Measure: write and read objects in order and at random.
    Bench(Bench),
    /// Send a tree to a server process and back, over TCP and over the best path, and compare them.
    Demo(Demo),
    /// Say whether RDMA would be used, and if not, why and what to do.
    Doctor(Doctor),
    /// Print a script that completes commands and flags in a shell.
    Completions(Completions),
}

/// What to find out.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  rpc-demo doctor                                this host
  rpc-demo doctor --peer http://10.0.0.1:50051   and the way to a server
  rpc-demo doctor --json | jq '.findings[]'      for scripts

It looks at rdma-core, kernel modules, device files, devices, ports, GIDs, addresses and the memlock limit, makes on each \
device what a connection needs, and connects the device with itself. For each thing in the way it names the transport's \
reason code (docs/troubleshooting.md tells about each) and the command that mends it.

Exit codes: 0 RDMA would be used, 1 it would not, 2 it cannot be told: a wrong flag or variable, no server at --peer, or \
an answer that could not be written. With --peer a server on this host counts as 0 too when memory is shared with it.")]
pub(crate) struct Doctor {
    /// A server to ask and to reach: what it offers, which path is chosen, how long each step
    /// takes, and a measurement of TCP and that path, side by side, of about two seconds and some
    /// tens of megabytes.
    #[arg(long, value_name = "URL", value_hint = ValueHint::Url)]
    pub(crate) peer: Option<String>,

    #[command(flatten)]
    pub(crate) patience: Patience,

    /// Print all of it as one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Which server, and how.
#[derive(Args, Clone, Debug)]
pub(crate) struct Remote {
    /// The server's address.
    #[arg(long, env = "RPC_DEMO_SERVER", value_name = "URL", default_value = DEFAULT_SERVER, value_hint = ValueHint::Url)]
    pub(crate) server: String,

    #[command(flatten)]
    pub(crate) path: Path,
}

const DEFAULT_SERVER: &str = "http://127.0.0.1:50051";

/// How to come to a server.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Path {
    /// Fail, with the reason, where RDMA cannot be had. Shared memory does not count as RDMA. What
    /// TONIC_RDMA says is stronger.
    #[arg(long)]
    pub(crate) require_rdma: bool,

    #[command(flatten)]
    pub(crate) patience: Patience,
}

/// How long to wait for a server.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Seconds to wait for a TCP connection.
    #[arg(long, env = "RPC_DEMO_CONNECT_TIMEOUT", value_name = "SECONDS", default_value_t = 10, value_parser = value_parser!(u64).range(1..=3600))]
    pub(crate) connect_timeout: u64,
}

/// Which server is asked, and the form of the answer.
#[derive(Args, Clone, Debug)]
pub(crate) struct Asked {
    /// Print JSON: the result as one object, a listing as one a line.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) remote: Remote,
}

/// How files travel.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Transfer {
    #[command(flatten)]
    pub(crate) parallel: Parallel,

    /// Take up what an interrupted transfer left: what is there already is compared by CRC32C, and
    /// only what is missing or differs travels.
    #[arg(long)]
    pub(crate) resume: bool,

    /// A file larger than this travels in ranges of this size, 64KiB to 4GiB.
    #[arg(long, env = "RPC_DEMO_RANGE_SIZE", value_name = "SIZE", default_value = "8MiB", value_parser = size::range)]
    pub(crate) range_size: u64,

    #[command(flatten)]
    pub(crate) chunks: Chunks,

    /// Print the result as one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// How much goes on at a time.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Parallel {
    /// Transfers at once. Each is a file or an object, or a range of a large one.
    #[arg(short, long, env = "RPC_DEMO_JOBS", value_name = "N", default_value_t = 8, value_parser = value_parser!(u16).range(1..=256))]
    pub(crate) jobs: u16,
}

/// How files are cut.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Chunks {
    /// Bytes a message carries, 4KiB to 3MiB.
    #[arg(long, env = "RPC_DEMO_CHUNK_SIZE", value_name = "SIZE", default_value = "1MiB", value_parser = size::chunk)]
    pub(crate) chunk_size: usize,
}

/// A directory to serve, and the terms.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  rpc-demo serve --root /srv/store                           for this host
  rpc-demo serve --root /srv/store --addr 10.0.0.1:50051     for all who reach this address
  rpc-demo serve --root /srv/store --metrics 127.0.0.1:9464  with figures for Prometheus

An object appears under its name whole or not at all. What an interrupted upload has received stays under the root, in \
.rpc-demo-tmp, until it is taken up with --resume or is too old; other unfinished files are removed at the start.

The first SIGTERM or SIGINT takes no more connections and lets transfers finish; the second ends them.")]
pub(crate) struct Serve {
    /// The directory whose files are served. Nothing outside it can be reached.
    #[arg(long, env = "RPC_DEMO_ROOT", value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) root: PathBuf,

    /// Where to listen; port 0 takes a free one. There is no authentication: choose an address that
    /// only those can reach who may read and write the root.
    #[arg(long, env = "RPC_DEMO_ADDR", value_name = "HOST:PORT", default_value = "127.0.0.1:50051", value_parser = addr::listen)]
    pub(crate) addr: SocketAddr,

    /// Where Prometheus may fetch metrics over HTTP, at /metrics; port 0 takes a free one.
    /// docs/metrics.md tells about each.
    #[arg(long, env = "RPC_DEMO_METRICS", value_name = "HOST:PORT", value_parser = addr::listen)]
    pub(crate) metrics: Option<SocketAddr>,

    /// Objects and ranges written at once; others wait for their turn.
    #[arg(long, env = "RPC_DEMO_MAX_WRITES", value_name = "N", default_value_t = 64, value_parser = value_parser!(u32).range(1..=200))]
    pub(crate) max_writes: u32,

    /// Objects and ranges read at once; others wait for their turn.
    #[arg(long, env = "RPC_DEMO_MAX_READS", value_name = "N", default_value_t = 128, value_parser = value_parser!(u32).range(1..=200))]
    pub(crate) max_reads: u32,

    /// Acknowledge without syncing files and directories to the disk: to measure what that costs. A
    /// crash of the host may then take what was acknowledged.
    #[arg(long, env = "RPC_DEMO_NO_SYNC", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) no_sync: bool,

    /// Hours that what an interrupted upload has received is kept for --resume; 0 removes it at the
    /// next start.
    #[arg(long, env = "RPC_DEMO_KEEP_UPLOADS", value_name = "HOURS", default_value_t = 24, value_parser = value_parser!(u64).range(..=8760))]
    pub(crate) keep_uploads: u64,

    /// Seconds that transfers in flight get to finish after SIGTERM or SIGINT. A second signal ends
    /// them at once.
    #[arg(long, env = "RPC_DEMO_GRACE", value_name = "SECONDS", default_value_t = 30, value_parser = value_parser!(u64).range(..=86400))]
    pub(crate) grace: u64,

    /// Stop when stdin ends: a server started by another program does not outlive it. A line on
    /// stdin is answered with what was spent so far.
    #[arg(long, hide = true)]
    pub(crate) until_eof: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  rpc-demo put disk.img backup/disk.img      one file, under that name
  rpc-demo put photos a.txt backup/          each below 'backup', under its own name
  tar c / | rpc-demo put - backup/root.tar   what comes on stdin

An object of that name is replaced, a directory is merged into one that is there. Permission bits and times of change go \
with files and directories; links and special files are left out and counted.")]
pub(crate) struct Put {
    /// Files and directories, or - for stdin.
    #[arg(value_name = "FILE|DIR", required = true, value_hint = ValueHint::AnyPath)]
    pub(crate) sources: Vec<PathBuf>,

    /// What to call it. With several sources, or with a / at its end, the directory to put them in;
    /// / is the root.
    pub(crate) target: String,

    #[command(flatten)]
    pub(crate) transfer: Transfer,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  rpc-demo get backup/disk.img copy.img      one object, under that name
  rpc-demo get backup/photos backup/a.txt .  each into this directory, under its own name

A file of that name is replaced, a directory is merged into one that is there. What an interrupted get of a large file \
has received stays beside the file as .rpc-demo-*.part, until --resume takes it up or another get replaces it.")]
pub(crate) struct Get {
    /// Objects and directories.
    #[arg(value_name = "NAME", required = true)]
    pub(crate) names: Vec<String>,

    /// What to call it here. With several names, or with a / at its end, the directory to put them
    /// in.
    #[arg(value_hint = ValueHint::AnyPath)]
    pub(crate) target: PathBuf,

    #[command(flatten)]
    pub(crate) transfer: Transfer,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
#[command(after_help = "\
By default: bytes and name, a / behind that of a directory. Long: permission bits, bytes, time of change (UTC), CRC32C \
where it is known, name. JSON: one object a line, with name, kind, size, mode, modified, crc32c, note.")]
pub(crate) struct Ls {
    /// An object, or the directory to list.
    #[arg(value_name = "PREFIX")]
    pub(crate) prefix: Option<String>,

    /// Permission bits, times and CRC32Cs, too.
    #[arg(short, long)]
    pub(crate) long: bool,

    /// Let the server read objects whose CRC32C it does not know.
    #[arg(long)]
    pub(crate) checksum: bool,

    #[command(flatten)]
    pub(crate) asked: Asked,
}

#[derive(Args, Debug)]
pub(crate) struct Stat {
    /// An object or a directory.
    pub(crate) name: String,

    #[command(flatten)]
    pub(crate) asked: Asked,
}

#[derive(Args, Debug)]
pub(crate) struct Rm {
    /// Objects, and directories with --recursive.
    #[arg(value_name = "NAME", required = true)]
    pub(crate) names: Vec<String>,

    /// Remove directories with all below them.
    #[arg(short, long)]
    pub(crate) recursive: bool,

    #[command(flatten)]
    pub(crate) asked: Asked,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  rpc-demo cp --from http://10.0.0.1:50051 --to http://10.0.0.2:50051 backup/photos photos

The bytes go from one server to the other through this program as they are, and are checked by the server that stores \
them against the CRC32C of the one that read them.")]
pub(crate) struct Cp {
    /// Objects and directories of the one server.
    #[arg(value_name = "NAME", required = true)]
    pub(crate) names: Vec<String>,

    /// What to call it on the other. With several names, or with a / at its end, the directory; /
    /// is the root.
    pub(crate) target: String,

    /// The server to read from.
    #[arg(long, env = "RPC_DEMO_SERVER", value_name = "URL", default_value = DEFAULT_SERVER, value_hint = ValueHint::Url)]
    pub(crate) from: String,

    /// The server to write to. Default: the same.
    #[arg(long, value_name = "URL", value_hint = ValueHint::Url)]
    pub(crate) to: Option<String>,

    #[command(flatten)]
    pub(crate) path: Path,
    #[command(flatten)]
    pub(crate) transfer: Transfer,
}

#[derive(Args, Debug)]
#[command(after_help = "\
For each size: objects are written one after the other, read in that order, read in random order, and replaced in random \
order. They lie in a directory of their own on the server and are removed at the end. The server syncs each write unless \
it was started with --no-sync. Latencies are those of whole objects.")]
pub(crate) struct Bench {
    /// Bytes of an object, 4KiB to 64MiB; several with commas.
    #[arg(long, value_name = "SIZE,...", default_value = "4KiB,64KiB,1MiB,16MiB,64MiB", value_delimiter = ',', value_parser = size::object)]
    pub(crate) sizes: Vec<u64>,

    #[command(flatten)]
    pub(crate) parallel: Parallel,

    /// Bytes to move in each measurement, within 2000 objects and 1 object a job.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = size::size)]
    pub(crate) amount: u64,

    #[command(flatten)]
    pub(crate) chunks: Chunks,

    #[command(flatten)]
    pub(crate) asked: Asked,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  rpc-demo demo                                  in memory, where that holds three trees of 1 GiB
  rpc-demo demo --dir /srv --size 4GiB           on this disk, syncs included
  rpc-demo demo --addr 10.0.0.1:0 --require-rdma over the device with this address

It closes with a table of TCP, the best path and a plain copy: 10^9 bytes a second, processor seconds of both ends for \
10^9 bytes, bytes copied for each byte, and how the best path compares with the others.")]
pub(crate) struct Demo {
    /// Bytes of the generated tree, at least 1MiB. Half of them are in one file. Default: 1GiB, or
    /// less where that does not fit.
    #[arg(long, value_name = "SIZE", value_parser = size::size)]
    pub(crate) size: Option<u64>,

    /// How often the tree is sent; the table has the medians. Default: 3, and 9 for a tree below
    /// 256MiB.
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=100))]
    pub(crate) rounds: Option<u16>,

    /// Decides the content of the files: the same seed gives the same tree.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// Transfers at once. Default: four for each processor of this host, and 8 at most.
    #[arg(short, long, value_name = "N", value_parser = value_parser!(u16).range(1..=256))]
    pub(crate) jobs: Option<u16>,

    /// Where the server listens. For RDMA, name an address of an RDMA device's interface.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0", value_parser = addr::listen)]
    pub(crate) addr: SocketAddr,

    /// Where to work: three times the size must be free. On a disk that is measured, too, with the
    /// syncs of the store. Default: /dev/shm, or the directory for temporary files.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) dir: Option<PathBuf>,

    /// Keep the trees (what was sent, the server's, what came back), and say where they are.
    #[arg(long)]
    pub(crate) keep: bool,

    /// Fail, with the reason, where RDMA cannot be had. Shared memory does not count as RDMA. What
    /// TONIC_RDMA says is stronger.
    #[arg(long)]
    pub(crate) require_rdma: bool,

    #[command(flatten)]
    pub(crate) chunks: Chunks,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  rpc-demo completions bash > ~/.local/share/bash-completion/completions/rpc-demo
  rpc-demo completions zsh > ~/.zfunc/_rpc-demo      where fpath has ~/.zfunc
  rpc-demo completions fish > ~/.config/fish/completions/rpc-demo.fish")]
pub(crate) struct Completions {
    /// The shell.
    pub(crate) shell: clap_complete::Shell,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_holds_together() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }
}
