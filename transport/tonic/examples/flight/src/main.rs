//! Puts a table of record batches to a server and gets the table back. The program alternates
//! between arrow-flight with tonic over TCP, and this crate's stubs over the best path from this
//! host to itself.
//!
//! `cargo run --release -p tonic-rdma-example-flight` prints the rates, their ratios and the copied
//! bytes. Both servers run the same service, each server on its own threads.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use arrow_array::{Float64Array, Int64Array, RecordBatch};
use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_client::FlightServiceClient as StockClient;
use arrow_flight::flight_service_server::FlightServiceServer as StockServer;
use arrow_flight::{FlightClient, FlightDescriptor, Ticket};
use clap::Parser;
use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tonic::transport::server::TcpIncoming;
use tonic_rdma::{Context, Copied, Endpoint, PoolConfig, Server, ServerStats};
use tonic_rdma_example_flight::encode::{self, BatchEncoder};
use tonic_rdma_example_flight::flight_service_client::FlightServiceClient;
use tonic_rdma_example_flight::flight_service_server::FlightServiceServer;
use tonic_rdma_example_flight::{decode, tables::Tables};

type Error = Box<dyn std::error::Error + Send + Sync>;

const MIB: f64 = 1_048_576.0;
const TABLE: &str = "measured";
/// Rounds in which each end learns its own codec, and that tonic accepts long messages.
const WARM_UP: u16 = 2;

#[derive(Parser)]
#[command(about = "Arrow Flight over tonic-rdma, beside arrow-flight with tonic over TCP")]
struct Options {
    /// Address to listen at. With TONIC_RDMA=verbs, the address of an RDMA device selects this
    /// device.
    #[arg(long, default_value = "127.0.0.1")]
    addr: IpAddr,
    /// Size of a batch, in MiB.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    mib: u16,
    /// Batches in a table.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    batches: u16,
    /// How often each contender puts and gets the table. The medians count.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: u16,
    /// Fails if tonic-rdma copies bodies, or moves less than this multiple of the bytes that tonic
    /// moves in the same time.
    #[arg(long, value_name = "RATIO")]
    at_least: Option<f64>,
}

/// Duration of each put and of each get, in seconds.
#[derive(Default)]
struct Times {
    put: Vec<f64>,
    get: Vec<f64>,
}

fn main() -> Result<ExitCode, Error> {
    let options = Options::parse();
    let servers = Runtime::new()?;
    let (stock, ours, served) = servers.block_on(serve(&options))?;
    let code = Runtime::new()?.block_on(measure(&options, stock, ours, served))?;
    servers.shutdown_background();
    Ok(code)
}

/// Returns a context with room for a table that is kept while the next table arrives, and for the
/// batches in flight.
fn context(options: &Options) -> Context {
    let table = (usize::from(options.mib) * usize::from(options.batches)) << 20;
    Context::builder().pool(PoolConfig::default().total(6 * table)).build()
}

/// Starts both servers, each with its own tables.
async fn serve(options: &Options) -> Result<(SocketAddr, SocketAddr, ServerStats), Error> {
    let listener = TcpListener::bind((options.addr, 0)).await?;
    let stock = listener.local_addr()?;
    let service = StockServer::new(Tables::default()).max_decoding_message_size(limit(options));
    let server = tonic::transport::Server::builder().add_service(service);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));

    let listener = TcpListener::bind((options.addr, 0)).await?;
    let ours = listener.local_addr()?;
    let service =
        FlightServiceServer::new(Tables::default()).max_decoding_message_size(limit(options));
    let mut server = Server::builder().context(context(options));
    let served = server.stats();
    let router = server.add_service(service);
    tokio::spawn(router.serve_with_incoming(TcpIncoming::from(listener)));
    Ok((stock, ours, served))
}

/// Length of the longest message: a batch and its header.
fn limit(options: &Options) -> usize {
    (usize::from(options.mib) << 20) + (64 << 10)
}

fn batch(options: &Options) -> Result<RecordBatch, Error> {
    let rows = (usize::from(options.mib) << 20) / 16;
    let ids = Int64Array::from_iter_values(0..rows as i64);
    let values = Float64Array::from_iter_values((0..rows).map(|row| row as f64 / 3.0));
    Ok(RecordBatch::try_from_iter([("id", Arc::new(ids) as _), ("value", Arc::new(values) as _)])?)
}

