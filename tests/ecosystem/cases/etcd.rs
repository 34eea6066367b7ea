//! etcd-client, with its custom channel and with a channel of tonic's type. The server is small:
//! keys and values in memory, and watches.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use async_stream::try_stream;
use etcd_client::proto::{
    PbCompactionRequest, PbCompactionResponse, PbDeleteRequest, PbDeleteResponse, PbEvent,
    PbKeyValue, PbKvServer, PbKvService, PbPutRequest, PbPutResponse, PbRangeRequest,
    PbRangeResponse, PbRangeStreamResponse, PbResponseHeader, PbTxnRequest, PbTxnResponse,
    PbWatchRequest, PbWatchRequestUnion, PbWatchResponse, PbWatchServer, PbWatchService,
};
use etcd_client::{Channel as EtcdChannel, Client, EventType, GetOptions, WatchOptions};
use futures_util::{Stream, StreamExt};
use tokio::sync::broadcast;
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::Server;
use tonic_rdma_ecosystem_tests::Net;
use tower::ServiceExt;
use tower::util::BoxCloneSyncService;

const MIB: usize = 1 << 20;

type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

type Keys = BTreeMap<Vec<u8>, PbKeyValue>;

/// Keys and values with the revision of their last change, and the watchers.
#[derive(Clone)]
struct Store {
    held: Arc<Mutex<(i64, Keys)>>,
    changes: broadcast::Sender<PbEvent>,
}

/// Whether a key equals `start` if `end` is empty, and otherwise whether it lies in the range from
/// `start` to before `end`.
fn covers(start: &[u8], end: &[u8], key: &[u8]) -> bool {
    if end.is_empty() { key == start } else { key >= start && key < end }
}

fn header(revision: i64) -> Option<PbResponseHeader> {
    Some(PbResponseHeader { revision, ..Default::default() })
}

#[tonic::async_trait]
impl PbKvService for Store {
    type RangeStreamStream = Replies<PbRangeStreamResponse>;

    async fn range(
        &self,
        request: Request<PbRangeRequest>,
    ) -> Result<Response<PbRangeResponse>, Status> {
        let asked = request.into_inner();
        let held = self.held.lock().unwrap();
        let found = held.1.values().filter(|kv| covers(&asked.key, &asked.range_end, &kv.key));
        let kvs: Vec<_> = found.cloned().collect();
        let count = kvs.len() as i64;
        let header = header(held.0);
        Ok(Response::new(PbRangeResponse { header, kvs, more: false, count }))
    }

