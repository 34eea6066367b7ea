//! A service of one handler, for tests that observe how a message arrives and leaves.

use std::future::Future;

use tonic::{Request, Response, Status, Streaming};

use crate::pb::Message;
use crate::pb::conformance_server::Conformance;

/// Calls the function for unary requests. The other methods are UNIMPLEMENTED.
#[derive(Clone, Copy, Debug)]
pub struct UnaryOnly<F>(pub F);

#[tonic::async_trait]
impl<F, R> Conformance for UnaryOnly<F>
where
    F: Fn(Request<Message>) -> R + Send + Sync + 'static,
    R: Future<Output = Result<Response<Message>, Status>> + Send + 'static,
{
    type DownloadStream = Streaming<Message>;
    type ChatStream = Streaming<Message>;

    async fn unary(&self, request: Request<Message>) -> Result<Response<Message>, Status> {
        (self.0)(request).await
    }

    async fn upload(&self, _: Request<Streaming<Message>>) -> Result<Response<Message>, Status> {
        Err(Status::unimplemented("upload"))
    }

    async fn download(&self, _: Request<Message>) -> Result<Response<Streaming<Message>>, Status> {
        Err(Status::unimplemented("download"))
    }

    async fn chat(
        &self,
        _: Request<Streaming<Message>>,
    ) -> Result<Response<Streaming<Message>>, Status> {
        Err(Status::unimplemented("chat"))
    }
}
