//! Payload is not copied, as pointers and counters show, over every fabric with a fast path.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[path = "../common/mod.rs"]
mod common;
mod lend;
mod rails;

use std::sync::Arc;

use bytes::Bytes;
use common::{Blob, Blobs, Fabric, Kind, LIMIT, Which, World, pattern, pooled};
use tokio_stream::{StreamExt, iter};
use tonic::Code;
use tonic_rdma::{Channel, Copied};

const MIB: usize = 1 << 20;
/// Number of tries of a check that may fail on a busy machine because it depends on timing.
const TRIES: usize = 5;

fn in_pool(channel: &Channel, bytes: &Bytes) -> bool {
    channel.pool().contains(bytes)
}

/// Makes every kind of call, with blobs in a pool buffer. Checks the data, and that the client's
/// received data lies in its pool.
async fn every_kind(world: &World, codec: Which, len: usize, landed: bool) {
    let mut client = world.client(codec);
    let data = pooled(&world.channel, len, 1).await;
    let check = |blob: &Blob| {
        assert!(blob.data == data, "other bytes than were sent");
        assert_eq!(in_pool(&world.channel, &blob.data), landed, "where the field lies");
    };
    let blob = Blob::of(data.clone());
    check(&client.echo(blob.clone()).await.unwrap());
    let last = client.up(iter(vec![blob.clone(); 3])).await.unwrap();
    assert_eq!(last.number, 3);
    check(&last);
    let mut down = client.down(Blob { number: 3, ..blob.clone() }).await.unwrap();
    for _ in 0..3 {
        check(&down.message().await.unwrap().unwrap());
    }
    assert_eq!(down.message().await.unwrap(), None);
    let mut chat = client.chat(iter(vec![blob; 3])).await.unwrap();
    for _ in 0..3 {
        check(&chat.message().await.unwrap().unwrap());
    }
    assert_eq!(chat.message().await.unwrap(), None);
}

#[tokio::test]
async fn pool_buffers_are_not_copied_by_any_kind_of_call() {
    for fabric in Fabric::FAST {
        let world = World::new(*fabric, Which::Ours).await;
        for _ in 0..2 {
            every_kind(&world, Which::Ours, MIB, true).await;
        }
        // The server now knows its codec, and both ends know the accepted message lengths.
        world.seen.take();
        let before = world.copied();
        every_kind(&world, Which::Ours, MIB, true).await;
        assert_eq!(world.copied() - before, Copied::default(), "{fabric:?}");
        assert_eq!(world.seen.take(), (8, 8), "{fabric:?}: fields in landing memory, of all");
        // A handler that returns its input acts as a proxy, so data is sent from where it landed.
    }
}

#[tokio::test]
async fn messages_that_do_not_fit_side_by_side_land_one_after_the_other() {
    for fabric in Fabric::FAST {
        // The pool has 8 MiB of landing memory, in which two messages of 4 MiB do not fit with
        // their headers. Earlier messages of 1 MiB have fragmented this memory.
        let world = World::with(*fabric, Which::Ours, 16 << 20, LIMIT).await;
        let small = Blob::of(pooled(&world.channel, MIB, 1).await);
        let large = Blob::of(pattern(4 * MIB, 2).into());
        let echo = async |blob: &Blob| {
            let reply = world.client(Which::Ours).echo(blob.clone()).await.unwrap();
            assert!(reply.data == blob.data, "other bytes than were sent");
        };
        for _ in 0..2 {
            tokio::join!(echo(&small), echo(&small), echo(&small), echo(&small));
            echo(&large).await;
        }
        // On a busy machine, a reader may not run for 50 ms, and the others would then copy. So the
        // clock stands still: it is paused, and never advances while a blocking task runs.
        tokio::time::pause();
        let (ends, end) = std::sync::mpsc::channel::<()>();
        let holds_clock = tokio::task::spawn_blocking(move || end.recv());
        let before = world.copied();
        let calls = [(); 6].map(|()| echo(&large));
        futures_util::future::join_all(calls).await;
        let copied = world.copied() - before;
        assert_eq!((copied.joined, copied.pressure), (0, 0), "{fabric:?}: {copied:?}");
        drop(ends);
        let _ = holds_clock.await.unwrap();
        tokio::time::resume();
    }
}

