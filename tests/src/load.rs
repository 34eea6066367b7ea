//! Load on a channel: calls of every kind, with checked data, and counts of their outcomes.

use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::task::JoinSet;
use tokio_stream::{StreamExt as _, iter, once};
use tonic::{Code, Status};
use tonic_rdma::{Channel, Path};

use crate::channel::AnyChannel;
use crate::harness::{Client, client_of};
use crate::service::script::{echo, echo_all, payload, receive_all, send_many, steps, summary};

/// Time limit of a wait. If nothing is wrong, every wait is shorter.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Calls in flight on each channel.
pub const WORKERS: u64 = 8;

/// Waits for `future`.
///
/// # Panics
/// `future` takes longer than [`LIMIT`], and so counts as hung.
#[allow(clippy::panic)]
pub async fn with_timeout<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, future).await.unwrap_or_else(|_| panic!("hangs: {what}"))
}

/// Polls `read` until `done`. Use it for conditions without a notification.
///
/// # Panics
/// `done` is still false after [`LIMIT`].
pub async fn poll_until<T: Debug, F: Future<Output = T>>(
    what: &str,
    mut read: impl FnMut() -> F,
    mut done: impl FnMut(&T) -> bool,
) -> T {
    let started = Instant::now();
    loop {
        let now = read().await;
        if done(&now) {
            return now;
        }
        assert!(started.elapsed() < LIMIT, "{what}: {now:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Counts of calls by outcome: `OK`, the name of a status, or `given up`.
#[derive(Clone, Default)]
pub struct Tally(Arc<Mutex<BTreeMap<String, u64>>>);

impl Tally {
    fn add(&self, end: &str) {
        *self.0.lock().unwrap().entry(end.to_owned()).or_default() += 1;
    }

    /// The number of calls with this outcome.
    pub fn of(&self, end: &str) -> u64 {
        self.0.lock().unwrap().get(end).copied().unwrap_or(0)
    }

    /// The number of calls that have ended.
    pub fn calls(&self) -> u64 {
        self.0.lock().unwrap().values().sum()
    }

    /// The number of calls by outcome.
    pub fn all(&self) -> BTreeMap<String, u64> {
        self.0.lock().unwrap().clone()
    }

    /// The number of calls with another outcome than `OK`.
    pub fn failed(&self) -> u64 {
        let ends = self.0.lock().unwrap();
        ends.iter().filter(|(end, _)| *end != "OK").map(|(_, count)| count).sum()
    }

    /// Adds the counts of another tally.
    pub fn include(&self, other: &Tally) {
        for (end, count) in other.0.lock().unwrap().iter() {
            *self.0.lock().unwrap().entry(end.clone()).or_default() += count;
        }
    }
}

impl fmt::Debug for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.lock().unwrap().fmt(f)
    }
}

/// A channel with [`WORKERS`] calls in flight.
#[derive(Debug)]
pub struct Load {
    running: Arc<AtomicBool>,
    workers: JoinSet<()>,
}

impl Load {
    /// Starts the load. A call may end with OK or with the status of a lost connection. Anything
    /// else fails the test.
    pub fn start(channel: &Channel, seed: u64, tally: &Tally) -> Self {
        Self::start_workers(channel, seed, tally, None)
    }

    /// Starts a load whose callers drop one call in eight within 10 ms. A dropped call that has not
    /// ended counts as `given up`.
    pub fn start_with_cancels(channel: &Channel, seed: u64, tally: &Tally) -> Self {
        Self::start_workers(channel, seed, tally, Some(Duration::from_millis(10)))
    }

    fn start_workers(
        channel: &Channel,
        seed: u64,
        tally: &Tally,
        cancel_after: Option<Duration>,
    ) -> Self {
        let running = Arc::new(AtomicBool::new(true));
        let mut workers = JoinSet::new();
        for worker in 0..WORKERS {
            let (running, tally) = (Arc::clone(&running), tally.clone());
            let mut client = client_of(AnyChannel::Rdma(channel.clone()));
            let mut rng = SmallRng::seed_from_u64(seed.wrapping_mul(WORKERS).wrapping_add(worker));
            workers.spawn(async move {
                while running.load(Ordering::Relaxed) {
                    let cancel_after = cancel_after.filter(|_| rng.random_ratio(1, 8));
                    let cancel_after =
                        cancel_after.map(|longest| rng.random_range(Duration::ZERO..longest));
                    let call = with_timeout("a call", one_call(&mut client, &mut rng));
                    let end = match cancel_after {
                        Some(cancel_after) => tokio::time::timeout(cancel_after, call).await,
                        None => Ok(call.await),
                    };
                    match end {
                        Err(_) => tally.add("given up"),
                        Ok(Ok(())) => tally.add("OK"),
                        Ok(Err(status)) => {
                            assert_connection_lost(&status);
                            if tally.failed() == 0 {
                                eprintln!("the first call that failed: {status}");
                            }
                            tally.add(&format!("{:?}", status.code()));
                            // Without a server, calls fail immediately. The pause keeps them from
                            // taking the CPU from the server that starts.
                            tokio::time::sleep(Duration::from_millis(2)).await;
                        }
                    }
                }
            });
        }
        Self { running, workers }
    }

    /// Stops the load and waits for the calls in flight.
    ///
    /// # Panics
    /// A call had wrong data, or failed with another status than that of a lost connection.
    pub async fn stop(mut self) {
        self.running.store(false, Ordering::Relaxed);
        while let Some(worker) = self.workers.join_next().await {
            worker.unwrap();
        }
    }

    /// Checks the calls so far.
    ///
    /// # Panics
    /// The panics of [`stop`](Self::stop).
    pub fn check(&mut self) {
        while let Some(worker) = self.workers.try_join_next() {
            worker.unwrap();
        }
    }
}

/// Makes one call of a random kind, with messages of 64 bytes to 1 MiB.
///
/// # Errors
/// The status of the call.
///
/// # Panics
/// Data is wrong or missing.
pub async fn one_call(client: &mut Client, rng: &mut SmallRng) -> Result<(), Status> {
    let seed = rng.random_range(0..1000);
    let bits = rng.random_range(6..=20);
    let size = rng.random_range(64..=1usize << bits);
    let three = move || (0..3).map(move |n: u64| payload(seed + n, size));
    let missing = "a reply is missing";
    match rng.random_range(0..6) {
        0..=2 => {
            let request = steps("", [echo(1)]).with_payload(seed, size);
            client.unary(request).await?.into_inner().expect(seed, size);
        }
        3 => {
            let mut replies =
                client.download(steps("", [send_many(seed, size, 3)])).await?.into_inner();
            for seed in seed..seed + 3 {
                replies.message().await?.expect(missing).expect(seed, size);
            }
            assert_eq!(replies.message().await?, None);
        }
        4 => {
            let stream = once(steps("", [receive_all(), summary()])).chain(iter(three()));
            let reply = client.upload(stream).await?.into_inner();
            assert_eq!((reply.count, reply.total), (4, 3 * size as u64));
        }
        _ => {
            let stream = once(steps("", [echo_all()])).chain(iter(three()));
            let mut replies = client.chat(stream).await?.into_inner();
            replies.message().await?.expect(missing).expect(0, 0);
            for seed in seed..seed + 3 {
                replies.message().await?.expect(missing).expect(seed, size);
            }
            assert_eq!(replies.message().await?, None);
        }
    }
    Ok(())
}

/// Checks that the status is that of a lost connection.
///
/// # Panics
/// The status is neither UNAVAILABLE nor one that hyper gives for a broken TCP connection.
pub fn assert_connection_lost(status: &Status) {
    let by_hyper = || {
        let text = format!("{status:?}");
        ["h2 protocol error", "transport error", "Canceled", "operation was canceled", "connection"]
            .iter()
            .any(|word| text.contains(word))
    };
    let right = match status.code() {
        Code::Unavailable => true,
        Code::Unknown | Code::Internal | Code::Cancelled => by_hyper(),
        _ => false,
    };
    assert!(right, "no lost connection: {status:?}");
}

/// Waits until the channel uses this path.
///
/// # Panics
/// The channel uses another path for longer than [`LIMIT`].
#[allow(clippy::panic)]
pub async fn wait_for_path(channel: &Channel, path: Path) {
    let mut channel = channel.clone();
    let last = channel.clone();
    let there = async {
        while channel.path().path != path {
            channel.path_changed().await;
        }
    };
    tokio::time::timeout(LIMIT, there)
        .await
        .unwrap_or_else(|_| panic!("not on {path}: {}", last.path()));
}

/// Makes calls until one succeeds. Returns whether the channel used TCP then.
pub async fn wait_for_call(channel: &Channel, rng: &mut SmallRng) -> bool {
    let mut client = client_of(AnyChannel::Rdma(channel.clone()));
    loop {
        match one_call(&mut client, rng).await {
            Ok(()) => return channel.path().path == Path::Tcp,
            Err(status) => assert_connection_lost(&status),
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
