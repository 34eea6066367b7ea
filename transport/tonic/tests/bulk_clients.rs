//! Many clients that send bulk to one server, over shared memory: landing memory settles, so that
//! nothing is registered any more, nothing is copied while nobody holds messages, and each client
//! has its share.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use common::{Blob, Blobs, Client, Fabric, LIMIT, Which, World, pooled};
use tokio::task::JoinSet;
use tonic_rdma::{Context, Copied, PoolConfig, PoolStats};

const MIB: usize = 1 << 20;
/// Puts of a client in flight.
const IN_FLIGHT: usize = 8;
/// How long a peer may be silent.
const DEAD_PEER: Duration = Duration::from_secs(60);
const PUT: &str = "/test.Blobs/Put";

/// A server with a pool, and clients with connections of their own.
struct Bulk {
    world: World,
    server: Context,
    clients: Vec<Client>,
    data: Bytes,
}

impl Bulk {
    async fn new(n: usize, pool: Option<usize>) -> Bulk {
        let context = || {
            let builder = Context::builder();
            match pool {
                Some(total) => builder.pool(PoolConfig::default().total(total)).build(),
                None => builder.build(),
            }
        };
        let (server, client) = (context(), Context::builder().build());
        let blobs = Blobs { codec: Which::Ours, seen: Arc::default(), limit: LIMIT, forward: None };
        let contexts = [Some(server.clone()), Some(client)];
        // On a busy machine a round of all clients takes longer than the default.
        let world = World::set(
            Fabric::Shm,
            contexts,
            blobs,
            |server| server.dead_peer_timeout(DEAD_PEER),
            |endpoint| endpoint.dead_peer_timeout(DEAD_PEER),
        )
        .await;
        let data = pooled(&world.channel, MIB, 1).await;
        let mut clients = Vec::new();
        for _ in 0..n {
            clients.push(Client::new(world.connect().await, Which::Ours, LIMIT));
        }
        Bulk { world, server, clients, data }
    }

    async fn pool(&self) -> PoolStats {
        self.server.pool_stats().await.remove(0).1
    }

    /// What the server has copied.
    fn copied(&self) -> Copied {
        self.world.server.get().copied_fast
    }

    /// `total` puts by all clients together. Returns how many each has made.
    async fn put(&self, total: usize) -> Vec<usize> {
        let left = Arc::new(AtomicUsize::new(total));
        self.put_while(|_| left.clone()).await
    }

    /// At least `total` puts, as many by each client, also where some of them get less time.
    async fn put_evenly(&self, total: usize) {
        let each = total.div_ceil(self.clients.len());
        let left: Vec<_> = self.clients.iter().map(|_| Arc::new(AtomicUsize::new(each))).collect();
        self.put_while(|n| left[n].clone()).await;
    }

    /// Puts by each client until what is `left` for it is none. Returns how many each has made.
    async fn put_while(&self, left: impl Fn(usize) -> Arc<AtomicUsize>) -> Vec<usize> {
        let mut workers = JoinSet::new();
        for (n, client) in self.clients.iter().enumerate() {
            for _ in 0..IN_FLIGHT {
                let (mut client, data, left) = (client.clone(), self.data.clone(), left(n));
                workers.spawn(async move {
                    let mut done = 0;
                    while left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok() {
                        client.unary(PUT, Blob::of(data.clone())).await.unwrap();
                        done += 1;
                    }
                    (n, done)
                });
            }
        }
        let mut counts = vec![0; self.clients.len()];
        while let Some(done) = workers.join_next().await {
            let (n, done) = done.unwrap();
            counts[n] += done;
        }
        counts
    }
}

/// Rounds of puts of which one has to be settled: beside six programs that never sleep, on two
/// processors, single rounds had up to 1.4 registrations in 100 puts. Chunks that never settle are
/// registered in each round.
const ROUNDS: usize = 3;
/// Registrations in 100 puts that no round may have.
const MAX_UNSETTLED: u64 = 3;

/// What a round of puts took, after a warm-up.
struct Settled {
    puts: usize,
    registrations: u64,
    counts: Vec<usize>,
}

async fn settled(n: usize, pool: Option<usize>, warm_up: usize, puts: usize) -> Settled {
    let bulk = Bulk::new(n, pool).await;
    bulk.put_evenly(warm_up).await;
    let mut round = 1;
    loop {
        let before = (bulk.pool().await.registrations, bulk.copied());
        let counts = bulk.put(puts).await;
        let (registrations, copied) = (bulk.pool().await.registrations, bulk.copied());
        let (registrations, copied) = (registrations - before.0, copied - before.1);
        eprintln!("{n} clients, {pool:?}: {registrations} registrations, {copied}, {counts:?}");
        let settled = Settled { puts, registrations, counts };
        settled.assert_fair();
        assert!(registrations * 100 <= MAX_UNSETTLED * puts as u64, "{registrations}");
        if pool.is_none() {
            assert_eq!(copied.pressure, 0, "{n} clients: {copied}");
        }
        if round == ROUNDS || settled.registers_nothing() {
            return settled;
        }
        round += 1;
    }
}

impl Settled {
    fn registers_nothing(&self) -> bool {
        self.registrations * 100 <= self.puts as u64
    }

    fn assert_registers_nothing(&self) {
        let Settled { puts, registrations, .. } = self;
        assert!(self.registers_nothing(), "{registrations} registrations, {puts} puts");
    }

    fn assert_fair(&self) {
        let (mean, slowest) = (self.puts / self.counts.len(), *self.counts.iter().min().unwrap());
        assert!(slowest * 2 >= mean, "{:?}", self.counts);
    }
}

/// With the default pool each has room for several messages.
async fn settles(n: usize) {
    let settled = settled(n, None, 300 + 16 * n, 800 + 16 * n).await;
    settled.assert_registers_nothing();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_settle_for_few_clients() {
    for n in [1, 2, 3, 8] {
        settles(n).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_settle_for_16_clients() {
    settles(16).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_settle_for_64_clients() {
    settles(64).await;
}

/// With a small pool messages wait for each other, but land in the same chunks, as long as a
/// message fits into a share.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_settle_in_a_small_pool() {
    for (total, n) in [(8 * MIB, 1), (8 * MIB, 2), (64 * MIB, 8), (64 * MIB, 15)] {
        let settled = settled(n, Some(total), 300, 500).await;
        settled.assert_registers_nothing();
    }
}