/// Memory stays registered while messages in it wait for landing memory, even if the application
/// has dropped its [`Registered`](tonic_rdma::Registered).
#[tokio::test]
async fn a_registration_lasts_until_the_message_is_written() {
    for fabric in Fabric::FAST {
        // The pool has room for one message of 4 MiB at a time, so the others wait.
        let world = World::with(*fabric, Which::Ours, 16 << 20, LIMIT).await;
        let learn = Blob::of(pooled(&world.channel, MIB, 1).await);
        for _ in 0..2 {
            world.client(Which::Ours).echo(learn.clone()).await.unwrap();
        }
        // The application's bytes do not keep the registration alive, but its handle does.
        let own: Bytes = pattern(4 * MIB, 3).into();
        let registered = world.channel.context().register(own.clone()).await.unwrap();
        assert_eq!(registered.devices().len(), 1);
        let calls: Vec<_> = (0..4)
            .map(|_| {
                let (mut client, blob) = (world.client(Which::Ours), Blob::of(own.clone()));
                tokio::spawn(async move { client.echo(blob).await.unwrap() })
            })
            .collect();
        while world.channel.pool().stats().filled == 0 && !calls[0].is_finished() {
            tokio::task::yield_now().await;
        }
        drop(registered);
        for call in calls {
            assert!(call.await.unwrap().data == own, "{fabric:?}: other bytes than were sent");
        }
        let kept = world.channel.pool();
        while kept.stats().application > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        assert!(!in_pool(&world.channel, &own));
    }
}

/// Memory is also registered with a device that the context begins to use later.
#[tokio::test]
async fn memory_is_registered_with_devices_that_come_later() {
    for fabric in Fabric::FAST {
        let [server, client] = fabric.hosts(16 << 20);
        let context = client.clone().unwrap();
        let registered = context.register(pattern(MIB, 5)).await.unwrap();
        assert_eq!(registered.devices(), Vec::<String>::new());
        let blobs =
            common::Blobs { codec: Which::Ours, seen: Arc::default(), limit: LIMIT, forward: None };
        let world = World::between(*fabric, [server, client], blobs).await;
        assert_eq!(registered.devices().len(), 1, "{fabric:?}");
        assert!(in_pool(&world.channel, &registered.slice(5..7)));
        let pool = world.channel.pool();
        assert_eq!(pool.stats().application, MIB);
        let reply = world.client(Which::Ours).echo(Blob::of(registered.bytes())).await.unwrap();
        assert!(reply.data == registered.bytes());
        drop(registered);
        while pool.stats().application > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    }
}

#[tokio::test]
async fn what_a_method_costs_until_it_is_known() {
    let world = World::new(Fabric::Sim, Which::Ours).await;
    let mut client = world.client(Which::Ours);
    let blob = Blob::of(pooled(&world.channel, MIB, 1).await);
    let reply = client.echo(blob.clone()).await.unwrap();
    // Each end knows its codec before its first message, so the field was not moved, and the reply
    // was sent from where the request had landed.
    assert!(in_pool(&world.channel, &reply.data));
    // The message is padded once in each direction, at the sender and at the receiver.
    let first = world.copied();
    assert!(first.learning.abs_diff(4 * MIB as u64) < 400, "{first:?}");
    assert_eq!(first.total(), first.learning, "{first:?}");
    // Nothing is left to learn, not even for shorter messages.
    let before = world.copied();
    client.echo(blob).await.unwrap();
    client.echo(Blob::of(pooled(&world.channel, 100_000, 2).await)).await.unwrap();
    assert_eq!(world.copied() - before, Copied::default());
}

