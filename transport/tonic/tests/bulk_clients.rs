//! Many clients send bulk to one server over shared memory. Each connection keeps its chunks of
//! landing memory, so no chunk is registered again. Nothing is copied while no application holds
//! messages. Whether each client gets its share depends on the machine's other work, so
//! `make bench-check` checks that.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use common::{Blob, Blobs, Client, Fabric, LIMIT, Which, World, pooled};
use tokio::task::JoinSet;
use tonic_rdma::{Context, Copied, PoolConfig, PoolStats};

const MIB: usize = 1 << 20;
/// Number of a client's puts in flight.
const IN_FLIGHT: usize = 8;
const PUT: &str = "/test.Blobs/Put";

/// A server with a pool, and clients with their own connections.
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
        let world =
            World::set(Fabric::Shm, contexts, blobs, |server| server, |endpoint| endpoint).await;
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

    /// The bytes that the server has copied.
    fn copied(&self) -> Copied {
        self.world.server.get().copied_fast
    }

    /// Makes `total` puts by all clients together. Returns the number of puts of each client.
    async fn put(&self, total: usize) -> Vec<usize> {
        let left = Arc::new(AtomicUsize::new(total));
        self.put_while(|_| left.clone()).await
    }

    /// Makes at least `total` puts, the same number by each client, even if some get less time.
    async fn put_evenly(&self, total: usize) {
        let each = total.div_ceil(self.clients.len());
        let left: Vec<_> = self.clients.iter().map(|_| Arc::new(AtomicUsize::new(each))).collect();
        self.put_while(|n| left[n].clone()).await;
    }

    /// Makes puts by each client until its `left` is zero. Returns the number of puts of each
    /// client.
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

/// Rounds of puts after a warm-up.
const ROUNDS: usize = 3;
/// Minimum bytes of landing memory that a message takes.
const PIECE: usize = MIB + 4096;
/// Maximum landing memory of a connection, in messages: those in flight, the same number being
/// read, standing grants, and the rest of a chunk.
const MOST: usize = 2 * IN_FLIGHT + 8;

/// Checks whether chunks stay with their connections.
///
/// A connection registers another chunk when it has more messages in flight and unread than ever
/// before, which for some happens late. So each chunk that is registered in a round must make the
/// landing memory larger by at least a message. One exception for every 100 puts is allowed: on a
/// busy machine a client may run so late that its chunks are returned as idle. The landing memory
/// has an upper limit. If chunks moved between connections, or came and went, each message would
/// register memory, and the landing memory would not grow.
async fn settles(n: usize, pool: Option<usize>, warm_up: usize, puts: usize) {
    let bulk = Bulk::new(n, pool).await;
    bulk.put_evenly(warm_up).await;
    for _ in 0..ROUNDS {
        let (before, copied) = (bulk.pool().await, bulk.copied());
        let counts = bulk.put(puts).await;
        let (after, copied) = (bulk.pool().await, bulk.copied() - copied);
        let registered = (after.registrations - before.registrations) as usize;
        let told = format!(
            "{n} clients, {pool:?}: {registered} registrations, {} bytes before, {} after, {copied}, {counts:?}",
            before.leased, after.leased
        );
        eprintln!("{told}");
        let grown = after.leased.saturating_sub(before.leased) / PIECE;
        assert!(registered.saturating_sub(grown) * 100 <= puts, "{told}");
        assert!(after.leased <= n * MOST * PIECE, "{told}");
        if pool.is_none() {
            assert_eq!(copied.pressure, 0, "{told}");
        }
    }
}

/// With the default pool, each client has room for several messages.
async fn settles_in_the_default_pool(n: usize) {
    settles(n, None, 300 + 16 * n, 800 + 16 * n).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_settle_for_few_clients() {
    for n in [1, 2, 3, 8] {
        settles_in_the_default_pool(n).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_settle_for_16_clients() {
    settles_in_the_default_pool(16).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_settle_for_64_clients() {
    settles_in_the_default_pool(64).await;
}

/// With a small pool, messages wait for each other but land in the same chunks, as long as a
/// message fits into a share.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_settle_in_a_small_pool() {
    for (total, n) in [(8 * MIB, 1), (8 * MIB, 2), (64 * MIB, 8), (64 * MIB, 15)] {
        settles(n, Some(total), 300, 500).await;
    }
}
