//! Measures a path by calls to the transport's own service. Also defines the transfers that each
//! way to a server performs.

use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::task::JoinSet;
use tonic::metadata::MetadataMap;
use tonic::{Code, Request, Status};

use crate::bootstrap::pb::ProbeRequest;
use crate::bootstrap::pb::bootstrap_client::BootstrapClient;
use crate::bootstrap::service::MAX_PROBE;
use crate::diagnose::peer_report::{Direction, Measured};

/// Number of messages per round in each direction, [`AT_ONCE`] of which are in flight at the same
/// time.
const MESSAGES: usize = 8;
const AT_ONCE: usize = 4;
/// Size in bytes of each message of a round.
const BULK: usize = MAX_PROBE;

/// A path to measure.
pub(super) struct Way<T> {
    client: BootstrapClient<T>,
    metadata: MetadataMap,
    payload: Bytes,
    latencies: Latencies,
    up: Moved,
    down: Moved,
}

/// Bytes transferred, and the time that the transfer took.
#[derive(Debug, Clone, Copy, Default)]
struct Moved {
    bytes: usize,
    took: Duration,
}

impl Moved {
    fn mib_s(self) -> f64 {
        let seconds = self.took.as_secs_f64();
        if seconds > 0.0 { self.bytes as f64 / (1 << 20) as f64 / seconds } else { 0.0 }
    }
}

/// A service that a stub can call through.
pub(super) trait CallService:
    tower::Service<http::Request<tonic::body::Body>, Response = http::Response<tonic::body::Body>>
    + Clone
    + Send
    + Sync
    + 'static
{
}

impl<T> CallService for T where
    T: tower::Service<
            http::Request<tonic::body::Body>,
            Response = http::Response<tonic::body::Body>,
        > + Clone
        + Send
        + Sync
        + 'static
{
}

impl<T> Way<T>
where
    T: CallService,
    T::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    T::Future: Send,
{
    pub(super) fn new(client: BootstrapClient<T>, metadata: MetadataMap) -> Self {
        let payload = vec![0; BULK].into();
        Self {
            client,
            metadata,
            payload,
            latencies: Latencies::default(),
            up: Moved::default(),
            down: Moved::default(),
        }
    }

    fn request(&self, up: usize, down: usize) -> Request<ProbeRequest> {
        let message = ProbeRequest {
            payload: self.payload.slice(..up),
            answer_bytes: u32::try_from(down).unwrap_or(0),
        };
        let mut request = Request::new(message);
        *request.metadata_mut() = self.metadata.clone();
        request
    }

    /// Performs a round of small calls, and of long calls in each direction.
    pub(super) async fn turn(&mut self, counts: bool) -> Result<(), Status> {
        for _ in 0..CALLS {
            let request = self.request(SMALL, SMALL);
            let began = Instant::now();
            check(self.client.probe(request).await?.get_ref().payload.len(), SMALL)?;
            if counts {
                self.latencies.push(began.elapsed());
            }
        }
        let up = self.bulk(BULK, 0).await?;
        let down = self.bulk(0, BULK).await?;
        if counts {
            for (sum, took) in [(&mut self.up, up), (&mut self.down, down)] {
                sum.bytes += MESSAGES * BULK;
                sum.took += took;
            }
        }
        Ok(())
    }

    async fn bulk(&self, up: usize, down: usize) -> Result<Duration, Status> {
        let began = Instant::now();
        self.calls(up, down, MESSAGES, AT_ONCE).await?;
        Ok(began.elapsed())
    }

    /// Makes `count` calls, `in_flight` at a time.
    async fn calls(
        &self,
        up: usize,
        down: usize,
        count: usize,
        in_flight: usize,
    ) -> Result<(), Status> {
        let some = |count: usize| {
            let mut client = self.client.clone();
            let requests: Vec<_> = (0..count).map(|_| self.request(up, down)).collect();
            async move {
                for request in requests {
                    check(client.probe(request).await?.get_ref().payload.len(), down)?;
                }
                Ok(())
            }
        };
        if in_flight == 1 {
            return some(count).await;
        }
        let mut tasks = JoinSet::new();
        for task in 0..in_flight {
            tasks.spawn(some((count + task) / in_flight));
        }
        while let Some(done) = tasks.join_next().await {
            let ended = |_| Status::internal("a task of the measurement ended early");
            done.map_err(ended)??;
        }
        Ok(())
    }

    pub(super) fn result(&self) -> Measured {
        Measured {
            calls: self.latencies.count(),
            latency_median_us: self.latencies.percentile_us(50),
            latency_p99_us: self.latencies.percentile_us(99),
            upload_mib_s: self.up.mib_s(),
            download_mib_s: self.down.mib_s(),
        }
    }
}

impl<T> Mover for Way<T>
where
    T: CallService,
    T::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    T::Future: Send,
{
    async fn run(&mut self, row: Row, count: usize) -> Result<bool, String> {
        let (up, down) = match row.direction {
            Direction::Both => (row.bytes, row.bytes),
            Direction::Up => (row.bytes, 0),
            Direction::Down => (0, row.bytes),
        };
        let calls = self.calls(up, down, count, row.in_flight);
        calls.await.map(|()| true).map_err(|status| failed(&status))
    }
}

pub(super) fn failed(status: &Status) -> String {
    match status.code() {
        Code::Unimplemented => "the server's version of the transport has no Probe".to_owned(),
        code => format!("a call failed ({code:?}: {})", status.message()),
    }
}

fn check(got: usize, wanted: usize) -> Result<(), Status> {
    match got == wanted {
        true => Ok(()),
        false => Err(Status::data_loss(format!("{got} bytes arrived, {wanted} were requested"))),
    }
}

/// Number of timed round trips per round.
pub(super) const CALLS: usize = 25;
/// Payload of a timed round trip in bytes, in each direction.
pub(super) const SMALL: usize = 64;

/// A transfer to measure over TCP, over the fast path, and over a connection without calls.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    pub(super) direction: Direction,
    pub(super) bytes: usize,
    pub(super) in_flight: usize,
}

pub(super) const fn row(direction: Direction, bytes: usize, in_flight: usize) -> Row {
    Row { direction, bytes, in_flight }
}

/// A way to transfer bytes.
pub(super) trait Mover {
    /// Performs a row's transfer `count` times. Returns false if this way does not support the
    /// transfer.
    fn run(&mut self, row: Row, count: usize) -> impl Future<Output = Result<bool, String>> + Send;
}

/// Durations of round trips.
#[derive(Debug, Clone, Default)]
pub(super) struct Latencies(Vec<Duration>);

impl Latencies {
    pub(super) fn push(&mut self, took: Duration) {
        self.0.push(took);
    }

    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }

    /// A percentile in microseconds. 0 without round trips.
    pub(super) fn percentile_us(&self, percent: usize) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let index = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
        sorted.get(index).map_or(0.0, |took| took.as_secs_f64() * 1e6)
    }
}
