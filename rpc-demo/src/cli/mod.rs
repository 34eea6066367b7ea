//! The command line.

mod addr;
mod completions;
#[cfg(test)]
mod man;
mod size;
mod usage;

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueHint, value_parser};
pub(crate) use completions::completions;
pub(crate) use size::{CHUNK, CHUNK_MAX, CHUNK_MIN, RANGE_CHUNK_ON_ONE_HOST, shown as size_shown};
pub(crate) use usage::parse;

/// A small object store over RDMA, with TCP as the fallback.
#[derive(Debug, Parser)]
#[command(name = "rpc-demo", version, max_term_width = 120)]
#[command(after_help = "\
Try it:
  rpc-demo demo                                  send about 1 GiB and fetch it, over TCP and the best path
  rpc-demo serve --root /srv/store               serve a directory on 127.0.0.1:50051
  rpc-demo put photos disk.img backup/           store a directory and a file below 'backup'
  rpc-demo ls backup --long                      list what is stored below 'backup'
  rpc-demo get backup/photos copy --resume       fetch it; after an interruption, only the missing parts

Exit codes: 0 success, 1 failure, 2 wrong command line or environment variable; 'doctor' has its own.
Environment: TONIC_RDMA=auto|off|require|require-verbs|shm|verbs and TONIC_RDMA_DEVICE=NAME choose the path, \
TONIC_RDMA_TOS=N its type of service, TONIC_RDMA_POOL=SIZE the size of pools, RUST_LOG the messages, NO_COLOR their look.")]
pub(crate) struct Cli {
    /// The command to run.
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Print more messages on stderr; repeat the flag for even more. RUST_LOG overrides the flag.
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub(crate) verbose: u8,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve the files of a directory.
    Serve(Serve),
    /// Store files and directories, or the content of stdin.
    Put(Put),
    /// Fetch objects and directories.
    Get(Get),
    /// List all objects, one object, or all objects below a directory.
    Ls(Ls),
    /// Show all properties of one object or directory.
    Stat(Stat),
    /// Remove objects, and directories with --recursive.
    Rm(Rm),
    /// Copy objects and directories from one server to another.
    Cp(Cp),
    /// Measure writes and reads of objects, in sequential and in random order.
    Bench(Bench),
    /// Send a tree to a server process and fetch it, over TCP and over the best path, and compare.
    Demo(Demo),
    /// Show the connections of a running server again and again.
    Top(Top),
    /// Show whether RDMA would be used, and if not, why, and how to fix it.
    Doctor(Doctor),
    /// Print a shell script that completes commands and flags.
    Completions(Completions),
}

/// The host and path to diagnose.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  rpc-demo doctor                                check this host
  rpc-demo doctor --peer http://10.0.0.1:50051   also check the path to a server
  rpc-demo doctor --json | jq '.findings[]'      print JSON, for scripts

The doctor checks rdma-core, kernel modules, device files, devices, ports, GIDs, addresses and the memlock limit. On each \
device it creates the objects that a connection needs, and connects the device with itself. For each problem it prints \
the transport's reason code (docs/troubleshooting.md explains them) and the command that fixes it.

Exit codes: 0 if RDMA would be used, 1 if not, 2 if unknown (wrong flag or variable, no server at --peer, unwritable output). \
With --peer, the code is also 0 if the server shares memory with this host.")]
pub(crate) struct Doctor {
    /// A server to connect to. The doctor shows what the server offers, which path is chosen and
    /// how long each step takes. For some seconds it compares TCP with the chosen path, and with
    /// SENDs and WRITEs without calls.
    #[arg(long, value_name = "URL", value_hint = ValueHint::Url)]
    pub(crate) peer: Option<String>,

    #[command(flatten)]
    pub(crate) timeout: ConnectTimeout,

