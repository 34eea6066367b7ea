//! Sends record batches by every method that carries them. The received batches equal the sent
//! batches, and on a fast path their columns lie where they landed.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::net::SocketAddr;
use std::sync::Arc;

use arrow_array::builder::{ListBuilder, StringDictionaryBuilder, UInt64Builder};
use arrow_array::cast::AsArray;
use arrow_array::types::Int32Type;
use arrow_array::{Array, ArrayRef, Float64Array, Int64Array, RecordBatch, StringArray};
use arrow_flight::decode::{DecodedFlightData, DecodedPayload};
use arrow_flight::encode::{DictionaryHandling, FlightDataEncoderBuilder};
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_client::FlightServiceClient as StockClient;
use arrow_flight::flight_service_server::FlightServiceServer as StockServer;
use arrow_flight::{FlightClient, FlightData, FlightDescriptor, Ticket};
use arrow_ipc::writer::IpcWriteOptions;
use bytes::Bytes;
use futures_util::{Stream, StreamExt, TryStreamExt, stream};
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Status};
use tonic_rdma::{
    Channel, Context, Copied, Endpoint, Policy, Pool, PoolConfig, Server, ServerStats,
};
use tonic_rdma_example_flight::decode;
use tonic_rdma_example_flight::encode::{self, BatchEncoder};
use tonic_rdma_example_flight::flight_service_client::FlightServiceClient;
use tonic_rdma_example_flight::flight_service_server::FlightServiceServer;
use tonic_rdma_example_flight::tables::Tables;

const MIB: usize = 1 << 20;
/// The result of this crate's decoder.
type Decoded = Result<DecodedFlightData, FlightError>;

const LIMIT: usize = 16 * MIB;

/// A listener at the guest device's address, or on this host.
async fn listen() -> TcpListener {
    let addr = std::env::var("GUEST_ADDR").unwrap_or_else(|_| "127.0.0.1".into());
    TcpListener::bind((addr, 0)).await.unwrap()
}

/// A server of [`Tables`] with this crate's stubs, and a channel to it.
struct World {
    channel: Channel,
    server: ServerStats,
}

impl World {
    async fn new(policy: Policy, pool: usize) -> World {
        let context = || Context::builder().pool(PoolConfig::default().total(pool)).build();
        let listener = listen().await;
        let addr = listener.local_addr().unwrap();
        let service = FlightServiceServer::new(Tables::default()).max_decoding_message_size(LIMIT);
        let mut server = Server::builder().context(context());
        let stats = server.stats();
        let router = server.add_service(service);
        tokio::spawn(router.serve_with_incoming(TcpIncoming::from(listener)));
        let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
        let channel = endpoint.context(context()).policy(policy).connect().await.unwrap();
        World { channel, server: stats }
    }

    async fn fast(pool: usize) -> World {
        World::new(Policy::Require, pool).await
    }

    fn client(&self) -> FlightServiceClient<Channel> {
        FlightServiceClient::new(self.channel.clone()).max_decoding_message_size(LIMIT)
    }

    /// The bytes that each end has copied.
    fn copied(&self) -> [Copied; 2] {
        [self.channel.stats().copied_fast, self.server.get().copied_fast]
    }

    /// The bytes that both ends have copied since `before`, without short messages.
    fn copied_since(&self, before: [Copied; 2]) -> u64 {
        let after = self.copied();
        after.into_iter().zip(before).map(|(a, b)| (a - b).total() - (a - b).eager).sum()
    }

    async fn put(&self, name: &str, batches: &[RecordBatch]) {
        let stored = self.client().do_put(messages(self.channel.pool(), name, batches)).await;
        let stored: Vec<_> = stored.unwrap().into_inner().try_collect().await.unwrap();
        assert_eq!(stored.len(), 1);
    }

    async fn get(&self, name: &str) -> impl Stream<Item = Decoded> + use<> {
        let ticket = Ticket { ticket: Bytes::copy_from_slice(name.as_bytes()) };
        decode::messages(self.client().do_get(ticket).await.unwrap().into_inner())
    }

    async fn exchange(&self, batches: &[RecordBatch]) -> impl Stream<Item = Decoded> + use<> {
        let messages = messages(self.channel.pool(), "exchanged", batches);
        decode::messages(self.client().do_exchange(messages).await.unwrap().into_inner())
    }
}

