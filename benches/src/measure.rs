//! Runs one round of a row over any transport.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::work::{Direction, Row, SMALL, WorkKind};

/// The result of a round.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Round {
    /// The row's figure, in its unit.
    pub figure: f64,
    /// Latencies in microseconds at the 50th, 99th and 99.9th percentile, if calls are timed
    /// individually.
    pub percentiles: Option<[f64; 3]>,
    /// Number of calls or messages.
    pub calls: usize,
    /// Payload bytes of the counted calls in both directions.
    pub bytes: usize,
    /// The rate at which calls start, in thousands per second, if calls start at given times
    /// whether or not earlier calls have ended.
    #[serde(default)]
    pub offered: Option<f64>,
    /// Number of calls of each client, if several clients share the server for a given time.
    #[serde(default)]
    pub shares: Vec<usize>,
}

/// A connection that carries calls.
pub trait Calls: Clone + Send + 'static {
    /// Allocates a payload in the best memory for this transport.
    fn payload(&self, length: usize) -> impl Future<Output = Bytes> + Send;
    /// Makes one unary call that requests a reply of `reply` bytes. Returns the length of the
    /// reply.
    fn unary(
        &mut self,
        payload: Bytes,
        reply: usize,
    ) -> impl Future<Output = anyhow::Result<usize>> + Send;
    /// Makes one streaming call. Fails unless `count` messages of `size` bytes arrive.
    fn stream(
        &mut self,
        size: usize,
        count: usize,
    ) -> impl Future<Output = anyhow::Result<()>> + Send;
    /// Opens a streaming call on which nothing is sent. The call stays open until the returned
    /// value is dropped.
    fn open(&mut self) -> impl Future<Output = anyhow::Result<Box<dyn Send>>> + Send;
    /// Whether the connection supports this row.
    fn supports(&self, row: &Row) -> bool;
    /// A description of the path, to detect changes.
    fn path(&self) -> String;
    /// Maximum size of the connection's pool in bytes, if it has a pool.
    fn pool(&self) -> Option<usize> {
        None
    }
}

pub(crate) async fn call<C: Calls>(
    client: &mut C,
    payload: Bytes,
    reply: usize,
) -> anyhow::Result<()> {
    let got = client.unary(payload, reply).await?;
    ensure!(got == reply, "a reply of {got} bytes instead of {reply}");
    Ok(())
}

/// Runs one round over the given connections.
///
/// # Errors
/// A call fails, or a reply has the wrong length.
pub async fn round<C: Calls>(clients: &[C], row: &Row) -> anyhow::Result<Round> {
    let Some(client) = clients.first() else { bail!("there is no connection") };
    match row.kind {
        WorkKind::Latency | WorkKind::IdleStreams { .. } => {
            Ok(latencies(sequential_latencies(client, row.calls).await?))
        }
        WorkKind::Rate { in_flight, .. } => rate(clients, in_flight, row.calls).await,
        WorkKind::Resting { in_flight, .. } => rate(&clients[..1], in_flight, row.calls).await,
        WorkKind::Clients { size, in_flight, time, .. } => {
            puts(clients, client.payload(size).await, in_flight, Duration::from_millis(time)).await
        }
        WorkKind::Bulk { size, direction, in_flight } => {
            let (request, reply) = match direction {
                Direction::Up => (size, 0),
                Direction::Down => (0, size),
            };
            let work = Work { payload: client.payload(request).await, reply, calls: row.calls };
            let (time, times) = run_concurrently(clients, work, in_flight, Timed::Each).await?;
            let percentiles = latencies(times).percentiles;
            Ok(Round { percentiles, ..throughput(row.calls, size, time) })
        }
        WorkKind::Stream { size } => {
            let begin = Instant::now();
            client.clone().stream(size, row.calls).await?;
            Ok(throughput(row.calls, size, begin.elapsed()))
        }
        WorkKind::LatencyUnderLoad { size } => latency_under_load(client, size, row.calls).await,
        WorkKind::Open { .. } => bail!("the calls of this row do not wait for each other"),
        WorkKind::Connect { .. } => bail!("this row makes its own connections"),
        WorkKind::Phase { .. } => bail!("a row of copies has no calls"),
    }
}

pub(crate) fn throughput(calls: usize, size: usize, time: Duration) -> Round {
    let bytes = calls * size;
    Round { figure: bytes as f64 / time.as_secs_f64() / 1e6, calls, bytes, ..Round::default() }
}

/// Makes a small call on a new connection, and drops the connection.
pub(crate) async fn only_call<C: Calls>(mut client: C) -> anyhow::Result<()> {
    let payload = client.payload(SMALL).await;
    call(&mut client, payload, SMALL).await
}

async fn rate<C: Calls>(clients: &[C], in_flight: usize, calls: usize) -> anyhow::Result<Round> {
    let Some(client) = clients.first() else { bail!("there is no connection") };
    let work = Work { payload: client.payload(SMALL).await, reply: SMALL, calls };
    let (time, times) = run_concurrently(clients, work, in_flight, Timed::Each).await?;
    let figure = calls as f64 / time.as_secs_f64() / 1e3;
    Ok(Round { figure, ..latencies(times) })
}

