//! The command line.

use clap::{Args, Parser, Subcommand};
use std::net::SocketAddr;
use std::path::PathBuf;

/// A small object store over RDMA, and over TCP where there is none.
#[derive(Debug, Parser)]
#[command(version, about, max_term_width = 100)]
#[command(after_help = "Exit codes: 0 done, 1 a transfer failed, 2 the command line is wrong.\n\
    Environment: TONIC_RDMA=auto|off|require and TONIC_RDMA_DEVICE=NAME choose the path, RUST_LOG the messages.")]
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
    /// Store a file, a directory with all below it, or what comes on stdin.
    Put(Put),
    /// Fetch an object, or a directory with all below it.
    Get(Get),
    /// List objects: all, one, or those below a directory.
    Ls(Ls),
    /// Start a server, put a generated tree, get it back, and compare the two.
    Demo(Demo),
}

/// Which server, and how.
#[derive(Args, Clone, Debug)]
pub(crate) struct Remote {
    /// The server's address.
    #[arg(long, env = "RPC_DEMO_SERVER", value_name = "URL", default_value = "http://127.0.0.1:50051")]
    pub(crate) server: String,

    /// Fail, with the reason, where RDMA cannot be had.
    #[arg(long)]
    pub(crate) require_rdma: bool,

    /// Seconds to wait for a TCP connection.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) connect_timeout: u64,
}

/// How files are cut.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Chunks {
    /// Bytes a message carries, 4KiB to 3MiB.
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = chunk_size)]
    pub(crate) chunk_size: usize,
}

/// Smallest and largest chunk in bytes; with its few bytes of framing the largest stays below the 4 MiB that tonic lets
/// a message have by default.
pub(crate) const CHUNK_MIN: usize = 4 << 10;
pub(crate) const CHUNK_MAX: usize = 3 << 20;
/// Bytes of a chunk where nobody asks for another size.
pub(crate) const CHUNK: usize = 1 << 20;

#[derive(Args, Debug)]
pub(crate) struct Serve {
    /// The directory whose files are served. Nothing outside it can be reached.
    #[arg(long, value_name = "DIR")]
    pub(crate) root: PathBuf,

    /// Where to listen; port 0 takes a free one. There is no authentication: choose an address that only those can reach
    /// who may read and write the root.
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:50051")]
    pub(crate) addr: SocketAddr,

    /// Transfers at once; others wait for their turn.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=400))]
    pub(crate) max_transfers: u32,

    /// Seconds that transfers under way get to finish after SIGTERM or SIGINT. A second signal ends them at once.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub(crate) grace: u64,

    /// Stop when stdin ends: a server started by another program does not outlive it.
    #[arg(long, hide = true)]
    pub(crate) until_eof: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Put {
    /// A file, a directory, or - for stdin.
    #[arg(value_name = "FILE|DIR")]
    pub(crate) source: PathBuf,

    /// What to call it. An object of that name is replaced; a directory is merged into one that is there.
    pub(crate) name: String,

    #[command(flatten)]
    pub(crate) chunks: Chunks,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct Get {
    /// An object or a directory.
    pub(crate) name: String,

    /// What to call it here. A file of that name is replaced; a directory is merged into one that is there.
    pub(crate) path: PathBuf,

    #[command(flatten)]
    pub(crate) chunks: Chunks,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct Ls {
    /// An object, or the directory to list.
    #[arg(value_name = "PREFIX")]
    pub(crate) prefix: Option<String>,

    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct Demo {
    /// Bytes of the generated tree, at least 1MiB. Half of them are in one file.
    #[arg(long, default_value = "1GiB", value_parser = size)]
    pub(crate) size: u64,

    /// Decides the content of the files: the same seed gives the same tree.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// Where the server listens. For RDMA, name an address of an RDMA device's interface.
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:0")]
    pub(crate) addr: SocketAddr,

    /// Where to work: three times the size must be free. Default: the directory for temporary files.
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,

    /// Keep the three trees, and say where they are.
    #[arg(long)]
    pub(crate) keep: bool,

    /// Fail, with the reason, where RDMA cannot be had.
    #[arg(long)]
    pub(crate) require_rdma: bool,

    #[command(flatten)]
    pub(crate) chunks: Chunks,
}

fn chunk_size(text: &str) -> Result<usize, String> {
    match usize::try_from(size(text)?) {
        Ok(bytes) if (CHUNK_MIN..=CHUNK_MAX).contains(&bytes) => Ok(bytes),
        _ => Err("it must be 4KiB to 3MiB".into()),
    }
}

/// Bytes: a number, perhaps with a unit (KiB, MiB, GiB, TiB, or kB, MB, GB, TB).
fn size(text: &str) -> Result<u64, String> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let factor = match unit.trim() {
        "" | "B" => 1,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        "T" | "TiB" => 1 << 40,
        "kB" => 1000,
        "MB" => 1000_u64.pow(2),
        "GB" => 1000_u64.pow(3),
        "TB" => 1000_u64.pow(4),
        _ => {
            return Err(
                "write a number of bytes with one of the units KiB, MiB, GiB, TiB, kB, MB, GB, TB".into()
            );
        }
    };
    let number: u64 = digits.parse().map_err(|_| "it does not begin with a whole number".to_owned())?;
    number.checked_mul(factor).ok_or_else(|| "it is more than 2^64 bytes".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_holds_together() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn sizes() {
        for (text, bytes) in
            [("0", 0), ("17", 17), ("1KiB", 1024), ("3 MiB", 3 << 20), ("2GB", 2_000_000_000)]
        {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for bad in ["", "x", "MiB", "1.5GiB", "-1", "1XB", "99999999999999999999", "99999999TiB"] {
            assert!(size(bad).is_err(), "{bad}");
        }
        assert_eq!(chunk_size("3MiB"), Ok(CHUNK_MAX));
        assert!(chunk_size("4MiB").is_err() && chunk_size("1").is_err());
    }
}