    /// Print the result as one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// The server to show, and how.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  rpc-demo serve --root /srv/store --channelz    a server that lists its connections
  rpc-demo top                                   watch it; Ctrl-C ends
  rpc-demo top http://10.0.0.1:50051 --once      print one table, for scripts

A row shows a channel, a server, or a link, which is one of its connections. Rates and bytes are those that the shown \
program sends and receives. REASON tells why calls use TCP; 'not asked' is a client without tonic-rdma or with \
TONIC_RDMA=off, and 'offered' the TCP connection of a client that may use the fast path. CREDITS are the control messages \
that the program and its peer may send. MEMORY is for control messages and for payload to land in; the peer may write to \
the granted part now. Bytes are shown in units of 1024.

Without a terminal, or with TERM=dumb, it prints one table and ends, as with --once.")]
pub(crate) struct Top {
    /// The server's address.
    #[arg(value_name = "URL", env = "RPC_DEMO_SERVER", default_value = DEFAULT_SERVER, value_hint = ValueHint::Url)]
    pub(crate) server: String,

    /// Seconds between two tables. The rates are averages over this time.
    #[arg(short, long, env = "RPC_DEMO_INTERVAL", value_name = "SECONDS", default_value_t = 1, value_parser = value_parser!(u64).range(1..=3600))]
    pub(crate) interval: u64,

    /// Print one table after one interval, and exit.
    #[arg(long)]
    pub(crate) once: bool,

    #[command(flatten)]
    pub(crate) timeout: ConnectTimeout,
}

/// The server, and the path to it.
#[derive(Args, Clone, Debug)]
pub(crate) struct Remote {
    /// The server's address.
    #[arg(long, env = "RPC_DEMO_SERVER", value_name = "URL", default_value = DEFAULT_SERVER, value_hint = ValueHint::Url)]
    pub(crate) server: String,

    #[command(flatten)]
    pub(crate) path: Path,
}

const DEFAULT_SERVER: &str = "http://127.0.0.1:50051";

/// The path to a server.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Path {
    #[command(flatten)]
    pub(crate) require: Require,

    #[command(flatten)]
    pub(crate) timeout: ConnectTimeout,
}

/// The path that a command requires.
#[derive(Args, Clone, Copy, Debug, Default)]
pub(crate) struct Require {
    /// Fail, and print the reason, if RDMA is not available. Shared memory does not count as RDMA.
    /// TONIC_RDMA takes precedence.
    #[arg(long)]
    pub(crate) require_rdma: bool,

    /// Fail, and print the reason, if neither RDMA nor shared memory is available. TONIC_RDMA takes
    /// precedence.
    #[arg(long, conflicts_with = "require_rdma")]
    pub(crate) require_fast_path: bool,
}

/// How long to wait for a server.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct ConnectTimeout {
    /// Seconds to wait for a TCP connection.
    #[arg(long, env = "RPC_DEMO_CONNECT_TIMEOUT", value_name = "SECONDS", default_value_t = 10, value_parser = value_parser!(u64).range(1..=3600))]
    pub(crate) connect_timeout: u64,
}

/// The server, and the format of the answer.
#[derive(Args, Clone, Debug)]
pub(crate) struct Asked {
    /// Print JSON: one object for a result, one object per line for a listing.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) remote: Remote,
}

/// Options for the transfer of files.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Transfer {
    #[command(flatten)]
    pub(crate) parallel: Parallel,

    /// Continue an interrupted transfer: compare by CRC32C what the target already has, and
    /// transfer only what is missing or differs.
    #[arg(long)]
    pub(crate) resume: bool,

    /// Transfer files larger than this in ranges of this size, 64KiB to 4GiB.
    #[arg(long, env = "RPC_DEMO_RANGE_SIZE", value_name = "SIZE", default_value = "8MiB", value_parser = size::range)]
    pub(crate) range_size: u64,

    #[command(flatten)]
    pub(crate) chunks: Chunks,

    #[command(flatten)]
    pub(crate) files: Files,

    /// Print the result as one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// The degree of parallelism.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Parallel {
    /// Number of parallel transfers. A transfer is a file, an object, or a range of a large file or
    /// object. Default: 8, and over shared memory at most two ranges per processor.
    #[arg(short, long, env = "RPC_DEMO_JOBS", value_name = "N", value_parser = value_parser!(u16).range(1..=256))]
    jobs: Option<u16>,
}

