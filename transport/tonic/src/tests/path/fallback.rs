//! The fallback to TCP, its reason, and the one log line about it.

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tonic::{Code, Status};

use crate::path::policy::EnvSettings;
use crate::tests::support::echo::{Client, Echo};
use crate::tests::support::logs::Logs;
use crate::tests::support::world::{Serving, World, endpoint, stock};
use crate::{Channel, Context, Endpoint, Path, Policy, PoolConfig, ReasonCode, Side};

async fn reason(world: &World, serving: &Serving) -> crate::Reason {
    let channel = world.endpoint(serving).connect().await.unwrap();
    Client::new(channel.clone()).all_kinds().await;
    assert_eq!(channel.stats().calls_fast, 0);
    channel.path().reason.unwrap()
}

#[tokio::test]
async fn the_servers_reason_is_told_as_the_peers() {
    let world = World::new();
    let serving = Serving::start(world.builder().policy(Policy::Off).add_service(Echo)).await;
    let off = reason(&world, &serving).await;
    assert_eq!((off.code(), off.side()), (ReasonCode::Policy, Side::Peer));

    world.server.remove();
    let serving = world.serve().await;
    let gone = reason(&world, &serving).await;
    assert_eq!((gone.code(), gone.side()), (ReasonCode::NoDevice, Side::Peer));
    assert!(gone.to_string().starts_with("peer: no-device: "), "{gone}");
}

#[tokio::test]
async fn a_reason_of_this_end_comes_first_and_spares_the_server() {
    let world = World::new();
    let serving = world.serve().await;
    world.client.fail_registrations(0, u64::MAX);
    let memlock = reason(&world, &serving).await;
    assert_eq!((memlock.code(), memlock.side()), (ReasonCode::Memlock, Side::Local), "{memlock}");

    let tiny =
        Context::builder().pool(PoolConfig::default().total(1)).sim(world.client.clone()).build();
    let channel = endpoint(serving.addr).context(tiny).connect().await.unwrap();
    let reason = channel.path().reason.unwrap();
    assert_eq!(
        (reason.code(), reason.side()),
        (ReasonCode::PoolExhausted, Side::Local),
        "{reason}"
    );
}

#[tokio::test]
async fn require_rdma_is_an_error_with_the_reason() {
    let world = World::new();
    let serving = stock().await;
    let required = world.endpoint(&serving).require_rdma(true);
    let error = required.connect().await.unwrap_err();
    assert_eq!(crate::Reason::of(&error).unwrap().code(), ReasonCode::PeerNotCapable);
    assert!(error.source().unwrap().to_string().contains("tonic_rdma::Server"), "names the cure");

    let mut client = Client::new(required.connect_lazy());
    for _ in 0..2 {
        let status = client.say("hello").await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.message().contains("peer-not-capable"), "{status}");
    }
}

#[tokio::test]
async fn connect_does_not_wait_longer_than_it_is_told() {
    let world = World::new();
    let serving = world.serve().await;
    world.server.lose_connects(true);
    let short = world.endpoint(&serving).fast_path_timeout(Duration::from_millis(50));
    let channel = short.connect().await.unwrap();
    let reason = channel.path().reason.unwrap();
    assert_eq!(reason.code(), ReasonCode::HandshakeTimeout);
    assert!(reason.detail().contains("50 ms; still trying"), "{reason}");
    Client::new(channel).all_kinds().await;
    let error = short.require_rdma(true).connect().await.unwrap_err();
    assert_eq!(crate::Reason::of(&error).unwrap().code(), ReasonCode::HandshakeTimeout);
}

#[tokio::test]
async fn the_upgrade_goes_on_behind() {
    let world = World::new();
    let serving = world.serve().await;
    let go = Arc::new(tokio::sync::Notify::new());
    let hook = {
        let go = go.clone();
        move |metadata| {
            let go = go.clone();
            async move {
                go.notified().await;
                Ok(metadata)
            }
        }
    };
    let endpoint = world.endpoint(&serving).offer_metadata(hook);
    let mut channel =
        endpoint.fast_path_timeout(Duration::from_millis(20)).connect().await.unwrap();
    assert_eq!(channel.path().path, Path::Tcp);
    go.notify_one();
    assert_eq!(channel.path_changed().await.path, Path::Sim);
    Client::new(channel).all_kinds().await;
}

