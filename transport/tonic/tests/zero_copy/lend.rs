//! Messages that are lent over shared memory: their pointers, counters, and when they come back.

use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes};
use rustix::fs::{MemfdFlags, memfd_create};
use tokio_stream::iter;
use tonic_rdma::{
    Channel, Context, LendableBuf, LendableMemory, Lending, PoolConfig, TransportStats,
};

use crate::common::{Blob, Blobs, Client, Fabric, LIMIT, Which, World, pattern, pooled};

const MIB: usize = 1 << 20;
/// Time limit of waits, longer than any expected event takes.
const LIMIT_OF_WAITS: Duration = Duration::from_secs(60);

/// The context of an end that borrows what its peer lends.
fn context(lending: Lending) -> Context {
    let pool = PoolConfig::default().total(64 << 20);
    Context::builder().pool(pool).lending(lending).borrowing(true).build()
}

fn blobs(codec: Which) -> Blobs {
    Blobs { codec, seen: Arc::default(), limit: LIMIT, forward: None }
}

/// A client and a server that both lend what they send.
async fn lending(codec: Which) -> World {
    let contexts = [Some(context(Lending::SameUser)), Some(context(Lending::SameUser))];
    World::between(Fabric::Shm, contexts, blobs(codec)).await
}

/// Makes calls until a message is lent. By then the peer has mapped the memory, and knows the
/// message's length.
async fn learnt(world: &World, client: &mut Client, data: &Bytes) {
    let before = world.channel.stats().bytes_sent_lent;
    let calls = async {
        while world.channel.stats().bytes_sent_lent == before {
            client.unary("/test.Blobs/Keep", Blob::of(data.clone())).await.unwrap();
        }
    };
    tokio::time::timeout(LIMIT_OF_WAITS, calls).await.expect("the peer never maps what is lent");
    world.seen.held.lock().unwrap().clear();
    all_back(&world.channel).await;
}

/// Like [`learnt`], for memory outside the pool.
async fn until_lent(world: &World, client: &mut Client, data: &Bytes) {
    learnt(world, client, data).await;
    let pool = world.channel.pool();
    until("all leases are back", || pool.stats().lent_application == 0).await;
}

fn lent(channel: &Channel) -> usize {
    channel.pool().stats().lent
}

/// Waits until `done`, and fails if that takes too long.
async fn until(what: &str, done: impl Fn() -> bool) {
    let waits = async {
        while !done() {
            tokio::task::yield_now().await;
        }
    };
    assert!(tokio::time::timeout(LIMIT_OF_WAITS, waits).await.is_ok(), "it never comes: {what}");
}

async fn all_back(channel: &Channel) {
    until("all leases are back", || lent(channel) == 0).await;
}

/// The bytes sent since `before`: lent, and by WRITE.
fn moved(world: &World, before: TransportStats) -> (u64, u64) {
    let now = world.channel.stats();
    (now.bytes_sent_lent - before.bytes_sent_lent, now.bytes_sent_write - before.bytes_sent_write)
}

#[tokio::test]
async fn requests_are_read_where_they_lie() {
    let world = lending(Which::Ours).await;
    let mut client = world.client(Which::Ours);
    for len in [64 << 10, MIB, 5 * MIB] {
        let data = pooled(&world.channel, len, 3).await;
        learnt(&world, &mut client, &data).await;
        let (before, copied) = (world.channel.stats(), world.copied());
        for _ in 0..10 {
            client.unary("/test.Blobs/Keep", Blob::of(data.clone())).await.unwrap();
            let kept = world.seen.held.lock().unwrap().pop().unwrap();
            assert!(kept.data == data && kept.data.as_ptr() != data.as_ptr());
            drop(kept);
            all_back(&world.channel).await;
        }
        let (lent, written) = moved(&world, before);
        assert_eq!(written, 0);
        assert!(lent >= 10 * len as u64);
        let copied = world.copied() - copied;
        assert!(copied.total() < 10 * 1000, "only the ends of messages: {copied}");
        assert_eq!(copied.total(), copied.eager);
    }
    assert_eq!(world.server.get().bytes_received_lent, world.channel.stats().bytes_sent_lent);
}

