//! Boxing of bodies for tonic.

use bytes::Bytes;
use http_body::Body as HttpBody;
use http_body_util::combinators::UnsyncBoxBody;
use tonic::Status;
use tonic::body::Body;

/// Boxes `body` as a body of tonic's. `UnsyncBoxBody` is the one type that tonic takes unchanged;
/// it wraps others in a layer that converts errors.
pub(crate) fn boxed(body: impl HttpBody<Data = Bytes, Error = Status> + Send + 'static) -> Body {
    Body::new(UnsyncBoxBody::new(body))
}
