//! A small object store over tonic-rdma, and its client.
//!
//! | module | what |
//! |---|---|
//! | [`cli`] | the command line |
//! | [`serve`], [`service`], [`store`] | the server: its life, its gRPC service, its directory |
//! | [`put`], [`get`], [`ls`] | the client's commands |
//! | [`demo`] | both in one command, as two processes |
//! | [`net`] | all that knows the transport |
//! | [`names`], [`digest`], [`source`], [`sink`] | names, CRC32C, files on their way out and in |
//! | [`tree`], [`progress`], [`summary`], [`output`], [`failure`], [`logging`] | local trees, and what is said |

mod cli;
mod demo;
mod digest;
mod failure;
mod get;
mod logging;
mod ls;
mod names;
mod net;
mod output;
mod pb;
mod progress;
mod put;
mod serve;
mod service;
mod sink;
mod source;
mod store;
mod summary;
mod tree;

use clap::Parser;
use cli::{Cli, Command};
use failure::Failure;
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};

fn main() -> ExitCode {
    let cli = Cli::parse();
    match start(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            use std::io::Write;
            // Where stderr is gone, the code is all that can be said.
            let _ = writeln!(std::io::stderr(), "rpc-demo: {failure}");
            ExitCode::from(failure.exit())
        }
    }
}

fn start(cli: Cli) -> Result<(), Failure> {
    logging::start(cli.verbose)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::io("cannot start", &error))?;
    // When the runtime is dropped, unfinished files have been removed: it waits for the threads that hold them.
    runtime.block_on(command(cli.command))
}

/// The limit on file sizes was met. The number is that of every Linux but MIPS and PA-RISC, and of the BSDs.
const SIGXFSZ: i32 = 25;

async fn command(command: Command) -> Result<(), Failure> {
    // With a handler, a write past the limit is an error of that write, and not the end of the process.
    let _handled = signal(SignalKind::from_raw(SIGXFSZ)).map_err(no_signals)?;
    match command {
        // The server has its own way to stop.
        Command::Serve(args) => serve::run(args).await,
        Command::Put(args) => until_signal(put::run(args)).await,
        Command::Get(args) => until_signal(get::run(args)).await,
        Command::Ls(args) => until_signal(ls::run(args)).await,
        Command::Demo(args) => until_signal(demo::run(args)).await,
    }
}

/// Drops the command on SIGINT and SIGTERM, so that it cleans up.
async fn until_signal(command: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    let mut interrupt = signal(SignalKind::interrupt()).map_err(no_signals)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(no_signals)?;
    tokio::select! {
        done = command => done,
        _ = interrupt.recv() => Err(interrupted("SIGINT")),
        _ = terminate.recv() => Err(interrupted("SIGTERM")),
    }
}

fn no_signals(error: std::io::Error) -> Failure {
    Failure::io("cannot handle signals", &error)
}

fn interrupted(signal: &str) -> Failure {
    Failure::new(
        "interrupted",
        format!("{signal} came"),
        "what is not complete was removed; repeat the command",
    )
}