/// All memory that a peer can read together with `bytes`, because it maps whole files.
fn mapped_with(bytes: &Bytes) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let at = bytes.as_ptr().addr() as u64;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ranges = maps.lines().filter(|line| line.contains(" r--s ")).filter_map(|line| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let number = |hex| u64::from_str_radix(hex, 16).ok();
        Some(number(start)?..number(end)?)
    });
    let range = ranges.into_iter().find(|range| range.contains(&at)).expect("it is mapped");
    let mut all = vec![0; (range.end - range.start) as usize];
    File::open("/proc/self/mem").unwrap().read_exact_at(&mut all, range.start).unwrap();
    all
}

/// The attack: a server of the same user, which is lent the messages sent to it, searches for data
/// that the client sends to another server. Both receive at the same time, and all messages have
/// one length.
#[tokio::test]
async fn a_peer_that_looks_around_finds_nothing_that_was_sent_to_another() {
    const LEN: usize = 64 << 10;
    let client = context(Lending::SameUser);
    let to = async || {
        let contexts = [Some(client.clone()), Some(context(Lending::SameUser))];
        World::between(Fabric::Shm, contexts, blobs(Which::Ours)).await
    };
    let (trusted, spy) = (to().await, to().await);
    let (mut to_trusted, mut to_spy) = (trusted.client(Which::Ours), spy.client(Which::Ours));
    let secret: Vec<u8> = b"the secret of another".iter().copied().cycle().take(LEN).collect();
    let public = pooled(&spy.channel, LEN, 3).await;
    learnt(&spy, &mut to_spy, &public).await;
    let mut looked = 0;
    for round in 0..20 {
        // Some of the memory is in use, and some was returned.
        let mut buf = trusted.channel.pool().alloc(LEN).await.unwrap();
        buf.put_slice(&secret);
        to_trusted.unary("/test.Blobs/Keep", Blob::of(buf.freeze())).await.unwrap();
        if round % 3 == 0 {
            trusted.seen.held.lock().unwrap().pop();
        }
        let public = pooled(&spy.channel, LEN, 3).await;
        to_spy.unary("/test.Blobs/Keep", Blob::of(public)).await.unwrap();
        let held = spy.seen.held.lock().unwrap().last().unwrap().data.clone();
        let all = mapped_with(&held);
        looked += all.len();
        let found = all.windows(21).filter(|bytes| bytes == b"the secret of another").count();
        assert_eq!(found, 0, "round {round}");
    }
    assert!(looked >= 20 * LEN && trusted.channel.stats().bytes_sent_lent > 0);
}

/// Nothing is copied before each end has mapped the other's memory.
#[tokio::test]
async fn the_first_messages_wait_to_be_mapped() {
    for len in [64 << 10, 5 * MIB] {
        let world = lending(Which::Ours).await;
        let data = pooled(&world.channel, len, 3).await;
        let mut client = world.client(Which::Ours);
        let before = world.channel.stats();
        client.unary("/test.Blobs/Keep", Blob::of(data.clone())).await.unwrap();
        assert!(world.seen.held.lock().unwrap().pop().unwrap().data == data);
        let give = Blob { number: len as u64, ..Blob::default() };
        let given = client.unary("/test.Blobs/Give", give).await.unwrap().data;
        assert!(given == pattern(len, 1));
        let (server, (lent, written)) = (world.server.get(), moved(&world, before));
        assert_eq!((written, server.bytes_sent_write), (0, 0));
        assert!(lent >= len as u64 && server.bytes_sent_lent >= len as u64);
        // Only small messages, and the padding that shows tonic the lengths, are copied.
        let copied = world.copied();
        assert_eq!(copied.total(), copied.learning + copied.eager, "{copied}");
        drop(given);
        all_back(&world.channel).await;
    }
}

