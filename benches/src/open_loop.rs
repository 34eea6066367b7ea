//! One round of a row whose calls start at given times, whether or not earlier calls have ended.
//!
//! A caller that waits for a reply makes no calls during the wait, so it does not measure how long
//! these calls would have waited (coordinated omission). Here a call's latency begins at the time
//! when the call was due, as in [wrk2](https://github.com/giltene/wrk2).

use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::task::{JoinSet, yield_now};

use crate::measure::{Calls, Round, call, latencies};
use crate::work::SMALL;

/// Number of calls in flight while the highest rate is measured.
const IN_FLIGHT: usize = 64;

/// Measures the highest rate of small calls, and then makes calls at `percent` of this rate, at
/// equal intervals. The caller polls the clock instead of sleeping, because timers are too coarse.
pub(crate) async fn round<C: Calls>(
    client: &C,
    percent: u32,
    calls: usize,
) -> anyhow::Result<Round> {
    let payload = client.payload(SMALL).await;
    let time = highest_rate(client, &payload, calls).await?;
    let interval = time.as_secs_f64() / calls as f64 * 100.0 / f64::from(percent);
    let (mut running, mut times) = (JoinSet::new(), Vec::with_capacity(calls));
    let (begin, mut made) = (Instant::now(), 0);
    while made < calls {
        let now = Instant::now();
        while made < calls {
            let due = begin + Duration::from_secs_f64(interval * made as f64);
            if due > now {
                break;
            }
            let (mut client, payload) = (client.clone(), payload.clone());
            running.spawn(async move {
                call(&mut client, payload, SMALL).await?;
                anyhow::Ok(due.elapsed())
            });
            made += 1;
        }
        while let Some(done) = running.try_join_next() {
            times.push(done??);
        }
        yield_now().await;
    }
    while let Some(done) = running.join_next().await {
        times.push(done??);
    }
    Ok(Round { offered: Some(1e-3 / interval), ..latencies(times) })
}

/// The duration of `calls` calls, [`IN_FLIGHT`] at a time. Each call has a task of its own, as in
/// the measurement, because a task costs about as much as a call over shared memory.
async fn highest_rate<C: Calls>(
    client: &C,
    payload: &Bytes,
    calls: usize,
) -> anyhow::Result<Duration> {
    let (begin, mut running) = (Instant::now(), JoinSet::new());
    for _ in 0..calls {
        if running.len() == IN_FLIGHT
            && let Some(done) = running.join_next().await
        {
            done??;
        }
        let (mut client, payload) = (client.clone(), payload.clone());
        running.spawn(async move { call(&mut client, payload, SMALL).await });
    }
    while let Some(done) = running.join_next().await {
        done??;
    }
    Ok(begin.elapsed())
}
