//! The client of the interoperability tests: the cases.
//!
//! Some cases of the description are left out. Compression cases need a server that sees whether a
//! message was compressed. Authentication cases need Google accounts. Some cases take too long. In
//! `timeout_on_sleeping_server` the server sends the response's head before it sleeps, which ends a
//! tonic client's deadline.

use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Request, Status};
use tonic_rdma::Channel;

use super::pb::test_service_client::TestServiceClient;
use super::pb::unimplemented_service_client::UnimplementedServiceClient;
use super::pb::{
    EchoStatus, Empty, Payload, ResponseParameters, SimpleRequest, StreamingInputCallRequest,
    StreamingOutputCallRequest, StreamingOutputCallResponse,
};
use super::{ECHO_INITIAL, ECHO_TRAILING};

/// Bytes of the requests and responses of streams.
const REQUESTS: [i32; 4] = [27182, 8, 1828, 45904];
const RESPONSES: [i32; 4] = [31415, 9, 2653, 58979];
const LARGE_REQUEST: i32 = 271_828;
const LARGE_RESPONSE: i32 = 314_159;

type Client = TestServiceClient<Channel>;

/// Runs all cases, one after the other, and returns their names.
///
/// # Panics
/// Panics when a case fails.
pub async fn run(channel: &Channel) -> Vec<&'static str> {
    let client = || TestServiceClient::new(channel.clone());
    let mut run = Vec::new();
    macro_rules! cases {
        ($($name:ident)*) => {$(
            $name(client()).await;
            run.push(stringify!($name));
        )*};
    }
    cases! {
        empty_unary large_unary client_streaming server_streaming ping_pong empty_stream
        custom_metadata status_code_and_message special_status_message unimplemented_method
        cancel_after_begin cancel_after_first_response
    }
    unimplemented_service(UnimplementedServiceClient::new(channel.clone())).await;
    run.push("unimplemented_service");
    run
}

