//! Client, server, protocol and memory over a simulated network and a simulated clock, in one
//! thread, driven by a seed.
//!
//! A seed draws a plan: hosts, pools, calls, and faults with their times. [`run`] executes it with
//! the real `Endpoint`, `Channel` and `Server` on the simulated fabric and on simulated TCP, and
//! the oracle checks the outcome. The same seed gives the same run. Tokio's clock is paused and
//! advances only when no task can run. One thread runs everything. All randomness comes from the
//! seed, including tokio's own, which needs `tokio_unstable` (set by `tests/sim/run`).
//!
//! | module | what |
//! |---|---|
//! | `plan` | what a seed expands to |
//! | `load` | the calls of a plan |
//! | `tcp_net` | TCP without sockets: connections that are slow, stall, or break |
//! | `pattern` | payload of messages |
//! | `service` | the server's side of a call |
//! | `calls` | the client's side of a call |
//! | `fault_injection` | injects the faults of a plan |
//! | `named` | buffers for fields to land in |
//! | `wire_checker` | checks the traffic on the fabric against the protocol's rules, frame by frame |
//! | `hosts` | the devices, pools and servers of a run |
//! | `world` | state that all tasks of a run share |
//! | `panics` | collects the panics of a run |
//! | `run` | one run, from start to result |
//! | `oracle` | records every call, and checks whether its outcome is allowed |
//! | `runner` | runs many seeds on all processors, and sums up their figures |

mod calls;
mod fault_injection;
mod figures;
mod hosts;
mod load;
mod named;
mod oracle;
mod panics;
mod pattern;
mod plan;
mod run;
pub mod runner;
mod service;
mod tcp_net;
mod wire_checker;
mod world;

pub use figures::Figures;
pub use plan::Theme;
pub use run::{Options, Report, Sabotage, run};
pub use wire_checker::WireChecker;
