//! The spans of calls, as an exporter of OpenTelemetry gets them, follow its conventions for gRPC.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use opentelemetry::Value;
use opentelemetry::trace::{SpanKind, Status as SpanStatus, TraceContextExt};
use opentelemetry_sdk::trace::SpanData;
use tonic::{Code, Request, Response, Status};
use tonic_rdma::{Path, Server};
use tonic_rdma_ecosystem_tests::Net;
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
use tonic_rdma_example_services::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_example_services::greeter::{HelloReply, HelloRequest};
use tracing::{Instrument, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt;

use crate::traced::ended;

const METHOD: &str = "greeter.Greeter/SayHello";

/// Answers with the status whose number is the caller's name.
struct Statuses;

#[tonic::async_trait]
impl Greeter for Statuses {
    async fn say_hello(
        &self,
        request: Request<HelloRequest>,
    ) -> Result<Response<HelloReply>, Status> {
        match Code::from_bytes(request.into_inner().name.as_bytes()) {
            Code::Ok => Ok(Response::new(HelloReply::default())),
            code => Err(Status::new(code, "as asked")),
        }
    }
}

/// The attributes that the conventions define, and the path and the role.
fn attributes(span: &SpanData) -> BTreeMap<&str, &Value> {
    let own = ["rpc.", "error", "server.", "network.", "otel.", "path", "role"];
    span.attributes
        .iter()
        .map(|attribute| (attribute.key.as_str(), &attribute.value))
        .filter(|(key, _)| own.iter().any(|prefix| key.starts_with(prefix)))
        .collect()
}

/// The span of one side of the call to the server at `addr` that had this status.
async fn span_of(kind: SpanKind, addr: SocketAddr, status: &'static str) -> SpanData {
    for _ in 0..1000 {
        let found = ended().into_iter().find(|span| {
            let attributes = attributes(span);
            span.span_kind == kind
                && attributes.get("server.port") == Some(&&Value::I64(addr.port().into()))
                && attributes.get("rpc.status_code") == Some(&&Value::from(status))
                && attributes.get("rpc.method") == Some(&&Value::from(METHOD))
        });
        match found {
            Some(span) => return span,
            // A server's span ends with its response.
            None => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
    let calls = ended().into_iter().filter(|span| span.name == METHOD);
    panic!("no span of the {kind:?} with {status}: {:#?}", calls.collect::<Vec<_>>());
}

pub(crate) async fn spans_have_their_attributes(net: Net) {
    let (addr, incoming) = net.listen().await;
    let routes = Server::builder().add_service(GreeterServer::new(Statuses));
    tokio::spawn(routes.serve_with_incoming(incoming));
    let mut client = GreeterClient::new(net.connect(addr).await);
    for (code, status, at_server) in [
        (Code::Ok, "OK", false),
        (Code::Unavailable, "UNAVAILABLE", true),
        (Code::NotFound, "NOT_FOUND", false),
    ] {
        let parent = info_span!("parent");
        let trace = parent.context().span().span_context().clone();
        let request = HelloRequest { name: (code as i32).to_string() };
        let result = client.say_hello(request).instrument(parent).await;
        assert_eq!(result.err().map_or(Code::Ok, |status| status.code()), code);

        let span = span_of(SpanKind::Client, addr, status).await;
        assert_eq!(span.parent_span_id, trace.span_id(), "of the caller's span");
        check(&span, net, addr, status, code != Code::Ok);
        check(&span_of(SpanKind::Server, addr, status).await, net, addr, status, at_server);
    }
}

fn check(span: &SpanData, net: Net, addr: SocketAddr, status: &'static str, is_error: bool) {
    assert_eq!(span.name, METHOD);
    let mut attributes = attributes(span);
    let role = if span.span_kind == SpanKind::Client { "client" } else { "server" };
    let (host, path) = (addr.ip().to_string(), net.path().to_string());
    let mut expected = BTreeMap::from([
        ("path", Value::from(path)),
        ("role", Value::from(role)),
        ("rpc.method", Value::from(METHOD)),
        ("rpc.status_code", Value::from(status)),
        ("rpc.system.name", Value::from("grpc")),
        ("server.address", Value::from(host.clone())),
        ("server.port", Value::I64(addr.port().into())),
    ]);
    if is_error {
        expected.insert("error.type", Value::from(status));
        assert_eq!(span.status, SpanStatus::error(""));
    } else {
        assert_eq!(span.status, SpanStatus::Unset);
    }
    // A client does not know the TCP connection of a call, and shared memory has no addresses.
    if net.path() == Path::Verbs || (role, net.path()) == ("server", Path::Tcp) {
        assert_eq!(attributes.remove("network.peer.address"), Some(&Value::from(host)));
        assert!(matches!(attributes.remove("network.peer.port"), Some(Value::I64(1..))));
    }
    assert!(
        attributes.into_iter().eq(expected.iter().map(|(key, value)| (*key, value))),
        "{span:?}"
    );
}
