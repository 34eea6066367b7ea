//! Boxes bodies in the type that tonic takes.

use bytes::Bytes;
use http_body::Body as HttpBody;
use http_body_util::combinators::UnsyncBoxBody;
use tonic::Status;
use tonic::body::Body;

/// Boxes `body` in tonic's type. tonic takes an `UnsyncBoxBody` unchanged, and wraps any other body
/// in a layer that converts errors.
pub(crate) fn boxed(body: impl HttpBody<Data = Bytes, Error = Status> + Send + 'static) -> Body {
    Body::new(UnsyncBoxBody::new(body))
}