    async fn put(&self, request: Request<PbPutRequest>) -> Result<Response<PbPutResponse>, Status> {
        let PbPutRequest { key, value, .. } = request.into_inner();
        let mut held = self.held.lock().unwrap();
        held.0 += 1;
        let mod_revision = held.0;
        let kv = PbKeyValue { key: key.clone(), value, mod_revision, ..Default::default() };
        held.1.insert(key, kv.clone());
        let _ = self.changes.send(PbEvent { r#type: 0, kv: Some(kv), prev_kv: None });
        Ok(Response::new(PbPutResponse { header: header(mod_revision), prev_kv: None }))
    }

    async fn delete_range(
        &self,
        request: Request<PbDeleteRequest>,
    ) -> Result<Response<PbDeleteResponse>, Status> {
        let asked = request.into_inner();
        let mut held = self.held.lock().unwrap();
        held.0 += 1;
        let before = held.1.len();
        let revision = held.0;
        held.1.retain(|key, _| {
            let gone = covers(&asked.key, &asked.range_end, key);
            if gone {
                let kv = PbKeyValue { key: key.clone(), ..Default::default() };
                let _ = self.changes.send(PbEvent { r#type: 1, kv: Some(kv), prev_kv: None });
            }
            !gone
        });
        let deleted = (before - held.1.len()) as i64;
        let header = header(revision);
        Ok(Response::new(PbDeleteResponse { header, deleted, prev_kvs: Vec::new() }))
    }

    async fn range_stream(
        &self,
        _: Request<PbRangeRequest>,
    ) -> Result<Response<Self::RangeStreamStream>, Status> {
        Err(Status::unimplemented("this server has no streamed ranges"))
    }

    async fn txn(&self, _: Request<PbTxnRequest>) -> Result<Response<PbTxnResponse>, Status> {
        Err(Status::unimplemented("this server has no transactions"))
    }

    async fn compact(
        &self,
        _: Request<PbCompactionRequest>,
    ) -> Result<Response<PbCompactionResponse>, Status> {
        Err(Status::unimplemented("this server keeps no history"))
    }
}

#[tonic::async_trait]
impl PbWatchService for Store {
    type WatchStream = Replies<PbWatchResponse>;

    async fn watch(
        &self,
        request: Request<Streaming<PbWatchRequest>>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let mut asks = request.into_inner();
        let mut changes = self.changes.subscribe();
        let replies = try_stream! {
            let first = asks.message().await?.and_then(|ask| ask.request_union);
            let Some(PbWatchRequestUnion::CreateRequest(watch)) = first else {
                Err(Status::invalid_argument("a watch begins with what it watches"))?;
                return;
            };
            yield PbWatchResponse { created: true, ..Default::default() };
            while let Ok(event) = changes.recv().await {
                let key = &event.kv.as_ref().map(|kv| kv.key.clone()).unwrap_or_default();
                if covers(&watch.key, &watch.range_end, key) {
                    yield PbWatchResponse { events: vec![event], ..Default::default() };
                }
            }
        };
        Ok(Response::new(Box::pin(replies)))
    }
}

pub(crate) async fn by_a_service_and_by_tonics_channel(net: Net) {
    let store = Store { held: Arc::default(), changes: broadcast::channel(64).0 };
    let (addr, incoming) = net.listen().await;
    let limit = 4 * MIB;
    let routes = Server::builder()
        .add_service(PbKvServer::new(store.clone()).max_decoding_message_size(limit))
        .add_service(PbWatchServer::new(store));
    tokio::spawn(routes.serve_with_incoming(incoming));
    let channel = net.connect(addr).await;
    let service = BoxCloneSyncService::new(channel.clone().map_err(Into::into));
    for channel in [EtcdChannel::Custom(service), EtcdChannel::Tonic(channel.into_tonic())] {
        keys_and_watches(Client::from_channel(channel, None).await.unwrap()).await;
    }
}

async fn keys_and_watches(mut client: Client) {
    let mut watch = client.watch("a/", Some(WatchOptions::new().with_prefix())).await.unwrap();
    let mut next = async || watch.next().await.unwrap().unwrap();
    assert!(next().await.created());
    let long = vec![7; MIB];
    client.put("a/1", "one", None).await.unwrap();
    client.put("b", "elsewhere", None).await.unwrap();
    client.put("a/2", long.clone(), None).await.unwrap();

    let all = client.get("a/", Some(GetOptions::new().with_prefix())).await.unwrap();
    assert_eq!(all.count(), 2);
    assert_eq!(all.kvs()[0].value_str().unwrap(), "one");
    assert!(all.kvs()[1].value() == long);
    assert!(client.get("a/3", None).await.unwrap().kvs().is_empty());
    assert_eq!(client.delete("a/1", None).await.unwrap().deleted(), 1);

    let mut seen = Vec::new();
    while seen.len() < 3 {
        let response = next().await;
        seen.extend(response.events().iter().map(|event| {
            let kv = event.kv().unwrap();
            (event.event_type(), kv.key_str().unwrap().to_owned(), kv.value().len())
        }));
    }
    let put = |key: &str, length| (EventType::Put, key.to_owned(), length);
    let deleted = (EventType::Delete, "a/1".to_owned(), 0);
    assert_eq!(seen, [put("a/1", 3), put("a/2", MIB), deleted]);
}