/// The messages of these batches, from this crate's encoder.
fn messages(
    pool: Pool,
    name: &str,
    batches: &[RecordBatch],
) -> impl Stream<Item = FlightData> + Send + 'static {
    let schema = batches[0].schema();
    let encoder = BatchEncoder::new(pool, &schema, IpcWriteOptions::default()).unwrap();
    let encoder = encoder.with_descriptor(FlightDescriptor::new_path(vec![name.to_owned()]));
    encode::batches(encoder, stream::iter(batches.to_vec()).map(Ok)).map(|m| m.unwrap())
}

/// A batch of about 2.5 MiB: numbers, numbers with gaps, strings, lists, and a dictionary.
fn mixed(seed: i64) -> RecordBatch {
    const ROWS: i64 = 64 << 10;
    let rows = seed * ROWS..(seed + 1) * ROWS;
    let mut lists = ListBuilder::new(UInt64Builder::new());
    let mut names = StringDictionaryBuilder::<Int32Type>::new();
    for row in rows.clone() {
        lists.values().append_slice(&[7; 3][..(row % 4) as usize]);
        lists.append(row % 5 > 0);
        names.append_value(["alpha", "beta", "gamma"][(row % 3) as usize]);
    }
    let gaps = rows.clone().map(|row| (row % 7 > 0).then_some(row as f64 / 3.0));
    let columns: [(&str, ArrayRef); 5] = [
        ("number", Arc::new(Int64Array::from_iter_values(rows.clone()))),
        ("gaps", Arc::new(gaps.collect::<Float64Array>())),
        ("text", Arc::new(StringArray::from_iter_values(rows.map(|row| format!("row {row}"))))),
        ("lists", Arc::new(lists.finish())),
        ("names", Arc::new(names.finish())),
    ];
    RecordBatch::try_from_iter(columns).unwrap()
}

/// A batch of numbers that takes this many bytes.
fn numbers(bytes: usize) -> RecordBatch {
    let column = Int64Array::from_iter_values(0..bytes as i64 / 8);
    RecordBatch::try_from_iter([("number", Arc::new(column) as ArrayRef)]).unwrap()
}

/// The number of these arrays' buffers that lie in `body`, and of those that do not.
fn places(columns: &[ArrayRef], body: &Bytes) -> (usize, usize) {
    fn walk(data: &arrow_data::ArrayData, body: &Bytes, places: &mut (usize, usize)) {
        let validity = data.nulls().map(|nulls| nulls.buffer());
        for buffer in data.buffers().iter().chain(validity).filter(|buffer| !buffer.is_empty()) {
            match body.as_ptr_range().contains(&buffer.as_ptr()) {
                true => places.0 += 1,
                false => places.1 += 1,
            }
        }
        for child in data.child_data() {
            walk(child, body, places);
        }
    }
    let mut found = (0, 0);
    for column in columns {
        walk(&column.to_data(), body, &mut found);
    }
    found
}

/// Compares received with sent batches. If `pool` is given, also checks that each body lies in the
/// pool, and each column's buffers in their message's body.
async fn check(stream: impl Stream<Item = Decoded>, sent: &[RecordBatch], pool: Option<&Pool>) {
    let mut messages = std::pin::pin!(stream);
    let mut sent = sent.iter();
    while let Some(message) = messages.next().await {
        let message = message.unwrap();
        let DecodedPayload::RecordBatch(batch) = message.payload else { continue };
        assert!(batch == *sent.next().unwrap(), "another batch than was sent");
        let Some(pool) = pool else { continue };
        assert!(pool.contains(&message.inner.data_body), "the body was copied");
        assert!(!pool.contains(&message.inner.data_header), "the peer can change a header");
        // Dictionaries come in their own messages, and may lie elsewhere.
        let columns: Vec<_> = batch
            .columns()
            .iter()
            .map(|column| match column.as_any_dictionary_opt() {
                Some(dictionary) => arrow_array::make_array(dictionary.keys().to_data()),
                None => column.clone(),
            })
            .collect();
        let (there, elsewhere) = places(&columns, &message.inner.data_body);
        assert!(there >= 8 && elsewhere == 0, "{there} buffers in the body, {elsewhere} elsewhere");
    }
    assert_eq!(sent.count(), 0, "batches that did not arrive");
}

