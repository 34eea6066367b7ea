//! Finds out why calls do not use RDMA, and how to fix it: see [`diagnose`](fn@diagnose).
//!
//! | file | what |
//! |---|---|
//! | `run`, `request` | a diagnosis as a future, and its input |
//! | `report`, `peer_report`, `step` | the result |
//! | `serialize` | serialization of the crate's own types in the result |
//! | `host` | this host: its state, and tests on its devices |
//! | `peer`, `measure` | a server: its offer, the steps to it, and a short measurement |
//! | `findings`, `no_address`, `cures` | the problems that prevent RDMA, and the commands that fix them |
//! | `hints` | reasons why RDMA is slower than it could be |

mod cures;
mod findings;
mod hints;
mod host;
mod measure;
mod no_address;
mod peer;
mod peer_report;
mod report;
mod request;
mod run;
#[cfg(feature = "serde")]
mod serialize;
mod step;
#[cfg(test)]
mod tests;

pub use peer_report::{Bare, Direction, Measured, Offered, Peer, Rates, Refused};
pub use report::{
    Cure, DescriptorsReport, Device, DeviceFile, Diagnosis, Finding, Gid, Hint, Host,
    HugePagesReport, Library, Limits, MemlockReport, Module, ModuleState, PathSettings as Settings,
    PcieLink, PoolSizeBy, Port, RdmaNamespaces, RunsIn,
};
pub use run::{Diagnose, diagnose};
pub use step::Step;
