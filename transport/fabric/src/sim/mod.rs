//! An in-process network that simulates verbs without hardware, for tests. A seed determines its
//! random numbers, and tests can inject faults.
//!
//! The network makes the checks of a NIC. A SEND needs a posted RECV that is long enough. A WRITE
//! needs a live key, the bounds of its region and the right to write. A source needs a live local
//! key. The accepting side must not send first (iWARP). A failed check ends the connection with
//! rdma-core's completion status for that failure.
//!
//! [`SimConfig::delay`] delays messages and completions for a number of *polls* drawn from the
//! seed. So the completion of a message may be reported after the answer to that message, and
//! batches arrive in parts. [`SimConfig::latency`] delays messages and completions by tokio's
//! clock. On a single-threaded runtime with a paused clock the same seed gives the same run.
//! Without latency, only connect timeouts use the clock.
//!
//! With [`SimConfig::audit`] the network also checks rules that a NIC cannot check, and
//! [`SimNet::breaches`] reports the breaches. An [`Observer`] gets all events. An [`InjectedBug`]
//! breaks one of the fabric's promises, so that tests can see whether the checkers notice.
//!
//! ```
//! # async fn example(pool_config: tonic_rdma_memory::PoolConfig) -> Result<(), Box<dyn std::error::Error>> {
//! use tonic_rdma_fabric::{Addr, Fabric};
//! use tonic_rdma_fabric::sim::{SimConfig, SimNet};
//!
//! let net = SimNet::new(SimConfig { seed: 7, ..SimConfig::default() });
//! let server = Fabric::Sim(net.device("sim0", "10.0.0.1".parse()?));
//! let client = Fabric::Sim(net.device("sim1", "10.0.0.2".parse()?));
//! let listener = server.listen(&Addr::Ip("10.0.0.1:0".parse()?))?;
//! assert_eq!(listener.local_addr().ip().map(|a| a.ip()), Some(server.addresses()?[0]));
//! # drop(client);
//! # Ok(())
//! # }
//! ```

mod config;
mod connect;
mod directory;
mod end;
mod faults;
mod instant;
mod link;
mod loans;
mod memory;
mod net;
mod observer;
mod state;

pub use self::config::{InjectedBug, SimConfig, SimStats};
pub use self::connect::{SimIncoming, SimListener};
pub use self::instant::{InstantCounts, InstantLink, InstantPeer};
pub use self::link::SimLink;
pub use self::net::{SimDevice, SimNet};
pub use self::observer::{EndId, Event, Observer};