#[tokio::test]
async fn batches_are_decoded_where_they_landed() {
    let world = World::fast(64 * MIB).await;
    let sent: Vec<_> = (0..3).map(mixed).collect();
    let pool = world.channel.pool();
    let round = async |pool| {
        let before = world.copied();
        world.put("table", &sent).await;
        check(world.get("table").await, &sent, pool).await;
        check(world.exchange(&sent).await, &sent, pool).await;
        world.copied_since(before)
    };
    // In each stream of a short message and long messages, padding fills one of tonic's frames, of
    // up to 32 KiB, so that tonic adds no other message to the frame. The padding counts as copied.
    // Over RDMA, headers are also copied to staging. Each round has four streams.
    const FILLING: u64 = 4 * (34 << 10);
    // Each end learns its own codec, and that tonic accepts messages of these lengths.
    let mut learnt = 0;
    while round(None).await > FILLING {
        learnt += 1;
        assert!(learnt < 8, "still copying: {:?}", world.copied());
    }
    for _ in 0..3 {
        let copied = round(Some(&pool)).await;
        assert!(copied <= FILLING, "{copied} bytes: {:?}", world.copied());
    }
    let world = World::new(Policy::Off, 64 * MIB).await;
    let sent: Vec<_> = (0..3).map(mixed).collect();
    world.put("table", &sent).await;
    check(world.get("table").await, &sent, None).await;
    check(world.exchange(&sent).await, &sent, None).await;
}

/// Starts a server of arrow-flight with tonic.
async fn stock_server() -> SocketAddr {
    let listener = listen().await;
    let addr = listener.local_addr().unwrap();
    let service = StockServer::new(Tables::default()).max_decoding_message_size(LIMIT);
    let server = tonic::transport::Server::builder().add_service(service);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    addr
}

#[tokio::test]
async fn flight_client_works_over_a_channel_of_this_crate() {
    let world = World::fast(64 * MIB).await;
    let stub = StockClient::new(world.channel.clone()).max_decoding_message_size(LIMIT);
    let mut client = FlightClient::new_from_inner(stub);
    let sent: Vec<_> = (0..3).map(mixed).collect();
    let descriptor = FlightDescriptor::new_path(vec!["table".into()]);
    let encoder = FlightDataEncoderBuilder::new()
        .with_dictionary_handling(DictionaryHandling::Resend)
        .with_flight_descriptor(Some(descriptor.clone()));
    let messages = encoder.build(stream::iter(sent.clone()).map(Ok));
    let stored: Vec<_> = client.do_put(messages).await.unwrap().try_collect().await.unwrap();
    assert_eq!(stored.len(), 1);
    let info = client.get_flight_info(descriptor).await.unwrap();
    assert_eq!(info.clone().try_decode_schema().unwrap(), *sent[0].schema());
    let ticket = info.endpoint[0].ticket.clone().unwrap();
    let got: Vec<_> = client.do_get(ticket).await.unwrap().try_collect().await.unwrap();
    let schema = got[0].schema();
    let [got, sent] = [got, sent].map(|batches| concat(&schema, &batches));
    assert!(got == sent, "another table than was put");
    let fast = world.channel.stats();
    assert!(fast.bytes_sent_write > 5 * MIB as u64 && fast.bytes_received_write > 5 * MIB as u64);
}

#[tokio::test]
async fn each_client_works_with_each_server() {
    let world = World::fast(64 * MIB).await;
    let sent: Vec<_> = (0..2).map(mixed).collect();
    // Use this crate's client with a stock server.
    let addr = stock_server().await;
    let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
    let stock = World { channel: endpoint.connect().await.unwrap(), server: world.server.clone() };
    stock.put("table", &sent).await;
    check(stock.get("table").await, &sent, None).await;
    check(stock.exchange(&sent).await, &sent, None).await;
}

fn concat(schema: &arrow_schema::SchemaRef, batches: &[RecordBatch]) -> Vec<ArrayRef> {
    (0..schema.fields().len())
        .map(|n| {
            let columns: Vec<_> = batches.iter().map(|batch| batch.column(n).as_ref()).collect();
            let joined = arrow_select::concat::concat(&columns).unwrap();
            // Equal values may have different keys.
            arrow_cast::cast(&joined, &plain(joined.data_type())).unwrap()
        })
        .collect()
}