/// Streams in both directions, including data that a handler was lent and sends back.
#[tokio::test]
async fn every_kind_of_call_is_lent() {
    for codec in [Which::Ours, Which::Plain] {
        let world = lending(codec).await;
        let mut client = world.client(Which::Ours);
        let data = pooled(&world.channel, MIB, 5).await;
        learnt(&world, &mut client, &data).await;
        let before = world.channel.stats();
        let blob = Blob { number: 3, text: "around".to_owned(), ..Blob::of(data.clone()) };
        assert!(client.echo(blob.clone()).await.unwrap().data == data);
        assert_eq!(client.up(iter(vec![blob.clone(); 5])).await.unwrap().number, 5);
        let mut down = client.down(blob.clone()).await.unwrap();
        for _ in 0..3 {
            let got = down.message().await.unwrap().unwrap();
            assert!(got.data == data && got.text == "around");
        }
        assert_eq!(down.message().await.unwrap(), None);
        let mut chat = client.chat(iter(vec![blob; 4])).await.unwrap();
        for _ in 0..4 {
            assert!(chat.message().await.unwrap().unwrap().data == data);
        }
        assert_eq!(chat.message().await.unwrap(), None);
        let (lent, written) = moved(&world, before);
        assert_eq!(written, 0, "{codec:?}");
        assert!(lent >= 11 * MIB as u64, "{codec:?}: {lent}");
        drop(data);
        all_back(&world.channel).await;
    }
}

/// A client, a proxy whose server forwards its input, and the service behind it. The client lends
/// to the proxy. `onward` is the lending setting of the client's and the proxy's programs.
async fn proxied(onward: [Lending; 2]) -> [World; 2] {
    let [client, proxy] = onward.map(|lending| Some(context(lending)));
    let behind = World::between(
        Fabric::Shm,
        [Some(context(Lending::Off)), proxy.clone()],
        blobs(Which::Ours),
    )
    .await;
    let forward = Some(behind.client(Which::Ours));
    let blobs = Blobs { forward, ..blobs(Which::Ours) };
    let front = World::between(Fabric::Shm, [proxy, client], blobs).await;
    [front, behind]
}

/// The bytes that a world's client has sent: lent, and by WRITE.
fn sent(world: &World) -> (u64, u64) {
    let stats = world.channel.stats();
    (stats.bytes_sent_lent, stats.bytes_sent_write)
}

/// A proxy that lends on sends borrowed data from where it lies: the service behind it reads the
/// client's buffer.
#[tokio::test]
async fn a_proxy_lends_on_if_both_programs_ask_for_it() {
    let [front, behind] = proxied([Lending::SameUserOnward; 2]).await;
    let data = pooled(&front.channel, MIB, 3).await;
    let mut client = front.client(Which::Ours);
    let mut forwarded = async || {
        let reply = client.unary("/test.Blobs/Forward", Blob::of(data.clone())).await.unwrap();
        assert!(reply.data == data);
    };
    let calls = async {
        while sent(&front).0 == 0 || sent(&behind).0 == 0 {
            forwarded().await;
        }
    };
    tokio::time::timeout(LIMIT_OF_WAITS, calls).await.expect("the proxy never lends on");
    let before = [sent(&front), sent(&behind)];
    for _ in 0..10 {
        forwarded().await;
    }
    for (world, (lent, written)) in [&front, &behind].into_iter().zip(before) {
        let now = sent(world);
        assert_eq!(now.1, written);
        assert!(now.0 - lent >= 10 * MIB as u64);
    }
    all_back(&front.channel).await;
    let stats = behind.channel.pool().stats();
    assert_eq!((stats.lent, stats.lent_application, stats.application), (0, 0, 0));
}

