//! The limits on time, concurrency and rate above the selection of the path. They act on every call
//! exactly once, in tonic's order.

use http::Request;
use tonic::body::Body;
use tower::ServiceBuilder;
use tower::buffer::Buffer;
use tower::limit::rate::Rate;
use tower::limit::{ConcurrencyLimit, ConcurrencyLimitLayer, RateLimit};
use tower::util::Either;

use crate::channel::select::{CallFuture, Select};
use crate::endpoint::Settings;
use crate::grpc_timeout::GrpcTimeout;

/// Default capacity of the queue in calls, as in tonic.
const BUFFER_SIZE: usize = 1024;

type Rated = Either<Buffer<Request<Body>, CallFuture>, Select>;
pub(crate) type Stack = GrpcTimeout<Either<ConcurrencyLimit<Rated>, Rated>>;

pub(crate) fn build(select: Select, settings: &Settings) -> Stack {
    let rated = match settings.rate_limit {
        // RateLimit cannot be cloned, so calls pass through a queue.
        Some((calls, per)) => {
            let limited = RateLimit::new(select, Rate::new(calls, per));
            let size = settings.buffer_size.unwrap_or(BUFFER_SIZE);
            let (buffer, worker) = Buffer::pair(limited, size);
            settings.executor.spawn(worker);
            Either::Left(buffer)
        }
        None => Either::Right(select),
    };
    ServiceBuilder::new()
        .layer_fn(|s| GrpcTimeout::new(s, settings.timeout))
        .option_layer(settings.concurrency_limit.map(ConcurrencyLimitLayer::new))
        .service(rated)
}
