//! What keeps calls from RDMA, and how to fix it: see [`diagnose`](fn@diagnose).
//!
//! | file | what |
//! |---|---|
//! | `run`, `request` | a diagnosis as a future, and its input |
//! | `report` | the result |
//! | `serialize` | serialization of the crate's own types in the result |
//! | `host` | this host: its state, and tests on its devices |
//! | `peer`, `probe` | a server: its offer, the steps to it, a short measurement |
//! | `findings`, `cures` | what prevents RDMA, and the commands that fix it |
//! | `hints` | what makes it slower than it could be |

mod cures;
mod findings;
mod hints;
mod host;
mod peer;
mod probe;
mod report;
mod request;
mod run;
#[cfg(feature = "serde")]
mod serialize;
#[cfg(test)]
mod tests;

pub use report::{
    Cure, DescriptorsReport, Device, DeviceFile, Diagnosis, Finding, Gid, Hint, Host,
    HugePagesReport, Library, Limits, Measured, MemlockReport, Module, ModuleState, Offered, Peer,
    PoolSizeBy, Port, Refused, RunsIn, Settings, Step,
};
pub use run::{Diagnose, diagnose};
