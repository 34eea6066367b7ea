//! One round of latency or throughput over a client.

use crate::{
    pb::{Blob, bench_client::BenchClient},
    service::LIMIT,
};
use bytes::Bytes;
use std::time::{Duration, Instant};
use tonic::{Status, body::Body, client::GrpcService, codegen::StdError};

/// A channel that the rounds here can use.
pub trait Carrier:
    GrpcService<Body, Error: Into<StdError>, ResponseBody = Body, Future: Send> + Clone + Send + 'static
{
}

impl<T> Carrier for T where
    T: GrpcService<Body, Error: Into<StdError>, ResponseBody = Body, Future: Send> + Clone + Send + 'static
{
}

/// What is exchanged in a call.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// The request's payload.
    pub request: Bytes,
    /// Bytes of the reply's payload.
    pub reply: usize,
}

impl Exchange {
    async fn call<T: Carrier>(&self, client: &mut BenchClient<T>) -> Result<(), Status> {
        let request = Blob { payload: self.request.clone(), reply: self.reply as u64 };
        let reply = client.exchange(request).await?.into_inner();
        if reply.payload.len() != self.reply {
            let got = reply.payload.len();
            return Err(Status::data_loss(format!("a reply of {got} bytes instead of {}", self.reply)));
        }
        Ok(())
    }

    /// Bytes that a call moves, both ways together.
    pub fn bytes(&self) -> usize {
        self.request.len() + self.reply
    }
}

fn client<T: Carrier>(channel: &T) -> BenchClient<T> {
    BenchClient::new(channel.clone()).max_decoding_message_size(LIMIT).max_encoding_message_size(LIMIT)
}

/// The median time of `calls` calls, one after the other.
///
/// # Errors
/// A call fails.
pub async fn latency<T: Carrier>(channel: &T, what: &Exchange, calls: usize) -> Result<Duration, Status> {
    let mut client = client(channel);
    let mut times = Vec::with_capacity(calls);
    for _ in 0..calls {
        let begin = Instant::now();
        what.call(&mut client).await?;
        times.push(begin.elapsed());
    }
    times.sort_unstable();
    Ok(times.get(times.len() / 2).copied().unwrap_or_default())
}

/// Bytes per second over `calls` calls, `in_flight` at a time.
///
/// # Errors
/// A call fails.
pub async fn throughput<T: Carrier>(
    channel: &T,
    what: &Exchange,
    calls: usize,
    in_flight: usize,
) -> Result<f64, Status> {
    let mut workers = tokio::task::JoinSet::new();
    let begin = Instant::now();
    for worker in 0..in_flight {
        // The remainder goes to the first workers.
        let share = calls / in_flight + usize::from(worker < calls % in_flight);
        let (what, mut client) = (what.clone(), client(channel));
        workers.spawn(async move {
            for _ in 0..share {
                what.call(&mut client).await?;
            }
            Ok::<(), Status>(())
        });
    }
    while let Some(done) = workers.join_next().await {
        done.map_err(|e| Status::internal(e.to_string()))??;
    }
    Ok((calls * what.bytes()) as f64 / begin.elapsed().as_secs_f64())
}
