//! Two hundred channels lose their server at the same moment, and it returns. They must not all
//! reconnect at once.
//!
//! The test uses a paused clock and pipes instead of sockets, so that the counts do not depend on
//! the machine.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::DuplexStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic_rdma_fabric::sim::{SimConfig, SimNet};

use crate::tests::support::echo::{Client, Echo};
use crate::{Channel, Context, Endpoint, Error, Path, PoolConfig, Server};

const CHANNELS: usize = 200;
/// The interval in which attempts are counted: much longer than an attempt, and much shorter than a
/// pause.
const MOMENT: Duration = Duration::from_millis(50);
/// Maximum number of attempts by all channels in one interval. If the first attempts are spread
/// evenly over the first pause, a quarter of them fall in one interval. For some time, the second
/// attempts of other channels add as many again.
const MAX: u64 = CHANNELS as u64 / 2;

type Sockets = mpsc::UnboundedSender<io::Result<DuplexStream>>;

/// The server's address. Connecting to it succeeds only while a server runs.
#[derive(Clone, Default)]
pub(crate) struct Port(Arc<Mutex<Option<Sockets>>>);

impl Port {
    pub(crate) fn connect(&self) -> io::Result<TokioIo<DuplexStream>> {
        let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
        let (near, far) = tokio::io::duplex(64 * 1024);
        let listening = self.0.lock().unwrap();
        listening.as_ref().ok_or_else(refused)?.send(Ok(far)).map_err(|_| refused())?;
        Ok(TokioIo::new(near))
    }
}

pub(crate) struct Serving {
    port: Port,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), Error>>,
}

impl Serving {
    pub(crate) fn start(port: &Port, server: Server) -> Self {
        // Pipes have no addresses to compare.
        let mut server = server.offer_through_gateways(true);
        let (sockets, incoming) = mpsc::unbounded_channel();
        *port.0.lock().unwrap() = Some(sockets);
        let (stop, stopped) = oneshot::channel::<()>();
        let router = server.add_service(Echo);
        let task = tokio::spawn(router.serve_with_incoming_shutdown(
            UnboundedReceiverStream::new(incoming),
            async move {
                let _ = stopped.await;
            },
        ));
        Self { port: port.clone(), stop, task }
    }

    pub(crate) async fn end(self) {
        *self.port.0.lock().unwrap() = None;
        self.stop.send(()).unwrap();
        self.task.await.unwrap().unwrap();
    }
}

struct Herd(Vec<Channel>);

impl Herd {
    fn attempts(&self) -> u64 {
        self.0.iter().map(|channel| channel.stats().attempts).sum()
    }

    fn on(&self, path: Path) -> usize {
        self.0.iter().filter(|channel| channel.path().path == path).count()
    }

    /// Advances the clock by `time`. Returns the maximum number of attempts that began in one
    /// interval.
    async fn busiest(&self, time: Duration) -> u64 {
        let (begin, mut last, mut most) = (Instant::now(), self.attempts(), 0);
        while begin.elapsed() < time {
            tokio::time::sleep(MOMENT).await;
            let now = self.attempts();
            (most, last) = (most.max(now - last), now);
        }
        most
    }

    /// Makes a call on every channel. Returns the number of answers.
    async fn call(&self) -> usize {
        let mut calls = JoinSet::new();
        for channel in &self.0 {
            let mut client = Client::new(channel.clone());
            calls.spawn(async move { client.say("hello").await.is_ok() });
        }
        calls.join_all().await.into_iter().filter(|answered| *answered).count()
    }
}

#[tokio::test(start_paused = true)]
async fn two_hundred_channels_are_no_thundering_herd() {
    let net = SimNet::new(SimConfig::default());
    // Control memory for all channels.
    let pool = PoolConfig::default().total(160 << 20).send(1 << 20).landing(32 << 20);
    let [servers, clients] = [1, 2].map(|n| {
        let device = net.device(format!("sim{n}"), [10, 0, 0, n].into());
        Context::builder().pool(pool.clone()).sim(device).build()
    });
    let port = Port::default();
    let serving = Serving::start(&port, Server::builder().context(servers.clone()));
    let mut herd = Herd(Vec::new());
    for _ in 0..CHANNELS {
        let port = port.clone();
        let connector = tower::service_fn(move |_| std::future::ready(port.connect()));
        let endpoint = Endpoint::from_static("http://herd").context(clients.clone());
        let channel = endpoint.connect_with_connector(connector).await.unwrap();
        assert_eq!(channel.path().path, Path::Sim, "{}", channel.path());
        herd.0.push(channel);
    }
    assert_eq!((herd.on(Path::Sim), herd.attempts()), (CHANNELS, CHANNELS as u64));

    // All channels lose the server within one interval.
    serving.end().await;
    assert_eq!(herd.on(Path::Tcp), CHANNELS);
    let first = herd.busiest(Duration::from_secs(1)).await;
    assert!((1..=MAX).contains(&first), "{first} attempts in one moment after the loss");
    let away = herd.busiest(Duration::from_secs(119)).await;
    assert!(away <= MAX, "{away} attempts in one moment while the server was away");
    // Pauses double from 250 ms to 30 s. Eight pauses end within the first minute, four more within
    // the second minute, and jitter adds some.
    let attempts = (herd.attempts() - CHANNELS as u64) as usize;
    assert!(
        (CHANNELS * 7..=CHANNELS * 20).contains(&attempts),
        "{attempts} attempts in two minutes"
    );
    assert_eq!(herd.call().await, 0);

    // The server returns without any calls, so each channel retries when its pause is over.
    let serving = Serving::start(&port, Server::builder().context(servers.clone()));
    let before = herd.attempts();
    let back = herd.busiest(Duration::from_secs(31)).await;
    assert!((1..=MAX / 4).contains(&back), "{back} attempts in one moment after the return");
    assert_eq!((herd.on(Path::Sim), herd.attempts() - before), (CHANNELS, CHANNELS as u64));

    // The server is lost and returns again, and all channels call at once. An answered call shows
    // that the server is back, so the channels need not wait for their pauses.
    serving.end().await;
    tokio::time::sleep(Duration::from_secs(120)).await;
    let serving = Serving::start(&port, Server::builder().context(servers.clone()));
    let before = herd.attempts();
    assert_eq!(herd.call().await, CHANNELS);
    let back = herd.busiest(Duration::from_millis(1500)).await;
    assert!((1..=MAX / 4).contains(&back), "{back} attempts in one moment after the first calls");
    assert_eq!((herd.on(Path::Sim), herd.attempts() - before), (CHANNELS, CHANNELS as u64));
    drop(herd);
    serving.end().await;
}
