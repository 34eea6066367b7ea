//! The server of the interoperability tests.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::HeaderMap;
use http_body_util::BodyExt as _;
use tokio_stream::{Stream, StreamExt as _};
use tonic::body::Body;
use tonic::{Code, Request, Response, Status, Streaming};
use tower::{Layer, Service};

use super::pb::test_service_server::{TestService, TestServiceServer};
use super::pb::{
    EchoStatus, Empty, Payload, SimpleRequest, SimpleResponse, StreamingInputCallRequest,
    StreamingInputCallResponse, StreamingOutputCallRequest, StreamingOutputCallResponse,
};
use super::{ECHO_INITIAL, ECHO_TRAILING};

/// The service. It needs the layer [`EchoMetadata`].
#[derive(Clone, Copy, Debug)]
pub struct Test;

impl Test {
    /// The service in the form that a server takes.
    pub fn server() -> TestServiceServer<Test> {
        TestServiceServer::new(Test)
    }
}

type Responses = Pin<Box<dyn Stream<Item = Result<StreamingOutputCallResponse, Status>> + Send>>;

#[tonic::async_trait]
impl TestService for Test {
    async fn empty_call(&self, _: Request<Empty>) -> Result<Response<Empty>, Status> {
        Ok(Response::new(Empty {}))
    }

    async fn unary_call(
        &self,
        request: Request<SimpleRequest>,
    ) -> Result<Response<SimpleResponse>, Status> {
        let request = request.into_inner();
        refuse(request.response_status)?;
        Ok(Response::new(SimpleResponse { payload: Some(zeros(request.response_size)?) }))
    }

    type StreamingOutputCallStream = Responses;

    async fn streaming_output_call(
        &self,
        request: Request<StreamingOutputCallRequest>,
    ) -> Result<Response<Responses>, Status> {
        Ok(Response::new(Box::pin(responses(request.into_inner()))))
    }

    async fn streaming_input_call(
        &self,
        request: Request<Streaming<StreamingInputCallRequest>>,
    ) -> Result<Response<StreamingInputCallResponse>, Status> {
        let mut requests = request.into_inner();
        let mut aggregated_payload_size = 0;
        while let Some(request) = requests.message().await? {
            aggregated_payload_size +=
                request.payload.map_or(0, |payload| payload.body.len()) as i32;
        }
        Ok(Response::new(StreamingInputCallResponse { aggregated_payload_size }))
    }

    type FullDuplexCallStream = Responses;

    async fn full_duplex_call(
        &self,
        request: Request<Streaming<StreamingOutputCallRequest>>,
    ) -> Result<Response<Responses>, Status> {
        let mut requests = request.into_inner();
        Ok(Response::new(Box::pin(async_stream::try_stream! {
            while let Some(request) = requests.message().await? {
                let mut responses = std::pin::pin!(responses(request));
                while let Some(response) = responses.next().await {
                    yield response?;
                }
            }
        })))
    }

    async fn unimplemented_call(&self, _: Request<Empty>) -> Result<Response<Empty>, Status> {
        Err(Status::unimplemented("no server has this method"))
    }
}

fn responses(
    request: StreamingOutputCallRequest,
) -> impl Stream<Item = Result<StreamingOutputCallResponse, Status>> + Send {
    async_stream::try_stream! {
        refuse(request.response_status)?;
        for parameters in request.response_parameters {
            if let Ok(pause @ 1..) = u64::try_from(parameters.interval_us) {
                tokio::time::sleep(Duration::from_micros(pause)).await;
            }
            yield StreamingOutputCallResponse { payload: Some(zeros(parameters.size)?) };
        }
    }
}

/// The status that the request asks for, unless it is OK.
fn refuse(status: Option<EchoStatus>) -> Result<(), Status> {
    match status {
        Some(EchoStatus { code, message }) if code != 0 => {
            Err(Status::new(Code::from_i32(code), message))
        }
        _ => Ok(()),
    }
}

fn zeros(len: i32) -> Result<Payload, Status> {
    /// Maximum length of a response in bytes. No case asks for a longer one.
    const LONGEST: usize = 16 << 20;
    match usize::try_from(len) {
        Ok(len) if len <= LONGEST => Ok(Payload { r#type: 0, body: vec![0; len].into() }),
        _ => Err(Status::invalid_argument(format!("a response of {len} bytes"))),
    }
}

/// Echoes certain metadata of a request.
#[derive(Clone, Copy, Debug)]
pub struct EchoMetadata;

impl<S> Layer<S> for EchoMetadata {
    type Service = Echoing<S>;

    fn layer(&self, inner: S) -> Echoing<S> {
        Echoing(inner)
    }
}

/// The service of [`EchoMetadata`].
#[derive(Clone, Debug)]
pub struct Echoing<S>(S);

impl<S> Service<http::Request<Body>> for Echoing<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let of = |name: &str| request.headers().get(name).cloned();
        let (initial, trailing) = (of(ECHO_INITIAL), of(ECHO_TRAILING));
        let response = self.0.call(request);
        Box::pin(async move {
            let mut response = response.await?;
            if let Some(value) = initial {
                response.headers_mut().insert(ECHO_INITIAL, value);
            }
            Ok(match trailing {
                None => response,
                Some(value) => response.map(|body| {
                    let trailers: HeaderMap =
                        [(ECHO_TRAILING.parse().unwrap(), value)].into_iter().collect();
                    Body::new(body.with_trailers(async { Some(Ok(trailers)) }))
                }),
            })
        })
    }
}
