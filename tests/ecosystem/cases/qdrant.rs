//! qdrant-client's generated stubs, with tonic-rdma's channel and with a channel of tonic's type,
//! and its own client, which makes tonic's channels. The server is small and made of its generated
//! service, with points in memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use ::qdrant_client::Payload;
use ::qdrant_client::qdrant::points_client::PointsClient;
use ::qdrant_client::qdrant::points_server::{Points, PointsServer};
use ::qdrant_client::qdrant::qdrant_server::{Qdrant, QdrantServer};
use ::qdrant_client::qdrant::*;
use tonic::client::GrpcService;
use tonic::codegen::{Body as HttpBody, Bytes, StdError};
use tonic::{Code, Request, Response, Status};
use tonic_rdma::{Path, RdmaConnectInfo, Server};
use tonic_rdma_ecosystem_tests::Net;

/// Number of floats in a vector. 64 points make a message of 1 MiB, which fits no SEND.
const DIMENSION: usize = 4096;
const POINTS: u64 = 64;

/// Points by their number, and the path over which the last one arrived.
#[derive(Clone, Default)]
struct Store {
    points: Arc<Mutex<HashMap<u64, PointStruct>>>,
    came_by: Arc<Mutex<Option<Path>>>,
}

fn number(id: Option<&PointId>) -> Result<u64, Status> {
    match id.and_then(|id| id.point_id_options.as_ref()) {
        Some(point_id::PointIdOptions::Num(number)) => Ok(*number),
        _ => Err(Status::invalid_argument("a point without a number")),
    }
}

#[tonic::async_trait]
impl Qdrant for Store {
    async fn health_check(
        &self,
        _: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckReply>, Status> {
        let (title, version) = ("points in memory".to_owned(), "1.20.0".to_owned());
        Ok(Response::new(HealthCheckReply { title, version, commit: None }))
    }
}

/// Methods that this server lacks.
macro_rules! without {
    ($($name:ident($request:ty) -> $reply:ty;)+) => {
        #[tonic::async_trait]
        impl Points for Store {
            async fn upsert(
                &self,
                request: Request<UpsertPoints>,
            ) -> Result<Response<PointsOperationResponse>, Status> {
                Store::upsert(self, request)
            }

            async fn get(&self, request: Request<GetPoints>) -> Result<Response<GetResponse>, Status> {
                Store::get(self, request)
            }

            $(async fn $name(&self, _: Request<$request>) -> Result<Response<$reply>, Status> {
                Err(Status::unimplemented("this server keeps points and no more"))
            })+
        }
    };
}

without! {
    delete(DeletePoints) -> PointsOperationResponse;
    update_vectors(UpdatePointVectors) -> PointsOperationResponse;
    delete_vectors(DeletePointVectors) -> PointsOperationResponse;
    set_payload(SetPayloadPoints) -> PointsOperationResponse;
    overwrite_payload(SetPayloadPoints) -> PointsOperationResponse;
    delete_payload(DeletePayloadPoints) -> PointsOperationResponse;
    clear_payload(ClearPayloadPoints) -> PointsOperationResponse;
    create_field_index(CreateFieldIndexCollection) -> PointsOperationResponse;
    delete_field_index(DeleteFieldIndexCollection) -> PointsOperationResponse;
    create_vector_name(CreateVectorNameRequest) -> PointsOperationResponse;
    delete_vector_name(DeleteVectorNameRequest) -> PointsOperationResponse;
    search(SearchPoints) -> SearchResponse;
    search_batch(SearchBatchPoints) -> SearchBatchResponse;
    search_groups(SearchPointGroups) -> SearchGroupsResponse;
    scroll(ScrollPoints) -> ScrollResponse;
    recommend(RecommendPoints) -> RecommendResponse;
    recommend_batch(RecommendBatchPoints) -> RecommendBatchResponse;
    recommend_groups(RecommendPointGroups) -> RecommendGroupsResponse;
    discover(DiscoverPoints) -> DiscoverResponse;
    discover_batch(DiscoverBatchPoints) -> DiscoverBatchResponse;
    count(CountPoints) -> CountResponse;
    update_batch(UpdateBatchPoints) -> UpdateBatchResponse;
    query(QueryPoints) -> QueryResponse;
    query_batch(QueryBatchPoints) -> QueryBatchResponse;
    query_groups(QueryPointGroups) -> QueryGroupsResponse;
    facet(FacetCounts) -> FacetResponse;
    search_matrix_pairs(SearchMatrixPoints) -> SearchMatrixPairsResponse;
    search_matrix_offsets(SearchMatrixPoints) -> SearchMatrixOffsetsResponse;
}

impl Store {
    fn upsert(
        &self,
        request: Request<UpsertPoints>,
    ) -> Result<Response<PointsOperationResponse>, Status> {
        let path = request.extensions().get::<RdmaConnectInfo>().map(|info| info.path);
        *self.came_by.lock().unwrap() = path;
        let mut points = self.points.lock().unwrap();
        for point in request.into_inner().points {
            points.insert(number(point.id.as_ref())?, point);
        }
        Ok(Response::new(PointsOperationResponse::default()))
    }

