//! A steady stream of long messages makes no allocation that grows with the payload. With tonic's
//! codec, only tonic's own buffers grow with the payload, and each grows to its final length in one
//! step. The test has its own process because it replaces the allocator.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::alloc::System;

use common::{Blob, Fabric, Which, World, pooled};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use tokio::sync::Mutex;
use tokio_stream::{StreamExt, iter};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Serialises the tests, because the allocator counts for all threads.
static ALONE: Mutex<()> = Mutex::const_new(());

/// The bytes allocated per message, with a stream in each direction.
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
    let _alone = ALONE.lock().await;
    for fabric in Fabric::FAST {
        let world = World::new(*fabric, Which::Ours).await;
        let short = per_message(&world, 64 << 10).await;
        let long = per_message(&world, 1 << 20).await;
        println!("{fabric:?}: {short} and {long} bytes per message and back");
        // Sixteen times the payload needs only a few more WRITEs.
        assert!(
            long < 16 << 10 && long < short + (8 << 10),
            "{fabric:?}: {short} and {long} bytes per message"
        );
    }
}

#[tokio::test]
async fn tonics_codec_allocates_a_buffer_to_encode_and_one_to_decode() {
    const COUNT: usize = 20;
    let _alone = ALONE.lock().await;
    for fabric in Fabric::FAST {
        let world = World::new(*fabric, Which::Plain).await;
        let mut client = world.client(Which::Plain);
        let len = 1 << 20;
        let blob = Blob::of(vec![7; len].into());
        let mut run = async |count: usize| {
            for _ in 0..count {
                assert_eq!(client.echo(blob.clone()).await.unwrap().data.len(), len);
            }
        };
        run(COUNT).await;
        let region = Region::new(ALLOCATOR);
        run(COUNT).await;
        let change = region.change();
        let (bytes, grown) = (change.bytes_allocated / COUNT, change.reallocations / COUNT);
        println!("{fabric:?}: {bytes} bytes and {grown} reallocations per message and back");
        // Four buffers, two at each end, each of which grows once from tonic's initial size.
        assert!((4 * len..4 * len + (64 << 10)).contains(&bytes), "{fabric:?}: {bytes} bytes");
        assert!(grown <= 4, "{fabric:?}: {grown} reallocations");
    }
}
