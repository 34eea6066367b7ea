//! The queries of docs/dashboard.json, docs/alerts.yml and docs/metrics.md ask for what an exporter
//! for Prometheus has exported, after calls over TCP, shared memory and the simulated fabric.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod alerts;
#[path = "../common/mod.rs"]
mod common;
mod exported;
mod grafana;
mod promql;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use common::{Blob, Blobs, Fabric, LIMIT, Which, World, calls, pooled};
use exported::Exported;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tokio::task::JoinHandle;
use tonic::Code;
use tonic::body::Body;
use tonic::transport::server::TcpIncoming;
use tonic_rdma::metrics::{ALL, Kind};
use tonic_rdma::server::is_offer;
use tonic_rdma::sim::{SimConfig, SimNet};
use tonic_rdma::{Context, Endpoint, Path, Policy, PoolConfig, Server};
use tower::layer::layer_fn;
use tower::util::BoxCloneService;
use tower::{Service, ServiceExt, service_fn};

use crate::alerts::Alert;
use crate::promql::check;

const METRICS: &str = include_str!("../../../../docs/metrics.md");
const TROUBLESHOOTING: &str = include_str!("../../../../docs/troubleshooting.md");

fn blobs() -> Blobs {
    Blobs { codec: Which::Ours, seen: Arc::default(), limit: LIMIT, forward: None }
}

