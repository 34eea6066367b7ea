//! tonic-reflection, which grpcurl queries first.

use prost::Message;
use tokio_stream::{StreamExt, iter};
use tonic_rdma::Server;
use tonic_rdma_ecosystem_tests::Net;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServerReflectionResponse};

pub(crate) async fn lists_and_describes(net: Net) {
    let (_, health) = tonic_health::server::health_reporter();
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .unwrap();
    let (addr, incoming) = net.listen().await;
    let routes = Server::builder().add_service(health).add_service(reflection);
    tokio::spawn(routes.serve_with_incoming(incoming));
    let mut client = ServerReflectionClient::new(net.connect(addr).await);
    let asks = [
        MessageRequest::ListServices(String::new()),
        MessageRequest::FileContainingSymbol("grpc.health.v1.Health.Check".into()),
        MessageRequest::FileContainingSymbol("no.such.Symbol".into()),
    ];
    let request = |ask| ServerReflectionRequest { host: String::new(), message_request: Some(ask) };
    let replies = client.server_reflection_info(iter(asks.map(request))).await.unwrap();
    let replies: Vec<ServerReflectionResponse> =
        replies.into_inner().take(2).map(Result::unwrap).collect().await;
    let Some(MessageResponse::ListServicesResponse(list)) = &replies[0].message_response else {
        panic!("no list: {:?}", replies[0]);
    };
    let names: Vec<&str> = list.service.iter().map(|service| &service.name[..]).collect();
    assert!(names.contains(&"grpc.health.v1.Health"), "{names:?}");
    let Some(MessageResponse::FileDescriptorResponse(files)) = &replies[1].message_response else {
        panic!("no file: {:?}", replies[1]);
    };
    let file = &files.file_descriptor_proto[0][..];
    let file = prost_types::FileDescriptorProto::decode(file).unwrap();
    assert_eq!(file.service[0].method[0].name(), "Check");
}
