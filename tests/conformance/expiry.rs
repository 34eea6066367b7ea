//! Calls that must expire after a handler has begun.

use std::future::Future;

use tonic::{IntoRequest, Response, Status};
use tonic_rdma_tests::harness::{Client, TestEnv};
use tonic_rdma_tests::pb::Message;

/// Makes calls that must expire, passes each status to `check`, and waits until a handler was
/// dropped. Repeats the call until a handler has begun, because on a busy machine a deadline may
/// pass before the call has reached it.
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