/// The first decoder belongs to a service of this codec that is called within the process, and
/// another codec reads the request. This costs one call.
#[tokio::test]
async fn another_decoder_is_noticed() {
    for fabric in Fabric::FAST {
        let world = World::new(*fabric, Which::Plain).await;
        let mut client = world.client(Which::Ours);
        let blob = Blob::of(pooled(&world.channel, MIB, 1).await);
        let first = client.unary("/test.Blobs/Behind", blob.clone()).await.unwrap_err();
        assert_eq!(first.code(), Code::Internal, "{first}");
        for _ in 0..3 {
            assert!(client.unary("/test.Blobs/Behind", blob.clone()).await.unwrap() == blob);
        }
    }
}

#[tokio::test]
async fn a_proxy_copies_nothing() {
    for fabric in Fabric::FAST {
        let [back, proxy, front] = fabric.hosts(32 << 20);
        let blobs = Blobs { codec: Which::Ours, seen: Arc::default(), limit: LIMIT, forward: None };
        let behind = World::between(*fabric, [back, proxy.clone()], blobs.clone()).await;
        let forward = Some(behind.client(Which::Ours));
        let blobs = Blobs { seen: Arc::default(), forward, ..blobs };
        let world = World::between(*fabric, [proxy, front], blobs).await;
        let mut client = world.client(Which::Ours);
        let data = pooled(&world.channel, MIB, 3).await;
        let mut forward = async || {
            let reply = client.unary("/test.Blobs/Forward", Blob::of(data.clone())).await.unwrap();
            assert!(reply.data == data && in_pool(&world.channel, &reply.data));
        };
        for _ in 0..3 {
            forward().await;
        }
        let before = [world.copied(), behind.copied()];
        for _ in 0..3 {
            forward().await;
        }
        let copied = [world.copied() - before[0], behind.copied() - before[1]];
        assert_eq!(copied, [Copied::default(); 2], "{fabric:?}: both sides of the proxy");
    }
}

#[tokio::test]
async fn every_place_where_bytes_may_be() {
    for fabric in Fabric::FAST {
        let world = World::new(*fabric, Which::Ours).await;
        let mut client = world.client(Which::Ours);
        let mut seed = 0;
        let mut round = async |client: &mut common::Client| {
            let mut bytes = Vec::new();
            for _ in 0..8 {
                seed += 1;
                bytes.push(pooled(&world.channel, 50_000 + bytes.len(), seed).await);
            }
            let mut next = || bytes.pop().unwrap();
            let inner = Blob { data: next(), number: 7, text: "small".into(), ..Blob::default() };
            let blob = Blob {
                data: next(),
                number: 1,
                parts: vec![next(), Bytes::from_static(b"short"), Bytes::new(), next()],
                nested: vec![Blob::of(next()), inner.clone(), Blob::default()],
                kind: Some(Kind::Inner(Box::new(Blob {
                    kind: Some(Kind::Raw(next())),
                    ..Blob::default()
                }))),
                map: [("key".to_owned(), Blob::of(next()))].into(),
                vec: vec![1, 2, 3],
                text: "text".into(),
                last: next(),
            };
            let reply = client.echo(blob.clone()).await.unwrap();
            assert_eq!(reply, blob);
            let Some(Kind::Inner(kind)) = &reply.kind else { panic!() };
            let Some(Kind::Raw(raw)) = &kind.kind else { panic!() };
            let nested = &reply.nested;
            for field in [
                &reply.data,
                &reply.parts[0],
                &reply.parts[3],
                &nested[0].data,
                &nested[1].data,
                raw,
            ]
            .into_iter()
            .chain([&reply.map["key"].data, &reply.last])
            {
                assert!(in_pool(&world.channel, field));
            }
        };
        for _ in 0..3 {
            round(&mut client).await;
        }
        let before = world.copied();
        round(&mut client).await;
        assert_eq!(world.copied() - before, Copied::default(), "{fabric:?}");
    }
}

/// Checks that in one of a few tries at most `most` bytes are copied while a small call is made.
/// The check depends on timing, which varies on a busy machine. If long copies did not pause for
/// small calls, each try would copy 8 MiB.
async fn little_is_copied_beside_small_calls(of_another: bool, most: u64) {
    let mut seen = Vec::new();
    for _ in 0..TRIES {
        let world = World::new(Fabric::Shm, Which::Ours).await;
        let client = match of_another {
            true => common::Client::new(world.connect().await, Which::Ours, LIMIT),
            false => world.client(Which::Ours),
        };
        let copied = copied_beside_small_calls(&world, client).await;
        if (1..=most).contains(&copied) {
            return;
        }
        seen.push(copied);
    }
    panic!("{seen:?} bytes are copied beside a small call, {most} at most wanted");
}