async fn measure(
    options: &Options,
    stock: SocketAddr,
    ours: SocketAddr,
    served: ServerStats,
) -> Result<ExitCode, Error> {
    let batch = batch(options)?;
    let batches = vec![batch; usize::from(options.batches)];
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{stock}"))?;
    let stub = StockClient::new(endpoint.connect().await?);
    let mut stock = FlightClient::new_from_inner(stub.max_decoding_message_size(limit(options)));

    let endpoint = Endpoint::from_shared(format!("http://{ours}"))?.context(context(options));
    let channel = endpoint.connect().await?;
    let path = channel.path().to_string();
    println!("tonic-rdma's calls go by {path}");
    let stub = FlightServiceClient::new(channel.clone());
    let mut ours = stub.max_decoding_message_size(limit(options));

    let (mut by_stock, mut by_ours) = (Times::default(), Times::default());
    let mut before = None;
    for round in 0..WARM_UP + options.rounds {
        let sums = [channel.stats().copied_fast, served.get().copied_fast];
        if round == WARM_UP {
            before = Some(sums);
        }
        let start = Instant::now();
        put_stock(&mut stock, options, &batches).await?;
        let put = start.elapsed().as_secs_f64();
        let ticket = Ticket { ticket: TABLE.into() };
        let got = stock.do_get(ticket).await?.try_fold(0, count).await?;
        let get = start.elapsed().as_secs_f64() - put;
        check(got, &batches)?;
        if round >= WARM_UP {
            by_stock.put.push(put);
            by_stock.get.push(get);
        }

        let start = Instant::now();
        let encoder = BatchEncoder::new(channel.pool(), &batches[0].schema(), Default::default())?
            .with_descriptor(FlightDescriptor::new_path(vec![TABLE.into()]));
        let messages = encode::batches(encoder, stream::iter(batches.clone()).map(Ok));
        let stored = ours.do_put(messages.map(|m| m.expect("batches of one schema"))).await?;
        stored.into_inner().try_for_each(|_| async { Ok(()) }).await?;
        let put = start.elapsed().as_secs_f64();
        let messages = ours.do_get(Ticket { ticket: TABLE.into() }).await?.into_inner();
        let got = decode::batches(messages).try_fold(0, count).await?;
        let get = start.elapsed().as_secs_f64() - put;
        check(got, &batches)?;
        if round >= WARM_UP {
            by_ours.put.push(put);
            by_ours.get.push(get);
        }
    }
    let before = before.unwrap_or_default();
    let after = [channel.stats().copied_fast, served.get().copied_fast];
    let copied = [after[0] - before[0], after[1] - before[1]];
    Ok(report(options, &by_stock, &by_ours, &path, copied))
}

async fn put_stock(
    client: &mut FlightClient,
    options: &Options,
    batches: &[RecordBatch],
) -> Result<(), Error> {
    let messages = FlightDataEncoderBuilder::new()
        .with_max_flight_data_size(limit(options))
        .with_flight_descriptor(Some(FlightDescriptor::new_path(vec![TABLE.into()])))
        .build(stream::iter(batches.to_vec()).map(Ok));
    client.do_put(messages).await?.try_for_each(|_| async { Ok(()) }).await?;
    Ok(())
}

/// Adds up the rows, and drops the batch, like a reader that has finished with the batch.
async fn count(rows: usize, batch: RecordBatch) -> Result<usize, FlightError> {
    Ok(rows + batch.num_rows())
}

fn check(rows: usize, batches: &[RecordBatch]) -> Result<(), Error> {
    let sent: usize = batches.iter().map(RecordBatch::num_rows).sum();
    match rows == sent {
        true => Ok(()),
        false => Err(format!("got {rows} rows of {sent}").into()),
    }
}

fn report(
    options: &Options,
    stock: &Times,
    ours: &Times,
    path: &str,
    copied: [Copied; 2],
) -> ExitCode {
    let mib = f64::from(options.mib) * f64::from(options.batches);
    let rate = |seconds: &[f64]| mib * MIB / 1e6 / median(seconds);
    let mut ok = true;
    for (what, stock, ours) in [("put", &stock.put, &ours.put), ("get", &stock.get, &ours.get)] {
        let (stock, ours) = (rate(stock), rate(ours));
        println!(
            "{what}: tonic over TCP {stock:.0} MB/s, tonic-rdma {ours:.0} MB/s, {:.1} times",
            ours / stock
        );
        ok &= options.at_least.is_none_or(|least| ours / stock >= least);
    }
    println!("copied by the client of tonic-rdma: {}", copied[0]);
    println!("copied by the server of tonic-rdma: {}", copied[1]);
    let copied: u64 = copied.iter().map(Copied::total).sum();
    let sent = 2.0 * f64::from(options.rounds) * mib * MIB;
    if options.at_least.is_some() && copied as f64 > sent / 100.0 {
        println!("bodies were copied, by {path}: {copied} bytes of {sent:.0}");
        ok = false;
    }
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn median(seconds: &[f64]) -> f64 {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
