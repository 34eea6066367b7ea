//! Streams from the server, from the client, and in both directions. A stream takes one path from
//! its beginning to its end, and a slow reader delays only its own stream.
//!
//! `cargo run -p tonic-rdma --example streaming`

use std::error::Error;
use std::pin::Pin;

use tokio_stream::{Stream, StreamExt, iter};
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::{Endpoint, Server};
use tonic_rdma_example_services::numbers::Number;
use tonic_rdma_example_services::numbers::numbers_client::NumbersClient;
use tonic_rdma_example_services::numbers::numbers_server::{Numbers, NumbersServer};

/// The handler is the same as with stock tonic.
struct Counting;

type NumberStream = Pin<Box<dyn Stream<Item = Result<Number, Status>> + Send>>;

#[tonic::async_trait]
impl Numbers for Counting {
    type CountStream = NumberStream;
    type DoubleStream = NumberStream;

    async fn count(&self, request: Request<Number>) -> Result<Response<NumberStream>, Status> {
        let last = request.into_inner().value;
        Ok(Response::new(Box::pin(iter((1..=last).map(|value| Ok(Number { value }))))))
    }

    async fn sum(&self, request: Request<Streaming<Number>>) -> Result<Response<Number>, Status> {
        let mut numbers = request.into_inner();
        let mut sum = Number::default();
        while let Some(number) = numbers.message().await? {
            sum.value += number.value;
        }
        Ok(Response::new(sum))
    }

    async fn double(
        &self,
        request: Request<Streaming<Number>>,
    ) -> Result<Response<NumberStream>, Status> {
        let doubled = request
            .into_inner()
            .map(|number| number.map(|Number { value }| Number { value: 2 * value }));
        Ok(Response::new(Box::pin(doubled)))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse()?)?;
    let url = format!("http://{}", incoming.local_addr()?);
    let router = Server::builder().add_service(NumbersServer::new(Counting));
    tokio::spawn(router.serve_with_incoming(incoming));

    let channel = Endpoint::from_shared(url)?.connect().await?;
    println!("calls go by {}", channel.path());
    let mut client = NumbersClient::new(channel);

    let mut counted = client.count(Number { value: 1000 }).await?.into_inner();
    let mut received = 0;
    while counted.message().await?.is_some() {
        received += 1;
    }
    println!("server streaming: {received} messages");

    let sum = client.sum(iter((1..=1000).map(|value| Number { value }))).await?.into_inner();
    println!("client streaming: the sum is {}", sum.value);

    // The client waits for the answer to each number before it sends the next number.
    let (send, queue) = tokio::sync::mpsc::channel(1);
    let numbers = tokio_stream::wrappers::ReceiverStream::new(queue);
    let mut doubled = client.double(numbers).await?.into_inner();
    let mut number = Number { value: 1 };
    for _ in 0..10 {
        send.send(number).await?;
        number = doubled.message().await?.ok_or("the server has ended the stream")?;
    }
    println!("both at once: {}", number.value);

    // Dropping a stream cancels it, and the server stops sending.
    let mut endless = client.count(Number { value: u64::MAX }).await?.into_inner();
    endless.message().await?;
    drop(endless);
    println!("cancelled");
    Ok(())
}