/// The default number of parallel transfers.
const JOBS: u16 = 8;

impl Parallel {
    /// The number of parallel transfers.
    pub(crate) fn jobs(self) -> u16 {
        self.jobs.unwrap_or(JOBS)
    }

    /// The number of ranges that are transferred in parallel if both ends share a host's
    /// processors. More ranges would take more processor time and would not be faster: see
    /// docs/performance-log.md, "Files from disk to disk".
    pub(crate) fn ranges_on_one_host(self) -> u16 {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let most = u16::try_from(processors * 2).unwrap_or(u16::MAX);
        self.jobs.unwrap_or(JOBS.min(most))
    }
}

/// How files are read and written, and how their bytes reach another process on this host.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Files {
    /// Read and write files through the page cache, not by O_DIRECT and io_uring.
    #[arg(long, env = "RPC_DEMO_NO_DIRECT", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) no_direct: bool,

    /// Lend memory to this user's processes on this host instead of copying to them, and read their
    /// memory in place. Takes effect if both ends set this flag.
    #[arg(long, env = "RPC_DEMO_LEND", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) lend: bool,
}

impl Files {
    /// Applies these options to this process.
    pub(crate) fn apply(self) {
        if self.no_direct {
            crate::disk::forbid();
        }
        if self.lend {
            crate::disk::lend();
        }
    }
}

/// How files are split into messages.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Chunks {
    /// Payload bytes of a message, 4KiB to 3MiB. Default: 1MiB; 2MiB for ranges over shared memory.
    #[arg(long, env = "RPC_DEMO_CHUNK_SIZE", value_name = "SIZE", value_parser = size::chunk)]
    pub(crate) chunk_size: Option<usize>,
}

/// The directory to serve, and the server's limits.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  rpc-demo serve --root /srv/store                           for clients on this host
  rpc-demo serve --root /srv/store --addr 10.0.0.1:50051     for every client that can reach this address
  rpc-demo serve --root /srv/store --metrics 127.0.0.1:9464  with metrics for Prometheus

An object appears under its name completely or not at all. The server keeps the received part of an interrupted upload \
below the root, in .rpc-demo-tmp, until --resume continues it or it expires, and removes other unfinished files when it \
starts.

After the first SIGTERM or SIGINT the server accepts no more connections and lets transfers finish; the second one ends \
them.")]
pub(crate) struct Serve {
    /// The directory to serve. Clients cannot reach files outside it.
    #[arg(long, env = "RPC_DEMO_ROOT", value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) root: PathBuf,

    /// The address to listen on; port 0 picks a free port. There is no authentication, so every
    /// client that can reach this address can read and write the root.
    #[arg(long, env = "RPC_DEMO_ADDR", value_name = "HOST:PORT", default_value = "127.0.0.1:50051", value_parser = addr::listen)]
    pub(crate) addr: SocketAddr,

    /// The address where Prometheus fetches metrics over HTTP, at /metrics; port 0 picks a free
    /// port. docs/metrics.md explains each metric.
    #[arg(long, env = "RPC_DEMO_METRICS", value_name = "HOST:PORT", value_parser = addr::listen)]
    pub(crate) metrics: Option<SocketAddr>,

    /// List the server's connections for `rpc-demo top`. Every client can then read the addresses,
    /// process IDs and traffic of all clients.
    #[arg(long, env = "RPC_DEMO_CHANNELZ", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) channelz: bool,

    /// Maximum number of objects and ranges written in parallel; others wait.
    #[arg(long, env = "RPC_DEMO_MAX_WRITES", value_name = "N", default_value_t = 64, value_parser = value_parser!(u32).range(1..=200))]
    pub(crate) max_writes: u32,

    /// Maximum number of objects and ranges read in parallel; others wait.
    #[arg(long, env = "RPC_DEMO_MAX_READS", value_name = "N", default_value_t = 128, value_parser = value_parser!(u32).range(1..=200))]
    pub(crate) max_reads: u32,

