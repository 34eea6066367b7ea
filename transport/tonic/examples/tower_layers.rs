//! Layers and interceptors need no change. At the server they see every call over either path, and
//! the Offer by which a client asks for the fast path. So a client without a token gets no ticket
//! either.
//!
//! `cargo run -p tonic-rdma --example tower_layers`

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tonic::service::InterceptorLayer;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Status};
use tonic_rdma::{Endpoint, Server};
use tonic_rdma_example_services::Hello;
use tonic_rdma_example_services::greeter::HelloRequest;
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
use tonic_rdma_example_services::greeter::greeter_server::GreeterServer;
use tower::ServiceBuilder;

/// The server's interceptor, which rejects calls without the token.
fn check(request: Request<()>) -> Result<Request<()>, Status> {
    match request.metadata().get("authorization") {
        Some(token) if token == "Bearer secret" => Ok(request),
        _ => Err(Status::unauthenticated("no valid token")),
    }
}

/// The client's interceptor, which adds the token.
fn bring(mut request: Request<()>) -> Result<Request<()>, Status> {
    let token = "Bearer secret".parse().map_err(|_| Status::internal("bad token"))?;
    request.metadata_mut().insert("authorization", token);
    Ok(request)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let calls = Arc::new(AtomicUsize::new(0));
    let count = calls.clone();
    let layer = ServiceBuilder::new()
        .map_request(move |request: http::Request<tonic::body::Body>| {
            if request.uri().path().starts_with("/greeter.Greeter/") {
                count.fetch_add(1, Ordering::Relaxed);
            }
            request
        })
        .timeout(Duration::from_secs(30))
        .layer(InterceptorLayer::new(check))
        .into_inner();
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse()?)?;
    let url = format!("http://{}", incoming.local_addr()?);
    let router = Server::builder().layer(layer).add_service(GreeterServer::new(Hello));
    tokio::spawn(router.serve_with_incoming(incoming));
    let request = || HelloRequest { name: "alice".into() };

    // Run the stub's interceptor on the Offer as well.
    let channel = Endpoint::from_shared(url.clone())?.offer_interceptor(bring).connect().await?;
    // The client's own layers wrap the channel, as they would wrap tonic's channel.
    let layered = ServiceBuilder::new()
        .concurrency_limit(16)
        .layer(InterceptorLayer::new(bring))
        .service(channel);
    let reply = GreeterClient::new(layered).say_hello(request()).await?;
    println!("with the token: {}", reply.into_inner().message);

    let channel = Endpoint::from_shared(url)?.connect().await?;
    let path = channel.path().path;
    match GreeterClient::new(channel).say_hello(request()).await {
        Ok(reply) => println!("without it: {}", reply.into_inner().message),
        Err(status) => println!("without it: {:?} by {path}", status.code()),
    }
    println!("the layer has seen {} calls", calls.load(Ordering::Relaxed));
    Ok(())
}