fn plain(data_type: &arrow_schema::DataType) -> arrow_schema::DataType {
    match data_type {
        arrow_schema::DataType::Dictionary(_, values) => values.as_ref().clone(),
        other => other.clone(),
    }
}

/// Batches that an application keeps use up landing memory. The memory that the application holds
/// grows to its limit. Further batches are then copied to the heap, and no stream stops.
#[tokio::test]
async fn batches_that_are_held_are_copied_only_at_the_limit() {
    let world = World::fast(128 * MIB).await;
    let batch = numbers(8 * MIB);
    world.put("table", &vec![batch.clone(); 2]).await;
    let pool = world.channel.pool();
    let mut held = Vec::new();
    let mut in_pool = Vec::new();
    for _ in 0..10 {
        let mut messages = std::pin::pin!(world.get("table").await);
        while let Some(message) = messages.next().await {
            let message = message.unwrap();
            let DecodedPayload::RecordBatch(got) = message.payload else { continue };
            assert!(got == batch, "another batch than was sent");
            in_pool.push(pool.contains(&message.inner.data_body));
            held.push(got);
        }
    }
    let limit = world.channel.pool().stats();
    let landed = in_pool.iter().filter(|there| **there).count();
    assert!(
        landed * 8 * MIB >= 32 * MIB,
        "{landed} of 20 batches were held where they landed: {limit:?}"
    );
    assert!(in_pool[..landed].iter().all(|there| *there), "copied before the limit: {in_pool:?}");
    assert!(landed < 20, "more is held than the pool has");
    drop(held);
    check_numbers(&world, &batch, &pool).await;
}

/// Checks that received batches are no longer copied once the held batches are dropped.
async fn check_numbers(world: &World, batch: &RecordBatch, pool: &Pool) {
    let mut messages = std::pin::pin!(world.get("table").await);
    while let Some(message) = messages.next().await {
        let message = message.unwrap();
        let DecodedPayload::RecordBatch(got) = message.payload else { continue };
        assert!(got == *batch && pool.contains(&message.inner.data_body));
    }
}

#[tokio::test]
async fn what_is_longer_than_the_pool_is_sent_from_the_heap() {
    let world = World::fast(8 * MIB).await;
    let sent = [numbers(12 * MIB)];
    let lies: Vec<_> = messages(world.channel.pool(), "table", &sent).collect().await;
    assert!(!world.channel.pool().contains(&lies[1].data_body));
    world.put("table", &sent).await;
    check(world.get("table").await, &sent, None).await;
}

/// The encoder produces messages with the same bodies as arrow-flight's encoder.
#[tokio::test]
async fn the_encoder_agrees_with_that_of_arrow_flight() {
    let pool = Context::builder().build();
    let endpoint = Endpoint::from_static("http://127.0.0.1:1").context(pool);
    let pool = endpoint.connect_lazy().pool();
    for handling in [
        IpcWriteOptions::default(),
        IpcWriteOptions::try_new(8, false, arrow_ipc::MetadataVersion::V5).unwrap(),
    ] {
        let batches = [numbers(MIB), numbers(8)];
        let theirs: Vec<_> = FlightDataEncoderBuilder::new()
            .with_options(handling.clone())
            .build(stream::iter(batches.to_vec()).map(Ok))
            .try_collect()
            .await
            .unwrap();
        let encoder = BatchEncoder::new(pool.clone(), &batches[0].schema(), handling).unwrap();
        let ours: Vec<_> = encode::batches(encoder, stream::iter(batches.to_vec()).map(Ok))
            .try_collect()
            .await
            .unwrap();
        assert_eq!(ours.len(), theirs.len());
        for (ours, theirs) in ours.iter().zip(&theirs) {
            assert!(ours.data_body == theirs.data_body, "another body");
        }
    }
}

