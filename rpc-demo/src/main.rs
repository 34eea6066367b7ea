//! A small object store over tonic-rdma, and its client.
//!
//! | module | what |
//! |---|---|
//! | [`cli`] | the command line |
//! | [`serve`], [`service`], [`store`] | the server: start and stop, its gRPC service, its directory |
//! | [`put`], [`get`], [`cp`], [`ls`], [`stat`], [`rm`], [`mod@bench`] | the client's commands |
//! | [`transfer`] | transfers files, objects and ranges, and resumes transfers |
//! | [`mod@metrics`] | a server's metrics for Prometheus |
//! | [`top`] | shows the connections of a running server in a terminal |
//! | [`doctor`] | shows whether RDMA would be used, and how to fix what prevents it |
//! | [`demo`] | compares TCP, the best path and a plain copy, with server and client processes |
//! | [`net`] | connects and serves, and is the only module that makes channels and servers |
//! | [`disk`] | reads and writes files through io_uring, so that they bypass the page cache |
//! | [`costs`] | processor time, and bytes copied between files and memory |
//! | [`names`], [`digest`], [`attributes`], [`ranges`] | names, CRC32C, modes and times, ranges of large files |
//! | [`source`], [`sink`], [`tree`], [`listing`] | reading and writing files; local and remote trees |
//! | [`progress`], [`terminal`], [`summary`], [`entry`], [`output`], [`failure`], [`logging`], [`signals`] | output, errors, signals |

mod attributes;
mod bench;
mod cli;
mod costs;
mod cp;
mod demo;
mod destination;
mod digest;
mod disk;
mod doctor;
mod entry;
mod failure;
mod get;
mod listing;
mod logging;
mod ls;
mod metrics;
mod names;
mod net;
mod output;
mod pb;
mod progress;
mod put;
mod ranges;
mod rm;
mod serve;
mod service;
mod signals;
mod sink;
mod source;
mod stat;
mod store;
mod summary;
mod terminal;
mod top;
mod transfer;
mod tree;

use std::process::ExitCode;

use cli::{Cli, Command};
use failure::Failure;
use mimalloc::MiMalloc;
use signals::until_signal;

/// Keeps freed memory for a while, so that a message of some megabytes reuses memory instead of
/// causing page faults.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    match cli::parse().and_then(start) {
        Ok(code) => code,
        Err(failure) => {
            use std::io::Write;
            // If stderr is closed, the exit code is all that remains.
            let _ = writeln!(std::io::stderr(), "rpc-demo: {failure}");
            ExitCode::from(failure.exit())
        }
    }
}

fn start(cli: Cli) -> Result<ExitCode, Failure> {
    logging::start(cli.verbose)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::io("cannot start", &error))?;
    // Dropping the runtime waits for the threads that hold unfinished files. These threads remove
    // the files when they end.
    runtime.block_on(command(cli.command))
}

async fn command(command: Command) -> Result<ExitCode, Failure> {
    net::check_environment()?;
    signals::survive_file_size_limit()?;
    let done = match command {
        // The doctor's exit code is its result, so a failed diagnosis has a separate code.
        Command::Doctor(args) => {
            return until_signal(doctor::run(args))
                .await
                .map_err(|failure| failure.with_exit(doctor::ERROR));
        }
        // These commands handle signals themselves.
        Command::Serve(args) => serve::run(args).await,
        Command::Bench(args) => bench::run(args).await,
        Command::Demo(args) => demo::run(args).await,
        Command::Top(args) => top::run(args).await,
        Command::Put(args) => until_signal(put::run(args)).await,
        Command::Get(args) => until_signal(get::run(args)).await,
        Command::Cp(args) => until_signal(cp::run(args)).await,
        Command::Ls(args) => until_signal(ls::run(args)).await,
        Command::Stat(args) => until_signal(stat::run(args)).await,
        Command::Rm(args) => until_signal(rm::run(args)).await,
        Command::Completions(args) => completions(args.shell),
    };
    done.map(|()| ExitCode::SUCCESS)
}

fn completions(shell: clap_complete::Shell) -> Result<(), Failure> {
    use std::io::Write;
    output::checked(std::io::stdout().write_all(&cli::completions(shell)))
}
