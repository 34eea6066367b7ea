//! One round of a row, over whatever carries calls.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::work::{Direction, Kind, Row, SMALL};

/// What a round gave.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Round {
    /// The row's figure, in its unit.
    pub figure: f64,
    /// Latencies in microseconds at the 50th, 99th and 99.9th percentile, where calls are timed one
    /// by one.
    pub percentiles: Option<[f64; 3]>,
    /// Calls, or messages.
    pub calls: usize,
    /// Payload bytes, both ways together, of the calls that are counted.
    pub bytes: usize,
}

/// A connection that carries calls.
pub trait Calls: Clone + Send + 'static {
    /// Memory to send: from where this transport likes it best.
    fn payload(&self, length: usize) -> Bytes;
    /// One unary call; gives the bytes of the reply, of which `reply` were asked for.
    fn unary(
        &mut self,
        payload: Bytes,
        reply: usize,
    ) -> impl Future<Output = anyhow::Result<usize>> + Send;
    /// One streaming call, which ends in an error unless `count` messages of `size` bytes came.
    fn stream(
        &mut self,
        size: usize,
        count: usize,
    ) -> impl Future<Output = anyhow::Result<()>> + Send;
    /// A streaming call that stays open, with nothing sent on it, until what it gives is dropped.
    fn open(&mut self) -> impl Future<Output = anyhow::Result<Box<dyn Send>>> + Send;
    /// Whether it can do what this row does.
    fn runs(&self, row: &Row) -> bool;
    /// The path in words, to see that it did not change.
    fn path(&self) -> String;
}

async fn call<C: Calls>(client: &mut C, payload: Bytes, reply: usize) -> anyhow::Result<()> {
    let got = client.unary(payload, reply).await?;
    ensure!(got == reply, "a reply of {got} bytes instead of {reply}");
    Ok(())
}

/// Runs one round, over as many connections as there are.
///
/// # Errors
/// A call fails, or a reply has the wrong length.
pub async fn round<C: Calls>(clients: &[C], row: &Row) -> anyhow::Result<Round> {
    let Some(client) = clients.first() else { bail!("there is no connection") };
    match row.kind {
        Kind::Latency | Kind::Held { .. } => Ok(latencies(one_by_one(client, row.calls).await?)),
        Kind::Rate { in_flight, .. } => {
            let time =
                together(clients, client.payload(SMALL), SMALL, row.calls, in_flight).await?;
            let figure = row.calls as f64 / time.as_secs_f64() / 1e3;
            Ok(Round { figure, percentiles: None, calls: row.calls, bytes: row.calls * SMALL * 2 })
        }
        Kind::Bulk { size, direction, in_flight } => {
            let (request, reply) = match direction {
                Direction::Up => (size, 0),
                Direction::Down => (0, size),
            };
            let time =
                together(clients, client.payload(request), reply, row.calls, in_flight).await?;
            Ok(throughput(row.calls, size, time))
        }
        Kind::Stream { size } => {
            let begin = Instant::now();
            client.clone().stream(size, row.calls).await?;
            Ok(throughput(row.calls, size, begin.elapsed()))
        }
        Kind::Beside { size } => beside(client, size, row.calls).await,
        Kind::Phase { .. } => bail!("a row of copies has no calls"),
    }
}

pub(crate) fn throughput(calls: usize, size: usize, time: Duration) -> Round {
    let bytes = calls * size;
    Round { figure: bytes as f64 / time.as_secs_f64() / 1e6, percentiles: None, calls, bytes }
}

/// The time of each of `calls` small calls, one after the other.
async fn one_by_one<C: Calls>(client: &C, calls: usize) -> anyhow::Result<Vec<Duration>> {
    let mut client = client.clone();
    let payload = client.payload(SMALL);
    let mut times = Vec::with_capacity(calls);
    for _ in 0..calls {
        let begin = Instant::now();
        call(&mut client, payload.clone(), SMALL).await?;
        times.push(begin.elapsed());
    }
    Ok(times)
}

pub(crate) fn latencies(mut times: Vec<Duration>) -> Round {
    times.sort_unstable();
    let at = |share: f64| {
        let index = ((times.len() as f64 * share) as usize).min(times.len().saturating_sub(1));
        times.get(index).copied().unwrap_or_default().as_secs_f64() * 1e6
    };
    let percentiles = [at(0.5), at(0.99), at(0.999)];
    Round {
        figure: percentiles[0],
        percentiles: Some(percentiles),
        calls: times.len(),
        bytes: times.len() * SMALL * 2,
    }
}

/// The time of `calls` calls, `in_flight` at a time, spread evenly over the connections.
pub(crate) async fn together<C: Calls>(
    clients: &[C],
    payload: Bytes,
    reply: usize,
    calls: usize,
    in_flight: usize,
) -> anyhow::Result<Duration> {
    let mut workers = tokio::task::JoinSet::new();
    let begin = Instant::now();
    for (worker, client) in (0..in_flight).zip(clients.iter().cycle()) {
        // The remainder goes to the first workers.
        let share = calls / in_flight + usize::from(worker < calls % in_flight);
        let (payload, mut client) = (payload.clone(), client.clone());
        workers.spawn(async move {
            for _ in 0..share {
                call(&mut client, payload.clone(), reply).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(done) = workers.join_next().await {
        done??;
    }
    Ok(begin.elapsed())
}

/// Large requests that end while small calls are measured beside them, at least: each has a
/// beginning and an end, where calls may wait for longer.
const TRANSFERS: usize = 8;
/// Small calls per large request, at most: where it takes more, the large ones are starved, and the
/// latency worth nothing.
const STARVED: usize = 20_000;

/// Latency while a large request is always in flight.
async fn beside<C: Calls>(client: &C, size: usize, calls: usize) -> anyhow::Result<Round> {
    let (payload, mut bulk, done) =
        (client.payload(size), client.clone(), Arc::new(AtomicUsize::new(0)));
    let ended = done.clone();
    // Ends with this set.
    let mut large = tokio::task::JoinSet::new();
    large.spawn(async move {
        loop {
            if let Err(error) = call(&mut bulk, payload.clone(), 0).await {
                return error.context("the large transfer");
            }
            ended.fetch_add(1, Relaxed);
        }
    });
    let mut times = Vec::with_capacity(calls);
    while times.len() < calls || done.load(Relaxed) < TRANSFERS {
        if let Some(error) = large.try_join_next() {
            return Err(error?);
        }
        let most = calls + STARVED * TRANSFERS;
        ensure!(times.len() < most, "{} transfers beside {most} calls", done.load(Relaxed));
        times.extend(one_by_one(client, calls.min(100)).await?);
    }
    Ok(latencies(times))
}