/// The median number of bytes that the world's channel copies for long messages during a small call
/// of `client`.
async fn copied_beside_small_calls(world: &World, mut client: common::Client) -> u64 {
    let large = Blob::of(pattern(16 * MIB, 1).into());
    let mut bulk = world.client(Which::Ours);
    // Ends the transfer after the last small call.
    let (last, beside) = tokio::sync::oneshot::channel();
    let transfer = tokio::spawn(async move {
        let last = futures_util::stream::once(async { beside.await.unwrap() });
        bulk.up(iter(vec![large; 16]).chain(last)).await.unwrap()
    });
    let sent = || world.channel.stats().bytes_sent_write;
    let mut beside = Vec::new();
    while sent() < 200 * MIB as u64 {
        let before = sent();
        client.echo(Blob::of(Bytes::from_static(b"small"))).await.unwrap();
        beside.push(sent() - before);
        assert!(!transfer.is_finished());
    }
    last.send(Blob { number: 7, ..Blob::default() }).unwrap();
    assert_eq!(transfer.await.unwrap().number, 17);
    beside.sort_unstable();
    beside[beside.len() / 2]
}

/// If the link copies, a small call waits only briefly for a concurrent long copy, which still
/// makes progress.
#[tokio::test]
async fn small_calls_do_not_wait_for_long_copies() {
    little_is_copied_beside_small_calls(false, 256 << 10).await;
}

/// The same applies to small calls of another connection, which does not know about the copies.
#[tokio::test]
async fn nor_do_those_of_another_connection() {
    little_is_copied_beside_small_calls(true, 2 * MIB as u64).await;
}

#[tokio::test]
async fn small_and_large_messages_mix() {
    for fabric in Fabric::FAST {
        let world = World::new(*fabric, Which::Ours).await;
        let mut client = world.client(Which::Ours);
        let blobs: Vec<Blob> =
            [10, MIB, 0, 4095, 4096, 5000, 300_000, 20, 20, 8_192, 65_536, 1, 2_000_000, 9]
                .iter()
                .enumerate()
                .map(|(n, len)| Blob {
                    number: n as u64,
                    ..Blob::of(pattern(*len, n as u8).into())
                })
                .collect();
        for _ in 0..3 {
            let replies = client.chat(iter(blobs.clone())).await.unwrap();
            let replies: Vec<Blob> = replies.map(Result::unwrap).collect().await;
            assert_eq!(replies.len(), blobs.len());
            assert!(replies == blobs, "{fabric:?}");
        }
    }
}

#[tokio::test]
async fn a_plain_codec_at_one_end_copies_there_and_says_so() {
    for fabric in Fabric::FAST {
        for (client_codec, server_codec) in
            [(Which::Ours, Which::Plain), (Which::Plain, Which::Ours)]
        {
            let world = World::new(*fabric, server_codec).await;
            for _ in 0..2 {
                every_kind(&world, client_codec, MIB, client_codec == Which::Ours).await;
            }
            world.seen.take();
            let before = [world.channel.stats(), world.server.get()];
            every_kind(&world, client_codec, MIB, client_codec == Which::Ours).await;
            let copied = [
                world.channel.stats().copied_fast - before[0].copied_fast,
                world.server.get().copied_fast - before[1].copied_fast,
            ];
            for (copied, codec) in copied.iter().zip([client_codec, server_codec]) {
                match codec {
                    Which::Ours => assert_eq!(*copied, Copied::default(), "{fabric:?}"),
                    // The codec copies eight messages in and eight messages out, each completely.
                    Which::Plain => {
                        let payload = 16 * MIB as u64;
                        assert!(
                            (payload..payload + 1000).contains(&copied.plain_codec),
                            "{fabric:?}: {copied:?}"
                        );
                        assert_eq!(
                            (copied.learning, copied.joined, copied.pressure),
                            (0, 0, 0),
                            "{fabric:?}"
                        );
                    }
                }
            }
            // A plain codec decodes to the heap.
            let expected = if server_codec == Which::Ours { (8, 8) } else { (0, 8) };
            assert_eq!(world.seen.take(), expected);
        }
    }
}

