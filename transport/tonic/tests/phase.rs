//! The place where payload lands has the alignment that the receiver requests, and is in phase with
//! its source (equal modulo 64).

#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

mod common;

use std::sync::Arc;

use bytes::Bytes;
use common::{Blob, Blobs, Client, Fabric, LIMIT, Which, World, pattern, pooled};
use tokio_stream::iter;
use tonic_rdma::sim::{SimConfig, SimNet};
use tonic_rdma::{Channel, Context, PoolConfig};

const MIB: usize = 1 << 20;
/// A length above that of any standing grant, so each message of this length requests memory.
const REQUESTED: usize = 3 * MIB;

/// A server and a client that request these alignments.
async fn world(fabric: Fabric, [server, client]: [usize; 2]) -> World {
    let net = SimNet::new(SimConfig::default());
    let context = |align, name, ip: u8| {
        let pool = PoolConfig::default().total(128 << 20);
        let builder = Context::builder().pool(pool).landing_alignment(align).unwrap();
        Some(match fabric {
            Fabric::Sim => builder.sim(net.device(name, [10, 0, 0, ip].into())).build(),
            Fabric::Shm | Fabric::Tcp => builder.build(),
        })
    };
    let contexts = [context(server, "server", 1), context(client, "client", 2)];
    let blobs = Blobs { codec: Which::Ours, seen: Arc::default(), limit: LIMIT, forward: None };
    World::between(fabric, contexts, blobs).await
}

fn place(bytes: &Bytes) -> usize {
    bytes.as_ptr() as usize
}

/// Heap bytes that begin this far after a multiple of 4096.
fn on_heap(behind: usize, len: usize) -> Bytes {
    let all = Bytes::from(pattern(len + 8192, 3));
    let at = behind.wrapping_sub(place(&all)) % 4096;
    all.slice(at..at + len)
}

/// Makes calls, after which both ends know the methods' codec and the accepted message lengths.
async fn warm_up(world: &World, len: usize) {
    let blob = Blob::of(on_heap(0, len));
    for path in ["/test.Blobs/Echo", "/test.Blobs/Keep"] {
        for _ in 0..3 {
            world.client(Which::Ours).unary(path, blob.clone()).await.unwrap();
        }
    }
    world.seen.held.lock().unwrap().clear();
}

/// The numbers of long WRITEs at both ends, and of those in phase.
fn long_writes(world: &World) -> [(u64, u64); 2] {
    [world.channel.stats(), world.server.get()]
        .map(|stats| (stats.long_writes, stats.long_writes_in_phase))
}

/// Makes calls with the whole pool buffer `data`, `in_flight` at a time.
async fn calls(client: &Client, data: &Bytes, in_flight: usize) {
    let calls = (0..in_flight).map(|_| {
        let (mut client, blob) = (client.clone(), Blob::of(data.clone()));
        tokio::spawn(async move {
            for _ in 0..4 {
                assert!(client.echo(blob.clone()).await.unwrap().data == blob.data);
                let mut down = client.down(Blob { number: 2, ..blob.clone() }).await.unwrap();
                while let Some(answer) = down.message().await.unwrap() {
                    assert!(answer.data == blob.data);
                }
                assert!(client.up(iter(vec![blob.clone(); 2])).await.unwrap().data == blob.data);
            }
        })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.unwrap();
    }
}

/// A copy in phase is as fast as memory allows on any processor.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn writes_of_whole_pool_buffers_are_in_phase_both_ways() {
    for align in [1, 64, 4096] {
        for in_flight in [1, 8] {
            for len in [100_000, MIB, REQUESTED] {
                let world = world(Fabric::Shm, [align, align]).await;
                let data = pooled(&world.channel, len, 1).await;
                // Before it knows the codec, the server answers with data that it copied to the
                // heap.
                calls(&world.client(Which::Ours), &data, 1).await;
                let before = long_writes(&world);
                calls(&world.client(Which::Ours), &data, in_flight).await;
                for (end, now) in long_writes(&world).into_iter().enumerate() {
                    let (all, in_phase) = (now.0 - before[end].0, now.1 - before[end].1);
                    // Each round sends one message in each direction, then one up and two down,
                    // then two up and one down.
                    let messages = (4 * 4 * in_flight) as u64;
                    assert!(all >= messages, "end {end}: {all}");
                    assert_eq!(in_phase, all, "end {end}: {align} {in_flight} {len}");
                }
            }
        }
    }
}

