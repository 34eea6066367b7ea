//! Registered memory is mapped from a file that is truncated while calls send from it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
#![cfg(target_os = "linux")]

mod common;

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use common::{Blob, Fabric, Which, World, pattern, pooled};
use tonic::Code;
use tonic_rdma::Registered;
use tonic_rdma_memory::test_util::MappedFile;

const MIB: usize = 1 << 20;

async fn mapped(world: &World, content: &[u8]) -> (std::fs::File, Registered) {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(content).unwrap();
    let map = MappedFile::new(&file, content.len()).unwrap();
    (file, world.channel.context().register(map).await.unwrap())
}

/// Sends from the memory until a call fails, while another thread truncates the file. Every reply
/// has the bytes of the original file, and none has zeros.
async fn until_it_fails(fabric: Fabric, world: &World, content: &[u8], len: usize, round: usize) {
    let (file, registered) = mapped(world, content).await;
    let mut client = world.client(Which::Ours);
    let begun = AtomicBool::new(false);
    let part = registered.slice(MIB..MIB + len);
    let failed = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !begun.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            (0..round * 2000).for_each(|_| std::hint::spin_loop());
            file.set_len(0).unwrap();
        });
        tokio::task::block_in_place(|| {
            tokio::runtime::Handle::current().block_on(async {
                loop {
                    begun.store(true, Ordering::Relaxed);
                    match client.echo(Blob::of(part.clone())).await {
                        Ok(reply) => {
                            assert!(reply.data == content[MIB..MIB + len], "{len} {round}: zeros");
                        }
                        Err(status) => break status,
                    }
                }
            })
        })
    });
    let codes = [Code::FailedPrecondition, Code::Unavailable, Code::Unknown, Code::Internal];
    assert!(codes.contains(&failed.code()), "{failed:?}");
    if registered.is_truncated() {
        // From now on only calls with this memory fail, and the error names the cause.
        let failed = client.echo(Blob::of(part.clone())).await.unwrap_err();
        match fabric {
            // tonic's own client reports an encoder's error without its text.
            Fabric::Tcp => assert_eq!(failed.code(), Code::Internal, "{failed:?}"),
            _ => {
                assert_eq!(failed.code(), Code::Internal, "{failed:?}");
                assert!(failed.message().contains("a file that was truncated"), "{failed:?}");
            }
        }
    }
}

async fn survives(fabric: Fabric) {
    let world = World::new(fabric, Which::Ours).await;
    let content = pattern(4 * MIB, 3);
    let learn = Blob::of(Bytes::from(content[..MIB].to_vec()));
    for _ in 0..2 {
        world.client(Which::Ours).echo(learn.clone()).await.unwrap();
    }
    for round in 0..10 {
        for len in [100, 64 << 10, MIB] {
            until_it_fails(fabric, &world, &content, len, round).await;
            // Other memory is sent as before, over the connection or its successor.
            let other = Blob::of(pooled(&world.channel, MIB, 1).await);
            let mut sent = world.client(Which::Ours).echo(other.clone()).await;
            for _ in 0..100 {
                if sent.is_ok() {
                    break;
                }
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                sent = world.client(Which::Ours).echo(other.clone()).await;
            }
            assert!(sent.unwrap().data == other.data, "{fabric:?} {round} {len}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_truncated_file_ends_calls_and_not_the_process_over_shared_memory() {
    survives(Fabric::Shm).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_truncated_file_ends_calls_and_not_the_process_over_tcp() {
    survives(Fabric::Tcp).await;
}