/// The attack: a client sends a secret to a proxy, and other data that the proxy forwards. If that
/// were lent on, the service behind would also map the file that holds the secret.
#[tokio::test]
async fn a_reader_behind_a_proxy_sees_only_what_is_sent_to_it() {
    const LEN: usize = 64 << 10;
    for onward in [
        [Lending::SameUser; 2],
        [Lending::SameUser, Lending::SameUserOnward],
        [Lending::SameUserOnward, Lending::SameUser],
    ] {
        let [front, behind] = proxied(onward).await;
        let mut client = front.client(Which::Ours);
        let public = pooled(&front.channel, LEN, 3).await;
        learnt(&front, &mut client, &public).await;
        let mut secret = front.channel.pool().alloc(LEN).await.unwrap();
        secret.put_slice(&b"for the proxy's eyes".repeat(LEN / 20));
        client.unary("/test.Blobs/Keep", Blob::of(secret.freeze())).await.unwrap();
        for _ in 0..10 {
            let public = Blob::of(public.clone());
            let reply = client.unary("/test.Blobs/Forward", public).await.unwrap();
            assert!(reply.data.len() == LEN);
        }
        let (lent, written) = sent(&behind);
        assert!(lent == 0 && written >= 10 * LEN as u64, "{onward:?}: {lent} {written}");
        assert!(sent(&front).0 >= 11 * LEN as u64, "the client lends: {onward:?}");
    }
}

/// A reader that keeps messages makes its peer copy the next ones, and neither is delayed.
#[tokio::test]
async fn what_a_reader_keeps_is_not_lent_twice() {
    let world = lending(Which::Ours).await;
    let mut client = world.client(Which::Ours);
    // The pool has 16 MiB for sending, of which 12 MiB may be lent.
    let data = pooled(&world.channel, MIB, 1).await;
    learnt(&world, &mut client, &data).await;
    let before = world.channel.stats();
    for n in 0..20 {
        client.unary("/test.Blobs/Keep", Blob::of(data.slice(64 * n..))).await.unwrap();
    }
    let (lent_bytes, written) = moved(&world, before);
    assert!(lent_bytes <= 12 * MIB as u64 + 12 * 1000 && written >= 7 * MIB as u64);
    assert!(lent(&world.channel) <= 12 * MIB);
    let held = std::mem::take(&mut *world.seen.held.lock().unwrap());
    for (n, blob) in held.iter().enumerate() {
        assert!(blob.data == data.slice(64 * n..), "message {n}");
    }
    drop(held);
    all_back(&world.channel).await;
    learnt(&world, &mut client, &data).await;
}

/// Sixty clients of one process, each with its own connection and arena.
#[tokio::test]
async fn sixty_clients_lend_from_one_pool() {
    let server = context(Lending::Off);
    let shared = context(Lending::SameUser);
    let world = World::between(Fabric::Shm, [Some(server), Some(shared)], blobs(Which::Ours)).await;
    let mut channels = Vec::new();
    for _ in 0..60 {
        channels.push(world.connect().await);
    }
    for round in 0..40 {
        for channel in &channels {
            let mut client = Client::new(channel.clone(), Which::Ours, LIMIT);
            let data = pooled(channel, 64 << 10, 9).await;
            let reply = client.echo(Blob::of(data.clone())).await.unwrap();
            assert!(reply.data == data, "{round}");
        }
    }
    for channel in &channels {
        assert!(channel.stats().bytes_sent_lent > 0);
    }
    all_back(&world.channel).await;
}

/// Calls that are dropped at any moment return the memory that they were lent.
#[tokio::test]
async fn dropped_calls_return_their_leases() {
    let world = lending(Which::Ours).await;
    let mut client = world.client(Which::Ours);
    let data = pooled(&world.channel, MIB, 2).await;
    learnt(&world, &mut client, &data).await;
    for n in 0..500_u32 {
        let call = client.echo(Blob::of(data.clone()));
        let polls = n % 7;
        let mut call = Box::pin(call);
        for _ in 0..polls {
            tokio::select! {
                biased;
                reply = &mut call => {
                    assert!(reply.unwrap().data == data);
                    break;
                }
                () = tokio::task::yield_now() => {}
            }
        }
    }
    all_back(&world.channel).await;
    drop(data);
    let pool = world.channel.pool();
    until("the pool has its memory", || pool.stats().send == 0).await;
}

