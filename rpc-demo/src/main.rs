//! A small object store over tonic-rdma, and its client.
//!
//! | module | what |
//! |---|---|
//! | [`cli`] | the command line |
//! | [`serve`], [`service`], [`store`] | the server: its life, its gRPC service, its directory |
//! | [`put`], [`get`], [`cp`], [`ls`], [`stat`], [`rm`], [`mod@bench`] | the client's commands |
//! | [`transfer`] | what moves contents: files, objects, ranges, what is missing |
//! | [`mod@metrics`] | what a server tells Prometheus |
//! | [`doctor`] | whether RDMA would be used, and what to do if not |
//! | [`demo`] | TCP, the best path and a plain copy in one command, server and client as processes of their own |
//! | [`net`] | all that knows the transport |
//! | [`costs`] | processor time, and bytes copied between files and memory |
//! | [`names`], [`digest`], [`attributes`], [`ranges`] | names, CRC32C, modes and times, how large files are cut |
//! | [`source`], [`sink`], [`tree`], [`listing`] | files on their way out and in; trees, here and there |
//! | [`progress`], [`summary`], [`entry`], [`output`], [`failure`], [`logging`], [`signals`] | what is said, and when it ends |

mod attributes;
mod bench;
mod cli;
mod costs;
mod cp;
mod demo;
mod destination;
mod digest;
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
mod transfer;
mod tree;

use std::process::ExitCode;

use cli::{Cli, Command};
use failure::Failure;
use mimalloc::MiMalloc;
use signals::until_signal;

/// Keeps what is freed for a while: messages of megabytes are not faulted in page by page.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    match cli::parse().and_then(start) {
        Ok(code) => code,
        Err(failure) => {
            use std::io::Write;
            // Where stderr is gone, the code is all that can be said.
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
    // When the runtime is dropped, unfinished files have been removed: it waits for the threads
    // that hold them.
    runtime.block_on(command(cli.command))
}

async fn command(command: Command) -> Result<ExitCode, Failure> {
    net::check_environment()?;
    signals::survive_file_size_limit()?;
    let done = match command {
        // Its code is its answer: what keeps it from answering has another.
        Command::Doctor(args) => {
            return until_signal(doctor::run(args))
                .await
                .map_err(|failure| failure.with_exit(doctor::ERROR));
        }
        // These have their own ways to stop.
        Command::Serve(args) => serve::run(args).await,
        Command::Bench(args) => bench::run(args).await,
        Command::Demo(args) => demo::run(args).await,
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
