//! tracing-opentelemetry: the call carries the context of a trace, and the server's spans are
//! children of the caller's.

use std::sync::OnceLock;

use http::HeaderMap;
use opentelemetry::global;
use opentelemetry::propagation::{Extractor, Injector};
use opentelemetry::trace::{TraceContextExt, TracerProvider};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
use tonic::metadata::{MetadataKey, MetadataMap};
use tonic::{Request, Response, Status};
use tonic_rdma::Server;
use tonic_rdma_ecosystem_tests::Net;
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
use tonic_rdma_example_services::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_example_services::greeter::{HelloReply, HelloRequest};
use tower_http::trace::TraceLayer;
use tracing::{Instrument, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// The ended spans of all cases.
static ENDED: OnceLock<InMemorySpanExporter> = OnceLock::new();

/// Records the spans of these cases and of calls, for the whole process.
pub(crate) fn subscribe() {
    let ended = ENDED.get_or_init(InMemorySpanExporter::default).clone();
    let provider = SdkTracerProvider::builder().with_simple_exporter(ended).build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("ecosystem"));
    let ours = Targets::new()
        .with_target(module_path!(), LevelFilter::INFO)
        .with_target("ecosystem::conventions", LevelFilter::INFO)
        .with_target("tonic_rdma::call", LevelFilter::DEBUG);
    tracing_subscriber::registry().with(layer.with_filter(ours)).init();
    global::set_text_map_propagator(TraceContextPropagator::new());
}

/// The spans that have ended.
pub(crate) fn ended() -> Vec<SpanData> {
    ENDED.get().unwrap().get_finished_spans().unwrap()
}

struct Inject<'a>(&'a mut MetadataMap);

impl Injector for Inject<'_> {
    fn set(&mut self, key: &str, value: String) {
        let key = MetadataKey::from_bytes(key.as_bytes()).unwrap();
        self.0.insert(key, value.parse().unwrap());
    }
}

struct Extract<'a>(&'a HeaderMap);

impl Extractor for Extract<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(|key| key.as_str()).collect()
    }
}

struct Traced;

#[tonic::async_trait]
impl Greeter for Traced {
    async fn say_hello(
        &self,
        request: Request<HelloRequest>,
    ) -> Result<Response<HelloReply>, Status> {
        let message = request.into_inner().name;
        let handled = async { Ok(Response::new(HelloReply { message })) };
        handled.instrument(info_span!("handle")).await
    }
}

pub(crate) async fn the_context_is_carried(net: Net) {
    let spans = TraceLayer::new_for_grpc().make_span_with(|request: &http::Request<_>| {
        let span = info_span!("serve");
        let carried = global::get_text_map_propagator(|p| p.extract(&Extract(request.headers())));
        span.set_parent(carried).unwrap();
        span
    });
    let (addr, incoming) = net.listen().await;
    let routes = Server::builder().layer(spans).add_service(GreeterServer::new(Traced));
    tokio::spawn(routes.serve_with_incoming(incoming));
    let inject = |mut request: Request<()>| {
        let context = tracing::Span::current().context();
        let mut into = Inject(request.metadata_mut());
        global::get_text_map_propagator(|p| p.inject_context(&context, &mut into));
        Ok(request)
    };
    let client = GreeterClient::with_interceptor(net.connect(addr).await, inject);
    let calls = (0..60).map(|n| {
        let mut client = client.clone();
        tokio::spawn(async move {
            let span = info_span!("call");
            let trace = span.context().span().span_context().trace_id();
            let request = HelloRequest { name: n.to_string() };
            client.say_hello(request).instrument(span).await.unwrap();
            trace
        })
    });
    for call in calls.collect::<Vec<_>>() {
        let trace = call.await.unwrap();
        let spans = loop {
            let mut spans = ended();
            spans.retain(|span| {
                let own = ["call", "serve", "handle"].contains(&&*span.name);
                own && span.span_context.trace_id() == trace
            });
            if spans.len() == 3 {
                break spans;
            }
            // The layer's span ends with the response.
            tokio::task::yield_now().await;
        };
        let named = |name| -> &SpanData { spans.iter().find(|span| span.name == name).unwrap() };
        let (call, serve, handle) = (named("call"), named("serve"), named("handle"));
        assert_eq!(serve.parent_span_id, call.span_context.span_id());
        assert!(serve.parent_span_is_remote);
        assert_eq!(handle.parent_span_id, serve.span_context.span_id());
    }
}
