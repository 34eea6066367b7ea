//! Checks of this host: the system's own information, and tests on its RDMA devices.
//!
//! | file | what |
//! |---|---|
//! | `check` | the checks in their order, and the transport's own decision |
//! | `facts` | facts that the findings need and the report does not contain |
//! | `system_files` | reads /proc, /sys and /dev |
//! | `kernel`, `sysfs`, `pcie`, `memory`, `descriptors` | the content of these files |
//! | `loopback` | connects a device to itself |

pub(super) mod check;
mod descriptors;
pub(super) mod facts;
pub(super) mod kernel;
mod loopback;
pub(super) mod memory;
mod pcie;
pub(super) mod sysfs;
pub(super) mod system_files;
