//! The gRPC status of a call, in metrics and spans.

use std::error::Error;
use std::iter;

use http::HeaderMap;
use tonic::{Code, ConnectError, Status, TimeoutExpired};
use tonic_rdma_proto::Side;

/// The status in the trailers of a response, or in the head of a response without a body.
pub(crate) fn of_headers(headers: &HeaderMap) -> Option<Code> {
    headers.get(Status::GRPC_STATUS).map(|value| Code::from_bytes(value.as_bytes()))
}

/// The status to which tonic converts an error.
pub(crate) fn of_error(error: &(dyn Error + 'static)) -> Code {
    iter::successors(Some(error), |&error| error.source())
        .find_map(of_cause)
        .unwrap_or(Code::Unknown)
}

fn of_cause(error: &(dyn Error + 'static)) -> Option<Code> {
    if let Some(status) = error.downcast_ref::<Status>() {
        return Some(status.code());
    }
    if error.is::<TimeoutExpired>() {
        return Some(Code::Cancelled);
    }
    if error.is::<ConnectError>() {
        return Some(Code::Unavailable);
    }
    if let Some(error) = error.downcast_ref::<hyper::Error>() {
        return match error {
            _ if error.is_timeout() => Some(Code::Unavailable),
            _ if error.is_canceled() => Some(Code::Cancelled),
            _ => None,
        };
    }
    let reason = error.downcast_ref::<h2::Error>()?.reason()?;
    Some(Status::from_error(Box::new(h2::Error::from(reason))).code())
}

/// The status of a call that was dropped before its end.
pub(crate) fn of_dropped() -> Code {
    if std::thread::panicking() { Code::Unknown } else { Code::Cancelled }
}

/// The name of a status code in gRPC's specification.
pub(crate) fn name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

/// Whether a status is an error of this side, by OpenTelemetry's conventions for gRPC. At a client,
/// every status but `OK` is an error. At a server, only a status that the caller has not caused is
/// an error.
pub(crate) fn is_error(side: Side, code: Code) -> bool {
    match side {
        Side::Client => code != Code::Ok,
        Side::Server => matches!(
            code,
            Code::Unknown
                | Code::DeadlineExceeded
                | Code::Unimplemented
                | Code::Internal
                | Code::Unavailable
                | Code::DataLoss
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_status_that_tonic_makes_of_it() {
        let of = |error: Box<dyn Error + Send + Sync>| (of_error(&*error), error);
        let timeout = || -> Box<dyn Error + Send + Sync> { Box::new(TimeoutExpired(())) };
        let all = [
            of(Box::new(Status::not_found("no"))),
            of(timeout()),
            of(Box::new(ConnectError(timeout()))),
            of(Box::new(std::io::Error::other(Status::aborted("nested")))),
            of(Box::new(std::io::Error::other("something else"))),
            of(Box::new(h2::Error::from(h2::Reason::REFUSED_STREAM))),
            of(Box::new(h2::Error::from(h2::Reason::CANCEL))),
        ];
        for (code, error) in all {
            let text = error.to_string();
            assert_eq!(code, Status::from_error(error).code(), "{text}");
        }
    }

    #[test]
    fn each_status_has_its_name() {
        let names: Vec<_> = (0..17).map(|code| name(Code::from_i32(code))).collect();
        for (code, name) in names.iter().enumerate() {
            let debug = format!("{:?}", Code::from_i32(i32::try_from(code).unwrap()));
            assert_eq!(name.replace('_', "").to_lowercase(), debug.to_lowercase());
        }
        assert_eq!(names.iter().filter(|&&name| name == "UNKNOWN").count(), 1);
    }
}
