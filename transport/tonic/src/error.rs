//! The errors of connecting, serving and calling.

use crate::path::policy::EnvError;
use crate::path::reason::Reason;

/// Any error, as tower and hyper pass it on.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// An error of an [`Endpoint`](crate::Endpoint), or of a [`Server`](crate::Server). The calls of a
/// [`Channel`](crate::Channel) fail with tonic's.
///
/// [`tonic::Status::from_error`] finds the gRPC status in it as in tonic's own transport error:
/// UNAVAILABLE for a connection that cannot be made, CANCELLED for an expired timeout, UNAVAILABLE
/// with the [`Reason`] for a required fast path that is not available.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of the TCP side: building an endpoint, connecting, TLS, HTTP/2. The
    /// [source](std::error::Error::source) tells whether the endpoint's configuration, the server
    /// or the network is the cause.
    #[error("transport error")]
    Transport(#[source] tonic::transport::Error),
    /// The caller gave [`user_agent`](crate::Endpoint::user_agent) an invalid header value.
    #[error("the user agent that the caller has set is not a valid header value")]
    InvalidUserAgent,
    /// The caller gave [`landing_alignment`](crate::ContextBuilder::landing_alignment) a value that
    /// is not a power of two, or above 4096.
    #[error(
        "landed payload cannot be aligned to {0} bytes, as the caller asks: it must be a power of two, 1 to 4096"
    )]
    InvalidAlignment(usize),
    /// The server's TCP address cannot be bound on this host: another process uses it, the host
    /// does not have it, or the process lacks the permission.
    #[error("this host cannot listen on {addr}")]
    Bind {
        /// The address that the caller gave.
        addr: std::net::SocketAddr,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// TLS was configured in a program that has no cryptography for it: its features choose none,
    /// and it has installed none.
    #[error(
        "TLS needs a provider of cryptography: enable the feature tls-ring or tls-aws-lc of tonic-rdma, or install one with rustls::crypto::CryptoProvider::install_default"
    )]
    NoCryptography,
    /// An environment variable of this process has a bad value, which whoever starts the process
    /// has to correct. A call fails with UNAVAILABLE.
    #[error("bad environment")]
    Environment(#[source] EnvironmentError),
    /// The fast path is required ([`require_fast_path`](crate::Endpoint::require_fast_path),
    /// [`require_rdma`](crate::Endpoint::require_rdma), `TONIC_RDMA=require`) and not available. The [`Reason`] tells which side is the cause, and its [`cure`](Reason::cure)
    /// what to do.
    #[error("RDMA is required and cannot be had")]
    RdmaRequired(#[source] RdmaRequired),
}

impl Error {
    pub(crate) fn required(reason: Reason) -> Self {
        let status = tonic::Status::unavailable(format!("RDMA is required: {reason}"));
        Self::RdmaRequired(RdmaRequired { reason, status })
    }

    pub(crate) fn bind(addr: std::net::SocketAddr) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Bind { addr, source }
    }

    /// The error of a conversion of the user's, which may be one of this crate's already.
    pub(crate) fn conversion(e: BoxError) -> Self {
        match e.downcast::<Error>() {
            Ok(e) => *e,
            Err(e) => Self::Transport(of_call(e)),
        }
    }

    /// The reason why RDMA is not available, if that is the cause.
    ///
    /// [`Reason::of`] finds it in the error of a call and in a [`tonic::Status`], too.
    pub fn reason(&self) -> Option<&Reason> {
        Reason::of(self)
    }
}

impl Reason {
    /// The reason in `error` or in what caused it: in an [`Error`], in the error of a call, in a
    /// [`tonic::Status`]. `None` if a required fast path is not the cause.
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
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(required) = error.downcast_ref::<RdmaRequired>() {
                return Some(&required.reason);
            }
            next = error.source();
        }
        None
    }
}

/// The error of a call, in the type that tonic's channel has. A call over TCP has one of that type
/// already.
pub(crate) fn of_call(e: BoxError) -> tonic::transport::Error {
    /// Turns into an endpoint by failing: tonic makes its error of any other in no other place.
    struct Failed(BoxError);

    impl TryFrom<Failed> for tonic::transport::Endpoint {
        type Error = BoxError;

        fn try_from(failed: Failed) -> Result<Self, BoxError> {
            Err(failed.0)
        }
    }

    match e.downcast::<tonic::transport::Error>() {
        Ok(e) => *e,
        Err(e) => match tonic::transport::Endpoint::new(Failed(e)) {
            Err(e) => e,
            Ok(_) => unreachable!("the conversion fails"),
        },
    }
}