/// A message of 16 MiB takes a quarter of this pool's landing memory.
#[tokio::test]
async fn messages_of_16_mib_land_in_one_piece() {
    for fabric in Fabric::FAST {
        let world = World::with(*fabric, Which::Ours, 128 << 20, common::LIMIT).await;
        let mut client = world.client(Which::Ours);
        let blob = Blob::of(pooled(&world.channel, 16 * MIB, 1).await);
        for _ in 0..2 {
            client.echo(blob.clone()).await.unwrap();
        }
        let before = world.copied();
        assert_eq!(client.echo(blob.clone()).await.unwrap(), blob);
        assert_eq!(world.copied() - before, Copied::default(), "{fabric:?}");
    }
}

#[tokio::test]
async fn heap_memory_is_copied_once() {
    for fabric in Fabric::FAST {
        let world = World::new(*fabric, Which::Ours).await;
        let mut client = world.client(Which::Ours);
        let data = Bytes::from(pattern(MIB, 9));
        let keep = Blob::of(data.clone());
        for _ in 0..3 {
            client.unary("/test.Blobs/Keep", keep.clone()).await.unwrap();
            let held = std::mem::take(&mut *world.seen.held.lock().unwrap());
            assert_eq!(held[0].data, data);
        }
        let before = world.copied();
        client.unary("/test.Blobs/Keep", keep).await.unwrap();
        let copied = world.copied() - before;
        // Over shared memory, a WRITE may read from any memory, so nothing is staged.
        let staged = if *fabric == Fabric::Shm { 0 } else { MIB as u64 };
        // The reply has only a few bytes.
        assert!(
            copied.staging == staged && copied.total() == staged + copied.eager,
            "{fabric:?}: {copied:?}"
        );
    }
}

#[tokio::test]
async fn over_tcp_it_saves_the_copy_of_the_encoder() {
    let world = World::new(Fabric::Tcp, Which::Ours).await;
    let mut client = world.client(Which::Ours);
    let blob = Blob { number: 5, ..Blob::of(pattern(MIB, 4).into()) };
    for _ in 0..2 {
        assert_eq!(client.echo(blob.clone()).await.unwrap(), blob);
    }
    let before = world.copied();
    assert_eq!(client.echo(blob.clone()).await.unwrap(), blob);
    let copied = world.copied() - before;
    assert_eq!((copied.plain_codec, copied.learning, copied.staging), (0, 0, 0), "{copied:?}");
    // tonic joins the frames that hyper receives.
    assert!(copied.joined > 2 * MIB as u64);
    // Pool buffers also work over TCP, so a program needs no branch.
    let pooled = pooled(&world.channel, MIB, 5).await;
    assert_eq!(client.echo(Blob::of(pooled.clone())).await.unwrap().data, pooled);
    // Copies by the plain codec are counted separately.
    let before = world.copied();
    world.client(Which::Plain).echo(blob).await.unwrap();
    assert!((world.copied() - before).plain_codec >= MIB as u64);
}

/// A receiver that keeps messages does not prevent others from receiving.
#[tokio::test]
async fn messages_that_are_held_are_copied_out_when_memory_runs_short() {
    for fabric in Fabric::FAST {
        let world = World::with(*fabric, Which::Ours, 16 << 20, LIMIT).await;
        let mut client = world.client(Which::Ours);
        let data = pooled(&world.channel, MIB, 1).await;
        for n in 0..24 {
            client
                .unary("/test.Blobs/Keep", Blob { number: n, ..Blob::of(data.clone()) })
                .await
                .unwrap();
        }
        let copied = world.server.get().copied_fast;
        assert!(copied.pressure >= 10 * MIB as u64, "{fabric:?}: {copied:?}");
        let (landed, all) = world.seen.take();
        assert!(
            all == 24 && landed > 2 && landed < 10,
            "{fabric:?}: {landed} of {all} in landing memory"
        );
        // Once the receiver releases the messages, nothing more is copied.
        world.seen.held.lock().unwrap().clear();
        let before = world.copied();
        client.unary("/test.Blobs/Keep", Blob::of(data)).await.unwrap();
        world.seen.held.lock().unwrap().clear();
        assert_eq!((world.copied() - before).pressure, 0, "{fabric:?}");
    }
}

