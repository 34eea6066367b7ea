//! opentelemetry-otlp takes only a channel of tonic's type: `Channel::into_tonic`.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use opentelemetry::trace::{Tracer, TracerProvider};
use opentelemetry_otlp::{SpanExporter, WithTonicConfig};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_sdk::trace::SdkTracerProvider;
use tonic::{Request, Response, Status};
use tonic_rdma::{Path, Server};
use tonic_rdma_ecosystem_tests::Net;

/// The names of the spans that arrived, with their paths.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<(String, Path)>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let path = tonic_rdma::connect_info(&request).path;
        let scopes = request.into_inner().resource_spans.into_iter().flat_map(|of| of.scope_spans);
        let names = scopes.flat_map(|scope| scope.spans).map(|span| (span.name, path));
        self.0.lock().unwrap().extend(names);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

pub(crate) async fn spans_are_exported_through_into_tonic(net: Net) {
    let collector = Collector::default();
    let (addr, incoming) = net.listen().await;
    let routes = Server::builder().add_service(TraceServiceServer::new(collector.clone()));
    tokio::spawn(routes.serve_with_incoming(incoming));
    let channel = net.connect(addr).await.into_tonic();
    let exporter = SpanExporter::builder().with_tonic().with_channel(channel).build().unwrap();
    let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).build();
    let tracer = provider.tracer("ecosystem");
    // These are more spans than a batch has.
    let names: Vec<String> = (0..1000).map(|n| format!("span {n}")).collect();
    for name in &names {
        drop(tracer.start(name.clone()));
    }
    tokio::task::spawn_blocking(move || provider.shutdown()).await.unwrap().unwrap();
    let came = collector.0.lock().unwrap().clone();
    assert_eq!(came.len(), names.len(), "each span comes once");
    assert!(came.iter().all(|(_, path)| *path == net.path()), "{:?}", came.first());
    let came: BTreeSet<String> = came.into_iter().map(|(name, _)| name).collect();
    assert!(came.into_iter().eq(BTreeSet::from_iter(names)));
}