/// The connection ends while the application holds borrowed memory.
#[tokio::test]
async fn what_is_held_outlives_the_connection() {
    let world = lending(Which::Ours).await;
    let mut client = world.client(Which::Ours);
    let data = pooled(&world.channel, MIB, 2).await;
    learnt(&world, &mut client, &data).await;
    client.unary("/test.Blobs/Keep", Blob::of(data)).await.unwrap();
    let (pool, seen) = (world.channel.pool(), world.seen.clone());
    drop((client, world));
    let held = std::mem::take(&mut *seen.held.lock().unwrap());
    // Other messages use the pool's memory during that time, but not this buffer.
    for _ in 0..100 {
        tokio::task::yield_now().await;
        let Ok(mut other) = pool.try_alloc(MIB) else { continue };
        other.resize_zeroed(MIB);
    }
    assert!(held[0].data == pattern(MIB, 2));
    assert_eq!(pool.stats().lent, MIB);
    drop(held);
    until("all leases are back", || pool.stats().lent == 0).await;
    assert_eq!(pool.stats().send, 0);
}

/// Makes calls with a pool buffer, and checks that nothing is lent.
async fn nothing_is_lent(world: &World) {
    let mut client = world.client(Which::Ours);
    let data = pooled(&world.channel, MIB, 2).await;
    for _ in 0..20 {
        assert!(client.echo(Blob::of(data.clone())).await.unwrap().data == data);
    }
    let (client, server) = (world.channel.stats(), world.server.get());
    assert_eq!((client.bytes_sent_lent, server.bytes_sent_lent), (0, 0));
    assert_eq!(lent(&world.channel), 0);
    assert_eq!(world.channel.path().path, tonic_rdma::Path::Shm, "the connection stands");
}

/// An end that copies on delivery declines loans, whatever its context says.
#[tokio::test]
async fn an_end_that_copies_on_delivery_borrows_nothing() {
    for [at_server, at_client] in [[true, false], [false, true]] {
        let lending = [at_client, at_server].map(|lends| match lends {
            true => Some(context(Lending::SameUser)),
            false => Some(context(Lending::Off)),
        });
        let world = World::set(
            Fabric::Shm,
            lending,
            blobs(Which::Ours),
            |server| server.copy_on_delivery(at_server),
            |endpoint| endpoint.copy_on_delivery(at_client),
        )
        .await;
        nothing_is_lent(&world).await;
        assert!(world.copied().delivery >= 20 * MIB as u64, "{:?}", world.copied());
    }
}

/// Nothing is lent unless both programs ask for it. Short messages and messages outside the pool
/// are never lent.
#[tokio::test]
async fn lending_is_asked_for() {
    let lends = || Some(Context::builder().lending(Lending::SameUser).build());
    for contexts in [[None, None], [None, lends()], [lends(), lends()]] {
        nothing_is_lent(&World::between(Fabric::Shm, contexts, blobs(Which::Ours)).await).await;
    }
    let borrows = [None, Some(context(Lending::Off))];
    nothing_is_lent(&World::between(Fabric::Shm, borrows, blobs(Which::Ours)).await).await;
    let world = lending(Which::Ours).await;
    let mut client = world.client(Which::Ours);
    let short = pooled(&world.channel, 16 << 10, 2).await;
    for data in [short, Bytes::from(pattern(MIB, 3))] {
        for _ in 0..20 {
            assert!(client.echo(Blob::of(data.clone())).await.unwrap().data == data);
        }
    }
    assert_eq!(world.channel.stats().bytes_sent_lent, 0);
}

/// A context that borrows nothing.
fn not_borrowing(lending: Lending) -> Context {
    let pool = PoolConfig::default().total(64 << 20);
    Context::builder().pool(pool).lending(lending).build()
}

fn lendable(len: usize, seed: u8) -> LendableMemory {
    let mut buf = LendableBuf::zeroed(len).unwrap();
    buf.copy_from_slice(&pattern(len, seed));
    buf.freeze()
}