    /// Acknowledge writes without syncing files and directories to the disk, to measure what a sync
    /// costs. A crash of the host may then lose acknowledged data.
    #[arg(long, env = "RPC_DEMO_NO_SYNC", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) no_sync: bool,

    #[command(flatten)]
    pub(crate) files: Files,

    /// Hours to keep the received part of an interrupted upload for --resume; 0 removes it at the
    /// next start.
    #[arg(long, env = "RPC_DEMO_KEEP_UPLOADS", value_name = "HOURS", default_value_t = 24, value_parser = value_parser!(u64).range(..=8760))]
    pub(crate) keep_uploads: u64,

    /// Seconds that transfers in flight have to finish after SIGTERM or SIGINT. A second signal
    /// ends these transfers at once.
    #[arg(long, env = "RPC_DEMO_GRACE", value_name = "SECONDS", default_value_t = 30, value_parser = value_parser!(u64).range(..=86400))]
    pub(crate) grace: u64,

    /// Stop when stdin ends, so that a server does not outlive the program that started it. The
    /// server answers each line on stdin with its costs so far.
    #[arg(long, hide = true)]
    pub(crate) until_eof: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  rpc-demo put disk.img backup/disk.img      store one file under that name
  rpc-demo put photos a.txt backup/          store each below 'backup' under its own name
  tar c / | rpc-demo put - backup/root.tar   store the content of stdin

An existing object is replaced; a directory is merged into an existing one. Permission bits and modification times are \
kept. Links and special files are skipped and counted.")]
pub(crate) struct Put {
    /// Files and directories, or - for stdin.
    #[arg(value_name = "FILE|DIR", required = true, value_hint = ValueHint::AnyPath)]
    pub(crate) sources: Vec<PathBuf>,

    /// The name to store the source under. With several sources, or with a / at the end, the
    /// directory to store the sources in; / is the root.
    pub(crate) target: String,

    #[command(flatten)]
    pub(crate) transfer: Transfer,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  rpc-demo get backup/disk.img copy.img      fetch one object to that name
  rpc-demo get backup/photos backup/a.txt .  fetch each into this directory, under its own name

An existing file is replaced; a directory is merged into an existing one. The received part of a large file stays next to \
it as .rpc-demo-*.part after an interruption, until --resume continues it or another get replaces it.")]
pub(crate) struct Get {
    /// Objects and directories.
    #[arg(value_name = "NAME", required = true)]
    pub(crate) names: Vec<String>,

    /// The local name. With several names, or with a / at the end, the directory to fetch the
    /// objects to.
    #[arg(value_hint = ValueHint::AnyPath)]
    pub(crate) target: PathBuf,

    #[command(flatten)]
    pub(crate) transfer: Transfer,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Default format: bytes and name; directory names end with /. Long: permission bits, bytes, modification time (UTC), CRC32C \
if known, name. JSON: one object per line, with name, kind, size, mode, modified, crc32c, note.")]
pub(crate) struct Ls {
    /// An object, or the directory to list.
    #[arg(value_name = "PREFIX")]
    pub(crate) prefix: Option<String>,

    /// Also show permission bits, modification times and CRC32Cs.
    #[arg(short, long)]
    pub(crate) long: bool,

    /// Make the server compute the CRC32C of each object whose CRC32C is unknown.
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

    /// Remove directories and everything below them.
    #[arg(short, long)]
    pub(crate) recursive: bool,

    #[command(flatten)]
    pub(crate) asked: Asked,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  rpc-demo cp --from http://10.0.0.1:50051 --to http://10.0.0.2:50051 backup/photos photos

The data passes through this program unchanged. The server that stores it checks it against the CRC32C of the server that \
read it.")]
pub(crate) struct Cp {
    /// Objects and directories on the source server.
    #[arg(value_name = "NAME", required = true)]
    pub(crate) names: Vec<String>,

