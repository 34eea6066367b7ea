//! The list of real channels and servers, over TCP and shared memory.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::service::interceptor::InterceptedService;
use tonic::{Code, Request, Status};
use tonic_rdma::server::TcpIncoming;
use tonic_rdma::{Channel, Endpoint, FabricKind, Path, Policy, Server};
use tonic_rdma_channelz::pb::channelz_client::ChannelzClient;
use tonic_rdma_channelz::pb::channelz_server::Channelz as _;
use tonic_rdma_channelz::pb::{self, Role};
use tonic_rdma_channelz::{Channelz, MAX_RESULTS};
use tonic_rdma_example_services::Hello;
use tonic_rdma_example_services::greeter::HelloRequest;
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
use tonic_rdma_example_services::greeter::greeter_server::GreeterServer;

type Client = ChannelzClient<Channel>;

/// A server of the greeter that lists itself as "public".
struct Serving {
    addr: SocketAddr,
    channelz: Channelz,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), tonic_rdma::Error>>,
}

impl Serving {
    async fn start() -> Serving {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (addr, channelz) = (listener.local_addr().unwrap(), Channelz::new());
        let (stop, stopped) = oneshot::channel::<()>();
        let mut builder = Server::builder().fabrics([FabricKind::Shm]);
        channelz.add_server("public", &builder);
        let router = builder.add_service(GreeterServer::new(Hello)).add_service(channelz.service());
        let task = tokio::spawn(async move {
            let stopped = async move { drop(stopped.await) };
            router.serve_with_incoming_shutdown(TcpIncoming::from(listener), stopped).await
        });
        Serving { addr, channelz, stop, task }
    }

    async fn connect(&self, policy: Policy) -> Channel {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.addr)).unwrap();
        endpoint.fabrics([FabricKind::Shm]).policy(policy).connect().await.unwrap()
    }
}

async fn greet(channel: &Channel) {
    let request = HelloRequest { name: "world".into() };
    GreeterClient::new(channel.clone()).say_hello(request).await.unwrap();
}

/// All owners, in pages of `max_results`.
async fn owners(client: &mut Client, max_results: u32) -> Vec<pb::Owner> {
    let mut all = Vec::<pb::Owner>::new();
    loop {
        let after = all.last().map_or(0, |owner| owner.id);
        let request = pb::ListOwnersRequest { after, max_results };
        let page = client.list_owners(request).await.unwrap().into_inner();
        assert!(page.end || !page.owners.is_empty());
        all.extend(page.owners);
        if page.end {
            return all;
        }
    }
}

/// All connections of an owner, in pages of `max_results`, and the number of pages.
async fn connections(
    client: &mut Client,
    owner: u64,
    max_results: u32,
) -> (Vec<pb::Connection>, usize) {
    let (mut all, mut pages) = (Vec::<pb::Connection>::new(), 0);
    loop {
        let after = all.last().map_or(0, |connection| connection.id);
        let request = pb::ListConnectionsRequest { owner, after, max_results };
        let page = client.list_connections(request).await.unwrap().into_inner();
        assert!(page.end || !page.connections.is_empty());
        all.extend(page.connections);
        pages += 1;
        if page.end {
            return (all, pages);
        }
    }
}

#[tokio::test]
async fn channels_and_servers_are_listed_as_they_are() {
    let serving = Serving::start().await;
    let (fast, tcp) = (serving.connect(Policy::Require).await, serving.connect(Policy::Off).await);
    serving.channelz.add_channel("fast", &fast);
    serving.channelz.add_channel("slow\n", &tcp);
    greet(&fast).await;
    greet(&tcp).await;
    // The list itself is read over both paths.
    for reader in [&fast, &tcp] {
        let mut client = Client::new(reader.clone());
        let list = owners(&mut client, 1).await;
        let shown: Vec<_> = list.iter().map(|o| (o.role(), &*o.name, &*o.path)).collect();
        assert_eq!(
            shown,
            [
                (Role::Server, "public", ""),
                (Role::Channel, "fast", "shm"),
                (Role::Channel, "slow\n", "tcp")
            ]
        );
        assert!(list[0].reason.is_none() && list[1].reason.is_none());
        let (reason, expected) = (list[2].reason.as_ref().unwrap(), tcp.path().reason.unwrap());
        assert_eq!((&*reason.code, &*reason.detail), (expected.code().as_str(), expected.detail()));
        assert_eq!(reason.cure, expected.cure());
        assert!(list[0].calls_fast >= 1 && list[0].calls_tcp >= 1 && list[0].connections == 1);
        assert_eq!(list[2].calls_fast, 0);

        let (of_fast, _) = connections(&mut client, list[1].id, 0).await;
        let own = &fast.connections()[0];
        assert_eq!((of_fast.len(), of_fast[0].id, &*of_fast[0].path), (1, own.id, "shm"));
        assert_eq!(of_fast[0].peer_pid, Some(std::process::id()));
        let usage = of_fast[0].usage.unwrap();
        assert!(usage.calls >= 1 && usage.credits > 0 && usage.control_memory > 0, "{usage:?}");
        assert!(usage.bytes_sent > 0 && usage.bytes_received > 0);
        assert!(connections(&mut client, list[2].id, 0).await.0.is_empty());

        let (of_server, pages) = connections(&mut client, list[0].id, 2).await;
        assert_eq!(pages, 2);
        let mut shown: Vec<_> =
            of_server.iter().map(|c| (&*c.path, c.asked, c.usage.is_some())).collect();
        shown.sort_unstable();
        assert_eq!(shown, [("shm", true, true), ("tcp", false, false), ("tcp", true, false)]);
    }
    let mut client = Client::new(fast.clone());
    let age = |list: &[pb::Connection]| list[0].age_ms;
    let owner = owners(&mut client, 0).await[1].id;
    let before = age(&connections(&mut client, owner, 0).await.0);
    tokio::time::sleep(Duration::from_millis(30)).await;
    assert!(age(&connections(&mut client, owner, 0).await.0) >= before + 30);
    assert_eq!(fast.path().path, Path::Shm);
}

