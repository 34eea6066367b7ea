//! Many connections between two processes: small calls on all connections in turn, the resources of
//! idle connections, and small calls on one connection while the others are idle.

use anyhow::Context as _;

use crate::allocator::Variant;
use crate::cost::Usage;
use crate::footprint::Footprint;
use crate::pair::Pair;
use crate::sample::Sample;
use crate::scale::args::Args;
use crate::scale::limits;
use crate::scale::record::{Connections, Ends, Load};
use crate::work::{Row, WorkKind};

/// Calls in flight.
pub const IN_FLIGHT: usize = 64;

/// Measures all contenders one after the other. A contender keeps its processes, and connections
/// are added to them. After a failure the contender gets new processes.
///
/// # Errors
/// No processor is allowed for this process. Other failures are recorded in the result.
pub async fn measure(args: &Args) -> anyhow::Result<Vec<Connections>> {
    let setup = args.setup(args.connections.iter().max().map(|most| *most as usize))?;
    let mut rows = Vec::new();
    for contender in &args.contenders {
        let variant = Variant { contender: *contender, allocator: args.allocator };
        let mut pair = None;
        for connections in args.connections.iter().map(|count| *count as usize) {
            eprintln!("{variant}: {connections} connections");
            let contender = contender.name();
            let mut row = Connections { contender, connections, ..Connections::default() };
            let measured = async {
                if pair.is_none() {
                    pair = Some(Pair::start(variant, &setup, &[]).await.context("cannot start")?);
                }
                let Some(pair) = &mut pair else { return Ok(()) };
                fill(args, pair, &mut row).await
            };
            if let Err(error) = measured.await {
                row.failure = Some(match &pair {
                    Some(pair) => format!("{error:#}; {}", describe_usage(pair)),
                    None => format!("{error:#}"),
                });
                pair = None;
            }
            rows.push(row);
        }
    }
    Ok(rows)
}

/// The usage and the limits of both processes.
fn describe_usage(pair: &Pair) -> String {
    let Ok((client, server)) = pair.processes() else { return String::new() };
    let usage = |pid| limits::describe(pid).unwrap_or_else(|error| format!("{error:#}"));
    format!("client: {}; server: {}", usage(client), usage(server))
}

async fn fill(args: &Args, pair: &mut Pair, found: &mut Connections) -> anyhow::Result<()> {
    let connections = found.connections;
    let calls = (args.calls as usize).max(2 * connections);
    let all = Row { kind: WorkKind::Rate { in_flight: IN_FLIGHT, connections }, calls };
    let one = Row { kind: WorkKind::Resting { in_flight: IN_FLIGHT, connections }, ..all };
    anyhow::ensure!(pair.prepare(&all).await?, "it has no such row");
    let (client, server) = pair.processes()?;
    // Warm-up.
    pair.round(&all).await?;
    for _ in 0..args.rounds {
        found.all.extend(pair.sample(&all).await?.as_ref().map(load));
    }
    let ends =
        || anyhow::Ok(Ends { client: Footprint::of(client)?, server: Footprint::of(server)? });
    found.busy = Some(ends()?);
    tokio::time::sleep(args.settle).await;
    let usage = || anyhow::Ok(Usage::of(client)?.cpu_ns + Usage::of(server)?.cpu_ns);
    if !args.rest.is_zero() {
        let before = usage()?;
        tokio::time::sleep(args.rest).await;
        // The processor time of a thread that has ended is lost, so the sum may decrease.
        let cpu = usage()?.saturating_sub(before) as f64 / 1e3;
        found.rest_cpu_us_per_s = Some(cpu / args.rest.as_secs_f64());
    }
    found.rest = Some(ends()?);
    for _ in 0..args.rounds {
        found.one.extend(pair.sample(&one).await?.as_ref().map(load));
    }
    Ok(())
}

fn load(sample: &Sample) -> Load {
    let cpu = (sample.client.cpu_ns + sample.server.cpu_ns) as f64 / 1e3;
    Load {
        kcalls_per_s: sample.round.figure,
        cpu_us_per_call: cpu / sample.round.calls.max(1) as f64,
    }
}
