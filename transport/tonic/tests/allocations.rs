//! A steady stream of long messages allocates nothing that grows with the payload. In a process of its own, for its
//! allocator.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::alloc::System;

use common::{Blob, Fabric, Which, World, pooled};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use tokio_stream::{StreamExt, iter};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Bytes allocated per message in a stream each way.
async fn per_message(world: &World, len: usize) -> usize {
    const COUNT: usize = 50;
    let mut client = world.client(Which::Ours);
    let blob = Blob::of(pooled(&world.channel, len, 1).await);
    let mut run = async |count: usize| {
        let mut chat = client.chat(iter(vec![blob.clone(); count])).await.unwrap();
        let mut got = 0;
        while let Some(reply) = chat.next().await {
            assert_eq!(reply.unwrap().data.len(), len);
            got += 1;
        }
        assert_eq!(got, count);
    };
    for _ in 0..3 {
        run(COUNT).await;
    }
    let region = Region::new(ALLOCATOR);
    run(COUNT).await;
    region.change().bytes_allocated / COUNT
}

#[tokio::test]
async fn nothing_is_allocated_that_grows_with_the_payload() {
    for fabric in Fabric::FAST {
        let world = World::new(*fabric, Which::Ours).await;
        let short = per_message(&world, 64 << 10).await;
        let long = per_message(&world, 1 << 20).await;
        println!("{fabric:?}: {short} and {long} bytes per message and back");
        // Sixteen times the payload: a few more WRITEs, and nothing else.
        assert!(
            long < 16 << 10 && long < short + (8 << 10),
            "{fabric:?}: {short} and {long} bytes per message"
        );
    }
}