#[tokio::test]
async fn bytes_outlive_channel_server_and_pool() {
    for fabric in Fabric::FAST {
        let world = World::new(*fabric, Which::Ours).await;
        let mut client = world.client(Which::Ours);
        let data = pattern(MIB, 8);
        let blob = Blob::of(Bytes::from(data.clone()));
        for _ in 0..3 {
            client.unary("/test.Blobs/Keep", blob.clone()).await.unwrap();
        }
        let reply = client.echo(blob).await.unwrap();
        assert!(in_pool(&world.channel, &reply.data));
        let held = std::mem::take(&mut *world.seen.held.lock().unwrap());
        drop(client);
        drop(world);
        // Nothing else keeps the pools alive.
        assert!(reply.data == data && held.iter().all(|blob| blob.data == data));
    }
}

/// tonic's limits also apply to messages whose fields are extracted.
#[tokio::test]
async fn limits_are_for_whole_messages() {
    for fabric in Fabric::FAST.iter().chain(&[Fabric::Tcp]) {
        let world = World::with(*fabric, Which::Ours, 32 << 20, 500_000).await;
        let mut client = world.client(Which::Ours);
        let mut strict = common::Client::new(world.channel.clone(), Which::Ours, 300_000);
        for _ in 0..3 {
            client.echo(Blob::of(vec![1; 400_000].into())).await.unwrap();
            let status = client.echo(Blob::of(vec![1; 500_000].into())).await.unwrap_err();
            assert_eq!(status.code(), Code::OutOfRange, "{fabric:?}: {status}");
            assert!(
                status.message().contains("found 500004 bytes, the limit is: 500000"),
                "{status}"
            );
        }
        let status = strict.echo(Blob::of(vec![1; 450_000].into())).await.unwrap_err();
        assert!(status.message().contains("found 450004 bytes, the limit is: 300000"), "{status}");
    }
}

/// Stubs of one method on the same channel share what they learn. A stub with its own channel keeps
/// its own limit.
#[tokio::test]
async fn a_limit_of_its_own_needs_a_channel_of_its_own() {
    for fabric in Fabric::FAST {
        let world = World::new(*fabric, Which::Ours).await;
        let mut lenient = world.client(Which::Ours);
        let mut strict = common::Client::new(world.channel.clone(), Which::Ours, 300_000);
        let mut alone = common::Client::new(world.connect().await, Which::Ours, 300_000);
        let blob = Blob::of(vec![1; 400_000].into());
        for _ in 0..3 {
            lenient.echo(blob.clone()).await.unwrap();
            strict.echo(blob.clone()).await.unwrap();
            let status = alone.echo(blob.clone()).await.unwrap_err();
            assert!(
                status.message().contains("found 400004 bytes, the limit is: 300000"),
                "{status}"
            );
        }
    }
}

