//! This host: what the system says of itself, and what can be made on its RDMA devices.
//!
//! | file | what |
//! |---|---|
//! | `check` | the checks in their order, and the transport's own decision |
//! | `facts` | what the findings need beyond the report |
//! | `system_files` | reads /proc, /sys and /dev |
//! | `kernel`, `sysfs`, `memory` | what these files say |
//! | `loopback` | a connection from a device to itself |

pub(super) mod check;
pub(super) mod facts;
pub(super) mod kernel;
mod loopback;
pub(super) mod memory;
pub(super) mod sysfs;
pub(super) mod system_files;