/// Shows that the counter leaves out WRITEs that are out of phase.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn what_is_out_of_phase_is_not_counted_as_in_phase() {
    let world = world(Fabric::Shm, [64, 64]).await;
    let mut client = world.client(Which::Ours);
    client.unary("/test.Blobs/Keep", Blob::of(on_heap(7, MIB))).await.unwrap();
    let [(all, in_phase), _] = long_writes(&world);
    assert!(
        all > 0 && in_phase == 0,
        "{in_phase} of {all}: the source is 7 bytes behind a line, and no line lies so"
    );
}

/// The blob that the server received in landing memory, and the answer.
async fn sent(world: &World, blob: Blob) -> (Blob, Blob) {
    let mut client = world.client(Which::Ours);
    client.unary("/test.Blobs/Keep", blob.clone()).await.unwrap();
    let kept = world.seen.held.lock().unwrap().pop().unwrap();
    assert!(kept == blob, "other bytes than were sent");
    let answer = client.echo(blob).await.unwrap();
    assert!(answer == kept);
    (kept, answer)
}

fn in_pool(channel: &Channel, bytes: &Bytes) -> bool {
    channel.pool().contains(bytes)
}

#[tokio::test]
async fn fields_land_aligned_wherever_they_come_from() {
    for fabric in Fabric::FAST {
        for [server, client] in [[64, 64], [4096, 64], [8, 512], [4096, 4096]] {
            let world = world(*fabric, [server, client]).await;
            warm_up(&world, REQUESTED).await;
            for len in [8000, MIB, REQUESTED] {
                let whole = pooled(&world.channel, len, 1).await;
                for data in [on_heap(7, len), on_heap(4095, len), whole.slice(3..), whole] {
                    let (kept, answer) = sent(&world, Blob::of(data)).await;
                    assert!(
                        in_pool(&world.channel, &answer.data),
                        "{fabric:?} {len}: nothing was copied"
                    );
                    assert_eq!(place(&kept.data) % server, 0, "{fabric:?} {len}");
                    assert_eq!(place(&answer.data) % client, 0, "{fabric:?} {len}");
                }
            }
        }
    }
}

#[tokio::test]
async fn fields_land_in_phase_where_no_alignment_is_asked_for() {
    for fabric in Fabric::FAST {
        let world = world(*fabric, [1, 1]).await;
        warm_up(&world, REQUESTED).await;
        for len in [8000, MIB, REQUESTED] {
            for behind in [0, 1, 7, 63, 64, 4095] {
                let data = on_heap(behind, len);
                let (kept, answer) = sent(&world, Blob::of(data)).await;
                assert_eq!(place(&kept.data) % 64, behind % 64, "{fabric:?} {len}");
                assert_eq!(place(&answer.data) % 64, behind % 64, "{fabric:?} {len}");
            }
        }
    }
}

/// Strings do not count as `bytes`. Of several `bytes` fields, the longest counts, wherever it is.
#[tokio::test]
async fn the_longest_field_of_bytes_is_the_one() {
    for fabric in Fabric::FAST {
        let world = world(*fabric, [4096, 4096]).await;
        warm_up(&world, MIB).await;
        let text = "x".repeat(300_000);
        let longest = on_heap(11, 200_000);
        let shorter = on_heap(13, 100_000);
        let first = Blob {
            data: longest.clone(),
            last: shorter.clone(),
            text: text.clone(),
            ..Blob::default()
        };
        let last = Blob { data: shorter.clone(), last: longest.clone(), text, ..Blob::default() };
        let between = Blob {
            data: shorter.clone(),
            parts: vec![shorter.clone(), longest.clone(), shorter.clone()],
            ..Blob::default()
        };
        for _ in 0..3 {
            let (kept, answer) = sent(&world, first.clone()).await;
            assert_eq!(
                (place(&kept.data) % 4096, place(&answer.data) % 4096),
                (0, 0),
                "{fabric:?}"
            );
            let (kept, answer) = sent(&world, last.clone()).await;
            assert_eq!(
                (place(&kept.last) % 4096, place(&answer.last) % 4096),
                (0, 0),
                "{fabric:?}"
            );
            let (kept, answer) = sent(&world, between.clone()).await;
            assert_eq!(
                (place(&kept.parts[1]) % 4096, place(&answer.parts[1]) % 4096),
                (0, 0),
                "{fabric:?}"
            );
        }
    }
}

#[test]
fn an_alignment_that_cannot_be_is_an_error() {
    for bytes in [0, 3, 65, 8192, 65_536, 65_600, usize::MAX] {
        let error = Context::builder().landing_alignment(bytes).unwrap_err();
        let text = "landed payload cannot be aligned to";
        assert!(error.to_string().starts_with(&format!("{text} {bytes} bytes")), "{error}");
    }
    for bytes in [1, 2, 64, 4096] {
        assert!(Context::builder().landing_alignment(bytes).is_ok());
    }
}