/// An end that does not trust the peer to leave sent data unchanged gets a copy, and only that end
/// pays for it.
#[tokio::test]
async fn copy_on_delivery_takes_messages_out_of_the_peers_reach() {
    for fabric in Fabric::FAST.iter().chain([&Fabric::Tcp]) {
        for (at_server, at_client) in [(true, false), (false, true)] {
            let blobs =
                Blobs { codec: Which::Ours, seen: Arc::default(), limit: LIMIT, forward: None };
            let world = World::set(
                *fabric,
                fabric.hosts(32 << 20),
                blobs,
                |server| server.copy_on_delivery(at_server),
                |endpoint| endpoint.copy_on_delivery(at_client),
            )
            .await;
            if *fabric == Fabric::Tcp {
                // TCP delivers data that the peer cannot write to.
                let mut client = world.client(Which::Ours);
                client.echo(Blob::of(pattern(MIB, 1).into())).await.unwrap();
                assert_eq!(world.copied().delivery, 0);
                continue;
            }
            for _ in 0..2 {
                every_kind(&world, Which::Ours, MIB, !at_client).await;
            }
            world.seen.take();
            let (client, server) =
                (world.channel.stats().copied_fast, world.server.get().copied_fast);
            every_kind(&world, Which::Ours, MIB, !at_client).await;
            let client = world.channel.stats().copied_fast - client;
            let server = world.server.get().copied_fast - server;
            let (landed, all) = world.seen.take();
            assert_eq!(
                (landed, all),
                (if at_server { 0 } else { 8 }, 8),
                "{fabric:?}: fields in landing memory"
            );
            // Each end receives eight messages, with a few bytes around each field.
            for (copies, copied) in [(at_client, client), (at_server, server)] {
                let expected = if copies { 8 * MIB as u64 } else { 0 };
                assert!(
                    copied.delivery >= expected && copied.delivery <= expected / 1000 * 1001,
                    "{copied:?}"
                );
                // Data that a handler sends back now lies on the heap, and is staged if the fabric
                // requires it.
                assert_eq!(
                    copied.total(),
                    copied.delivery + copied.staging,
                    "{fabric:?}: {copied:?}"
                );
            }
        }
    }
}

/// A peer whose messages are kept gets at most its share of the pool, and the rest is for other
/// peers.
#[tokio::test]
async fn a_peer_keeps_to_its_share_of_the_pool() {
    const SHARE: usize = 4 * MIB;
    for fabric in Fabric::FAST {
        let net = tonic_rdma::sim::SimNet::new(tonic_rdma::sim::SimConfig::default());
        let contexts = [Some(SHARE), None].map(|share| {
            let mut builder = tonic_rdma::Context::builder()
                .pool(tonic_rdma::PoolConfig::default().total(64 << 20));
            if *fabric == Fabric::Sim {
                let n = if share.is_some() { 1 } else { 2 };
                builder = builder.sim(net.device(format!("sim{n}"), [10, 0, 0, n].into()));
            }
            if let Some(share) = share {
                builder = builder.pinned_per_peer(share);
            }
            Some(builder.build())
        });
        let server = contexts[0].clone().unwrap();
        let blobs = Blobs { codec: Which::Ours, seen: Arc::default(), limit: LIMIT, forward: None };
        let world = World::between(*fabric, contexts, blobs).await;
        let leased = || async {
            server.pool_stats().await.iter().map(|(_, stats)| stats.leased).sum::<usize>()
        };
        let mut client = world.client(Which::Ours);
        let data = pooled(&world.channel, MIB, 1).await;
        for n in 0..24 {
            client
                .unary("/test.Blobs/Keep", Blob { number: n, ..Blob::of(data.clone()) })
                .await
                .unwrap();
            assert!(leased().await <= SHARE, "{fabric:?}: {} leased", leased().await);
        }
        // Messages kept beyond its share were copied out.
        let copied = world.server.get().copied_fast;
        assert!(copied.pressure >= 18 * MIB as u64, "{fabric:?}: {copied:?}");
        // Another peer has its own share, and nothing is copied for it, because the pool is far
        // from empty.
        let other = world.connect().await;
        let mut client = common::Client::new(other.clone(), Which::Ours, LIMIT);
        for _ in 0..4 {
            assert!(client.echo(Blob::of(data.clone())).await.unwrap().data == data);
        }
        assert!(leased().await <= 2 * SHARE);
        assert_eq!(world.server.get().copied_fast.pressure, copied.pressure, "{fabric:?}");
        // A message longer than the share lands in parts.
        let long = Bytes::from(pattern(3 * SHARE, 2));
        world.seen.held.lock().unwrap().clear();
        assert!(client.echo(Blob::of(long.clone())).await.unwrap().data == long);
        assert!(leased().await <= 2 * SHARE);
    }
}
