//! A process that is out of descriptors, and so makes no landing memory. In a binary of its own,
//! because the limit is the process's.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::os::fd::AsRawFd;
use std::time::Duration;

use bytes::Bytes;
use common::{Blob, Blobs, Client, Fabric, LIMIT, Which, World};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tonic_rdma::{Path, Policy, ReasonCode};

/// Sets the soft limit on descriptors.
fn limit(current: Option<u64>) {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current, maximum }).unwrap();
}

/// The lowest number that no descriptor has: with it as the limit, none can be opened.
fn lowest_free() -> u64 {
    std::fs::File::open("/dev/null").unwrap().as_raw_fd() as u64
}

/// A long call ends as over TCP, though nobody has memory for it to land in. Those that follow take
/// TCP, with a reason that names the error and the cure, and come back once there are
/// descriptors.
#[tokio::test]
async fn long_calls_end_as_over_tcp_and_come_back() {
    let blobs = Blobs { codec: Which::Ours, seen: Default::default(), limit: LIMIT, forward: None };
    let serve = |server: tonic_rdma::Server| server;
    let connect = |endpoint: tonic_rdma::Endpoint| endpoint.policy(Policy::Auto);
    let world = World::set(Fabric::Shm, Fabric::Shm.hosts(64 << 20), blobs, serve, connect).await;
    let mut channel = world.channel.clone();
    let mut client = Client::new(channel.clone(), Which::Ours, LIMIT);
    let (short, long) = (Bytes::from(vec![7; 64]), Bytes::from(vec![9; 3 << 20]));
    // Its TCP connection is there before the limit is, as that of a channel that has made calls.
    assert_eq!(client.echo(Blob::of(short.clone())).await.unwrap().data, short);
    assert_eq!(channel.path().path, Path::Shm);
    let before = getrlimit(Resource::Nofile).current;
    limit(Some(lowest_free()));
    for data in [&long, &short, &long, &long] {
        let echoed = client.echo(Blob::of(data.clone())).await.unwrap();
        assert!(echoed.data == *data, "{} bytes", data.len());
    }
    let reason = channel.path().reason.expect("its calls take TCP");
    assert_eq!(reason.code(), ReasonCode::ProcessLimit, "{reason}");
    assert!(reason.detail().contains("os error 24"), "{reason}");
    assert!(reason.cure().contains("ulimit -n"), "{reason}");
    assert!(channel.stats().calls_tcp > 0, "{:?}", channel.stats());
    limit(before);
    let back = async {
        while channel.path().path != Path::Shm {
            channel.path_changed().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), back).await.expect("it does not come back");
    let calls = channel.stats().calls_tcp;
    assert!(client.echo(Blob::of(long.clone())).await.unwrap().data == long);
    assert_eq!(channel.stats().calls_tcp, calls);
}
