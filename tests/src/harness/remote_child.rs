//! The child's end of [`remote`](crate::harness::remote). The child serves, and executes the
//! commands on stdin.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;

use tokio::sync::mpsc;
use tonic_rdma::Copied;

use crate::codec;
use crate::fabric::Fabric;
use crate::harness::remote::VARIABLE;
use crate::harness::{Server, TestEnv};

/// Writes a line to the parent.
fn print_line(line: &str) {
    let mut out = io::stdout().lock();
    // A failure means that the parent has ended; stdin then ends this process.
    let _ = out.write_all(format!("{line}\n").as_bytes());
    let _ = out.flush();
}

/// A command of the parent.
enum Command {
    Stop,
    Abort,
    /// Report when every byte of the pools has been returned.
    Pools(String),
}

/// Serves if the environment says that this process is the child of a test. Otherwise returns
/// `None`.
///
/// # Errors
/// `TONIC_RDMA_TEST_SERVE` is not the name of a fabric.
pub fn serve_if_asked() -> Result<Option<ExitCode>, String> {
    let Some(name) = std::env::var_os(VARIABLE) else {
        return Ok(None);
    };
    let name = name.to_string_lossy();
    let fabric =
        Fabric::from_name(&name).ok_or_else(|| format!("{VARIABLE}={name}: no such fabric"))?;
    let (_, codec) = fabric.codecs();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .on_thread_start(move || codec::set_thread_codec(codec))
        .enable_all()
        .build()
        .map_err(|e| e.to_string())?;
    runtime.block_on(async {
        let env = Arc::new(TestEnv::with_sink(fabric, |line| print_line(&line)));
        let mut server = Some(env.server_here().await);
        let (sender, mut commands) = mpsc::unbounded_channel();
        let command_env = Arc::clone(&env);
        thread::spawn(move || run_commands(&command_env, &sender));
        let addr = server.as_ref().map(Server::addr);
        print_line(&format!("addr {}", addr.unwrap()));
        let mut ending = None;
        loop {
            let command = tokio::select! {
                command = commands.recv() => command,
                end = async { ending.as_mut().unwrap().await }, if ending.is_some() => {
                    ending = None;
                    print_line("ended");
                    let () = end;
                    continue;
                }
            };
            match command {
                None => return,
                Some(Command::Stop) => {
                    if let Some(mut server) = server.take() {
                        server.stop();
                        ending = Some(Box::pin(server.ended()));
                    }
                }
                Some(Command::Abort) => {
                    server = None;
                    ending = None;
                }
                Some(Command::Pools(n)) => {
                    env.assert_pools_returned().await;
                    print_line(&format!("answer {n} whole"));
                }
            }
        }
    });
    runtime.shutdown_background();
    Ok(Some(ExitCode::SUCCESS))
}

/// Executes the commands on stdin until it ends.
fn run_commands(env: &TestEnv, commands: &mpsc::UnboundedSender<Command>) {
    for line in io::stdin().lines().map_while(Result::ok) {
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match word {
            "open" => env.probe().open(rest),
            "stop" => drop(commands.send(Command::Stop)),
            "abort" => drop(commands.send(Command::Abort)),
            "ask" => {
                let (n, question) = rest.split_once(' ').unwrap();
                match question {
                    "pools" => drop(commands.send(Command::Pools(n.to_owned()))),
                    "copied" => {
                        let Copied {
                            eager, staging, joined, pressure, plain_codec, learning, ..
                        } = env.server_copied();
                        print_line(&format!(
                            "answer {n} {eager} {staging} {joined} {pressure} {plain_codec} {learning}"
                        ));
                    }
                    _ => print_line(&format!("answer {n} ")),
                }
            }
            _ => unreachable!("the test says {line:?}"),
        }
    }
}