#[tokio::test]
async fn no_batch_is_a_schema() {
    let world = World::fast(64 * MIB).await;
    let schema = numbers(8).schema();
    let encoder = BatchEncoder::new(world.channel.pool(), &schema, Default::default()).unwrap();
    let encoder = encoder.with_descriptor(FlightDescriptor::new_path(vec!["empty".into()]));
    let none = stream::empty::<Result<RecordBatch, FlightError>>();
    let messages = encode::batches(encoder, none).map(|m| m.unwrap());
    world.client().do_put(messages).await.unwrap();
    let got: Vec<_> = world.get("empty").await.try_collect().await.unwrap();
    let [DecodedFlightData { payload: DecodedPayload::Schema(got), .. }] = &got[..] else {
        panic!("{got:?}")
    };
    assert_eq!(*got, schema);
}

#[tokio::test]
async fn bad_input_is_an_error() {
    let world = World::fast(64 * MIB).await;
    let mut client = world.client();
    let missing = client.do_get(Ticket { ticket: "missing".into() }).await.unwrap_err();
    assert_eq!(missing.code(), Code::NotFound);
    assert!(missing.message().contains("missing"), "{missing}");
    let no_text = client.do_get(Ticket { ticket: vec![0xff].into() }).await.unwrap_err();
    assert_eq!(no_text.code(), Code::InvalidArgument);
    let nameless = client.do_put(stream::iter([FlightData::new()])).await.unwrap_err();
    assert_eq!(nameless.code(), Code::InvalidArgument);
    let descriptor = FlightDescriptor::new_path(vec!["a".into(), "b".into()]);
    let two_names = FlightData::new().with_descriptor(descriptor);
    let two_names = client.do_put(stream::iter([two_names])).await.unwrap_err();
    assert!(two_names.message().contains("2 names"), "{two_names}");
}

/// A peer may send anything as an Arrow message: bytes that are not a message, a truncated body, or
/// offsets beyond the end of the body.
#[tokio::test]
async fn messages_that_are_no_batches_are_errors() {
    let world = World::fast(64 * MIB).await;
    let pool = world.channel.pool();
    let good: Vec<_> = messages(pool, "table", &[mixed(0)]).collect().await;
    let last = good.len() - 1;
    let spoil: [fn(&mut FlightData); 4] = [
        |message| message.data_header = Bytes::from_static(b"no message of Arrow"),
        |message| message.data_header = message.data_header.slice(..message.data_header.len() / 2),
        |message| message.data_body = message.data_body.slice(..message.data_body.len() / 2),
        |message| {
            let mut body = message.data_body.to_vec();
            body.fill(0xff);
            message.data_body = body.into();
        },
    ];
    for (n, spoil) in spoil.into_iter().enumerate() {
        let mut bad = good.clone();
        spoil(&mut bad[last]);
        let replies = world.client().do_exchange(stream::iter(bad)).await.unwrap().into_inner();
        let got: Result<Vec<_>, _> = decode::batches(replies).try_collect().await;
        assert!(got.is_err(), "case {n}");
    }
    // An error of the call reaches the reader.
    let failed = decode::batches(stream::iter([Err(Status::aborted("on purpose"))]));
    let failed = failed.try_collect::<Vec<_>>().await.unwrap_err();
    assert!(matches!(failed, FlightError::Tonic(status) if status.code() == Code::Aborted));
}

/// Whatever is changed in a header, the reader gets an error or a batch, and never panics.
#[tokio::test]
async fn spoilt_headers_never_panic() {
    let pool = Endpoint::from_static("http://127.0.0.1:1").connect_lazy().pool();
    let good: Vec<_> = messages(pool, "table", &[mixed(0).slice(7, 50)]).collect().await;
    let mut random = 1_u64;
    let mut next = move |below: usize| {
        // xorshift64 (Marsaglia, 2003)
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 11) as usize % below
    };
    let mut errors = 0;
    for _ in 0..3000 {
        let mut bad = good.clone();
        let spoilt = next(bad.len());
        let mut header = bad[spoilt].data_header.to_vec();
        for _ in 0..1 + next(3) {
            let at = next(header.len());
            header[at] = [0, 1, 0x7f, 0x80, 0xff, next(256) as u8][next(6)];
        }
        bad[spoilt].data_header = header.into();
        let batches = decode::batches(stream::iter(bad.into_iter().map(Ok)));
        errors += usize::from(batches.try_collect::<Vec<_>>().await.is_err());
    }
    assert!(errors > 300, "{errors} errors: the headers were hardly spoilt");
}
