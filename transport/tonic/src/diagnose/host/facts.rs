//! Facts that the findings need and the report does not contain.

use crate::diagnose::host::kernel::Loadable;
use crate::diagnose::host::sysfs::Interface;

/// Facts for the cures that the report does not contain.
#[derive(Debug, Clone, Default)]
pub(in crate::diagnose) struct Facts {
    pub(in crate::diagnose) interfaces: Vec<Interface>,
    /// The distribution, and those it is derived from.
    pub(in crate::diagnose) families: Vec<String>,
    /// The drivers that the kernel provides, loaded or not.
    pub(in crate::diagnose) loadable: Loadable,
    /// The process that started this process.
    pub(in crate::diagnose) parent: Option<u32>,
    /// Whether `TONIC_RDMA` is set.
    pub(in crate::diagnose) policy_from_env: bool,
    /// Whether `TONIC_RDMA_DEVICE` is set.
    pub(in crate::diagnose) device_from_env: bool,
}
