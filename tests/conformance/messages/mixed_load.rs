//! A seeded mix of calls of every kind and size, many of them in flight.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::task::JoinSet;
use tokio_stream::StreamExt;
use tonic_rdma_tests::harness::{Client, TestEnv};
use tonic_rdma_tests::service::script::{
    echo, echo_all, hang, payload, receive_all, send_many, steps, summary,
};

cases![sixty_four_in_flight, sixty_four_in_flight_with_cancels];

/// A size of a random order of magnitude, up to 1 MiB.
fn size(rng: &mut SmallRng) -> usize {
    let bits = rng.random_range(0..=20);
    rng.random_range(0..=1usize << bits)
}

async fn one_call(client: &mut Client, seed: u64, rng: &mut SmallRng) {
    let size = size(rng);
    match rng.random_range(0..8) {
        0..=4 => {
            let request = steps("", [echo(1)]).with_payload(seed, size);
            let reply = client.unary(request).await.unwrap().into_inner();
            reply.expect(seed, size);
        }
        5 => {
            let request = steps("", [send_many(seed, size, 3)]);
            let mut replies = client.download(request).await.unwrap().into_inner();
            for seed in seed..seed + 3 {
                replies.message().await.unwrap().unwrap().expect(seed, size);
            }
            assert_eq!(replies.message().await.unwrap(), None);
        }
        6 => {
            let stream = tokio_stream::once(steps("", [receive_all(), summary()]))
                .chain(tokio_stream::iter((seed..seed + 3).map(move |seed| payload(seed, size))));
            let reply = client.upload(stream).await.unwrap().into_inner();
            assert_eq!((reply.count, reply.total), (4, 3 * size as u64));
        }
        _ => {
            let stream = tokio_stream::once(steps("", [echo_all()]))
                .chain(tokio_stream::iter((seed..seed + 3).map(move |seed| payload(seed, size))));
            let mut replies = client.chat(stream).await.unwrap().into_inner();
            replies.message().await.unwrap().unwrap().expect(0, 0);
            for seed in seed..seed + 3 {
                replies.message().await.unwrap().unwrap().expect(seed, size);
            }
            assert_eq!(replies.message().await.unwrap(), None);
        }
    }
}

async fn sixty_four_in_flight(env: &TestEnv) {
    let (_server, client) = env.pair().await;
    let mut workers = JoinSet::new();
    for worker in 0..64u64 {
        let mut client = client.clone();
        workers.spawn(async move {
            let mut rng = SmallRng::seed_from_u64(worker);
            for call in 0..20 {
                one_call(&mut client, 1000 * worker + call, &mut rng).await;
            }
        });
    }
    workers.join_all().await;
}

async fn sixty_four_in_flight_with_cancels(env: &TestEnv) {
    let (_server, client) = env.pair().await;
    let mut workers = JoinSet::new();
    for worker in 0..64u64 {
        let mut client = client.clone();
        workers.spawn(async move {
            let mut rng = SmallRng::seed_from_u64(500 + worker);
            for call in 0..12 {
                let seed = 1000 * worker + call;
                if rng.random_ratio(1, 3) {
                    // Drop the stream after its first message, with more in flight.
                    let size = size(&mut rng);
                    let request = steps("left", [send_many(seed, size, 4), hang()]);
                    let mut replies = client.download(request).await.unwrap().into_inner();
                    replies.message().await.unwrap().unwrap().expect(seed, size);
                } else {
                    one_call(&mut client, seed, &mut rng).await;
                }
            }
        });
    }
    workers.join_all().await;
    let left = env.probe().count("began:left");
    assert!(left > 0);
    env.probe().seen_times("dropped:left", left).await;
}
