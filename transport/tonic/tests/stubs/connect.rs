//! The `connect` of stubs from tonic-rdma-build takes the fast path, with every kind of destination
//! that tonic's `connect` accepts.

use std::error::Error as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};
use tonic_rdma::{Channel, Endpoint, Path, Server, Uri};
use tonic_rdma_example_services::store::store_client::StoreClient;
use tonic_rdma_example_services::store::store_server::{Store, StoreServer};
use tonic_rdma_example_services::store::{Name, Object, Receipt};

/// Records the path of each request.
#[derive(Clone, Default)]
struct Paths(Arc<Mutex<Vec<Path>>>);

#[tonic::async_trait]
impl Store for Paths {
    async fn put(&self, request: Request<Object>) -> Result<Response<Receipt>, Status> {
        self.0.lock().unwrap().push(tonic_rdma::connect_info(&request).path);
        Ok(Response::new(Receipt { bytes: request.get_ref().data.len() as u64 }))
    }

    async fn get(&self, _: Request<Name>) -> Result<Response<Object>, Status> {
        Err(Status::unimplemented("these tests put"))
    }
}

async fn serve() -> (SocketAddr, Paths) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let paths = Paths::default();
    let router = Server::builder().add_service(StoreServer::new(paths.clone()));
    tokio::spawn(router.serve_with_incoming(TcpIncoming::from(listener)));
    (addr, paths)
}

#[tokio::test]
async fn every_kind_of_destination() {
    let (addr, paths) = serve().await;
    let text = format!("http://{addr}");
    let uri: Uri = text.parse().unwrap();
    let clients: [StoreClient<Channel>; 5] = [
        StoreClient::connect(text.clone()).await.unwrap(),
        StoreClient::connect(&*text.clone().leak()).await.unwrap(),
        StoreClient::connect(uri.clone()).await.unwrap(),
        StoreClient::connect(Bytes::from(text)).await.unwrap(),
        StoreClient::connect(Endpoint::from(uri)).await.unwrap(),
    ];
    for mut client in clients {
        let object = Object { name: "o".into(), data: Bytes::from_static(&[7; 100]) };
        assert_eq!(client.put(object).await.unwrap().into_inner().bytes, 100);
    }
    let paths = paths.0.lock().unwrap();
    assert_eq!(paths.len(), 5);
    assert!(paths.iter().all(|path| *path == Path::Shm), "{paths:?}");
}

#[tokio::test]
async fn a_destination_that_is_none_is_an_error() {
    let error = StoreClient::connect("no uri at all").await.unwrap_err();
    assert!(error.source().is_some(), "{error}");
}