/// Lends application memory, which the test fills or takes from a file: in total sixteen times as
/// much as the pool may lend. Messages in pool memory are not lent.
#[tokio::test]
async fn memory_of_the_application_is_lent_and_nothing_else() {
    for filled_elsewhere in [false, true] {
        let client = not_borrowing(Lending::SameUserRegistered);
        let contexts = [Some(context(Lending::Off)), Some(client)];
        let world = World::between(Fabric::Shm, contexts, blobs(Which::Ours)).await;
        let memory = match filled_elsewhere {
            false => lendable(8 * MIB, 3),
            true => {
                let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
                let mut file = File::from(memfd_create("test", flags).unwrap());
                file.write_all(&pattern(8 * MIB, 3)).unwrap();
                LendableMemory::from_file(file).unwrap()
            }
        };
        let table = world.channel.context().register_lendable(memory).await.unwrap();
        assert_eq!(table.devices(), ["shm"]);
        let mut client = world.client(Which::Ours);
        let pool = world.channel.pool();
        until_lent(&world, &mut client, &table.bytes()).await;
        let (before, copied) = (world.channel.stats(), world.copied());
        // Lend 192 MiB at a time, although the pool has only 16 MiB for sending.
        for n in 0..24 {
            let blob = Blob::of(table.slice(n * 64..));
            client.unary("/test.Blobs/Keep", blob).await.unwrap();
        }
        let (moved_lent, written) = moved(&world, before);
        assert!(written == 0 && moved_lent >= 24 * (8 * MIB as u64 - 24 * 64), "{moved_lent}");
        let copied = world.copied() - copied;
        assert_eq!(copied.total(), copied.eager, "{copied}");
        assert_eq!((lent(&world.channel), pool.stats().application), (0, 8 * MIB));
        assert!(pool.stats().lent_application > 190 * MIB);
        for (n, kept) in world.seen.held.lock().unwrap().iter().enumerate() {
            assert!(kept.data == pattern(8 * MIB, 3)[n * 64..], "message {n}");
        }
        // The pool is not lent, although the context lends.
        let before = world.channel.stats();
        let data = pooled(&world.channel, MIB, 1).await;
        for _ in 0..20 {
            assert!(client.echo(Blob::of(data.clone())).await.unwrap().data == data);
        }
        assert_eq!(moved(&world, before).0, 0);
        // The memory is registered for as long as it is read, and then dropped.
        drop((table, client));
        assert_eq!(pool.stats().application, 8 * MIB);
        world.seen.held.lock().unwrap().clear();
        until("the memory is given back", || pool.stats().application == 0).await;
    }
}

/// Memory that is registered before there is a connection, and read after the connection has ended.
#[tokio::test]
async fn memory_of_the_application_outlives_the_connection() {
    let context = not_borrowing(Lending::SameUserRegistered);
    let table = context.register_lendable(lendable(MIB, 9)).await.unwrap();
    assert!(table.devices().is_empty(), "nothing is opened yet");
    let world = World::between(
        Fabric::Shm,
        [Some(self::context(Lending::Off)), Some(context)],
        blobs(Which::Ours),
    )
    .await;
    let mut client = world.client(Which::Ours);
    until_lent(&world, &mut client, &table.bytes()).await;
    client.unary("/test.Blobs/Keep", Blob::of(table.bytes())).await.unwrap();
    let (pool, seen) = (world.channel.pool(), world.seen.clone());
    drop((client, world, table));
    let held = std::mem::take(&mut *seen.held.lock().unwrap());
    assert!(held[0].data == pattern(MIB, 9));
    assert_eq!((pool.stats().application, pool.stats().lent_application), (MIB, MIB));
    drop(held);
    until("the memory is given back", || pool.stats().application == 0).await;
}

/// Memory registered for lending is lent only if the program lends at all. It is sent from where it
/// lies in any case.
#[tokio::test]
async fn memory_of_the_application_is_lent_by_permission() {
    let world = World::between(
        Fabric::Shm,
        [Some(context(Lending::Off)), Some(not_borrowing(Lending::Off))],
        blobs(Which::Ours),
    )
    .await;
    let table = world.channel.context().register_lendable(lendable(MIB, 9)).await.unwrap();
    let mut client = world.client(Which::Ours);
    for _ in 0..20 {
        assert!(client.echo(Blob::of(table.bytes())).await.unwrap().data == table.bytes());
    }
    let stats = world.channel.stats();
    assert_eq!((stats.bytes_sent_lent, stats.copied_fast.staging), (0, 0));
    assert!(stats.bytes_sent_write >= 20 * MIB as u64);
}
