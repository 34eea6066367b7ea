//! The rate of small calls made on several threads, by number of connections.

use std::process::ExitCode;

use benches::contender::Contender;
use benches::report::{markdown, median};
use benches::threads::Threads;
use clap::Parser;
use mimalloc::MiMalloc;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

#[derive(Parser, Debug)]
#[command(version, about, long_about = None)]
struct Args {
    /// The contender
    #[arg(long, default_value_t = Contender::Shm)]
    contender: Contender,
    /// Number of client threads, and of server threads
    #[arg(long, default_value_t = 2)]
    workers: usize,
    /// Numbers of connections of a channel
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4])]
    connections: Vec<usize>,
    /// Calls in flight
    #[arg(long, default_value_t = 64)]
    in_flight: usize,
    /// Calls in a round
    #[arg(long, default_value_t = 50_000)]
    calls: usize,
    /// Rounds, after one uncounted round
    #[arg(long, default_value_t = 7)]
    rounds: usize,
}

fn main() -> ExitCode {
    benches::exit::exit("threads", run(&Args::parse()))
}

fn run(args: &Args) -> anyhow::Result<()> {
    let threads = Threads::new(args.contender, args.workers, &args.connections)?;
    threads.round(args.in_flight, args.calls)?;
    let rounds = (0..args.rounds).map(|_| threads.round(args.in_flight, args.calls));
    let rounds = rounds.collect::<Result<Vec<_>, _>>()?;
    let mut table = markdown(&["connections", "kcall/s", "to the first"].map(str::to_owned));
    for (at, count) in args.connections.iter().enumerate() {
        let rate = median(rounds.iter().map(|round| round[at].1));
        let ratio = median(rounds.iter().map(|round| round[at].1 / round[0].1));
        table.add_row([count.to_string(), format!("{rate:.1}"), format!("{ratio:.2}")]);
    }
    println!("{table}");
    Ok(())
}