/// Makes `calls` small calls one after the other, and returns their durations.
async fn sequential_latencies<C: Calls>(client: &C, calls: usize) -> anyhow::Result<Vec<Duration>> {
    let mut client = client.clone();
    let payload = client.payload(SMALL).await;
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
        ..Round::default()
    }
}

/// Equal unary calls.
pub(crate) struct Work {
    pub(crate) payload: Bytes,
    /// Bytes of a reply.
    pub(crate) reply: usize,
    /// Number of calls.
    pub(crate) calls: usize,
}

/// Selects the durations to measure in addition to that of all calls together.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Timed {
    /// No other duration.
    All,
    /// The duration of each call.
    Each,
}

/// Makes calls, `in_flight` at a time, spread evenly over the connections. Returns the duration of
/// all calls together and, with [`Timed::Each`], of each call. With more connections than calls in
/// flight, each caller cycles through its share of the connections.
pub(crate) async fn run_concurrently<C: Calls>(
    clients: &[C],
    work: Work,
    in_flight: usize,
    timed: Timed,
) -> anyhow::Result<(Duration, Vec<Duration>)> {
    let Work { payload, reply, calls } = work;
    let callers: Vec<Vec<C>> = (0..in_flight)
        .map(|n| clients.iter().skip(n % clients.len()).step_by(in_flight).cloned().collect())
        .collect();
    let mut workers = tokio::task::JoinSet::new();
    let begin = Instant::now();
    for (worker, mut own) in callers.into_iter().enumerate() {
        // The remainder goes to the first workers.
        let share = calls / in_flight + usize::from(worker < calls % in_flight);
        let (payload, connections) = (payload.clone(), own.len());
        workers.spawn(async move {
            let mut times = Vec::with_capacity(if timed == Timed::Each { share } else { 0 });
            for n in 0..share {
                let begin = (timed == Timed::Each).then(Instant::now);
                call(&mut own[n % connections], payload.clone(), reply).await?;
                times.extend(begin.map(|begin| begin.elapsed()));
            }
            anyhow::Ok(times)
        });
    }
    let mut times = Vec::new();
    while let Some(done) = workers.join_next().await {
        times.extend(done??);
    }
    Ok((begin.elapsed(), times))
}

/// Runs large requests of all clients for `time`, `in_flight` per client. The figure and the shares
/// include only calls that ended within `time`, because a client may run alone afterwards. The
/// numbers of calls and bytes include all calls, because the costs are measured over all calls.
async fn puts<C: Calls>(
    clients: &[C],
    payload: Bytes,
    in_flight: usize,
    time: Duration,
) -> anyhow::Result<Round> {
    let size = payload.len();
    let mut workers = tokio::task::JoinSet::new();
    let end = Instant::now() + time;
    for (index, client) in clients.iter().enumerate() {
        for _ in 0..in_flight {
            let (payload, mut client) = (payload.clone(), client.clone());
            workers.spawn(async move {
                let (mut calls, mut in_time) = (0, 0);
                while Instant::now() < end {
                    call(&mut client, payload.clone(), 0).await?;
                    calls += 1;
                    in_time += usize::from(Instant::now() <= end);
                }
                anyhow::Ok((index, calls, in_time))
            });
        }
    }
    let (mut calls, mut shares) = (0, vec![0; clients.len()]);
    while let Some(done) = workers.join_next().await {
        let (index, made, in_time) = done??;
        calls += made;
        shares[index] += in_time;
    }
    let in_time: usize = shares.iter().sum();
    let Round { figure, .. } = throughput(in_time, size, time);
    Ok(Round { figure, calls, bytes: calls * size, shares, ..Round::default() })
}

/// Minimum number of large requests that must end during the measurement, because small calls may
/// wait longer at the beginning and at the end of a transfer.
const MIN_TRANSFERS: usize = 8;
/// Maximum number of small calls per large request. If more are needed, large requests are starved,
/// and the latency means nothing.
const MAX_CALLS_PER_TRANSFER: usize = 20_000;

/// Measures the latency of small calls while a large request is always in flight.
async fn latency_under_load<C: Calls>(
    client: &C,
    size: usize,
    calls: usize,
) -> anyhow::Result<Round> {
    let (payload, mut bulk, done) =
        (client.payload(size).await, client.clone(), Arc::new(AtomicUsize::new(0)));
    let ended = done.clone();
    // The task ends when this set is dropped.
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
    while times.len() < calls || done.load(Relaxed) < MIN_TRANSFERS {
        if let Some(error) = large.try_join_next() {
            return Err(error?);
        }
        let max_calls = calls + MAX_CALLS_PER_TRANSFER * MIN_TRANSFERS;
        ensure!(
            times.len() < max_calls,
            "{} transfers beside {max_calls} calls",
            done.load(Relaxed)
        );
        times.extend(sequential_latencies(client, calls.min(100)).await?);
    }
    Ok(latencies(times))
}
