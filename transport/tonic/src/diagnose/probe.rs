//! A short measurement of TCP and the fast path in alternating rounds, so that other load affects
//! both alike.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Uri;
use tokio::task::JoinSet;
use tonic::metadata::MetadataMap;
use tonic::{Code, Request, Status};

use crate::bootstrap::client::OfferHook;
use crate::bootstrap::pb::ProbeRequest;
use crate::bootstrap::pb::bootstrap_client::BootstrapClient;
use crate::bootstrap::service::MAX_PROBE;
use crate::channel::Channel;
use crate::diagnose::report::{Measured, Peer};
use crate::endpoint::Endpoint;

/// No round begins after this time.
const BUDGET: Duration = Duration::from_secs(2);
/// Time limit of the whole measurement: on a network that needs longer, there is nothing to
/// compare.
const LIMIT: Duration = Duration::from_secs(30);
/// Calls per round whose round trip is timed.
const CALLS: usize = 25;
/// Payload of such a call in bytes, each way.
const SMALL: usize = 64;
/// Messages per round, each way, of which [`AT_ONCE`] are in flight at once.
const MESSAGES: usize = 8;
const AT_ONCE: usize = 4;
/// Size of such a message in bytes.
const BULK: usize = MAX_PROBE;

/// Measures, and records the result or the reason for its absence.
pub(super) async fn run(
    endpoint: &Endpoint,
    tcp: tonic::transport::Channel,
    channel: Channel,
    origin: Uri,
    peer: &mut Peer,
) {
    let measured = tokio::time::timeout(LIMIT, measure(endpoint, tcp, channel, origin)).await;
    let late = || Err(format!("it took longer than {} s", LIMIT.as_secs()));
    match measured.unwrap_or_else(|_| late()) {
        Ok((tcp, fast)) => {
            peer.tcp = Some(tcp);
            peer.fast = fast;
        }
        Err(why) => peer.not_measured = Some(why),
    }
}

async fn measure(
    endpoint: &Endpoint,
    tcp: tonic::transport::Channel,
    channel: Channel,
    origin: Uri,
) -> Result<(Measured, Option<Measured>), String> {
    let metadata =
        metadata(endpoint.shared.hook.as_ref()).await.map_err(|status| failed(&status))?;
    let mut by_tcp = Way::new(BootstrapClient::with_origin(tcp, origin.clone()), metadata.clone());
    let mut by_fast = channel
        .path()
        .path
        .is_fast()
        .then(|| Way::new(BootstrapClient::with_origin(channel.clone(), origin), metadata));
    let began = Instant::now();
    // The first round warms up: connections open their windows, and the codec learns the method.
    for turn in 0.. {
        by_tcp.turn(turn > 0).await.map_err(|status| failed(&status))?;
        if let Some(fast) = &mut by_fast {
            fast.turn(turn > 0).await.map_err(|status| failed(&status))?;
            if !channel.path().path.is_fast() {
                return Err("the fast path was lost meanwhile".to_owned());
            }
        }
        if turn > 0 && began.elapsed() > BUDGET {
            break;
        }
    }
    Ok((by_tcp.result(), by_fast.map(Way::result)))
}

fn failed(status: &Status) -> String {
    match status.code() {
        Code::Unimplemented => "the server's version of the transport has no Probe".to_owned(),
        code => format!("a call failed ({code:?}: {})", status.message()),
    }
}

/// The metadata that the server's layers require, if any.
async fn metadata(hook: Option<&OfferHook>) -> Result<MetadataMap, Status> {
    match hook {
        Some(hook) => Ok(hook.ask().await?.metadata().clone()),
        None => Ok(MetadataMap::new()),
    }
}

/// One path under measurement.
struct Way<T> {
    client: BootstrapClient<T>,
    metadata: MetadataMap,
    payload: Bytes,
    latencies: Vec<Duration>,
    up: Moved,
    down: Moved,
}

/// Bytes moved, and the time that they took.
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

impl<T> Way<T>
where
    T: tower::Service<
            http::Request<tonic::body::Body>,
            Response = http::Response<tonic::body::Body>,
        > + Clone
        + Send
        + 'static,
    T::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    T::Future: Send,
{
    fn new(client: BootstrapClient<T>, metadata: MetadataMap) -> Self {
        let payload = vec![0; BULK].into();
        Self {
            client,
            metadata,
            payload,
            latencies: Vec::new(),
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

    async fn turn(&mut self, counts: bool) -> Result<(), Status> {
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
        let mut under_way = JoinSet::new();
        let began = Instant::now();
        for _ in 0..MESSAGES {
            if under_way.len() == AT_ONCE {
                join(&mut under_way).await?;
            }
            let (mut client, request) = (self.client.clone(), self.request(up, down));
            under_way.spawn(async move {
                let answer = client.probe(request).await?;
                check(answer.get_ref().payload.len(), down)
            });
        }
        while !under_way.is_empty() {
            join(&mut under_way).await?;
        }
        Ok(began.elapsed())
    }

    fn result(mut self) -> Measured {
        self.latencies.sort_unstable();
        let at = |percent: usize| {
            let index =
                (self.latencies.len() * percent / 100).min(self.latencies.len().saturating_sub(1));
            self.latencies.get(index).map_or(0.0, |took| took.as_secs_f64() * 1e6)
        };
        Measured {
            calls: u32::try_from(self.latencies.len()).unwrap_or(u32::MAX),
            latency_median_us: at(50),
            latency_p99_us: at(99),
            upload_mib_s: self.up.mib_s(),
            download_mib_s: self.down.mib_s(),
        }
    }
}

async fn join(under_way: &mut JoinSet<Result<(), Status>>) -> Result<(), Status> {
    match under_way.join_next().await {
        Some(Ok(done)) => done,
        Some(Err(_)) => Err(Status::internal("a task of the measurement ended early")),
        None => Ok(()),
    }
}

fn check(got: usize, wanted: usize) -> Result<(), Status> {
    match got == wanted {
        true => Ok(()),
        false => Err(Status::data_loss(format!("{got} bytes came, {wanted} were asked for"))),
    }
}
