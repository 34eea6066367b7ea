//! Converts errors to gRPC statuses: a code, and one line that names the object and says what to
//! do.

use std::io;

use tonic::{Code, Status};

use crate::names::{Name, NameError, Shown};
use crate::store::{StoreError, UploadError};

pub(super) fn bad_name(name: &str, error: NameError) -> Status {
    Status::invalid_argument(format!("'{}' cannot be the name of an object: {error}", Shown(name)))
}

pub(super) fn breach(name: &Name, what: &str) -> Status {
    Status::invalid_argument(format!("the transfer of '{name}' has {what}; nothing was stored"))
}

pub(super) fn differs(
    name: &Name,
    arrived: impl std::fmt::Display,
    promised: impl std::fmt::Display,
) -> Status {
    Status::data_loss(format!(
        "'{name}' arrived as {arrived} where {promised} was sent; nothing was stored, send it again"
    ))
}

pub(super) fn upload_status(error: &UploadError) -> Status {
    let code = match error {
        UploadError::Store(error) => return store_status(error),
        UploadError::Unknown | UploadError::Twice(..) => Code::Aborted,
        UploadError::NoSuchRange(..) => Code::InvalidArgument,
        UploadError::Incomplete(..) => Code::FailedPrecondition,
        UploadError::Differs { .. } => Code::DataLoss,
        UploadError::TooMany(_) | UploadError::NoRoom { .. } => Code::ResourceExhausted,
    };
    Status::new(code, error.to_string())
}

pub(super) fn store_status(error: &StoreError) -> Status {
    failed(error.doing, &error.name, &error.error)
}

pub(super) fn status(doing: &'static str, name: &Name, error: &io::Error) -> Status {
    failed(doing, &name.to_string(), error)
}

/// The status for an I/O error. `name` must already be escaped for display.
fn failed(doing: &str, name: &str, error: &io::Error) -> Status {
    use io::ErrorKind as Kind;
    let (code, cure) = match error.kind() {
        Kind::NotFound => (Code::NotFound, "`rpc-demo ls` lists the existing objects"),
        Kind::PermissionDenied => {
            (Code::PermissionDenied, "check the permissions under the server's root")
        }
        Kind::StorageFull | Kind::QuotaExceeded => {
            (Code::ResourceExhausted, "free some space under the server's root")
        }
        Kind::FileTooLarge => {
            (Code::ResourceExhausted, "raise the server's limit on file sizes (ulimit -f)")
        }
        Kind::ReadOnlyFilesystem => {
            (Code::FailedPrecondition, "the server's root is mounted read-only")
        }
        Kind::IsADirectory => {
            (Code::FailedPrecondition, "there is a directory of that name; use another")
        }
        Kind::NotADirectory => {
            (Code::FailedPrecondition, "a part of the name is a file; use another name")
        }
        Kind::InvalidFilename => {
            (Code::InvalidArgument, "the server's file system refuses the name; use another")
        }
        Kind::InvalidInput => (Code::FailedPrecondition, ""),
        _ if too_many_files(error) => {
            (Code::ResourceExhausted, "raise the server's limit on open files (ulimit -n)")
        }
        _ => (Code::Internal, "see the server's log"),
    };
    if code == Code::Internal {
        tracing::error!("cannot {doing} '{name}': {error}");
    }
    let join = if cure.is_empty() { "" } else { "; " };
    Status::new(code, format!("cannot {doing} '{name}': {error}{join}{cure}"))
}

fn too_many_files(error: &io::Error) -> bool {
    use rustix::io::Errno;
    [Errno::MFILE, Errno::NFILE]
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

pub(super) fn bad_ranges(name: &Name) -> Status {
    Status::invalid_argument(format!("'{name}' cannot be cut into ranges of that size"))
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn what_a_disk_says_has_a_code_and_names_the_object() {
        for (errno, code) in [
            (Errno::NOSPC, Code::ResourceExhausted),
            (Errno::DQUOT, Code::ResourceExhausted),
            (Errno::FBIG, Code::ResourceExhausted),
            (Errno::MFILE, Code::ResourceExhausted),
            (Errno::ACCESS, Code::PermissionDenied),
            (Errno::NOENT, Code::NotFound),
            (Errno::ISDIR, Code::FailedPrecondition),
            (Errno::NOTDIR, Code::FailedPrecondition),
            (Errno::ROFS, Code::FailedPrecondition),
            (Errno::NAMETOOLONG, Code::InvalidArgument),
            (Errno::IO, Code::Internal),
        ] {
            let status = failed("write", "a/b", &io::Error::from(errno));
            assert_eq!(status.code(), code, "{errno}");
            assert!(status.message().contains("'a/b'"), "{}", status.message());
        }
    }
}
