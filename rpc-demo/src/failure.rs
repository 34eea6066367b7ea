//! Errors of commands on one line: what failed, why, and what to do.

use std::fmt;

use tonic::{Code, Status};

use crate::names::Shown;

#[derive(Debug)]
pub(crate) struct Failure {
    exit: u8,
    what: String,
    why: String,
    cure: String,
    /// Whether a later attempt can continue with the data transferred so far.
    resumable: bool,
}

/// Exit code of a failure.
const FAILED: u8 = 1;
/// Exit code for a wrong command line.
const USAGE: u8 = 2;

impl Failure {
    /// Describes that `what` failed because of `why`. `cure` says what to do, and may be empty.
    pub(crate) fn new(
        what: impl Into<String>,
        why: impl fmt::Display,
        cure: impl Into<String>,
    ) -> Failure {
        Failure {
            exit: FAILED,
            what: what.into(),
            why: why.to_string(),
            cure: cure.into(),
            resumable: true,
        }
    }

    /// A failure for an invalid argument or environment variable.
    pub(crate) fn usage(
        what: impl Into<String>,
        why: impl fmt::Display,
        cure: impl Into<String>,
    ) -> Failure {
        Failure { exit: USAGE, ..Failure::new(what, why, cure) }
    }

    /// Returns the same failure with another exit code.
    pub(crate) fn with_exit(self, exit: u8) -> Failure {
        Failure { exit, ..self }
    }

    /// Marks a failure after which a later attempt cannot continue the transfer, for example
    /// because the content is wrong.
    pub(crate) fn not_resumable(self) -> Failure {
        Failure { resumable: false, ..self }
    }

    /// Whether a later attempt can continue with the data transferred so far.
    pub(crate) fn resumable(&self) -> bool {
        self.resumable
    }

    /// A failure for an invalid name on the command line.
    pub(crate) fn name(name: &str, error: crate::names::NameError) -> Failure {
        Failure::usage(
            format!("'{}' cannot be the name of an object", Shown(name)),
            error,
            "give a relative name such as backup/disk.img",
        )
    }

    /// A failure of a local file operation.
    pub(crate) fn io(what: impl Into<String>, error: &std::io::Error) -> Failure {
        use std::io::ErrorKind as Kind;
        let cure = match error.kind() {
            Kind::NotFound => "check the path",
            Kind::PermissionDenied => "check the permissions, or run as a user who has them",
            Kind::StorageFull | Kind::QuotaExceeded => "free some space, or use another disk",
            Kind::FileTooLarge => {
                "raise the limit on file sizes (ulimit -f), or use another file system"
            }
            Kind::NotADirectory | Kind::IsADirectory => "use another path",
            Kind::InvalidFilename => "use a shorter path",
            _ => "",
        };
        Failure::new(what, error, cure)
    }

    /// A failure of a call: the server returned an error, or the connection was lost.
    pub(crate) fn status(what: impl Into<String>, status: &Status) -> Failure {
        let what = what.into();
        if is_connection_loss(status) {
            let why = format!("the connection to the server was lost ({})", Shown(&detail(status)));
            return Failure::new(
                what,
                why,
                "check whether the server still runs, then repeat the command; put, get and cp \
                 continue with --resume",
            );
        }
        // The server's message already contains the cure.
        let message = Shown(status.message()).to_string();
        let why = match message.strip_prefix(&what).and_then(|rest| rest.strip_prefix(": ")) {
            // The server's message repeats `what`.
            Some(why) => why.to_owned(),
            None if message.is_empty() => format!("the server says {:?}", status.code()),
            None => message,
        };
        let cure = match status.code() {
            Code::Unimplemented => "is it an rpc-demo server of this version?",
            _ => "",
        };
        Failure::new(what, why, cure)
    }

    pub(crate) fn exit(&self) -> u8 {
        self.exit
    }
}

/// Whether the connection failed rather than the call.
fn is_connection_loss(status: &Status) -> bool {
    // A status that the store returns has no source. A status that the transport creates has a
    // source, or is UNAVAILABLE.
    status.code() == Code::Unavailable || std::error::Error::source(status).is_some()
}

fn detail(status: &Status) -> String {
    causes(status_source(status).unwrap_or(status))
}

fn status_source(status: &Status) -> Option<&(dyn std::error::Error + 'static)> {
    std::error::Error::source(status)
}

/// An error and its causes on one line, without repetition.
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let more = cause.to_string();
        if text == "transport error" {
            text = more;
        } else if !text.contains(&more) && cause.downcast_ref::<tonic::Status>().is_none() {
            text = format!("{text}: {more}");
        }
        next = cause.source();
    }
    text
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.why)?;
        if !self.cure.is_empty() {
            write!(f, "; {}", self.cure)?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_server_says_again_is_said_once() {
        let status = Status::not_found("cannot list 'x': No such file");
        let line = Failure::status("cannot list 'x'", &status).to_string();
        assert_eq!(line, "cannot list 'x': No such file");
        let line = Failure::status("cannot get 'x'", &status).to_string();
        assert_eq!(line, "cannot get 'x': cannot list 'x': No such file");
    }
}