#[tokio::test]
async fn a_lost_link_is_replaced_and_calls_go_on_meanwhile() {
    let world = World::new();
    let serving = world.serve().await;
    let shut = Arc::new(AtomicBool::new(false));
    let hook = {
        let shut = shut.clone();
        move |metadata| {
            let shut = shut.load(Ordering::Relaxed);
            async move { if shut { Err(Status::unavailable("not now")) } else { Ok(metadata) } }
        }
    };
    world.client.kill_links_after(Some(20));
    let mut channel = world.endpoint(&serving).offer_metadata(hook).connect().await.unwrap();
    assert_eq!(channel.path().path, Path::Sim);
    world.client.kill_links_after(None);
    shut.store(true, Ordering::Relaxed);

    let mut client = Client::new(channel.clone());
    let mut lost = 0;
    while channel.path().path == Path::Sim {
        if let Err(status) = client.say("hello").await {
            assert_eq!(status.code(), Code::Unavailable, "{status}");
            lost += 1;
        }
        tokio::task::yield_now().await;
    }
    assert!(lost <= 1, "one call at a time was in flight, {lost} were lost");
    let down = channel.path_changed().await.reason.unwrap();
    assert!(matches!(down.code(), ReasonCode::LinkLost | ReasonCode::HandshakeRejected), "{down}");
    let who = client.who().await.unwrap();
    assert!(who.starts_with("path=tcp "), "{who}");

    shut.store(false, Ordering::Relaxed);
    while channel.path_changed().await.path != Path::Sim {}
    let who = client.who().await.unwrap();
    assert!(who.starts_with("path=sim "), "{who}");
}

#[tokio::test]
async fn bad_environment_fails_calls_of_a_lazy_channel_by_name() {
    let world = World::new();
    let serving = world.serve().await;
    let bad = EnvSettings::from_lookup(|name| (name == "TONIC_RDMA").then(|| "maybe".into()));
    let endpoint = world.endpoint(&serving);
    let channel = Channel::lazy(endpoint.connect_tcp_lazy(), &endpoint, bad.clone());
    let status = Client::new(channel.clone()).say("hello").await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("TONIC_RDMA=\"maybe\""), "{status}");
    assert_eq!(channel.stats().calls_tcp, 0);

    let off =
        EnvSettings::from_lookup(|name| (name == "TONIC_RDMA").then(|| "off".into())).unwrap();
    let tcp = endpoint.connect_tcp().await.unwrap();
    let channel = Channel::establish(tcp, &endpoint, off).await.unwrap();
    assert_eq!(channel.path().reason.unwrap().to_string(), "policy: TONIC_RDMA=off");
}

#[tokio::test]
async fn a_server_that_is_not_there() {
    let world = World::new();
    let addr = {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap()
    };
    let endpoint = endpoint(addr).context(world.client_context.clone());
    let error = endpoint.connect().await.unwrap_err();
    assert!(crate::Cause::of(&error).is_none());
    let stock = tonic::transport::Endpoint::from_shared(format!("http://{addr}")).unwrap();
    let expected = Status::from_error(Box::new(stock.connect().await.unwrap_err()));
    assert_eq!(Status::from_error(Box::new(error)).code(), expected.code());

    let mut client = Client::new(endpoint.connect_lazy());
    assert_eq!(client.say("hello").await.unwrap_err().code(), Code::Unavailable);
}

#[tokio::test]
async fn each_decision_is_logged_once_with_reason_and_cure() {
    let logs = Logs::capture();
    let world = World::new();
    let serving = stock().await;
    let channel = world.endpoint(&serving).connect().await.unwrap();
    Client::new(channel).all_kinds().await;
    let lines = logs.lines_with("calls go over TCP");
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(
        lines[0].contains("WARN") && lines[0].contains("code=\"peer-not-capable\""),
        "{lines:?}"
    );
    assert!(lines[0].contains("cure="), "{lines:?}");

    // Uses a name that no other test uses, because the process remembers which origins it has
    // reported. A program that connects for each call gets one line.
    let serving = world.serve().await;
    let origin = format!("http://localhost:{}", serving.addr.port());
    for _ in 0..3 {
        let endpoint = Endpoint::from_shared(origin.clone()).unwrap();
        let channel = endpoint.context(world.client_context.clone()).connect().await.unwrap();
        assert_eq!(channel.path().path, Path::Sim, "{}", channel.path());
        Client::new(channel).all_kinds().await;
    }
    let lines = logs.lines_with("calls go over the fast path");
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("INFO") && lines[0].contains("device=sim-client"), "{lines:?}");
}

#[tokio::test]
async fn nothing_is_left_running_when_the_last_clone_is_dropped() {
    let world = World::new();
    let serving = world.serve().await;
    // Connect once first, because the first connection creates objects that exist once per process.
    drop(world.connect(&serving).await);
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let settled = |limit: usize| async move {
        while tasks() > limit {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    // The tasks of an idle server: its accept loop, its fast path, and the fast path's listener.
    let idle = 3;
    settled(idle).await;
    for endpoint in [world.endpoint(&serving), world.endpoint(&serving).policy(Policy::Off)] {
        let channel = endpoint.connect().await.unwrap();
        Client::new(channel.clone()).all_kinds().await;
        assert!(tasks() > idle);
        drop(channel);
        settled(idle).await;
    }
}