    /// The name on the target server. With several names, or with a / at the end, the directory; /
    /// is the root.
    pub(crate) target: String,

    /// The server to read from.
    #[arg(long, env = "RPC_DEMO_SERVER", value_name = "URL", default_value = DEFAULT_SERVER, value_hint = ValueHint::Url)]
    pub(crate) from: String,

    /// The server to write to. Default: the server to read from.
    #[arg(long, value_name = "URL", value_hint = ValueHint::Url)]
    pub(crate) to: Option<String>,

    #[command(flatten)]
    pub(crate) path: Path,
    #[command(flatten)]
    pub(crate) transfer: Transfer,
}

#[derive(Args, Debug)]
#[command(after_help = "\
For each size, the bench writes objects sequentially, reads them in the same order, reads them in random order, and \
replaces them in random order. The objects are in a directory of their own on the server and are removed at the end. The \
server syncs each write unless it was started with --no-sync. Latencies are those of whole objects.")]
pub(crate) struct Bench {
    /// Object sizes, 4KiB to 64MiB, separated by commas.
    #[arg(long, value_name = "SIZE,...", default_value = "4KiB,64KiB,1MiB,16MiB,64MiB", value_delimiter = ',', value_parser = size::object)]
    pub(crate) sizes: Vec<u64>,

    #[command(flatten)]
    pub(crate) parallel: Parallel,

    /// Bytes to transfer in each measurement: at most 2000 objects, and at least one per job.
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
  rpc-demo demo                                  in memory, if three trees of 1 GiB fit
  rpc-demo demo --lend                           without a copy between the ends on this host
  rpc-demo demo --dir /srv --size 4GiB           on the disk of /srv, with syncs
  rpc-demo demo --addr 10.0.0.1:0 --require-rdma over the RDMA device with this address

The demo ends with a table of TCP, the best path and a plain copy: 10^9 bytes per second, processor seconds of both ends \
per 10^9 bytes, bytes copied per byte, and the ratio of the best path to the others.")]
pub(crate) struct Demo {
    /// Size of the generated tree, at least 1MiB. One file takes half of it. Default: 1GiB, or less
    /// if 1GiB does not fit.
    #[arg(long, value_name = "SIZE", value_parser = size::size)]
    pub(crate) size: Option<u64>,

    /// How many times to send the tree; the table shows medians. Default: 3, and 9 for a tree below
    /// 256MiB.
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=100))]
    pub(crate) rounds: Option<u16>,

    /// Seed for the content of the files: the same seed gives the same tree.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// Number of parallel transfers. Default: four per processor of this host, at most 8.
    #[arg(short, long, value_name = "N", value_parser = value_parser!(u16).range(1..=256))]
    pub(crate) jobs: Option<u16>,

    /// The address that the server listens on. For RDMA, use an address of an RDMA device's
    /// interface.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0", value_parser = addr::listen)]
    pub(crate) addr: SocketAddr,

    /// The directory to work in: three times the size must be free. On a disk, the measurement
    /// includes the disk and the store's syncs. Default: /dev/shm, or the temporary directory.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) dir: Option<PathBuf>,

    /// Keep the trees (the original, the server's, the fetched one), and print where they are.
    #[arg(long)]
    pub(crate) keep: bool,

    #[command(flatten)]
    pub(crate) require: Require,

    /// Make both ends lend memory to each other over shared memory.
    #[arg(long, env = "RPC_DEMO_LEND", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) lend: bool,

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
    /// The shell to print the script for.
    pub(crate) shell: clap_complete::Shell,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_holds_together() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn on_one_host_ranges_have_two_jobs_for_each_processor() {
        let jobs = |jobs| {
            let parallel = Parallel { jobs };
            (parallel.jobs(), parallel.ranges_on_one_host())
        };
        let processors = std::thread::available_parallelism().unwrap().get();
        assert_eq!(jobs(None), (8, 8.min(processors as u16 * 2)));
        for asked in [1, 8, 256] {
            assert_eq!(jobs(Some(asked)), (asked, asked), "what was asked for");
        }
    }
}
