//! Several fast connections of one channel.

use tokio::runtime::Handle;

use crate::tests::support::echo::Client;
use crate::tests::support::world::World;
use crate::{Channel, Context, Path, PoolConfig, ReasonCode};

/// Calls from this many threads in sequence, so that each gets its own connection.
async fn from_threads(channel: &Channel, threads: usize) {
    for _ in 0..threads {
        let (mut client, runtime) = (Client::new(channel.clone()), Handle::current());
        let call = move || runtime.block_on(async move { client.who().await });
        let called = tokio::task::spawn_blocking(move || std::thread::spawn(call).join());
        let who = called.await.unwrap().unwrap().unwrap();
        assert!(who.starts_with("path=sim "), "{who}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn threads_have_connections_of_their_own_and_no_more() {
    let world = World::new();
    let serving = world.serve().await;
    let channel = world.endpoint(&serving).connections(3).connect().await.unwrap();
    assert_eq!(channel.path().path, Path::Sim, "{}", channel.path());
    assert_eq!(channel.stats().connections, 1, "until a thread needs another");
    while channel.stats().connections < 3 {
        from_threads(&channel, 3).await;
    }
    let before = channel.stats();
    from_threads(&channel, 12).await;
    let stats = channel.stats();
    assert_eq!((stats.connections, stats.attempts, stats.calls_tcp), (3, 3, 0));
    assert_eq!(stats.calls_fast, before.calls_fast + 12);
    // A lost connection is restored; meanwhile its calls take the others, or TCP.
    all_lost(&world, &channel).await;
    drop(serving);
}

/// Breaks all connections; the channel restores all of them.
async fn all_lost(world: &World, channel: &Channel) {
    let before = channel.stats().connections;
    world.server.cut();
    while channel.stats().connections_lost < before {
        tokio::task::yield_now().await;
    }
    let mut changes = channel.clone();
    while channel.path().path != Path::Sim {
        changes.path_changed().await;
    }
    while channel.stats().connections < 2 * before {
        let (mut client, runtime) = (Client::new(channel.clone()), Handle::current());
        let call = move || runtime.block_on(async move { client.who().await });
        let called = tokio::task::spawn_blocking(move || std::thread::spawn(call).join());
        called.await.unwrap().unwrap().unwrap();
    }
}

#[tokio::test]
async fn one_connection_is_the_default() {
    let world = World::new();
    let serving = world.serve().await;
    for endpoint in [world.endpoint(&serving), world.endpoint(&serving).connections(0)] {
        let channel = endpoint.connect().await.unwrap();
        from_threads(&channel, 8).await;
        assert_eq!(channel.stats().connections, 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_memory_for_another_the_first_carries_all_calls() {
    let world = World::new();
    let serving = world.serve().await;
    // The pool has control memory for a few connections.
    let pool = PoolConfig::default().total(2 << 20);
    let small = Context::builder().pool(pool).sim(world.client.clone()).build();
    let channel =
        world.endpoint(&serving).context(small).connections(1000).connect().await.unwrap();
    assert_eq!(channel.path().path, Path::Sim, "{}", channel.path());
    while channel.stats().attempts < 64 {
        from_threads(&channel, 8).await;
    }
    let stats = channel.stats();
    assert!(stats.connections < 64, "{stats:?}");
    assert_eq!(stats.calls_tcp, 0);
    assert_ne!(channel.path().reason.map(|reason| reason.code()), Some(ReasonCode::PoolExhausted));
}
