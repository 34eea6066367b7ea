//! The service `tonic_rdma.v1.Bootstrap`, with the limits on Offers.
//!
//! | limit | value | beyond it |
//! |---|---|---|
//! | length of a request | [`MAX_REQUEST`] | OUT_OF_RANGE, before the message is read |
//! | fabrics that a request names, each counted once | `MAX_FABRICS` | INVALID_ARGUMENT |
//! | Offers of one TCP connection at a time | [`OFFERS_AT_ONCE`] | RESOURCE_EXHAUSTED |
//! | length of an answer | `MAX_ANSWER` | details are cut, and the last addresses are left out |
//!
//! An Offer counts until its answer has been written to the connection. So a client that does not
//! read answers can have at most [`OFFERS_AT_ONCE`] answers waiting.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Frame, SizeHint};
use tokio::sync::OwnedSemaphorePermit;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::Service;

use crate::bootstrap::OFFER_PATH;
use crate::bootstrap::connection::{Asker, OFFERS_AT_ONCE, OfferConnection};
use crate::bootstrap::pb::bootstrap_server::{BootstrapServer, SERVICE_NAME};
use crate::bootstrap::service::OfferService;

/// Maximum length of a request for an Offer, in bytes.
pub(crate) const MAX_REQUEST: usize = 4096;

/// The service of Offer and Probe, which applies the limits to Offers.
#[derive(Debug, Clone)]
pub(crate) struct LimitedOffers {
    offer: BootstrapServer<OfferService>,
    /// Serves other calls. A Probe may be longer than an Offer, because measurements use it.
    other: BootstrapServer<OfferService>,
    /// Counts the Offers whose connection is unknown, because a layer has removed the connection
    /// from the request's extensions.
    unknown: Asker,
}

impl LimitedOffers {
    pub(crate) fn new(service: OfferService) -> Self {
        let other = BootstrapServer::new(service);
        let offer = other.clone().max_decoding_message_size(MAX_REQUEST);
        Self { offer, other, unknown: Asker::new(u64::MAX) }
    }
}

impl NamedService for LimitedOffers {
    const NAME: &'static str = SERVICE_NAME;
}

impl Service<Request<Body>> for LimitedOffers {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if request.uri().path() != OFFER_PATH {
            return self.other.call(request);
        }
        let asker = request.extensions().get::<OfferConnection>().and_then(|c| c.asker.as_ref());
        let Some(permit) = asker.unwrap_or(&self.unknown).begin() else {
            let status = Status::resource_exhausted(format!(
                "{OFFERS_AT_ONCE} Offers of this connection are in progress, or their answers are not read"
            ));
            return Box::pin(std::future::ready(Ok(status.into_http())));
        };
        let answering = self.offer.call(request);
        Box::pin(async move {
            let counted = |body| Body::new(Counted { body, permit: Arc::new(permit) });
            Ok(answering.await?.map(counted))
        })
    }
}

/// The body of an answer. The Offer counts as in progress while the body or one of its frames
/// exists, because HTTP/2 keeps frames until the peer takes them.
struct Counted {
    body: Body,
    permit: Arc<OwnedSemaphorePermit>,
}

impl http_body::Body for Counted {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        let counted = |bytes| {
            let permit = self.permit.clone();
            Bytes::from_owner(CountedBytes { bytes, _permit: permit })
        };
        Poll::Ready(frame.map(|frame| Ok(frame?.map_data(counted))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

struct CountedBytes {
    bytes: Bytes,
    _permit: Arc<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for CountedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}
