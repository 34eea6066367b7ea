//! Errors of operations on objects.

use std::io;

/// An operation on an object failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} '{name}': {error}")]
pub(crate) struct StoreError {
    /// The operation that was tried.
    pub(crate) doing: &'static str,
    /// The object or directory.
    pub(crate) name: String,
    /// Why the operation failed.
    pub(crate) error: io::Error,
}

/// Adds the operation and the name to an I/O error.
pub(super) trait Doing<T> {
    fn doing(self, doing: &'static str, name: &str) -> Result<T, StoreError>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, doing: &'static str, name: &str) -> Result<T, StoreError> {
        let name = if name.is_empty() { "/" } else { name };
        self.map_err(|error| StoreError {
            doing,
            name: crate::names::Shown(name).to_string(),
            error,
        })
    }
}
