//! An existing service, changed to zero copy in two lines.
//!
//! In `build.rs`:
//!
//! ```text
//! -   tonic_prost_build::compile_protos("store.proto")?;
//! +   tonic_rdma_build::compile_protos("store.proto")?;
//! ```
//!
//! And in the code, for buffers that are sent without a copy:
//!
//! ```text
//! -     let mut data = Vec::with_capacity(len);
//! +     let mut data = channel.pool().alloc(len).await?;
//! ```
//!
//! `cargo run -p tonic-rdma --example zero_copy` puts an object and gets it back, over the best
//! path from this host to itself, and prints the copied bytes. On TCP the encoder's copy is
//! avoided, and received data is joined from its frames.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{BufMut, Bytes};
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};
use tonic_rdma::{Endpoint, Server};
use tonic_rdma_example_services::store::store_client::StoreClient;
use tonic_rdma_example_services::store::store_server::{Store, StoreServer};
use tonic_rdma_example_services::store::{Name, Object, Receipt};

/// Keeps received data where it landed.
#[derive(Default)]
struct Memory(Arc<Mutex<HashMap<String, Bytes>>>);

#[tonic::async_trait]
impl Store for Memory {
    async fn put(&self, request: Request<Object>) -> Result<Response<Receipt>, Status> {
        let Object { name, data } = request.into_inner();
        let bytes = data.len() as u64;
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(name, data);
        Ok(Response::new(Receipt { bytes }))
    }

    async fn get(&self, request: Request<Name>) -> Result<Response<Object>, Status> {
        let name = request.into_inner().name;
        let data = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&name).cloned();
        let data = data.ok_or_else(|| Status::not_found(format!("no object {name:?}")))?;
        // The data is sent from the memory in which it landed.
        Ok(Response::new(Object { name, data }))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    const LEN: usize = 1 << 20;
    const ROUNDS: usize = 4;

    // Pass an RDMA device's address to use that device.
    let at = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1".into());
    let listener = TcpListener::bind((at.as_str(), 0)).await?;
    let addr = listener.local_addr()?;
    let mut server = Server::builder();
    let served = server.stats();
    let router = server.add_service(StoreServer::new(Memory::default()));
    tokio::spawn(router.serve_with_incoming(TcpIncoming::from(listener)));

    let channel = Endpoint::from_shared(format!("http://{addr}"))?.connect().await?;
    println!("calls go by {}", channel.path());
    let mut client = StoreClient::new(channel.clone());
    for round in 1..=ROUNDS {
        let before = [channel.stats(), served.get()];
        let mut data = channel.pool().alloc(LEN).await?;
        data.put_bytes(round as u8, LEN); // or read a file into it
        let object = Object { name: "object".into(), data: data.freeze() };
        let put = client.put(object).await?.into_inner();
        let got = client.get(Name { name: "object".into() }).await?.into_inner();
        assert_eq!((put.bytes as usize, got.data.len(), got.data[0]), (LEN, LEN, round as u8));
        for (end, now, before) in
            [("client", channel.stats(), before[0]), ("server", served.get(), before[1])]
        {
            let mut copied = now.copied_fast - before.copied_fast;
            copied += now.copied_tcp - before.copied_tcp;
            println!("round {round}: the {end} copied {copied}");
        }
    }
    Ok(())
}
