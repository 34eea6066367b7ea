//! A child of fork(2) that executes no program. Objects that it creates work, over shared memory
//! and TCP. Inherited ones fail with an error that names the fork, where tonic's hang. The parent
//! notices nothing. `transport/tonic/tests/fork` forks while any lock may be held, tries other
//! inherited objects, and runs over each device.

use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::time::Duration;

use tonic_rdma::Context;
use tonic_rdma_memory::test_util::process::{Child, fork};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::codec::CodecKind;
use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::harness::client_of;
use tonic_rdma_tests::load::with_timeout;
use tonic_rdma_tests::process::runtime;

use crate::client::{self, Client, Here, connect, echo_one, own_path, path_of};
use crate::server::{ACT, Server, signal};

const SIZES: [usize; 4] = [10, 100 << 10, 3 << 20, 16];
/// How long to wait for a call that has no thread to carry it.
const A_WHILE: Duration = Duration::from_secs(2);

/// Runs a future in a runtime of the child, on a thread that is not part of the parent's runtime.
fn run<T: Send>(future: impl Future<Output = T> + Send) -> T {
    std::thread::scope(|scope| {
        let run = || {
            let runtime = runtime(CodecKind::ZeroCopy);
            let done = runtime.block_on(with_timeout("a child", future));
            runtime.shutdown_background();
            done
        };
        scope.spawn(run).join().unwrap()
    })
}

/// Connects and calls in a child, and checks the path.
async fn own_calls(fabric: Fabric, at: SocketAddr) {
    let endpoint = client::endpoint(fabric, at, &Context::builder().build());
    let channel = connect(&endpoint, fabric, at).await;
    let path = path_of(&channel);
    assert!(path.starts_with(own_path(fabric)), "{path}");
    for size in SIZES {
        echo_one(client_of(channel.clone()), size).await.unwrap();
    }
}

/// Forks a child of a handler, which calls the server that it is a copy of.
pub fn of_a_handler(fabric: Fabric, at: SocketAddr) -> Child {
    fork(|| run(own_calls(fabric, at))).unwrap()
}

/// Returns the outcome of a child's call over its parent's channel.
async fn inherited_call(channel: AnyChannel) -> String {
    match tokio::time::timeout(A_WHILE, echo_one(client_of(channel), 10)).await {
        Err(_) => "waits".to_owned(),
        Ok(Ok(())) => "succeeds".to_owned(),
        Ok(Err(status)) => format!("{:?}: {}", status.code(), status.message()),
    }
}

/// Executes the command `fork` in a client's process, and returns the answer.
pub async fn answer(here: Here, what: &str) -> String {
    let Here { fabric, at, .. } = here;
    match what {
        "own" => {
            let child = fork(|| run(own_calls(fabric, at))).unwrap();
            let well = tokio::task::spawn_blocking(|| child.wait().unwrap()).await.unwrap();
            if well { "ok".to_owned() } else { "the child failed".to_owned() }
        }
        "inherited" => {
            let (mut read, write) = std::io::pipe().unwrap();
            let channel = here.channel.clone();
            let child = fork(|| {
                let end = run(inherited_call(channel));
                (&write).write_all(end.as_bytes()).unwrap();
            });
            drop(write);
            let said = tokio::task::spawn_blocking(move || {
                let mut said = String::new();
                read.read_to_string(&mut said).unwrap();
                assert!(child.unwrap().wait().unwrap());
                said
            });
            said.await.unwrap()
        }
        "orphan" => {
            let parent = std::process::id();
            let orphan = fork(|| {
                drop(here.channel);
                while std::os::unix::process::parent_id() == parent {
                    std::thread::sleep(Duration::from_millis(5));
                }
                run(own_calls(fabric, at));
                (&std::io::stdout()).write_all(b"the orphan is well\n").unwrap();
            });
            orphan.unwrap().id().to_string()
        }
        _ => panic!("no fork: {what}"),
    }
}

async fn ends(fabric: Fabric) -> (Server, Client) {
    let server = Server::start(fabric, "", "").await;
    let mut client = Client::start(&server, fabric, "", "").await;
    client.is_on_its_path().await;
    client.echo(&SIZES).await;
    (server, client)
}

/// Checks that the parent's calls continue on its connection.
async fn assert_unharmed(fabric: Fabric, client: &mut Client) {
    client.is_on_its_path().await;
    client.echo(&SIZES).await;
    let [_, over_tcp, lost] = client.counts().await;
    assert_eq!((over_tcp > 0, lost), (fabric == Fabric::Tcp, 0));
}

pub async fn a_child_with_its_own_channel(fabric: Fabric) {
    let (_server, mut client) = ends(fabric).await;
    for _ in 0..3 {
        client.does("fork own").await;
        assert_unharmed(fabric, &mut client).await;
    }
}

pub async fn a_child_with_its_parents_channel(fabric: Fabric) {
    let (_server, mut client) = ends(fabric).await;
    for _ in 0..3 {
        let end = client.ask("fork inherited").await;
        match fabric {
            // The threads that would carry the call belong to the parent.
            Fabric::Stock => assert_eq!(end, "waits"),
            _ => assert!(end.starts_with("Unavailable: ") && end.contains("fork"), "{end}"),
        }
        assert_unharmed(fabric, &mut client).await;
    }
}

pub async fn a_child_of_a_handler(fabric: Fabric) {
    let (mut server, mut client) = ends(fabric).await;
    for _ in 0..3 {
        client.does(&format!("act {ACT} fork")).await;
        assert_eq!(server.process.read_line().await, "child: true");
        assert_unharmed(fabric, &mut client).await;
    }
}

pub async fn a_child_that_outlives_its_parent(fabric: Fabric) {
    let (server, mut client) = ends(fabric).await;
    let orphan = client.ask("fork orphan").await;
    assert!(orphan.parse::<u32>().is_ok(), "{orphan}");
    signal(&client.process, "KILL");
    assert_eq!(client.process.read_line().await, "the orphan is well");
    // The server has lost no other connection.
    let mut other = Client::start(&server, fabric, "", "").await;
    other.echo(&SIZES).await;
    other.is_on_its_path().await;
}
