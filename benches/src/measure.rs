//! One round of a row over one connection.

use crate::{
    client::Client,
    pb::Blob,
    work::{Direction, Kind, Row, SMALL},
};
use bytes::Bytes;
use std::time::{Duration, Instant};
use tonic::Status;

/// What a round gave.
#[derive(Clone, Debug, Default)]
pub struct Round {
    /// The row's figure, in its unit.
    pub figure: f64,
    /// Latencies in microseconds at the 50th, 99th and 99.9th percentile, where calls are timed one by one.
    pub percentiles: Option<[f64; 3]>,
    /// Calls, or messages.
    pub calls: usize,
    /// Payload bytes, both ways together.
    pub bytes: usize,
}

async fn call(client: &mut Client, payload: Bytes, reply: usize) -> Result<(), Status> {
    let request = Blob { payload, reply: reply as u64, count: 0 };
    let got = client.exchange(request).await?.into_inner().payload.len();
    if got == reply { Ok(()) } else { Err(wrong(got, reply)) }
}

fn wrong(got: usize, wanted: usize) -> Status {
    Status::data_loss(format!("a reply of {got} bytes instead of {wanted}"))
}

/// Runs one round.
///
/// # Errors
/// A call fails, or a reply has the wrong length.
pub async fn round(client: &Client, row: &Row) -> Result<Round, Status> {
    match row.kind {
        Kind::Latency => Ok(latencies(one_by_one(client, row.calls).await?)),
        Kind::Rate { in_flight } => {
            let time = together(client, client.payload(SMALL), SMALL, row.calls, in_flight).await?;
            let figure = row.calls as f64 / time.as_secs_f64() / 1e3;
            Ok(Round { figure, percentiles: None, calls: row.calls, bytes: row.calls * SMALL * 2 })
        }
        Kind::Bulk { size, direction, in_flight } => {
            let (request, reply) = match direction {
                Direction::Up => (size, 0),
                Direction::Down => (0, size),
            };
            let time = together(client, client.payload(request), reply, row.calls, in_flight).await?;
            Ok(throughput(row.calls, size, time))
        }
        Kind::Stream { size } => Ok(throughput(row.calls, size, stream(client, size, row.calls).await?)),
        Kind::Beside { size } => beside(client, size, row.calls).await,
    }
}

pub(crate) fn throughput(calls: usize, size: usize, time: Duration) -> Round {
    let bytes = calls * size;
    Round { figure: bytes as f64 / time.as_secs_f64() / 1e6, percentiles: None, calls, bytes }
}

/// The time of each of `calls` small calls, one after the other, in order of length.
async fn one_by_one(client: &Client, calls: usize) -> Result<Vec<Duration>, Status> {
    let mut client = client.clone();
    let payload = client.payload(SMALL);
    let mut times = Vec::with_capacity(calls);
    for _ in 0..calls {
        let begin = Instant::now();
        call(&mut client, payload.clone(), SMALL).await?;
        times.push(begin.elapsed());
    }
    times.sort_unstable();
    Ok(times)
}

pub(crate) fn latencies(times: Vec<Duration>) -> Round {
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

/// The time of `calls` calls, `in_flight` at a time.
pub(crate) async fn together(
    client: &Client,
    payload: Bytes,
    reply: usize,
    calls: usize,
    in_flight: usize,
) -> Result<Duration, Status> {
    let mut workers = tokio::task::JoinSet::new();
    let begin = Instant::now();
    for worker in 0..in_flight {
        // The remainder goes to the first workers.
        let share = calls / in_flight + usize::from(worker < calls % in_flight);
        let (payload, mut client) = (payload.clone(), client.clone());
        workers.spawn(async move {
            for _ in 0..share {
                call(&mut client, payload.clone(), reply).await?;
            }
            Ok::<(), Status>(())
        });
    }
    while let Some(done) = workers.join_next().await {
        done.map_err(|e| Status::internal(e.to_string()))??;
    }
    Ok(begin.elapsed())
}

/// The time of one call that streams `count` messages.
async fn stream(client: &Client, size: usize, count: usize) -> Result<Duration, Status> {
    let begin = Instant::now();
    let request = Blob { payload: Bytes::new(), reply: size as u64, count: count as u64 };
    let mut replies = client.clone().stream(request).await?.into_inner();
    for _ in 0..count {
        let got = replies.message().await?.map_or(0, |blob| blob.payload.len());
        if got != size {
            return Err(wrong(got, size));
        }
    }
    Ok(begin.elapsed())
}

/// Latency while a large request is always under way.
async fn beside(client: &Client, size: usize, calls: usize) -> Result<Round, Status> {
    let (payload, mut bulk) = (client.payload(size), client.clone());
    let large = tokio::spawn(async move {
        loop {
            if let Err(status) = call(&mut bulk, payload.clone(), 0).await {
                return status;
            }
        }
    });
    let times = one_by_one(client, calls).await;
    if large.is_finished() {
        return Err(large.await.unwrap_or_else(|e| Status::internal(e.to_string())));
    }
    large.abort();
    Ok(latencies(times?))
}
