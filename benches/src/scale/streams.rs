//! Many open streams on one connection, and small calls on the same connection.

use anyhow::Context as _;

use crate::allocator::Variant;
use crate::footprint::Footprint;
use crate::pair::Pair;
use crate::scale::args::Args;
use crate::scale::record::{Ends, LatencyRound, Streams};
use crate::work::{Row, WorkKind};

/// Measures all contenders one after the other.
///
/// # Errors
/// No processor is allowed for this process. Other failures are recorded in the result.
pub async fn measure(args: &Args) -> anyhow::Result<Vec<Streams>> {
    // Servers raise their stream limit only if `room` is given.
    let setup = args.setup(Some(1))?;
    let mut rows = Vec::new();
    for contender in &args.contenders {
        let variant = Variant { contender: *contender, allocator: args.allocator };
        let mut pair = None;
        for streams in args.streams.iter().map(|count| *count as usize) {
            eprintln!("{variant}: {streams} streams");
            let mut row = Streams { contender: contender.name(), streams, ..Streams::default() };
            let measured = async {
                if pair.is_none() {
                    pair = Some(Pair::start(variant, &setup, &[]).await.context("cannot start")?);
                }
                let Some(pair) = &mut pair else { return Ok(()) };
                fill(args, pair, &mut row).await
            };
            if let Err(error) = measured.await {
                row.failure = Some(format!("{error:#}"));
                pair = None;
            }
            rows.push(row);
        }
    }
    Ok(rows)
}

async fn fill(args: &Args, pair: &mut Pair, found: &mut Streams) -> anyhow::Result<()> {
    // Sequential calls take several times as long as the same number of calls with 64 in flight.
    let calls = (args.calls as usize / 4).max(16);
    let row = Row { kind: WorkKind::IdleStreams { streams: found.streams }, calls };
    anyhow::ensure!(pair.prepare(&row).await?, "it has no such row");
    pair.round(&row).await?;
    for _ in 0..args.rounds {
        found.rounds.extend(pair.sample(&row).await?.map(|sample| LatencyRound {
            latency_us: sample.round.figure,
            cpu_us_per_call: (sample.client.cpu_ns + sample.server.cpu_ns) as f64
                / 1e3
                / sample.round.calls.max(1) as f64,
        }));
    }
    let (client, server) = pair.processes()?;
    found.ends = Some(Ends { client: Footprint::of(client)?, server: Footprint::of(server)? });
    Ok(())
}