fn zeros(len: i32) -> Option<Payload> {
    Some(Payload { r#type: 0, body: vec![0; len as usize].into() })
}

fn turn(request: i32, response: i32) -> StreamingOutputCallRequest {
    let response_parameters = vec![ResponseParameters { size: response, interval_us: 0 }];
    StreamingOutputCallRequest {
        response_parameters,
        payload: zeros(request),
        ..Default::default()
    }
}

fn is_zeros(response: &StreamingOutputCallResponse, len: i32) {
    let payload = response.payload.as_ref().unwrap();
    assert!(payload.body.len() == len as usize && payload.body.iter().all(|byte| *byte == 0));
}

async fn empty_unary(mut client: Client) {
    assert_eq!(client.empty_call(Empty {}).await.unwrap().into_inner(), Empty {});
}

fn large() -> SimpleRequest {
    SimpleRequest {
        response_size: LARGE_RESPONSE,
        payload: zeros(LARGE_REQUEST),
        ..Default::default()
    }
}

async fn large_unary(mut client: Client) {
    let response = client.unary_call(large()).await.unwrap().into_inner();
    assert!(response.payload == zeros(LARGE_RESPONSE));
}

async fn client_streaming(mut client: Client) {
    let requests = REQUESTS.map(|len| StreamingInputCallRequest { payload: zeros(len) });
    let response = client.streaming_input_call(tokio_stream::iter(requests)).await.unwrap();
    assert_eq!(response.into_inner().aggregated_payload_size, 74_922);
}

async fn server_streaming(mut client: Client) {
    let response_parameters =
        RESPONSES.map(|size| ResponseParameters { size, interval_us: 0 }).into();
    let request = StreamingOutputCallRequest { response_parameters, ..Default::default() };
    let mut responses = client.streaming_output_call(request).await.unwrap().into_inner();
    for len in RESPONSES {
        is_zeros(&responses.message().await.unwrap().unwrap(), len);
    }
    assert_eq!(responses.message().await.unwrap(), None);
}

async fn ping_pong(mut client: Client) {
    let (sender, requests) = mpsc::channel(1);
    let mut turns = REQUESTS.into_iter().zip(RESPONSES);
    let (first, len) = turns.next().unwrap();
    sender.send(turn(first, len)).await.unwrap();
    let call = client.full_duplex_call(ReceiverStream::new(requests)).await;
    let mut responses = call.unwrap().into_inner();
    is_zeros(&responses.message().await.unwrap().unwrap(), len);
    for (request, response) in turns {
        sender.send(turn(request, response)).await.unwrap();
        is_zeros(&responses.message().await.unwrap().unwrap(), response);
    }
    drop(sender);
    assert_eq!(responses.message().await.unwrap(), None);
}

async fn empty_stream(mut client: Client) {
    let call = client.full_duplex_call(tokio_stream::empty()).await;
    assert_eq!(call.unwrap().into_inner().message().await.unwrap(), None);
}

async fn custom_metadata(mut client: Client) {
    const INITIAL: &str = "test_initial_metadata_value";
    const TRAILING: &[u8] = b"\xab\xab\xab";
    fn with<T>(message: T) -> Request<T> {
        let mut request = Request::new(message);
        let metadata = request.metadata_mut();
        metadata.insert(ECHO_INITIAL, INITIAL.parse().unwrap());
        metadata.insert_bin(ECHO_TRAILING, MetadataValue::from_bytes(TRAILING));
        request
    }
    let initial = |metadata: &MetadataMap| assert_eq!(metadata.get(ECHO_INITIAL).unwrap(), INITIAL);
    let trailing = |metadata: &MetadataMap| {
        assert_eq!(metadata.get_bin(ECHO_TRAILING).unwrap().to_bytes().unwrap(), TRAILING);
    };
    // A stub of unary calls returns initial and trailing metadata in one map.
    let response = client.unary_call(with(large())).await.unwrap();
    initial(response.metadata());
    trailing(response.metadata());

    let requests = tokio_stream::iter([turn(LARGE_REQUEST, LARGE_RESPONSE)]);
    let response = client.full_duplex_call(with(requests)).await.unwrap();
    initial(response.metadata());
    let mut responses = response.into_inner();
    is_zeros(&responses.message().await.unwrap().unwrap(), LARGE_RESPONSE);
    assert_eq!(responses.message().await.unwrap(), None);
    trailing(&responses.trailers().await.unwrap().unwrap());
}

async fn refused_with(client: &mut Client, code: Code, message: &str) {
    let status = Some(EchoStatus { code: code as i32, message: message.to_owned() });
    let is_that = |status: Status| assert_eq!((status.code(), status.message()), (code, message));
    let request = SimpleRequest { response_status: status.clone(), ..Default::default() };
    is_that(client.unary_call(request).await.unwrap_err());
    let request = StreamingOutputCallRequest { response_status: status, ..Default::default() };
    let call = client.full_duplex_call(tokio_stream::iter([request])).await;
    match call {
        Ok(response) => is_that(response.into_inner().message().await.unwrap_err()),
        Err(status) => is_that(status),
    }
}

async fn status_code_and_message(mut client: Client) {
    refused_with(&mut client, Code::Unknown, "test status message").await;
}

async fn special_status_message(mut client: Client) {
    let message = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n";
    refused_with(&mut client, Code::Unknown, message).await;
}

async fn unimplemented_method(mut client: Client) {
    let status = client.unimplemented_call(Empty {}).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented, "{status}");
}

async fn unimplemented_service(mut client: UnimplementedServiceClient<Channel>) {
    let status = client.unimplemented_call(Empty {}).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented, "{status}");
}

async fn cancel_after_begin(mut client: Client) {
    let (_requests, never) = mpsc::channel::<StreamingInputCallRequest>(1);
    let call = tokio::spawn(async move {
        client.streaming_input_call(ReceiverStream::new(never)).await.map(drop)
    });
    tokio::task::yield_now().await;
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
}

async fn cancel_after_first_response(mut client: Client) {
    let requests = tokio_stream::iter([turn(REQUESTS[0], RESPONSES[0])])
        .chain(tokio_stream::pending::<StreamingOutputCallRequest>());
    let mut responses = client.full_duplex_call(requests).await.unwrap().into_inner();
    is_zeros(&responses.message().await.unwrap().unwrap(), RESPONSES[0]);
    drop(responses);
    // The connection still works.
    empty_unary(client).await;
}
