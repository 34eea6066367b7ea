//! A Flight service that keeps tables in memory.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrow_flight::flight_service_server::FlightService;
use arrow_flight::{
    Action, ActionType, Criteria, Empty, FlightData, FlightDescriptor, FlightEndpoint, FlightInfo,
    HandshakeRequest, HandshakeResponse, PollInfo, PutResult, SchemaResult, Ticket,
};
use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use tonic::{Request, Response, Status, Streaming};

/// The stream of a method's replies.
type Reply<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Keeps the messages that `DoPut` receives in the memory in which they landed. `DoGet` sends the
/// messages from this memory. No message is decoded, so a peer can change nothing between a check
/// and a use. `DoExchange` sends back each message that it receives.
///
/// `Tables` implements the trait of the arrow-flight crate, as an existing service does. The server
/// stub of arrow-flight can serve `Tables`, and so can [this crate's
/// stub](crate::flight_service_server).
#[derive(Clone, Debug, Default)]
pub struct Tables(Arc<Mutex<BTreeMap<String, Table>>>);

/// The messages of a table: first the schema, then dictionaries and batches.
type Table = Arc<[FlightData]>;

impl Tables {
    fn tables(&self) -> MutexGuard<'_, BTreeMap<String, Table>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, name: &str) -> Result<Table, Status> {
        let table = self.tables().get(name).cloned();
        table.ok_or_else(|| Status::not_found(format!("there is no table {name:?}")))
    }

    /// Returns the name of the table, which is the descriptor's path.
    fn named(descriptor: &FlightDescriptor) -> Result<String, Status> {
        match &descriptor.path[..] {
            [name] => Ok(name.clone()),
            path => Err(Status::invalid_argument(format!(
                "a descriptor's path is the name of one table, not {} names",
                path.len()
            ))),
        }
    }

    fn info(name: &str, table: &Table) -> FlightInfo {
        let ticket = Ticket { ticket: Bytes::copy_from_slice(name.as_bytes()) };
        FlightInfo {
            schema: schema(table),
            flight_descriptor: Some(FlightDescriptor::new_path(vec![name.to_owned()])),
            endpoint: vec![FlightEndpoint::new().with_ticket(ticket)],
            total_records: -1,
            total_bytes: table.iter().map(|message| message.data_body.len() as i64).sum(),
            ..FlightInfo::default()
        }
    }
}

/// Returns the schema message as the `schema` field of `FlightInfo` and `SchemaResult` carries it:
/// after the continuation marker and the length, as in an IPC stream.
fn schema(table: &Table) -> Bytes {
    let header = table.first().map_or(&[][..], |message| &message.data_header);
    let mut schema = Vec::with_capacity(8 + header.len());
    schema.extend_from_slice(&u32::MAX.to_le_bytes());
    schema.extend_from_slice(&(header.len() as u32).to_le_bytes());
    schema.extend_from_slice(header);
    schema.into()
}

fn unimplemented<T>(method: &str) -> Result<T, Status> {
    Err(Status::unimplemented(format!("tables have no {method}")))
}

#[tonic::async_trait]
impl FlightService for Tables {
    type HandshakeStream = Reply<HandshakeResponse>;
    type ListFlightsStream = Reply<FlightInfo>;
    type DoGetStream = Reply<FlightData>;
    type DoPutStream = Reply<PutResult>;
    type DoExchangeStream = Reply<FlightData>;
    type DoActionStream = Reply<arrow_flight::Result>;
    type ListActionsStream = Reply<ActionType>;

    async fn handshake(
        &self,
        _: Request<Streaming<HandshakeRequest>>,
    ) -> Result<Response<Self::HandshakeStream>, Status> {
        unimplemented("handshake")
    }

    async fn list_flights(
        &self,
        _: Request<Criteria>,
    ) -> Result<Response<Self::ListFlightsStream>, Status> {
        let infos: Vec<_> =
            self.tables().iter().map(|(name, table)| Ok(Self::info(name, table))).collect();
        Ok(Response::new(stream::iter(infos).boxed()))
    }

    async fn get_flight_info(
        &self,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let name = Self::named(request.get_ref())?;
        let table = self.get(&name)?;
        Ok(Response::new(Self::info(&name, &table)))
    }

    async fn poll_flight_info(
        &self,
        _: Request<FlightDescriptor>,
    ) -> Result<Response<PollInfo>, Status> {
        unimplemented("queries to poll")
    }

    async fn get_schema(
        &self,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<SchemaResult>, Status> {
        let table = self.get(&Self::named(request.get_ref())?)?;
        Ok(Response::new(SchemaResult { schema: schema(&table) }))
    }

    async fn do_get(
        &self,
        request: Request<Ticket>,
    ) -> Result<Response<Self::DoGetStream>, Status> {
        let ticket = request.into_inner().ticket;
        let name = std::str::from_utf8(&ticket)
            .map_err(|_| Status::invalid_argument("a ticket is the name of a table in UTF-8"))?;
        let table = self.get(name)?;
        let messages = (0..table.len()).map(move |n| Ok(table[n].clone()));
        Ok(Response::new(stream::iter(messages).boxed()))
    }

    async fn do_put(
        &self,
        request: Request<Streaming<FlightData>>,
    ) -> Result<Response<Self::DoPutStream>, Status> {
        let mut messages = request.into_inner();
        let mut table = Vec::new();
        let mut name = None;
        while let Some(mut message) = messages.message().await? {
            if let Some(descriptor) = message.flight_descriptor.take() {
                name = Some(Self::named(&descriptor)?);
            }
            table.push(message);
        }
        let Some(name) = name else {
            return Err(Status::invalid_argument(
                "no message has a descriptor, which names the table",
            ));
        };
        let stored = PutResult { app_metadata: table.len().to_string().into() };
        self.tables().insert(name, table.into());
        Ok(Response::new(stream::iter([Ok(stored)]).boxed()))
    }

    async fn do_exchange(
        &self,
        request: Request<Streaming<FlightData>>,
    ) -> Result<Response<Self::DoExchangeStream>, Status> {
        let messages = request.into_inner().map(|message| {
            message.map(|mut message| {
                message.flight_descriptor = None;
                message
            })
        });
        Ok(Response::new(messages.boxed()))
    }

    async fn do_action(
        &self,
        _: Request<Action>,
    ) -> Result<Response<Self::DoActionStream>, Status> {
        unimplemented("actions")
    }

    async fn list_actions(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<Self::ListActionsStream>, Status> {
        Ok(Response::new(stream::empty().boxed()))
    }
}
