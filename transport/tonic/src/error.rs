//! The errors of connecting, serving and calling. These errors have tonic's type, and contain this
//! crate's causes.

use crate::path::policy::EnvError;
use crate::path::reason::{Reason, ReasonCode};

pub(crate) use tonic::transport::Error;

/// Any error, in the type that tower and hyper use.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why an [`Endpoint`](crate::Endpoint), a [`Server`](crate::Server) or a call failed, for causes
/// that tonic does not know.
///
/// [`Cause::of`] finds the cause among the sources of a [`tonic_rdma::Error`](crate::Error), which
/// is tonic's error, or of a [`tonic::Status`]. [`tonic::Status::from_error`] finds the gRPC
/// status: UNAVAILABLE for a bad environment and for a required fast path that is not available.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// The server's TCP address cannot be bound on this host: another process uses the address, the
    /// host does not have the address, or the process lacks the permission.
    #[error("this host cannot listen on {addr}")]
    Bind {
        /// The address that the caller gave.
        addr: std::net::SocketAddr,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// TLS was configured, but the program has no cryptography for TLS: its features choose no
    /// provider, and the program has not installed a provider.
    #[error("TLS needs a cryptography provider, and this program has none")]
    NoCryptography,
    /// An environment variable of this process has a bad value. Correct the value where the process
    /// is started. Calls fail with UNAVAILABLE.
    #[error(transparent)]
    Environment(BadEnvironment),
    /// The fast path is required and not available. The requirement comes from
    /// [`require_fast_path`](crate::Endpoint::require_fast_path),
    /// [`require_rdma`](crate::Endpoint::require_rdma) or `TONIC_RDMA=require`. The [`Reason`]
    /// tells which side is the cause.
    #[error(transparent)]
    Required(Required),
}

impl Cause {
    pub(crate) fn required(reason: Reason) -> Self {
        let status = tonic::Status::unavailable(format!("a fast path is required: {reason}"));
        Self::Required(Required { reason, status })
    }

    pub(crate) fn bind(addr: std::net::SocketAddr) -> impl FnOnce(std::io::Error) -> Error {
        move |source| Self::Bind { addr, source }.into()
    }

    /// Finds the cause in `error` or its sources. `None` if the error is tonic's own.
    ///
    /// ```
    /// # async fn run() {
    /// use tonic_rdma::{Cause, Endpoint};
    ///
    /// let endpoint = Endpoint::from_static("http://10.0.0.1:50051").require_rdma(true);
    /// if let Err(error) = endpoint.connect().await
    ///     && let Some(cause) = Cause::of(&error)
    /// {
    ///     println!("{cause}: {}", cause.cure());
    /// }
    /// # }
    /// ```
    pub fn of<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a Self> {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(cause) = error.downcast_ref::<Self>() {
                return Some(cause);
            }
            next = error.source();
        }
        None
    }

    /// The reason why the required fast path is not available, if that is the cause.
    pub fn reason(&self) -> Option<&Reason> {
        match self {
            Self::Required(required) => Some(&required.reason),
            _ => None,
        }
    }

    /// Returns one sentence that says what to do about the cause.
    pub fn cure(&self) -> String {
        match self {
            Self::Bind { .. } => {
                "give an address of this host and a port that no other process uses".to_owned()
            }
            Self::NoCryptography => {
                "enable the feature tls-ring or tls-aws-lc of tonic-rdma, or install one \
                 with rustls::crypto::CryptoProvider::install_default"
                    .to_owned()
            }
            Self::Environment(bad) => {
                format!("unset {}, or correct its value", bad.env.variable())
            }
            Self::Required(required) => required.reason.cure().to_owned(),
        }
    }
}

impl Reason {
    /// Finds the reason in `error` or its sources: in an [`Error`], a call's error, or a
    /// [`tonic::Status`]. `None` unless the cause is a required fast path that is not available.
    ///
    /// ```
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// use tonic_rdma::{Endpoint, Reason};
    /// use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
    ///
    /// let endpoint = Endpoint::from_static("http://10.0.0.1:50051").require_rdma(true);
    /// let mut client = GreeterClient::new(endpoint.connect_lazy());
    /// if let Err(status) = client.say_hello(tonic::Request::new(Default::default())).await
    ///     && let Some(reason) = Reason::of(&status)
    /// {
    ///     println!("{reason}: {}", reason.cure());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn of<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a Self> {
        Cause::of(error)?.reason()
    }
}

/// Converts any error to the type that tonic's channel and server use. An error of that type stays
/// as it is.
pub(crate) fn in_tonics_type(e: BoxError) -> Error {
    /// An error that cannot be converted to an endpoint. tonic wraps errors of other types only
    /// when such a conversion fails.
    struct Failed(BoxError);

    impl TryFrom<Failed> for tonic::transport::Endpoint {
        type Error = BoxError;

        fn try_from(failed: Failed) -> Result<Self, BoxError> {
            Err(failed.0)
        }
    }

    match e.downcast::<Error>() {
        Ok(e) => *e,
        Err(e) => match tonic::transport::Endpoint::new(Failed(e)) {
            Err(e) => e,
            Ok(_) => unreachable!("the conversion fails"),
        },
    }
}

/// tonic's error for a user agent that is not a valid header value.
pub(crate) fn invalid_user_agent() -> Error {
    match tonic::transport::Endpoint::from_static("http://[::]").user_agent("\n") {
        Err(e) => e,
        Ok(_) => unreachable!("no header value has a line feed"),
    }
}

impl From<Cause> for Error {
    fn from(cause: Cause) -> Self {
        in_tonics_type(cause.into())
    }
}

