//! Calls that must expire after a handler has begun.

use std::future::Future;

use tonic::{IntoRequest, Response, Status};
use tonic_rdma_tests::harness::{Client, TestEnv};
use tonic_rdma_tests::pb::Message;

/// Makes calls that must expire, and passes each status to `check`, until a handler has begun. Then
/// waits until a handler has been dropped. On a busy machine, the deadline of a call may pass
/// before the call reaches a handler.
pub(crate) async fn expires<T, F: Future<Output = Result<T, Status>>>(
    env: &TestEnv,
    id: &str,
    call: impl Fn() -> F,
    check: impl Fn(&Status),
) {
    while env.probe().count(&format!("began:{id}")) == 0 {
        check(&call().await.err().expect("the call has expired"));
    }
    env.probe().seen(&format!("dropped:{id}")).await;
}

/// Makes a call with a clone of the client.
pub(crate) fn unary(
    client: &Client,
    request: impl IntoRequest<Message>,
) -> impl Future<Output = Result<Response<Message>, Status>> {
    let (mut client, request) = (client.clone(), request.into_request());
    async move { client.unary(request).await }
}