impl From<tonic::transport::Error> for Error {
    fn from(e: tonic::transport::Error) -> Self {
        Self::Transport(e)
    }
}

impl From<EnvError> for Error {
    fn from(env: EnvError) -> Self {
        let status = tonic::Status::unavailable(env.to_string());
        Self::Environment(EnvironmentError { env, status })
    }
}

/// The general cure, unless the reason's detail contains a better one.
fn cure(reason: &Reason) -> String {
    match reason.code() {
        crate::path::reason::ReasonCode::Memlock => String::new(),
        code => format!("; {}", code.cure()),
    }
}

/// The cause in [`Error::RdmaRequired`]: the [`Reason`] and its cure.
#[derive(Debug, thiserror::Error)]
#[error("{reason}{cure}", cure = cure(.reason))]
pub struct RdmaRequired {
    reason: Reason,
    // The source in which `Status::from_error` finds the status.
    #[source]
    status: tonic::Status,
}

/// The cause in [`Error::Environment`]: the environment variable that has to be corrected.
#[derive(Debug, thiserror::Error)]
#[error("{env}")]
pub struct EnvironmentError {
    env: EnvError,
    #[source]
    status: tonic::Status,
}

impl EnvironmentError {
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
    use crate::path::reason::ReasonCode;

    #[test]
    fn statuses_are_found_as_in_tonics_own_error() {
        let required = Error::required(Reason::new(ReasonCode::NoDevice, "none"));
        assert_eq!(required.reason().map(Reason::code), Some(ReasonCode::NoDevice));
        let status = Status::from_error(Box::new(required));
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.message().contains("no-device: none"));

        let timeout = of_call(Box::new(tonic::TimeoutExpired(())));
        let status = Status::from_error(Box::new(timeout));
        assert_eq!(status.code(), Code::Cancelled);
        assert_eq!(status.message(), "Timeout expired");

        let lost = of_call(Box::new(Status::unavailable("link lost")));
        let status = Status::from_error(Box::new(lost));
        assert_eq!((status.code(), status.message()), (Code::Unavailable, "link lost"));
        assert!(status.source().is_some_and(|source| source.is::<tonic::transport::Error>()));
    }

    #[test]
    fn reasons_are_found_behind_tonics_types() {
        let required = Error::required(Reason::new(ReasonCode::NoDevice, "none"));
        let call = of_call(Box::new(required));
        assert_eq!(Reason::of(&call).map(Reason::code), Some(ReasonCode::NoDevice));
        let status = Status::from_error(Box::new(call));
        assert_eq!(Reason::of(&status).map(Reason::code), Some(ReasonCode::NoDevice));
        assert_eq!(Reason::of(&Status::unavailable("no-device: none")), None);
    }

    #[test]
    fn every_error_says_who_has_to_act() {
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
        let bad_uri = tonic::transport::Endpoint::from_shared("http://[").unwrap_err();
        let refused = std::io::Error::from(std::io::ErrorKind::AddrInUse);
        let lookup = |name: &str| (name == "TONIC_RDMA").then(|| "fast".into());
        let env = crate::path::policy::EnvSettings::from_lookup(lookup).unwrap_err();
        let cases: [(Error, &[&str]); 6] = [
            (Error::from(bad_uri), &["invalid URI"]),
            (Error::InvalidUserAgent, &["the caller"]),
            (Error::InvalidAlignment(3), &["the caller"]),
            (Error::bind(([192, 0, 2, 1], 1).into())(refused), &["this host"]),
            (Error::from(env), &["environment variable TONIC_RDMA"]),
            (
                Error::required(Reason::from_peer(ReasonCode::NoDevice, "none")),
                &["peer: no-device"],
            ),
        ];
        for (error, words) in cases {
            let text = text(&error);
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        }
        for code in ReasonCode::ALL {
            let local = text(&Error::required(Reason::new(code, "why")));
            let peer = text(&Error::required(Reason::from_peer(code, "why")));
            assert!(peer.contains("peer: ") && !local.contains("peer: "), "{local}; {peer}");
            if code != ReasonCode::Memlock {
                assert!(local.contains(code.cure()), "{local}");
            }
        }
    }

    #[test]
    fn errors_are_not_wrapped_twice() {
        let inner = Error::required(Reason::new(ReasonCode::Policy, ""));
        assert!(matches!(Error::conversion(Box::new(inner)), Error::RdmaRequired(_)));
        let tonics = tonic::transport::Endpoint::from_shared("http://[").unwrap_err();
        let text = tonics.to_string();
        assert_eq!(of_call(Box::new(tonics)).to_string(), text);
    }
}
