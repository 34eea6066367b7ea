//! arrow-flight's SQL client and server, as published, over the channel itself and over one of
//! tonic's type.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{Int64Array, RecordBatch};
use arrow_flight::decode::FlightRecordBatchStream;
use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::flight_service_server::{FlightService, FlightServiceServer};
use arrow_flight::sql::client::FlightSqlServiceClient;
use arrow_flight::sql::server::{FlightSqlService, PeekableFlightDataStream};
use arrow_flight::sql::{
    CommandStatementIngest, CommandStatementQuery, CommandStatementUpdate, ProstMessageExt,
    SqlInfo, TicketStatementQuery,
};
use arrow_flight::{FlightDescriptor, FlightEndpoint, FlightInfo, Ticket};
use arrow_schema::{DataType, Field, Schema};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use prost::Message;
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::codegen::{Body as HttpBody, StdError};
use tonic::{Code, Request, Response, Status};
use tonic_rdma::Server;
use tonic_rdma_ecosystem_tests::Net;

/// Rows of a batch, which make 1 MiB of numbers.
const ROWS: i64 = 128 << 10;

/// Counts up to the requested number.
#[derive(Clone)]
struct Numbers;

fn schema() -> Arc<Schema> {
    Arc::new(Schema::new(vec![Field::new("number", DataType::Int64, false)]))
}

/// The rows from `start` on.
fn batch(start: i64) -> RecordBatch {
    let numbers = Int64Array::from_iter_values(start..start + ROWS);
    RecordBatch::try_new(schema(), vec![Arc::new(numbers)]).unwrap()
}

/// The number of batches in `COUNT n`.
fn batches(query: &str) -> Result<i64, Status> {
    let count = query.strip_prefix("COUNT ").and_then(|count| count.parse().ok());
    count.ok_or_else(|| Status::invalid_argument(format!("no such statement: {query}")))
}

#[tonic::async_trait]
impl FlightSqlService for Numbers {
    type FlightService = Numbers;

    async fn get_flight_info_statement(
        &self,
        query: CommandStatementQuery,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        batches(&query.query)?;
        let handle = TicketStatementQuery { statement_handle: query.query.into() };
        let ticket = Ticket { ticket: handle.as_any().encode_to_vec().into() };
        let info = FlightInfo::new()
            .try_with_schema(&schema())
            .map_err(|error| Status::internal(error.to_string()))?
            .with_endpoint(FlightEndpoint::new().with_ticket(ticket))
            .with_descriptor(request.into_inner());
        Ok(Response::new(info))
    }

    async fn do_get_statement(
        &self,
        ticket: TicketStatementQuery,
        _: Request<Ticket>,
    ) -> Result<Response<<Self as FlightService>::DoGetStream>, Status> {
        let count = batches(&String::from_utf8_lossy(&ticket.statement_handle))?;
        let batches = stream::iter((0..count).map(|n| Ok(batch(n * ROWS))));
        let encoded = FlightDataEncoderBuilder::new().with_schema(schema()).build(batches);
        Ok(Response::new(encoded.map_err(Status::from).boxed()))
    }

    async fn do_put_statement_update(
        &self,
        update: CommandStatementUpdate,
        _: Request<PeekableFlightDataStream>,
    ) -> Result<i64, Status> {
        Ok(batches(&update.query)? * ROWS)
    }

    async fn do_put_statement_ingest(
        &self,
        _: CommandStatementIngest,
        request: Request<PeekableFlightDataStream>,
    ) -> Result<i64, Status> {
        let data = request.into_inner().map_err(Into::into);
        let batches = FlightRecordBatchStream::new_from_flight_data(data);
        let counted = batches.try_fold(0, async |rows, come| {
            assert_eq!(come.column(0).as_primitive::<Int64Type>().value(0), rows);
            Ok(rows + come.num_rows() as i64)
        });
        counted.await.map_err(|error| Status::data_loss(error.to_string()))
    }

    async fn register_sql_info(&self, _: i32, _: &SqlInfo) {}
}

pub(crate) async fn queries_and_updates(net: Net) {
    let (addr, incoming) = net.listen().await;
    let routes = Server::builder().add_service(FlightServiceServer::new(Numbers));
    tokio::spawn(routes.serve_with_incoming(incoming));
    let channel = net.connect(addr).await;
    use_statements(FlightSqlServiceClient::new(channel.clone())).await;
    use_statements(FlightSqlServiceClient::new(channel.into_tonic())).await;
}

async fn use_statements<T>(mut client: FlightSqlServiceClient<T>)
where
    T: GrpcService<Body> + Clone + Send,
    T::Error: Into<StdError>,
    T::ResponseBody: HttpBody<Data = Bytes> + Send + 'static,
    <T::ResponseBody as HttpBody>::Error: Into<StdError> + Send,
    T::Future: Send,
{
    let info = client.execute("COUNT 8".into(), None).await.unwrap();
    assert_eq!(info.clone().try_decode_schema().unwrap(), *schema());
    let ticket = info.endpoint[0].ticket.clone().unwrap();
    let batches: Vec<_> = client.do_get(ticket).await.unwrap().try_collect().await.unwrap();
    let numbers = batches.iter().flat_map(|b| b.column(0).as_primitive::<Int64Type>().values());
    assert!(numbers.copied().eq(0..8 * ROWS));

    assert_eq!(client.execute_update("COUNT 3".into(), None).await.unwrap(), 3 * ROWS);
    let error = client.execute("DROP".into(), None).await.unwrap_err();
    let arrow_flight::error::FlightError::Tonic(status) = error else {
        panic!("not a status: {error}");
    };
    assert_eq!(status.code(), Code::InvalidArgument);

    let sent = stream::iter((0..8).map(|n| Ok(batch(n * ROWS))));
    let ingest = CommandStatementIngest { table: "numbers".into(), ..Default::default() };
    assert_eq!(client.execute_ingest(ingest, sent).await.unwrap(), 8 * ROWS);
}
