//! Many clients that send large messages to one server, which discards them on receipt.
//!
//! The clients are connections of one process and share its pool. All send the same buffer of that
//! pool, so that further clients do not increase the amount of memory that is read.

use anyhow::Context as _;

use crate::allocator::Variant;
use crate::cost::Usage;
use crate::pair::{Pair, Setup};
use crate::scale::args::Args;
use crate::scale::record::{Bulk, BulkRound, Memory};
use crate::work::{Row, WorkKind};

/// Bytes of a message.
pub const SIZE: usize = 1 << 20;
/// Messages in flight per client.
pub const IN_FLIGHT: usize = 8;

/// Measures all contenders with all numbers of clients. Each round starts new processes for each
/// contender, and rotates the order of the contenders.
///
/// # Errors
/// No processor is allowed for this process. Other failures are recorded in the result.
pub async fn measure(args: &Args) -> anyhow::Result<Vec<Bulk>> {
    // Pools have their default sizes.
    let setup = args.setup(None)?;
    let mut rows: Vec<Bulk> = Vec::new();
    for contender in &args.contenders {
        rows.extend(args.bulk.iter().map(|clients| Bulk {
            contender: contender.name(),
            clients: *clients as usize,
            ..Bulk::default()
        }));
    }
    for round in 0..args.rounds as usize {
        for turn in 0..args.contenders.len() {
            let at = (round + turn) % args.contenders.len();
            let variant = Variant { contender: args.contenders[at], allocator: args.allocator };
            let rows = &mut rows[at * args.bulk.len()..][..args.bulk.len()];
            of_contender(args, variant, &setup, rows).await;
        }
    }
    Ok(rows)
}

/// Runs one round of each row. After a failure the next row gets new processes.
async fn of_contender(args: &Args, variant: Variant, setup: &Setup, rows: &mut [Bulk]) {
    let mut pair = None;
    for row in rows.iter_mut().filter(|row| row.failure.is_none()) {
        eprintln!("{variant}: {} bulk clients", row.clients);
        let measured = async {
            if pair.is_none() {
                pair = Some(Pair::start(variant, setup, &[]).await.context("cannot start")?);
            }
            let Some(pair) = &mut pair else { return Ok(None) };
            row.pool = pair.pool();
            round(args, pair, row.clients).await
        };
        match measured.await {
            Ok(Some(round)) => row.rounds.push(round),
            Ok(None) => row.failure = Some("it has no such row".to_owned()),
            Err(error) => {
                row.failure = Some(format!("{error:#}"));
                pair = None;
            }
        }
    }
}

async fn round(args: &Args, pair: &mut Pair, clients: usize) -> anyhow::Result<Option<BulkRound>> {
    let row = |time: std::time::Duration| {
        let time = time.as_millis() as u64;
        Row {
            kind: WorkKind::Clients { clients, size: SIZE, in_flight: IN_FLIGHT, time },
            calls: 0,
        }
    };
    if !pair.prepare(&row(args.warm_up)).await? {
        return Ok(None);
    }
    pair.round(&row(args.warm_up)).await?;
    let (client, server) = pair.processes()?;
    let usage = || anyhow::Ok(Usage::of(client)?.cpu_ns + Usage::of(server)?.cpu_ns);
    // On a busy machine it can happen that no message arrives in a short time.
    let mut time = args.seconds;
    let (cpu, before, round) = loop {
        let (cpu, before) = (usage()?, pair.server_figures().await?);
        let round = pair.round(&row(time)).await?;
        if round.figure > 0.0 {
            break (cpu, before, round);
        }
        anyhow::ensure!(time < 64 * args.seconds, "no message arrived in {time:?}");
        time *= 2;
    };
    let (cpu, after) = (usage()?.saturating_sub(cpu), pair.server_figures().await?);
    let mean = round.shares.iter().sum::<usize>() as f64 / clients as f64;
    let slowest = round.shares.iter().min().copied().unwrap_or_default();
    Ok(Some(BulkRound {
        mb_per_s: round.figure,
        slowest_to_mean: slowest as f64 / mean,
        messages: round.calls,
        bytes: round.bytes,
        // Nanoseconds per byte equal seconds per gigabyte.
        cpu_s_per_gb: cpu as f64 / round.bytes as f64,
        memory: after.zip(before).map(|(after, before)| Memory {
            registrations: after.registrations - before.registrations,
            pressure: after.pressure - before.pressure,
            registered: after.registered,
        }),
    }))
}
