//! Bodies as tonic takes them.

use bytes::Bytes;
use http_body::Body as HttpBody;
use http_body_util::combinators::UnsyncBoxBody;
use tonic::Status;
use tonic::body::Body;

/// A body of tonic's around `body`, in the one box that tonic takes as it is: others it puts behind
/// a layer for errors.
pub(crate) fn boxed(body: impl HttpBody<Data = Bytes, Error = Status> + Send + 'static) -> Body {
    Body::new(UnsyncBoxBody::new(body))
}
