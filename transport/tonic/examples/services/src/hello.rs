//! A handler like one in an existing program, except that it also returns the path.

use tonic::{Request, Response, Status};

use crate::greeter::greeter_server::Greeter;
use crate::greeter::{HelloReply, HelloRequest};

/// Answers with a greeting.
#[derive(Debug, Clone, Copy, Default)]
pub struct Hello;

#[tonic::async_trait]
impl Greeter for Hello {
    async fn say_hello(
        &self,
        request: Request<HelloRequest>,
    ) -> Result<Response<HelloReply>, Status> {
        let path = tonic_rdma::connect_info(&request).path;
        let message = format!("hello {}, you came by {path}", request.into_inner().name);
        Ok(Response::new(HelloReply { message }))
    }
}
