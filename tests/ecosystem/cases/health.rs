//! tonic-health, which Kubernetes and load balancers query.

use tokio_stream::StreamExt;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_rdma::Server;
use tonic_rdma_ecosystem_tests::Net;
use tonic_rdma_example_services::Hello;
use tonic_rdma_example_services::greeter::greeter_server::GreeterServer;

const GREETER: &str = "greeter.Greeter";

pub(crate) async fn is_checked_and_watched(net: Net) {
    let (reporter, service) = tonic_health::server::health_reporter();
    let (addr, incoming) = net.listen().await;
    let routes = Server::builder().add_service(service).add_service(GreeterServer::new(Hello));
    tokio::spawn(routes.serve_with_incoming(incoming));
    let mut client = HealthClient::new(net.connect(addr).await);
    let of = |service: &str| HealthCheckRequest { service: service.into() };
    let whole = client.check(of("")).await.unwrap().into_inner();
    assert_eq!(whole.status(), ServingStatus::Serving);
    assert_eq!(client.check(of(GREETER)).await.unwrap_err().code(), Code::NotFound);

    reporter.set_serving::<GreeterServer<Hello>>().await;
    let mut watch = client.watch(of(GREETER)).await.unwrap().into_inner();
    let mut next = async || watch.next().await.unwrap().unwrap().status();
    assert_eq!(next().await, ServingStatus::Serving);
    reporter.set_not_serving::<GreeterServer<Hello>>().await;
    assert_eq!(next().await, ServingStatus::NotServing);
    let now = client.check(of(GREETER)).await.unwrap().into_inner();
    assert_eq!(now.status(), ServingStatus::NotServing);
}
