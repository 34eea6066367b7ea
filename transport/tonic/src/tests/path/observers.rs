//! The lists of channels and connections for operators.

use std::time::Duration;

use crate::tests::support::echo::{Client, Echo};
use crate::tests::support::world::{Serving, World, endpoint, stock};
use crate::{Channel, ConnectionInfo, Path, Policy, ReasonCode, Server, ServerObserver};

/// All connections of a server, in pages of `most`.
fn pages(observer: &ServerObserver, most: usize) -> Vec<ConnectionInfo> {
    let mut all: Vec<ConnectionInfo> = Vec::new();
    loop {
        let after = all.last().map_or(0, |info| info.id);
        let page = observer.connections(after, most).unwrap();
        assert!(page.len() <= most);
        let is_last = page.len() < most;
        all.extend(page);
        if is_last {
            return all;
        }
    }
}

fn fast(all: &[ConnectionInfo]) -> Vec<&ConnectionInfo> {
    all.iter().filter(|info| info.path.is_fast()).collect()
}

/// Waits until a server has this many connections on the fast path and on TCP.
async fn until(observer: &ServerObserver, expected: (usize, usize)) {
    let counts = || {
        let all = pages(observer, 100);
        (fast(&all).len(), all.len() - fast(&all).len())
    };
    for _ in 0..2000 {
        if counts() == expected {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{:?} instead of {expected:?} connections", counts());
}

#[tokio::test]
async fn both_ends_list_a_connection_with_the_same_numbers() {
    let world = World::new();
    let mut builder = world.builder();
    let observer = builder.observer();
    let serving = Serving::start(builder.add_service(Echo)).await;
    let channel = world.connect(&serving).await;
    let mut client = Client::new(channel.clone());
    client.all_kinds().await;
    client.say(&"x".repeat(1 << 20)).await.unwrap();
    // An end may learn a little later than the caller that a call has ended.
    let is_idle = |info: &ConnectionInfo| info.usage.is_none_or(|u| u.calls_in_flight == 0);
    while !(channel.connections().iter().all(is_idle) && pages(&observer, 9).iter().all(is_idle)) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }

    let ours = channel.connections();
    let [own] = &ours[..] else { panic!("{ours:?}") };
    let (path, stats) = (channel.path(), channel.stats());
    assert_eq!((own.path, &own.device, own.local_addr), (path.path, &path.device, path.local_addr));
    assert_eq!((own.remote_addr, own.peer_pid), (path.remote_addr, None));
    assert_eq!((own.asked, &own.reason), (true, &None));
    let usage = own.usage.unwrap();
    assert_eq!((usage.calls, usage.calls_in_flight), (stats.calls_fast, 0));
    assert_eq!(
        (usage.bytes_sent, usage.bytes_received),
        (
            stats.bytes_sent_write + stats.bytes_sent_send,
            stats.bytes_received_write + stats.bytes_received_send
        )
    );
    assert!(usage.bytes_sent > 1 << 20 && usage.credits > 0 && usage.peer_credits > 0);
    assert!(usage.control_memory > 0 && usage.landing_memory > 0, "{usage:?}");

    // The list has the server's end, and the TCP connection over which the client has asked.
    let all = pages(&observer, 1);
    assert_eq!(all.len(), 2, "{all:?}");
    let tcp = all.iter().find(|info| info.path == Path::Tcp).unwrap();
    assert_eq!((tcp.asked, &tcp.reason, tcp.usage), (true, &None, None));
    assert!(tcp.remote_addr.unwrap().ip().is_loopback());
    let theirs = fast(&all)[0];
    assert_eq!((theirs.remote_addr, theirs.local_addr), (own.local_addr, own.remote_addr));
    let served = theirs.usage.unwrap();
    assert_eq!((served.calls, served.calls_in_flight), (usage.calls, 0));
    assert_eq!(
        (served.bytes_received, served.bytes_sent),
        (usage.bytes_sent, usage.bytes_received)
    );
    assert!(theirs.id > tcp.id && own.id != theirs.id);

    tokio::time::sleep(Duration::from_millis(20)).await;
    let later = channel.connections()[0].age;
    assert!(later >= own.age + Duration::from_millis(20), "{later:?} after {:?}", own.age);
}

#[tokio::test]
async fn a_call_in_flight_is_counted_and_takes_no_connection_from_the_list() {
    let world = World::new();
    let mut builder = world.builder();
    let observer = builder.observer();
    let serving = Serving::start(builder.add_service(Echo)).await;
    let channel = world.connect(&serving).await;
    let mut client = Client::new(channel.clone());
    // This call gets no answer.
    let call = tokio::spawn(async move { client.say("zzz").await });
    let in_flight = || channel.connections()[0].usage.unwrap().calls_in_flight;
    while in_flight() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(in_flight(), 1);
    while fast(&pages(&observer, 10))[0].usage.unwrap().calls_in_flight == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    call.abort();
    while in_flight() == 1 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn what_has_ended_is_not_listed_and_an_observer_keeps_nothing() {
    let world = World::new();
    let mut builder = world.builder();
    let observer = builder.observer();
    let mut serving = Serving::start(builder.add_service(Echo)).await;
    drop(builder);
    let (first, second) = (world.connect(&serving).await, world.connect(&serving).await);
    until(&observer, (2, 2)).await;
    let watch = first.observer();
    assert_eq!(watch.path().unwrap(), first.path());
    assert_eq!(watch.stats().unwrap(), first.stats());
    assert_eq!(watch.connections().unwrap().len(), 1);
    drop(first);
    until(&observer, (1, 1)).await;
    assert_eq!((watch.path(), watch.stats(), watch.connections()), (None, None, None));
    let after = second.connections()[0].id;
    serving.stop();
    serving.ended().await.unwrap();
    assert_eq!((observer.connections(0, 10), observer.stats()), (None, None));
    while second.path().path.is_fast() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(second.connections().is_empty(), "{after}");
}

#[tokio::test]
async fn a_tcp_connection_tells_whether_and_why_its_client_has_no_fast_path() {
    let world = World::new();
    let mut builder = world.builder().policy(Policy::Off);
    let observer = builder.observer();
    let serving = Serving::start(builder.add_service(Echo)).await;
    let channel = world.endpoint(&serving).connect().await.unwrap();
    assert!(channel.connections().is_empty());
    until(&observer, (0, 1)).await;
    let asked = &pages(&observer, 10)[0];
    assert!(asked.asked);
    assert_eq!(asked.reason.as_ref().unwrap().code(), ReasonCode::Policy);
    let plain = endpoint(serving.addr).policy(Policy::Off).connect().await.unwrap();
    Client::new(plain.clone()).say("hello").await.unwrap();
    until(&observer, (0, 2)).await;
    let all = pages(&observer, 10);
    assert_eq!((all[1].asked, &all[1].reason), (false, &None));
    // A stock server lists nothing, and a channel to it has only tonic's connection.
    let stock = stock().await;
    assert!(world.endpoint(&stock).connect().await.unwrap().connections().is_empty());
}

#[tokio::test]
async fn pages_give_each_connection_once_in_order() {
    let world = World::new();
    let mut builder = world.builder();
    let observer = builder.observer();
    let serving = Serving::start(builder.add_service(Echo)).await;
    let mut channels = Vec::new();
    for _ in 0..7 {
        channels.push(world.connect(&serving).await);
    }
    until(&observer, (7, 7)).await;
    let ids = |all: &[ConnectionInfo]| all.iter().map(|info| info.id).collect::<Vec<_>>();
    let all = ids(&pages(&observer, 100));
    assert!(all.is_sorted_by(|a, b| a < b), "{all:?}");
    for most in [1, 2, 3, 5, 13, 14, 15] {
        assert_eq!(ids(&pages(&observer, most)), all, "pages of {most}");
    }
    assert_eq!(observer.connections(0, 0).unwrap(), []);
    assert_eq!(observer.connections(u64::MAX, 10).unwrap(), []);
    assert_eq!(observer.connections(all[3], usize::MAX).unwrap().len(), 10);
}

#[tokio::test]
async fn a_balanced_channel_lists_the_connections_of_all_endpoints() {
    let world = World::new();
    let (a, b) = (world.serve().await, world.serve().await);
    let channel = Channel::balance_list([world.endpoint(&a), world.endpoint(&b)].into_iter());
    let watch = channel.observer();
    let mut client = Client::new(channel.clone());
    while channel.connections().len() < 2 {
        client.say("hello").await.unwrap();
    }
    assert_eq!(watch.connections().unwrap().len(), 2);
    assert!(watch.stats().unwrap().calls_tcp + watch.stats().unwrap().calls_fast > 0);
    drop((client, channel));
    while watch.connections().is_some() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The list is read all the time while connections come, go and are lost.
#[tokio::test(flavor = "multi_thread")]
async fn reading_the_list_hinders_no_connection_that_comes_or_goes() {
    let world = World::new();
    let mut builder = Server::builder().context(world.server_context.clone());
    let observer = builder.observer();
    let serving = Serving::start(builder.add_service(Echo)).await;
    let (stop, mut stopped) = tokio::sync::oneshot::channel::<()>();
    let reader = {
        let observer = observer.clone();
        tokio::task::spawn_blocking(move || {
            let mut reads = 0;
            while stopped.try_recv().is_err() {
                pages(&observer, 3);
                reads += 1;
            }
            reads
        })
    };
    for round in 0..20 {
        let channel = world.connect(&serving).await;
        let call = Client::new(channel.clone()).say("hello").await;
        assert_eq!(call.unwrap(), "hello");
        channel.connections();
        if round % 2 == 0 {
            // The call is given up together with its channel.
            let mut client = Client::new(channel);
            let call = client.say("zzz");
            assert!(tokio::time::timeout(Duration::from_millis(5), call).await.is_err());
        }
    }
    until(&observer, (0, 0)).await;
    stop.send(()).unwrap();
    assert!(reader.await.unwrap() > 0);
}
