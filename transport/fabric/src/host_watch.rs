//! The host watch of builds without RDMA. Such a watch cannot be created.

use std::io;

use crate::never::Never;

/// Reports that devices, ports or addresses may have changed. The type has no values in this build.
#[derive(Clone, Debug)]
pub struct HostWatch(Never);

/// The changes that a [`HostWatch`] reports, for one task.
#[derive(Debug)]
pub struct HostEvents(Never);

impl HostWatch {
    /// Fails, because this build has no RDMA.
    ///
    /// # Errors
    /// Always.
    pub fn new() -> io::Result<HostWatch> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// This function is never called, because this build cannot make a watch.
    ///
    /// # Errors
    /// None.
    pub fn has_changed(&self) -> io::Result<bool> {
        self.0.reached()
    }

    /// This function is never called, because this build cannot make a watch.
    ///
    /// # Errors
    /// None.
    pub fn events(&self) -> io::Result<HostEvents> {
        self.0.reached()
    }
}

impl HostEvents {
    /// This function is never called, because the type has no values.
    ///
    /// # Errors
    /// None.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn next(&mut self) -> io::Result<()> {
        self.0.reached()
    }
}
