//! Messages that are too long for one piece of landing memory, over shared memory, with either
//! codec. The longest that gRPC can state is tested in the protocol, without its bytes:
//! `conn::tests::long_messages`.

use bytes::Bytes;

use crate::common::{Blob, Fabric, LIMIT, Which, World};

/// Bytes that differ from block to block.
fn bytes(len: usize) -> Bytes {
    let mut bytes = vec![0; len];
    for (at, block) in bytes.chunks_mut(4093).enumerate() {
        block.fill(at as u8);
    }
    bytes.into()
}

/// Echoes a message of this length by a server with a pool of 64 MiB.
async fn echoes(len: usize, codec: Which) {
    let world = World::with(Fabric::Shm, codec, 64 << 20, LIMIT).await;
    let data = bytes(len);
    let echoed = world.client(codec).echo(Blob::of(data.clone())).await.unwrap();
    assert!(echoed.data == data, "{codec:?}: the same {len} bytes");
    let stats = world.channel.stats();
    assert_eq!((stats.calls_fast, stats.calls_tcp), (1, 0), "{stats:?}");
}

#[tokio::test]
async fn messages_of_300_mib_pass_both_ways() {
    for codec in [Which::Ours, Which::Plain] {
        echoes(300 << 20, codec).await;
    }
}

#[tokio::test]
#[ignore = "takes 5 GiB of memory: cargo test --release -p tonic-rdma --test limits -- --ignored"]
async fn messages_of_1_gib_pass_both_ways() {
    for codec in [Which::Ours, Which::Plain] {
        echoes(1 << 30, codec).await;
    }
}
