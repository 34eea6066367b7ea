//! axum serves pages at the service's address, with axum's own layers around pages and service.

use axum::extract::Path;
use axum::routing::get;
use http::StatusCode;
use http_body_util::BodyExt;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tonic::body::Body;
use tonic::service::Routes;
use tonic_rdma::Server;
use tonic_rdma_ecosystem_tests::{Net, greet};
use tonic_rdma_example_services::Hello;
use tonic_rdma_example_services::greeter::greeter_server::GreeterServer;

pub(crate) async fn beside_grpc(net: Net) {
    let marked = axum::middleware::map_response(async |mut response: axum::response::Response| {
        response.headers_mut().insert("marked", "yes".parse().unwrap());
        response
    });
    let app = Routes::new(GreeterServer::new(Hello))
        .into_axum_router()
        .route("/ready/{who}", get(async |Path(who): Path<String>| format!("{who} is ready")))
        .layer(marked);
    let (addr, incoming) = net.listen().await;
    let routes = Server::builder().accept_http1(true).add_routes(Routes::from(app));
    tokio::spawn(routes.serve_with_incoming(incoming));
    let channel = net.connect(addr).await;
    assert_eq!(greet(channel).await.unwrap(), net.greeting());

    let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
    let page = async |path: &str| {
        let response = client.get(format!("http://{addr}{path}").parse().unwrap()).await.unwrap();
        assert_eq!(response.headers()["marked"], "yes");
        let (status, of_grpc) = (response.status(), response.headers().contains_key("grpc-status"));
        let text = response.into_body().collect().await.unwrap().to_bytes();
        (status, of_grpc, String::from_utf8(text.into()).unwrap())
    };
    assert_eq!(page("/ready/all").await, (StatusCode::OK, false, "all is ready".into()));
    // tonic's routes answer requests that have no route.
    assert_eq!(page("/ready").await, (StatusCode::OK, true, String::new()));
}
