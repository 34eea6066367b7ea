//! Client, server, protocol and memory over a simulated network and a simulated clock, in one
//! thread, driven by a seed.
//!
//! A seed draws a plan: hosts, pools, calls, faults and their moments. [`run`] lives through it
//! with the real `Endpoint`, `Channel` and `Server` on the simulated fabric and on a stand-in for
//! TCP, and the oracle judges what came of it. The same seed gives the same run: tokio's clock is
//! paused and moves only when nothing else is left to do, one thread runs everything, and all
//! chance comes from the seed, that of tokio included (which needs `tokio_unstable`:
//! `tests/sim/run` sets it).
//!
//! | module | what |
//! |---|---|
//! | `plan` | what a seed stands for |
//! | `load` | the calls of a plan |
//! | `tcp_net` | TCP without sockets: connections that are slow, stall, break |
//! | `pattern` | contents of messages |
//! | `service` | the server's side of a call |
//! | `calls` | the client's side of a call |
//! | `chaos` | faults at their moments |
//! | `wire_checker` | checks what goes over the fabric against the protocol's rules, frame by frame |
//! | `world` | the hosts of a run |
//! | `run` | one run from start to verdict |
//! | `oracle` | what was seen of every call, and whether it may be so |
//! | `runner` | many seeds on all processors, figures |

mod calls;
mod chaos;
mod figures;
mod load;
mod oracle;
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
