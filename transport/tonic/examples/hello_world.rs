//! Hello world in both directions: a client and a server of tonic-rdma, and each of them with stock
//! tonic at the other end.
//!
//! `cargo run -p tonic-rdma --example hello_world` runs everything in one process. To run it as two
//! processes, on one host or on hosts with an RDMA network between them:
//!
//! ```text
//! hello_world server 10.0.0.1:50051
//! hello_world client http://10.0.0.1:50051
//! ```

use std::error::Error;

use tonic::transport::server::TcpIncoming;
use tonic_rdma::{Channel, Endpoint, Server}; // was: tonic::transport::{...}
use tonic_rdma_example_services::Hello;
use tonic_rdma_example_services::greeter::HelloRequest;
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
use tonic_rdma_example_services::greeter::greeter_server::GreeterServer;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["server", addr] => {
            Server::builder().add_service(GreeterServer::new(Hello)).serve(addr.parse()?).await?;
            Ok(())
        }
        ["client", url] => call(Endpoint::from_shared(url.to_owned())?.connect().await?).await,
        [] => both_ways().await,
        _ => Err("usage: hello_world [server IP:PORT | client URL]".into()),
    }
}

async fn both_ways() -> Result<(), Box<dyn Error>> {
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse()?)?;
    let ours = format!("http://{}", incoming.local_addr()?);
    let router = Server::builder().add_service(GreeterServer::new(Hello));
    tokio::spawn(router.serve_with_incoming(incoming));

    let incoming = TcpIncoming::bind("127.0.0.1:0".parse()?)?;
    let stock = format!("http://{}", incoming.local_addr()?);
    let router = tonic::transport::Server::builder().add_service(GreeterServer::new(Hello));
    tokio::spawn(router.serve_with_incoming(incoming));

    println!("tonic-rdma to tonic-rdma:");
    call(Endpoint::from_shared(ours.clone())?.connect().await?).await?;

    println!("tonic-rdma to stock tonic:");
    call(Endpoint::from_shared(stock)?.connect().await?).await?;

    println!("stock tonic to tonic-rdma:");
    let channel = tonic::transport::Endpoint::from_shared(ours)?.connect().await?;
    let request = HelloRequest { name: "world".into() };
    let reply = GreeterClient::new(channel).say_hello(request).await?.into_inner();
    println!("  {}", reply.message);
    Ok(())
}

async fn call(channel: Channel) -> Result<(), Box<dyn Error>> {
    // Prints the path, or TCP and the reason for it.
    println!("  calls go by {}", channel.path());
    let request = HelloRequest { name: "world".into() };
    let reply = GreeterClient::new(channel).say_hello(request).await?.into_inner();
    println!("  {}", reply.message);
    Ok(())
}