/// Scrapes until `done` accepts the text, and returns the text.
async fn scrape(prometheus: &PrometheusHandle, what: &str, done: impl Fn(&str) -> bool) -> String {
    let scrapes = async {
        loop {
            let text = prometheus.render();
            if done(&text) {
                return text;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let scraped = tokio::time::timeout(Duration::from_secs(60), scrapes).await;
    scraped.unwrap_or_else(|_| panic!("never exported: {what} in {}", prometheus.render()))
}

/// Makes calls, and a call that fails, over one fabric. Leaves nothing open.
async fn call_over(fabric: Fabric) {
    let hosts: [Option<Context>; 2] = fabric.hosts(32 << 20);
    let world = World::between(fabric, hosts.clone(), blobs()).await;
    calls(world.channel.clone()).await;
    let mut client = world.client(Which::Ours);
    client.echo(Blob::of(pooled(&world.channel, 1 << 20, 1).await)).await.unwrap();
    client.unary("/test.Others/Echo", Blob::default()).await.unwrap_err();
    for context in hosts.iter().flatten() {
        context.record_metrics().await;
    }
}

/// While a stream is silent, the peer's device answers a heartbeat. Then the link breaks, the
/// stream fails, and the channel gets another link.
async fn lose_the_link(prometheus: &PrometheusHandle) {
    let net = SimNet::new(SimConfig::default());
    let devices =
        [net.device("server", [10, 0, 0, 1].into()), net.device("client", [10, 0, 0, 2].into())];
    let hosts = devices.clone().map(|device| {
        Some(Context::builder().pool(PoolConfig::default().total(8 << 20)).sim(device).build())
    });
    let world = World::between(Fabric::Sim, hosts, blobs()).await;
    let mut silent = world.client(Which::Ours).chat(tokio_stream::pending()).await.unwrap();
    scrape(prometheus, "a round trip", |text| text.contains("tonic_rdma_round_trip_seconds")).await;
    devices[1].cut();
    assert_eq!(silent.message().await.unwrap_err().code(), Code::Unavailable);
    let mut channel = world.channel.clone();
    let reconnected = |text: &str| text.contains("tonic_rdma_reconnects_total{");
    let path = async { while channel.path_changed().await.path != Path::Sim {} };
    tokio::join!(path, scrape(prometheus, "a reconnect", reconnected));
}

/// Servers refuse connections: one server already has the only connection that it allows, and the
/// other server's only ticket was used.
async fn be_refused(prometheus: &PrometheusHandle) {
    let world = World::set(
        Fabric::Sim,
        Fabric::Sim.hosts(8 << 20),
        blobs(),
        |server| server.max_connections(1),
        |endpoint| endpoint.policy(Policy::Auto),
    )
    .await;
    assert_eq!(world.connect().await.path().path, Path::Tcp);
    let (endpoint, serving) = serve_with_one_ticket().await;
    for path in [Path::Sim, Path::Tcp] {
        assert_eq!(endpoint.connect().await.unwrap().path().path, path);
    }
    for reason in ["connections", "ticket"] {
        let refused = format!("tonic_rdma_connections_refused_total{{reason=\"{reason}\"}}");
        scrape(prometheus, reason, |text| text.contains(&refused)).await;
    }
    serving.abort();
}

/// Serves blobs. Each Offer gets a copy of the answer to the first Offer, so only one client can
/// use the ticket.
async fn serve_with_one_ticket() -> (Endpoint, JoinHandle<()>) {
    let [server, client] = Fabric::Sim.hosts(8 << 20).map(Option::unwrap);
    let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let addr = incoming.local_addr().unwrap();
    let first: Arc<OnceLock<Bytes>> = Arc::default();
    let layer = layer_fn(move |inner| answering_once(inner, first.clone()));
    let router = Server::builder().context(server).layer(layer).add_service(blobs());
    let serving = tokio::spawn(async move { router.serve_with_incoming(incoming).await.unwrap() });
    let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap().context(client);
    (endpoint.fast_path_timeout(Duration::from_secs(20)), serving)
}

/// Replaces the messages of answers to Offers by the first of them, which is kept in `first`.
fn answering_once<S>(
    inner: S,
    first: Arc<OnceLock<Bytes>>,
) -> BoxCloneService<Request<Body>, Response<Body>, S::Error>
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
{
    BoxCloneService::new(service_fn(move |request: Request<Body>| {
        let (inner, first) = (inner.clone(), first.clone());
        async move {
            let is_offer = is_offer(&request);
            let response = inner.oneshot(request).await?;
            if !is_offer {
                return Ok(response);
            }
            let (head, body) = response.into_parts();
            let body = body.collect().await.unwrap();
            let trailers = body.trailers().cloned();
            let message = first.get_or_init(|| body.to_bytes()).clone();
            let body = Full::new(message).with_trailers(async { trailers.map(Ok) });
            Ok(Response::from_parts(head, Body::new(body)))
        }
    }))
}

/// The queries of the table "What to look at".
fn queries_of_the_guide() -> Vec<&'static str> {
    let rows = METRICS.lines().skip_while(|line| !line.starts_with("| question | query")).skip(2);
    let cells = rows.take_while(|line| line.starts_with('|')).map(|row| {
        row.split(" | ").nth(1).unwrap_or_else(|| panic!("a row without a query: {row}"))
    });
    let spans = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    spans.filter(|span| span.contains(['{', '('])).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_query_asks_for_what_is_exported() {
    let builder = PrometheusBuilder::new().set_buckets(&[0.001, 0.01, 0.1, 1.0]).unwrap();
    let prometheus = builder.install_recorder().unwrap();
    tonic_rdma::metrics::describe();
    for fabric in [Fabric::Tcp, Fabric::Shm] {
        call_over(fabric).await;
    }
    lose_the_link(&prometheus).await;
    be_refused(&prometheus).await;
    let text = scrape(&prometheus, "all of it", |text| {
        let named = |metric: &&tonic_rdma::metrics::Metric| text.contains(metric.name);
        ALL.iter().filter(named).count() == ALL.len()
    })
    .await;
    let exported = Exported::parse(&text);
    for metric in ALL {
        let end = if metric.kind == Kind::Histogram { "_bucket" } else { "" };
        exported.series(&format!("{}{end}", metric.name)).unwrap();
    }

    let mut wrong = grafana::wrong_queries(&exported);
    let alerts = alerts::read();
    assert!(alerts.len() >= 6, "{} alerts", alerts.len());
    wrong.extend(alerts.iter().filter_map(|alert| wrong_alert(alert, &exported)));
    let guide = queries_of_the_guide();
    assert!(guide.len() >= 9, "{guide:?}");
    wrong.extend(guide.into_iter().filter_map(|query| check(query, &exported, &[]).err()));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Checks the query of an alert, and the labels in its texts. Returns the first mistake.
fn wrong_alert(alert: &Alert, exported: &Exported) -> Option<String> {
    let labels = match check(&alert.expr, exported, &[]) {
        Ok(labels) => labels,
        Err(error) => return Some(format!("{}: {error}", alert.name)),
    };
    let texts = [&alert.summary, &alert.description];
    let named = texts.into_iter().flat_map(|text| text.split("$labels.").skip(1));
    let mut named = named.map(|rest| rest.split([' ', '}']).next().unwrap_or_default());
    let foreign = named.find(|label| !labels.contains(*label))?;
    Some(format!("{}: the text names {foreign}, the query gives {labels:?}", alert.name))
}

#[test]
fn each_alert_says_what_to_do() {
    let sections: Vec<String> = TROUBLESHOOTING
        .lines()
        .filter_map(|line| {
            line.trim_start_matches('#').strip_prefix(' ').filter(|_| line.starts_with('#'))
        })
        .map(|title| title.to_lowercase().replace('`', "").replace(' ', "-"))
        .collect();
    for Alert { name, summary, description, runbook, .. } in alerts::read() {
        assert!(name.starts_with("TonicRdma"), "{name}");
        assert!(summary.len() > 20 && description.len() > 80, "{name}");
        let section = runbook.strip_prefix("docs/troubleshooting.md#");
        let section = section.unwrap_or_else(|| panic!("{name}: {runbook}"));
        assert!(sections.iter().any(|own| own == section), "{name}: no section {section}");
    }
}

/// A query with a wrong name, label, value or function is refused.
#[test]
fn mistakes_are_found() {
    let exported = Exported::parse(
        "# TYPE calls_total counter\n\
         calls_total{role=\"client\",path=\"tcp\"} 1\n\
         calls_total{role=\"server\",path=\"shm\"} 1\n\
         # TYPE open gauge\n\
         open{role=\"client\"} 1\n\
         # TYPE took_seconds histogram\n\
         took_seconds_bucket{path=\"tcp\",le=\"+Inf\"} 1\n",
    );
    let right = [
        "open",
        "sum by (role, job) (rate(calls_total{job=~\"$job\", path=\"tcp\"}[5m]))",
        "sum(increase(calls_total{path!=\"tcp\"}[$__rate_interval])) / sum(open) > 0.5",
        "histogram_quantile(0.5, sum by (le, path) (rate(took_seconds_bucket[5m])))",
        "sum by (path) (rate(calls_total{role=~\"client|server\"}[1d])) and on (path) \
         sum by (path, role) (rate(calls_total[1h])) > 0",
        "rate(calls_total[5m]) / ignoring(path) group_left open",
    ];
    for query in right {
        check(query, &exported, &["job"]).unwrap();
    }
    let wrong = [
        ("sum(rate(call_total[5m]))", "nobody exports call_total"),
        ("sum(rate(calls_total{rôle=\"client\"}[5m]))", "no \"\\\"\" before"),
        ("sum(rate(calls_total{device=\"a\"}[5m]))", "no label device"),
        ("sum(rate(calls_total{path=\"TCP\"}[5m]))", "no calls_total has path=\"TCP\""),
        ("sum(rate(calls_total{path!=\"udp\"}[5m]))", "no calls_total has path=\"udp\""),
        ("sum(rate(calls_total{path=~\"tcp|udp\"}[5m]))", "no calls_total has path=\"udp\""),
        ("sum(rate(calls_total{role=\"client\", path=\"shm\"}[5m]))", "beside the other matchers"),
        ("sum(rate(calls_total{job=~\"$jobs\"}[5m]))", "job \"$jobs\" is unknown"),
        ("sum by (reason) (rate(calls_total[5m]))", "by reason"),
        ("rate(calls_total)", "needs a range"),
        ("rate(calls_total[5])", "what is the range"),
        ("rate(open[5m])", "something that shrinks"),
        ("calls_total[5m]", "no vector"),
        ("speed(calls_total[5m])", "unknown function speed"),
        ("histogram_quantile(0.5, sum by (path) (rate(took_seconds_bucket[5m])))", "needs le"),
        ("rate(calls_total[5m]) / open", "the sides have the labels"),
        ("sum(open) / on (path) sum by (path) (rate(calls_total[5m]))", "on {\"path\"}"),
        ("sum(open))", "what is \")\"?"),
        ("sum(open", "no \")\" before"),
    ];
    for (query, why) in wrong {
        let error = check(query, &exported, &["job"]).unwrap_err();
        assert!(error.contains(why), "{error}, not {why}");
    }
}
