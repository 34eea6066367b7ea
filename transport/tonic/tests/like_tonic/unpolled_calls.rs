//! A call with a streamed request whose future is not polled for a while. On TCP, hyper sends the
//! request in a task of its own. On the fast path, the call's future sends it.

use std::future::{Future as _, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::task::Poll;

use tokio::net::TcpListener;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::server::TcpIncoming;
use tonic_rdma::{Endpoint, FabricKind, Policy, Server};
use tonic_rdma_example_services::numbers::Number;
use tonic_rdma_example_services::numbers::numbers_client::NumbersClient;
use tonic_rdma_example_services::numbers::numbers_server::{Numbers, NumbersServer};

const NUMBERS: u64 = 100;

/// Counts the numbers of all requests.
struct Counts(Arc<AtomicU64>);

type Replies = Pin<Box<dyn Stream<Item = Result<Number, Status>> + Send>>;

#[tonic::async_trait]
impl Numbers for Counts {
    type CountStream = Replies;
    type DoubleStream = Replies;

    async fn count(&self, _: Request<Number>) -> Result<Response<Replies>, Status> {
        Ok(Response::new(Box::pin(tokio_stream::empty())))
    }

    async fn sum(&self, request: Request<Streaming<Number>>) -> Result<Response<Number>, Status> {
        let (mut numbers, mut sum) = (request.into_inner(), 0);
        while let Some(number) = numbers.message().await? {
            self.0.fetch_add(1, SeqCst);
            sum += number.value;
        }
        Ok(Response::new(Number { value: sum }))
    }

    async fn double(&self, _: Request<Streaming<Number>>) -> Result<Response<Replies>, Status> {
        Ok(Response::new(Box::pin(tokio_stream::empty())))
    }
}

#[tokio::test]
async fn a_streamed_request_advances_with_its_future() {
    for policy in [Policy::Off, Policy::Require] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let counted = Arc::new(AtomicU64::new(0));
        let router = Server::builder().add_service(NumbersServer::new(Counts(counted.clone())));
        tokio::spawn(router.serve_with_incoming(TcpIncoming::from(listener)));
        let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
        let endpoint = endpoint.policy(policy).fabrics([FabricKind::Shm]);
        // The time is enough on a busy machine.
        let endpoint = endpoint.fast_path_timeout(std::time::Duration::from_secs(30));
        let channel = endpoint.connect().await.unwrap();
        let (send, numbers) = tokio::sync::mpsc::unbounded_channel();
        let mut client = NumbersClient::new(channel.clone());
        let mut call = pin!(client.sum(UnboundedReceiverStream::new(numbers)));
        assert!(poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await.is_pending());
        for value in 0..NUMBERS {
            send.send(Number { value }).unwrap();
        }
        drop(send);
        if policy == Policy::Off {
            while counted.load(SeqCst) < NUMBERS {
                tokio::task::yield_now().await;
            }
        } else {
            let mut other = NumbersClient::new(channel);
            for _ in 0..20 {
                let mut replies = other.count(Number { value: 0 }).await.unwrap().into_inner();
                assert!(replies.next().await.is_none());
            }
            assert_eq!(counted.load(SeqCst), 0, "{policy:?}");
        }
        let sum = call.await.unwrap().into_inner().value;
        assert_eq!((sum, counted.load(SeqCst)), (NUMBERS * (NUMBERS - 1) / 2, NUMBERS));
    }
}
