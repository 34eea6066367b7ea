//! A service with all four kinds of call, and its client over any channel.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{Request, Response};
use tokio_stream::{Stream, StreamExt, iter};
use tonic::body::Body;
use tonic::client::{Grpc, GrpcService};
use tonic::server::NamedService;
use tonic::{Status, Streaming};
use tonic_prost::ProstCodec;
use tower::Service;

type Reply<T> = Result<tonic::Response<T>, Status>;
type Strings = Pin<Box<dyn Stream<Item = Result<String, Status>> + Send>>;
type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// | method | kind | answer |
/// |---|---|---|
/// | Say | unary | the request's text, except: a leading `!` gives a status with the text, `zzz` no answer, and `?` the server's device |
/// | Split | server streaming | its words |
/// | Join | client streaming | the words, joined |
/// | Chat | bidirectional | each word in upper case |
/// | Who | unary | the handler's facts about the caller |
#[derive(Clone, Debug, Default)]
pub(crate) struct Echo;

impl NamedService for Echo {
    const NAME: &'static str = "test.Echo";
}

fn codec() -> ProstCodec<String, String> {
    ProstCodec::default()
}

async fn say(request: tonic::Request<String>) -> Reply<String> {
    let device = crate::connect_info(&request).device;
    let said = request.into_inner();
    if said == "?" {
        return Ok(tonic::Response::new(device.unwrap_or_default().to_string()));
    }
    if said == "zzz" {
        std::future::pending::<()>().await;
    }
    match said.strip_prefix('!') {
        Some(text) => Err(Status::aborted(text)),
        None => Ok(tonic::Response::new(said)),
    }
}

async fn who(request: tonic::Request<String>) -> Reply<String> {
    let info = crate::connect_info(&request);
    let agent = request.metadata().get("user-agent").map(|v| v.to_str().unwrap_or("?").to_owned());
    #[cfg(feature = "_tls-any")]
    let certs = request.peer_certs().map_or(0, |certs| certs.len());
    #[cfg(not(feature = "_tls-any"))]
    let certs = 0;
    Ok(tonic::Response::new(format!(
        "path={} device={} remote={} local={} agent={} certs={certs}",
        info.path,
        info.device.unwrap_or_default(),
        request.remote_addr().is_some(),
        request.local_addr().is_some(),
        agent.unwrap_or_default(),
    )))
}

async fn split(request: tonic::Request<String>) -> Reply<Strings> {
    let words: Vec<_> = request.get_ref().split(' ').map(|w| Ok(w.to_owned())).collect();
    Ok(tonic::Response::new(Box::pin(iter(words))))
}

async fn join(request: tonic::Request<Streaming<String>>) -> Reply<String> {
    let words: Vec<String> = request.into_inner().collect::<Result<_, _>>().await?;
    Ok(tonic::Response::new(words.join(" ")))
}

async fn chat(request: tonic::Request<Streaming<String>>) -> Reply<Strings> {
    let shouted = request.into_inner().map(|word| word.map(|w| w.to_uppercase()));
    Ok(tonic::Response::new(Box::pin(shouted)))
}

impl Service<Request<Body>> for Echo {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<Body>) -> Answer {
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(codec());
            Ok(match req.uri().path() {
                "/test.Echo/Say" => grpc.unary(tower::service_fn(say), req).await,
                "/test.Echo/Who" => grpc.unary(tower::service_fn(who), req).await,
                "/test.Echo/Split" => grpc.server_streaming(tower::service_fn(split), req).await,
                "/test.Echo/Join" => grpc.client_streaming(tower::service_fn(join), req).await,
                "/test.Echo/Chat" => grpc.streaming(tower::service_fn(chat), req).await,
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}

/// A client of [`Echo`].
#[derive(Clone)]
pub(crate) struct Client<C>(Grpc<C>);

impl<C> Client<C>
where
    C: GrpcService<Body>,
    C::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    C::ResponseBody: http_body::Body<Data = bytes::Bytes> + Send + 'static,
    <C::ResponseBody as http_body::Body>::Error:
        Into<Box<dyn std::error::Error + Send + Sync>> + Send,
{
    pub(crate) fn new(channel: C) -> Self {
        Self(Grpc::new(channel))
    }

    async fn ready(&mut self) -> Result<(), Status> {
        self.0.ready().await.map_err(|e| Status::from_error(e.into()))
    }

    pub(crate) async fn unary(
        &mut self,
        path: &'static str,
        request: tonic::Request<String>,
    ) -> Result<String, Status> {
        self.ready().await?;
        let path = http::uri::PathAndQuery::from_static(path);
        Ok(self.0.unary(request, path, codec()).await?.into_inner())
    }

    pub(crate) async fn say(&mut self, what: &str) -> Result<String, Status> {
        self.unary("/test.Echo/Say", tonic::Request::new(what.to_owned())).await
    }

    pub(crate) async fn who(&mut self) -> Result<String, Status> {
        self.unary("/test.Echo/Who", tonic::Request::new(String::new())).await
    }

    /// Makes one call of each kind, and checks it.
    pub(crate) async fn all_kinds(&mut self) {
        assert_eq!(self.say("hello").await.unwrap(), "hello");
        let status = self.say("!no").await.unwrap_err();
        assert_eq!((status.code(), status.message()), (tonic::Code::Aborted, "no"));

        self.ready().await.unwrap();
        let path = http::uri::PathAndQuery::from_static("/test.Echo/Split");
        let request = tonic::Request::new("a b c".to_owned());
        let words = self.0.server_streaming(request, path, codec()).await.unwrap().into_inner();
        let words: Vec<String> = words.map(Result::unwrap).collect().await;
        assert_eq!(words, ["a", "b", "c"]);

        self.ready().await.unwrap();
        let path = http::uri::PathAndQuery::from_static("/test.Echo/Join");
        let request = tonic::Request::new(iter(words));
        let joined = self.0.client_streaming(request, path, codec()).await.unwrap().into_inner();
        assert_eq!(joined, "a b c");

        self.ready().await.unwrap();
        let (tx, rx) = tokio::sync::mpsc::channel(1);
        let path = http::uri::PathAndQuery::from_static("/test.Echo/Chat");
        let request = tonic::Request::new(tokio_stream::wrappers::ReceiverStream::new(rx));
        let mut answers = self.0.streaming(request, path, codec()).await.unwrap().into_inner();
        for word in ["x", "y"] {
            tx.send(word.to_owned()).await.unwrap();
            assert_eq!(answers.message().await.unwrap(), Some(word.to_uppercase()));
        }
        drop(tx);
        assert_eq!(answers.message().await.unwrap(), None);
    }
}