#[tokio::test]
async fn what_has_ended_is_not_listed() {
    let serving = Serving::start().await;
    let other = Serving::start().await;
    let channel = serving.connect(Policy::Require).await;
    other.channelz.add_channel("short-lived", &channel);
    let mut client = Client::new(other.connect(Policy::Off).await);
    let owner = owners(&mut client, 0).await[1].id;
    assert_eq!(connections(&mut client, owner, 0).await.0.len(), 1);
    drop(channel);
    while owners(&mut client, 0).await.len() > 1 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let request = pb::ListConnectionsRequest { owner, after: 0, max_results: 0 };
    let gone = client.list_connections(request).await.unwrap_err();
    assert_eq!(gone.code(), Code::NotFound);
    // An entry does not keep a server that has ended.
    let ended = Serving::start().await;
    ended.stop.send(()).unwrap();
    ended.task.await.unwrap().unwrap();
    let request = Request::new(pb::ListOwnersRequest::default());
    let left = ended.channelz.list_owners(request).await.unwrap().into_inner();
    assert!(left.owners.is_empty() && left.end, "{left:?}");
}

/// Connections that carry no call are listed like others, in pages of at most the requested length.
#[tokio::test]
async fn many_connections_come_in_pages() {
    let serving = Serving::start().await;
    let mut client = Client::new(serving.connect(Policy::Off).await);
    let owner = owners(&mut client, 0).await[0].id;
    let mut silent = Vec::new();
    for _ in 0..250 {
        silent.push(TcpStream::connect(serving.addr).await.unwrap());
    }
    let count = async |client: &mut Client, max_results| {
        let (all, pages) = connections(client, owner, max_results).await;
        assert!(all.is_sorted_by(|a, b| a.id < b.id));
        (all.len(), pages)
    };
    while count(&mut client, 0).await.0 < 251 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(count(&mut client, 0).await, (251, 3));
    assert_eq!(count(&mut client, 7).await, (251, 36));
    assert_eq!(count(&mut client, MAX_RESULTS).await, (251, 1));
    assert_eq!(count(&mut client, u32::MAX).await, (251, 1));
    silent.truncate(2);
    while count(&mut client, 0).await.0 > 3 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // An unknown owner is an error. An `after` beyond all ids gets the last page.
    for (owner, expected) in [(0, None), (u64::MAX, None), (owner, Some(true))] {
        let request = pb::ListConnectionsRequest { owner, after: u64::MAX, max_results: u32::MAX };
        let answer = client.list_connections(request).await;
        assert_eq!(answer.ok().map(|answer| answer.into_inner().end), expected);
    }
}

#[tokio::test]
async fn a_program_that_does_not_add_the_service_has_none() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let mut builder = Server::builder().policy(Policy::Off);
    // Adding an entry does not add the service.
    Channelz::new().add_server("public", &builder);
    let router = builder.add_service(GreeterServer::new(Hello));
    tokio::spawn(router.serve_with_incoming(TcpIncoming::from(listener)));
    let channel = Endpoint::from_shared(format!("http://{addr}")).unwrap().connect().await.unwrap();
    let error = Client::new(channel).list_owners(pb::ListOwnersRequest::default()).await;
    assert_eq!(error.unwrap_err().code(), Code::Unimplemented);
}

#[tokio::test]
async fn an_interceptor_keeps_the_list_from_strangers() {
    fn operators_only(request: Request<()>) -> Result<Request<()>, Status> {
        match request.metadata().get("authorization") {
            Some(token) if token == "Bearer secret" => Ok(request),
            _ => Err(Status::unauthenticated("for operators only")),
        }
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let mut builder = Server::builder().fabrics([FabricKind::Shm]);
    let channelz = Channelz::new();
    channelz.add_server("public", &builder);
    let service = InterceptedService::new(channelz.service(), operators_only);
    tokio::spawn(builder.add_service(service).serve_with_incoming(TcpIncoming::from(listener)));
    for policy in [Policy::Off, Policy::Require] {
        let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
        let endpoint = endpoint.fabrics([FabricKind::Shm]).policy(policy);
        let mut client = Client::new(endpoint.connect().await.unwrap());
        let refused = client.list_owners(pb::ListOwnersRequest::default()).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated);
        let request = pb::ListConnectionsRequest { owner: 1, after: 0, max_results: 0 };
        let refused = client.list_connections(request).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated);
        let mut request = Request::new(pb::ListOwnersRequest::default());
        request.metadata_mut().insert("authorization", "Bearer secret".parse().unwrap());
        assert_eq!(client.list_owners(request).await.unwrap().into_inner().owners.len(), 1);
    }
}
