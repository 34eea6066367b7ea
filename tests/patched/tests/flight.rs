//! arrow-flight as published, client and server, with tonic-rdma's tonic-prost instead of tonic's.
//! Its stubs cause no copies.

use std::sync::{Arc, Mutex};

use arrow_array::{Int64Array, RecordBatch};
use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::flight_service_server::{FlightService, FlightServiceServer};
use arrow_flight::{
    Action, ActionType, Criteria, Empty, FlightClient, FlightData, FlightDescriptor, FlightInfo,
    HandshakeRequest, HandshakeResponse, PollInfo, PutResult, SchemaResult, Ticket,
};
use arrow_schema::{DataType, Field, Schema};
use futures_util::stream::{self, BoxStream};
use futures_util::{StreamExt, TryStreamExt};
use tokio::net::TcpListener;
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::codegen::{Body as HttpBody, Bytes, StdError};
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::server::TcpIncoming;
use tonic_rdma::{Copied, Endpoint, Policy, Server, ServerStats};

const MIB: u64 = 1 << 20;
const BATCHES: i64 = 16;
/// Rows of a batch, which make 1 MiB of numbers.
const ROWS: i64 = 128 << 10;

fn batch(n: i64) -> RecordBatch {
    let schema = Schema::new(vec![Field::new("number", DataType::Int64, false)]);
    let numbers = Int64Array::from_iter_values(n * ROWS..(n + 1) * ROWS);
    RecordBatch::try_new(Arc::new(schema), vec![Arc::new(numbers)]).unwrap()
}

/// A service that returns the data of the last put.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<FlightData>>>);

type Replies<T> = Result<Response<BoxStream<'static, Result<T, Status>>>, Status>;

fn no<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("this server puts and gets"))
}

#[tonic::async_trait]
impl FlightService for Kept {
    type HandshakeStream = BoxStream<'static, Result<HandshakeResponse, Status>>;
    type ListFlightsStream = BoxStream<'static, Result<FlightInfo, Status>>;
    type DoGetStream = BoxStream<'static, Result<FlightData, Status>>;
    type DoPutStream = BoxStream<'static, Result<PutResult, Status>>;
    type DoExchangeStream = BoxStream<'static, Result<FlightData, Status>>;
    type DoActionStream = BoxStream<'static, Result<arrow_flight::Result, Status>>;
    type ListActionsStream = BoxStream<'static, Result<ActionType, Status>>;

    async fn do_put(&self, request: Request<Streaming<FlightData>>) -> Replies<PutResult> {
        let put: Vec<FlightData> = request.into_inner().try_collect().await?;
        *self.0.lock().unwrap() = put;
        Ok(Response::new(stream::once(async { Ok(PutResult::default()) }).boxed()))
    }

    async fn do_get(&self, _: Request<Ticket>) -> Replies<FlightData> {
        let kept = std::mem::take(&mut *self.0.lock().unwrap());
        Ok(Response::new(stream::iter(kept.into_iter().map(Ok)).boxed()))
    }

    async fn handshake(
        &self,
        _: Request<Streaming<HandshakeRequest>>,
    ) -> Replies<HandshakeResponse> {
        no()
    }

    async fn list_flights(&self, _: Request<Criteria>) -> Replies<FlightInfo> {
        no()
    }

    async fn get_flight_info(
        &self,
        _: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        no()
    }

    async fn poll_flight_info(
        &self,
        _: Request<FlightDescriptor>,
    ) -> Result<Response<PollInfo>, Status> {
        no()
    }

    async fn get_schema(
        &self,
        _: Request<FlightDescriptor>,
    ) -> Result<Response<SchemaResult>, Status> {
        no()
    }

    async fn do_exchange(&self, _: Request<Streaming<FlightData>>) -> Replies<FlightData> {
        no()
    }

    async fn do_action(&self, _: Request<Action>) -> Replies<arrow_flight::Result> {
        no()
    }

    async fn list_actions(&self, _: Request<Empty>) -> Replies<ActionType> {
        no()
    }
}

async fn start() -> (tonic_rdma::Channel, ServerStats) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let mut server = Server::builder();
    let stats = server.stats();
    let routes = server.add_service(FlightServiceServer::new(Kept::default()));
    tokio::spawn(routes.serve_with_incoming(TcpIncoming::from(listener)));
    let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
    (endpoint.policy(Policy::Require).connect().await.unwrap(), stats)
}

/// Puts a table and gets it back.
async fn there_and_back<T>(client: &mut FlightClient<T>)
where
    T: GrpcService<Body> + Clone + Send,
    T::Error: Into<StdError>,
    T::ResponseBody: HttpBody<Data = Bytes> + Send + 'static,
    <T::ResponseBody as HttpBody>::Error: Into<StdError> + Send,
    T::Future: Send,
{
    let sent: Vec<_> = (0..BATCHES).map(batch).collect();
    let encoded = FlightDataEncoderBuilder::new()
        .with_max_flight_data_size(2 << 20)
        .build(stream::iter(sent.clone().into_iter().map(Ok)));
    let put: Vec<_> = client.do_put(encoded).await.unwrap().try_collect().await.unwrap();
    assert_eq!(put.len(), 1);
    let got = client.do_get(Ticket::new("it")).await.unwrap();
    let got: Vec<RecordBatch> = got.try_collect().await.unwrap();
    assert!(got == sent, "another table than was put");
}

/// Padding by the encoder, so that tonic sends the first long message of a stream by itself.
const PADDING: u64 = 32 << 10;

/// Checks that no codec caused a copy, at one end, in one stream.
fn nothing_for_the_codec(copied: Copied) {
    assert_eq!((copied.plain_codec, copied.joined), (0, 0), "{copied}");
    assert!(copied.learning <= PADDING, "{copied}");
}

#[tokio::test(flavor = "multi_thread")]
async fn stock_stubs_copy_nothing() {
    let (channel, server) = start().await;
    let mut client = FlightClient::new(channel.clone());
    // The first long messages of a method show tonic their length.
    there_and_back(&mut client).await;
    there_and_back(&mut client).await;
    let (before, served) = (channel.stats(), server.get().copied_fast);
    there_and_back(&mut client).await;
    let after = channel.stats();
    assert!(after.bytes_sent_write - before.bytes_sent_write >= BATCHES as u64 * MIB);
    assert!(after.bytes_received_write - before.bytes_received_write >= BATCHES as u64 * MIB);
    nothing_for_the_codec(after.copied_fast - before.copied_fast);
    nothing_for_the_codec(server.get().copied_fast - served);
}

/// Behind `into_tonic` the stub's messages pass through an HTTP/2 connection within the process,
/// and leave it as frames. For the fast path, such a request is like one that a plain codec has
/// encoded: each byte is copied once on its way, and the server joins the parts of the request. A
/// reply enters that HTTP/2 connection from the memory where it landed.
#[tokio::test(flavor = "multi_thread")]
async fn stock_stubs_behind_a_channel_of_tonics() {
    let (channel, server) = start().await;
    let mut client = FlightClient::new(channel.clone().into_tonic());
    there_and_back(&mut client).await;
    there_and_back(&mut client).await;
    let (before, served) = (channel.stats().copied_fast, server.get().copied_fast);
    there_and_back(&mut client).await;
    let (copied, served) =
        (channel.stats().copied_fast - before, server.get().copied_fast - served);
    let payload = BATCHES as u64 * MIB;
    let once = payload + payload / 16;
    assert!(copied.plain_codec <= once && copied.joined == 0, "{copied}");
    assert!(served.plain_codec == 0 && served.joined <= once, "{served}");
}