impl From<EnvError> for Error {
    fn from(env: EnvError) -> Self {
        let status = tonic::Status::unavailable(env.to_string());
        Cause::Environment(BadEnvironment { env, status }).into()
    }
}

impl From<InvalidAlignment> for Error {
    fn from(error: InvalidAlignment) -> Self {
        in_tonics_type(error.into())
    }
}

/// The caller gave [`landing_alignment`](crate::ContextBuilder::landing_alignment) a value that is
/// not a power of two, or is above 4096.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "landed payload cannot be aligned to {0} bytes, as the caller asks: the alignment must be a \
     power of two from 1 to 4096"
)]
pub struct InvalidAlignment(pub(crate) usize);

/// The general cure, unless the reason's detail contains a better one.
fn cure(reason: &Reason) -> String {
    match reason.code() {
        ReasonCode::Memlock => String::new(),
        code => format!("; {}", code.cure()),
    }
}

/// The cause of [`Cause::Required`]: the [`Reason`] and its cure.
#[derive(Debug, thiserror::Error)]
#[error("a fast path is required: {reason}{cure}", cure = cure(.reason))]
pub struct Required {
    reason: Reason,
    // `Status::from_error` finds the status in this source.
    #[source]
    status: tonic::Status,
}

/// The cause of [`Cause::Environment`]: the environment variable to correct.
#[derive(Debug, thiserror::Error)]
#[error("bad environment: {env}")]
pub struct BadEnvironment {
    env: EnvError,
    #[source]
    status: tonic::Status,
}

impl BadEnvironment {
    /// The variable, its value and the allowed values.
    pub fn env(&self) -> &EnvError {
        &self.env
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use tonic::{Code, Status};

    use super::*;

    fn required(reason: Reason) -> Error {
        Cause::required(reason).into()
    }

    #[test]
    fn statuses_are_found_as_in_tonics_own_error() {
        let error = required(Reason::new(ReasonCode::NoDevice, "none"));
        assert_eq!(Reason::of(&error).map(Reason::code), Some(ReasonCode::NoDevice));
        let status = Status::from_error(Box::new(error));
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.message().contains("no-device: none"));

        let timeout = in_tonics_type(Box::new(tonic::TimeoutExpired(())));
        let status = Status::from_error(Box::new(timeout));
        assert_eq!(status.code(), Code::Cancelled);
        assert_eq!(status.message(), "Timeout expired");

        let lost = in_tonics_type(Box::new(Status::unavailable("link lost")));
        let status = Status::from_error(Box::new(lost));
        assert_eq!((status.code(), status.message()), (Code::Unavailable, "link lost"));
        assert!(status.source().is_some_and(|source| source.is::<Error>()));
    }

    #[test]
    fn causes_and_reasons_are_found_behind_tonics_types() {
        let call = required(Reason::new(ReasonCode::NoDevice, "none"));
        assert_eq!(call.to_string(), "transport error", "as tonic's");
        let status = Status::from_error(Box::new(call));
        assert_eq!(Reason::of(&status).map(Reason::code), Some(ReasonCode::NoDevice));
        assert!(matches!(Cause::of(&status), Some(Cause::Required(_))));
        assert_eq!(Reason::of(&Status::unavailable("no-device: none")), None);
        let tonics = tonic::transport::Endpoint::from_shared("http://[").unwrap_err();
        assert!(Cause::of(&tonics).is_none());
    }

    #[test]
    fn every_error_says_who_has_to_act_and_what_to_do() {
        let text = |error: &dyn std::error::Error| {
            let mut text = error.to_string();
            let mut source = error.source();
            while let Some(error) = source {
                text.push_str(": ");
                text.push_str(&error.to_string());
                source = error.source();
            }
            text
        };
        let refused = std::io::Error::from(std::io::ErrorKind::AddrInUse);
        let lookup = |name: &str| (name == "TONIC_RDMA").then(|| "fast".into());
        let env = crate::path::policy::EnvSettings::from_lookup(lookup).unwrap_err();
        let cases: [(Error, &str, &str); 4] = [
            (Cause::bind(([192, 0, 2, 1], 1).into())(refused), "this host", "an address of this"),
            (Cause::NoCryptography.into(), "this program", "enable the feature tls-ring"),
            (Error::from(env), "environment variable TONIC_RDMA", "unset TONIC_RDMA"),
            (
                required(Reason::from_peer(ReasonCode::NoDevice, "none")),
                "peer: no-device",
                ReasonCode::NoDevice.cure(),
            ),
        ];
        for (error, who, what) in cases {
            let (text, cure) = (text(&error), Cause::of(&error).unwrap().cure());
            assert!(text.contains(who) && cure.contains(what), "{text}; {cure}");
        }
        let alignment = Error::from(InvalidAlignment(3));
        assert!(text(&alignment).contains("the caller"), "{alignment:?}");
        assert_eq!(invalid_user_agent().to_string(), "user agent is not a valid header value");
        for code in ReasonCode::ALL {
            let local = text(&required(Reason::new(code, "why")));
            let peer = text(&required(Reason::from_peer(code, "why")));
            assert!(peer.contains("peer: ") && !local.contains("peer: "), "{local}; {peer}");
            if code != ReasonCode::Memlock {
                assert!(local.contains(code.cure()), "{local}");
            }
        }
    }

    #[test]
    fn errors_are_not_wrapped_twice() {
        let tonics = tonic::transport::Endpoint::from_shared("http://[").unwrap_err();
        let text = tonics.to_string();
        assert_eq!(in_tonics_type(Box::new(tonics)).to_string(), text);
    }
}
