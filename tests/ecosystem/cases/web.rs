//! tonic-web: browsers call over HTTP/1.1 at the address where others take the fast path.

use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tonic::body::Body;
use tonic_rdma::Server;
use tonic_rdma_ecosystem_tests::{Net, greet};
use tonic_rdma_example_services::Hello;
use tonic_rdma_example_services::greeter::HelloRequest;
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
use tonic_rdma_example_services::greeter::greeter_server::GreeterServer;
use tonic_web::{GrpcWebCall, GrpcWebClientLayer, GrpcWebLayer};
use tower::Layer;

pub(crate) async fn calls_by_http_1_beside_the_fast_path(net: Net) {
    let (addr, incoming) = net.listen().await;
    let mut server = Server::builder().accept_http1(true).layer(GrpcWebLayer::new());
    let routes = server.add_service(GreeterServer::new(Hello));
    tokio::spawn(routes.serve_with_incoming(incoming));
    let channel = net.connect(addr).await;
    assert_eq!(greet(channel.clone()).await.unwrap(), net.greeting());

    let http_1 = Client::builder(TokioExecutor::new()).build_http::<GrpcWebCall<Body>>();
    let web = GrpcWebClientLayer::new().layer(http_1);
    let mut browser = GreeterClient::with_origin(web, format!("http://{addr}").parse().unwrap());
    for _ in 0..3 {
        let reply = browser.say_hello(HelloRequest { name: "you".into() }).await.unwrap();
        assert_eq!(reply.into_inner().message, "hello you, you came by tcp");
        assert_eq!(greet(channel.clone()).await.unwrap(), net.greeting());
    }
}
