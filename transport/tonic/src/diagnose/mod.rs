//! What keeps calls from RDMA, and how to fix it: see [`diagnose`](fn@diagnose).
//!
//! | file | what |
//! |---|---|
//! | `run`, `request` | a diagnosis as a future, and what it is asked |
//! | `report` | the result |
//! | `serialize` | the result's words, serialized |
//! | `host` | this host: what there is, and what can be made on it |
//! | `peer`, `probe` | a server: its offer, the steps to it, a short measurement |
//! | `findings`, `cures` | what is in the way, and the commands that fix it |

mod cures;
mod findings;
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
    Cure, Device, DeviceFile, Diagnosis, Finding, Gid, Host, HugePagesReport, Library, Limits,
    Measured, MemlockReport, Module, ModuleState, Offered, Peer, Port, Refused, RunsIn, Settings,
    Step,
};
pub use run::{Diagnose, diagnose};