    fn get(&self, request: Request<GetPoints>) -> Result<Response<GetResponse>, Status> {
        let points = self.points.lock().unwrap();
        let mut result = Vec::new();
        for id in &request.into_inner().ids {
            if let Some(point) = points.get(&number(Some(id))?) {
                let payload = point.payload.clone();
                result.push(RetrievedPoint { id: point.id.clone(), payload, ..Default::default() });
            }
        }
        Ok(Response::new(GetResponse { result, ..Default::default() }))
    }
}

/// Points with distinct vectors and payload.
fn points(salt: f32) -> Vec<PointStruct> {
    let vector = |n: u64| (0..DIMENSION).map(|i| n as f32 + i as f32 * salt).collect::<Vec<_>>();
    let payload =
        |n: u64| Payload::from(HashMap::from([("name", Value::from(format!("{n}/{salt}")))]));
    (0..POINTS).map(|n| PointStruct::new(n, vector(n), payload(n))).collect()
}

/// Puts points, and gets them, by a generated stub.
async fn puts_and_gets<T>(service: T, store: &Store, salt: f32)
where
    T: GrpcService<tonic::body::Body>,
    T::Error: Into<StdError>,
    T::ResponseBody: HttpBody<Data = Bytes> + Send + 'static,
    <T::ResponseBody as HttpBody>::Error: Into<StdError> + Send,
{
    let mut stub = PointsClient::new(service);
    let (collection_name, sent) = ("things".to_owned(), points(salt));
    let put = UpsertPoints { collection_name, points: sent.clone(), ..Default::default() };
    stub.upsert(put).await.unwrap();
    {
        let held = store.points.lock().unwrap();
        assert!(sent.iter().all(|point| held[&number(point.id.as_ref()).unwrap()] == *point));
    }
    let ids = sent.iter().filter_map(|point| point.id.clone()).collect();
    let got = stub.get(GetPoints { ids, ..Default::default() }).await.unwrap().into_inner().result;
    assert_eq!(got.len(), sent.len());
    assert!(got.iter().zip(&sent).all(|(got, sent)| got.payload == sent.payload));
    let error = stub.count(CountPoints::default()).await.unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Code::Unimplemented, "this server keeps points and no more")
    );
}

pub(crate) async fn stubs_by_either_channel_beside_its_own_client(net: Net) {
    let (addr, incoming) = net.listen().await;
    let store = Store::default();
    let serving = Server::builder()
        .add_service(PointsServer::new(store.clone()))
        .add_service(QdrantServer::new(store.clone()))
        .serve_with_incoming(incoming);
    tokio::spawn(async move { serving.await.unwrap() });
    let channel = net.connect(addr).await;
    let came_by = || store.came_by.lock().unwrap().take();
    let path = (net.path() != Path::Tcp).then(|| net.path());
    puts_and_gets(channel.clone(), &store, 0.5).await;
    assert_eq!(came_by(), path);
    puts_and_gets(channel.into_tonic(), &store, 0.25).await;
    assert_eq!(came_by(), path);

    let client = ::qdrant_client::Qdrant::from_url(&format!("http://{addr}")).build().unwrap();
    assert_eq!(client.health_check().await.unwrap().title, "points in memory");
    let sent = points(2.0);
    client.upsert_points(UpsertPointsBuilder::new("things", sent.clone())).await.unwrap();
    assert_eq!(came_by(), None, "its channels are tonic's");
    let held = store.points.lock().unwrap();
    assert!(sent.iter().all(|point| held[&number(point.id.as_ref()).unwrap()] == *point));
}
