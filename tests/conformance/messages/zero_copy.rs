//! Payload in pool memory and in registered memory is not copied in any kind of call, as counters
//! and the fields' addresses show.

use bytes::{BufMut, Bytes};
use tokio::sync::oneshot;
use tokio_stream::{StreamExt, iter};
use tonic_rdma::{Copied, Pool};
use tonic_rdma_tests::codec::CodecKind;
use tonic_rdma_tests::connect;
use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::harness::{TestEnv, client_of};
use tonic_rdma_tests::load::with_timeout;
use tonic_rdma_tests::pb::Message;
use tonic_rdma_tests::service::script::{echo, echo_all, payload, steps};

cases![for Some(tonic_rdma_tests::fabric::Fabric::FAST);
    every_kind_of_call,
    memory_of_the_application,
];

/// Fits the pool of a host with the usual memlock limit.
const LEN: usize = 200_000;

/// The pattern in a buffer from the pool.
async fn pooled(pool: &Pool, seed: u64) -> Bytes {
    let mut buf = pool.alloc(LEN).await.unwrap();
    buf.put_slice(&payload(seed, LEN).payload);
    buf.freeze()
}

async fn every_kind_of_call(env: &TestEnv) {
    let server = env.server().await;
    let channel = connect!(env, server);
    let mut client = client_of(channel.clone());
    let channel = channel.rdma();
    let pool = channel.pool();
    let (at_client, at_server) = env.fabric().codecs();
    let check = |message: &Message| {
        message.expect(message.seed, LEN);
        // If both ends lend, the server echoes data that it has borrowed, so the field in the reply
        // is this process's own memory.
        let lends = env.fabric() == Fabric::ShmTwo;
        let landed = pool.contains(&message.payload);
        assert!(lends || landed == (at_client == CodecKind::ZeroCopy), "where the field lies");
    };
    let mut before = [Copied::default(); 2];
    let copied = || [channel.stats().copied_fast, env.server_copied()];
    // In the first rounds both ends learn about each method.
    for round in 0..4 {
        if round == 3 {
            before = copied();
        }
        let with = async |message: Message, seed| Message {
            payload: pooled(&pool, seed).await,
            seed,
            ..message
        };
        check(&client.unary(with(steps("", [echo(1)]), 1).await).await.unwrap().into_inner());
        let upload = [with(steps("", [echo(1)]), 2).await, with(Message::default(), 3).await];
        check(&client.upload(iter(upload)).await.unwrap().into_inner());
        let download = client.download(with(steps("", [echo(1)]), 4).await).await.unwrap();
        let download: Vec<Message> = download.into_inner().map(Result::unwrap).collect().await;
        download.iter().for_each(check);
        let mut chat = vec![with(steps("", [echo_all()]), 5).await];
        for seed in 6..8 {
            chat.push(with(Message::default(), seed).await);
        }
        let mut chat = client.chat(iter(chat)).await.unwrap().into_inner();
        for _ in 5..8 {
            check(&chat.message().await.unwrap().unwrap());
        }
        assert_eq!(chat.message().await.unwrap(), None);
    }
    let after = copied();
    if env.fabric() == Fabric::ShmTwo {
        let stats = channel.stats();
        assert!(stats.bytes_sent_lent > 0 && stats.bytes_received_lent > 0, "{stats:?}");
    }
    for (end, which) in [at_client, at_server].into_iter().enumerate() {
        let copied = after[end] - before[end];
        match which {
            // Scripts are short, so only they are copied.
            CodecKind::ZeroCopy => {
                assert!(copied.total() == copied.eager && copied.eager < 200, "{copied:?}")
            }
            CodecKind::Plain => assert!(copied.plain_codec >= 6 * LEN as u64, "{copied:?}"),
        }
    }
}

/// Registered application memory at an odd address is sent in place over several connections, one
/// after the other. It returns to the application when all its bytes are dropped.
async fn memory_of_the_application(env: &TestEnv) {
    /// An owner that reports when it is dropped.
    struct Owner(Vec<u8>, Option<oneshot::Sender<()>>);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0[1..]
        }
    }
    impl Drop for Owner {
        fn drop(&mut self) {
            let _ = self.1.take().map(|dropped| dropped.send(()));
        }
    }

    let server = env.server().await;
    let (told, mut dropped) = oneshot::channel();
    let mut bytes = vec![0];
    bytes.extend_from_slice(&payload(1, LEN).payload);
    let owner = Owner(bytes, Some(told));
    let addr = owner.as_ref().as_ptr().addr();
    let mut registered = None;
    let mut owner = Some(owner);
    for _ in 0..2 {
        let channel = connect!(env, server);
        let mut client = client_of(channel.clone());
        let channel = channel.rdma();
        if let Some(owner) = owner.take() {
            registered = Some(channel.context().register(owner).await.unwrap());
        }
        let registered = registered.as_ref().unwrap();
        let blob = registered.bytes();
        assert_eq!((blob.as_ptr().addr(), registered.len()), (addr, LEN));
        let again = channel.context().register(blob.slice(5..9)).await.map(drop);
        let again = again.unwrap_err().to_string();
        assert!(again.contains("is registered already"), "{again}");
        let mut before = Copied::default();
        for round in 0..4 {
            if round == 3 {
                before = channel.stats().copied_fast;
            }
            let message = Message { payload: blob.clone(), seed: 1, ..steps("", [echo(1)]) };
            client.unary(message).await.unwrap().into_inner().expect(1, LEN);
        }
        let copied = channel.stats().copied_fast - before;
        assert!(channel.pool().contains(&blob.slice(7..)));
        match env.fabric().codecs().0 {
            CodecKind::ZeroCopy => {
                assert!(copied.total() == copied.eager && copied.eager < 200, "{copied:?}")
            }
            CodecKind::Plain => assert!(copied.plain_codec >= LEN as u64, "{copied:?}"),
        }
    }
    let devices = registered.as_ref().unwrap().devices();
    assert_eq!(devices.len(), 1, "once with the device: {devices:?}");
    let slice = registered.as_ref().unwrap().slice(3..4);
    drop(registered);
    assert!(dropped.try_recv().is_err(), "a slice is left");
    drop(slice);
    with_timeout("the memory does not come back", dropped).await.unwrap();
}
