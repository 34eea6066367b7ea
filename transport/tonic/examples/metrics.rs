//! The output of an exporter for Prometheus. docs/metrics.md describes each metric.
//!
//! `cargo run -p tonic-rdma --example metrics`

use std::error::Error;

use metrics_exporter_prometheus::PrometheusBuilder;
use tonic::transport::server::TcpIncoming;
use tonic_rdma::{Context, Endpoint, Server};
use tonic_rdma_example_services::Hello;
use tonic_rdma_example_services::greeter::HelloRequest;
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
use tonic_rdma_example_services::greeter::greeter_server::GreeterServer;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // Install the recorder before the first channel or server. With its feature `http-listener`,
    // the exporter answers scrapes itself.
    let prometheus = PrometheusBuilder::new().install_recorder()?;
    tonic_rdma::metrics::describe();

    let incoming = TcpIncoming::bind("127.0.0.1:0".parse()?)?;
    let url = format!("http://{}", incoming.local_addr()?);
    let router = Server::builder().add_service(GreeterServer::new(Hello));
    tokio::spawn(router.serve_with_incoming(incoming));
    let channel = Endpoint::from_shared(url)?.connect().await?;
    let mut client = GreeterClient::new(channel);
    for _ in 0..100 {
        client.say_hello(HelloRequest { name: "world".into() }).await?;
    }

    // Call this before each scrape, because the metrics of pools are recorded only on request.
    Context::global().record_metrics().await;
    for line in prometheus.render().lines().filter(|line| !line.is_empty()) {
        println!("{line}");
    }
    Ok(())
}
