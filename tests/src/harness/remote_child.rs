//! The child's end of [`remote`](crate::harness::remote): serves, and does what the lines on stdin
//! say.

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
fn tell(line: &str) {
    let mut out = io::stdout().lock();
    // A parent that is gone ends this process by its stdin.
    let _ = out.write_all(format!("{line}\n").as_bytes());
    let _ = out.flush();
}

/// What the parent wants.
enum Order {
    Stop,
    Abort,
    /// Is every byte of the pools back?
    Pools(String),
}

/// Serves when this process is such a child; else `None`.
///
/// # Errors
/// `TONIC_RDMA_TEST_SERVE` names no fabric.
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
        .on_thread_start(move || codec::use_here(codec))
        .enable_all()
        .build()
        .map_err(|e| e.to_string())?;
    runtime.block_on(async {
        let env = Arc::new(TestEnv::with_sink(fabric, |line| tell(&line)));
        let mut server = Some(env.server_here().await);
        let (sender, mut orders) = mpsc::unbounded_channel();
        let there = Arc::clone(&env);
        thread::spawn(move || obey(&there, &sender));
        let addr = server.as_ref().map(Server::addr);
        tell(&format!("addr {}", addr.unwrap()));
        let mut ending = None;
        loop {
            let order = tokio::select! {
                order = orders.recv() => order,
                end = async { ending.as_mut().unwrap().await }, if ending.is_some() => {
                    ending = None;
                    tell("ended");
                    let () = end;
                    continue;
                }
            };
            match order {
                None => return,
                Some(Order::Stop) => {
                    if let Some(mut server) = server.take() {
                        server.stop();
                        ending = Some(Box::pin(server.ended()));
                    }
                }
                Some(Order::Abort) => {
                    server = None;
                    ending = None;
                }
                Some(Order::Pools(n)) => {
                    env.pools_are_whole().await;
                    tell(&format!("answer {n} whole"));
                }
            }
        }
    });
    runtime.shutdown_background();
    Ok(Some(ExitCode::SUCCESS))
}

/// Does what the lines on stdin say, until there are no more.
fn obey(env: &TestEnv, orders: &mpsc::UnboundedSender<Order>) {
    for line in io::stdin().lines().map_while(Result::ok) {
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match word {
            "open" => env.probe().open(rest),
            "stop" => drop(orders.send(Order::Stop)),
            "abort" => drop(orders.send(Order::Abort)),
            "ask" => {
                let (n, question) = rest.split_once(' ').unwrap();
                match question {
                    "pools" => drop(orders.send(Order::Pools(n.to_owned()))),
                    "copied" => {
                        let Copied {
                            eager, staging, joined, pressure, plain_codec, learning, ..
                        } = env.server_copied();
                        tell(&format!(
                            "answer {n} {eager} {staging} {joined} {pressure} {plain_codec} {learning}"
                        ));
                    }
                    _ => tell(&format!("answer {n} ")),
                }
            }
            _ => unreachable!("the test says {line:?}"),
        }
    }
}
