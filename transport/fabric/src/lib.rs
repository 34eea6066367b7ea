//! The fabric boundary of tonic-rdma: the verbs model in safe Rust, and its providers.
//!
//! A [`Fabric`] is one device that can carry connections. The fabric registers memory through the
//! [`Registrar`](tonic_rdma_memory::Registrar) of a [`Pool`](tonic_rdma_memory::Pool). The fabric
//! makes [`Link`]s when it [connects](Fabric::connect) to a peer, or when it
//! [listens](Fabric::listen) and accepts a peer. A link is a connected, reliable queue pair with
//! its completion queue, its connection-manager id and its control block.
//!
//! # Map
//!
//! | module | what |
//! |---|---|
//! | [`addr`] | [`Addr`], [`ShmAddr`]: addresses of listeners and of the ends of links |
//! | [`link`] | the [`Link`] trait, [`Work`], [`Completion`], [`LinkConfig`], [`Caps`], [`PeerInfo`] |
//! | [`error`] | [`FabricError`], [`ConnectError`], [`LinkError`]: whose fault, which verb, what to do |
//! | [`device`] | [`DeviceInfo`]: the properties that a device reports |
//! | [`reject_reason`] | [`RejectReason`]: why a peer's connection manager rejects a request |
//! | [`provider`] | [`Fabric`], [`Listener`], [`Incoming`], [`AnyLink`]: one type over all providers |
//! | `bare` | SENDs and WRITEs over a link without calls, to measure it (feature `measure`) |
//! | [`access`] | [`ShmAccess`], [`Lending`]: with which processes memory is shared |
//! | `shm` | shared memory between processes of one host (Linux, feature `shm`) |
//! | `returns` | leases whose bytes are no longer read |
//! | [`timer`] | [`Timer`], a timer with no cost while it waits, and its [`Clock`] |
//! | [`turn`] | charges work to the turn of the task that does it |
//! | [`wake_gate`] | [`WakeGate`]: skips polling a future until its waker fires |
//! | [`host_snapshot`] | [`HostSnapshot`]: devices, addresses and limits of this host |
//! | [`self_test`] | [`SelfTest`]: the result of creating each object that a connection needs |
//! | `sim` | an in-process network with a seed and faults, for tests (feature `test-util`) |
//! | `verbs` | rdma-core, loaded at run time: InfiniBand, RoCE and iWARP (Linux, feature `verbs`) |
//!
//! # The control block
//!
//! Every link owns one block of registered memory. A new link takes the block from the pool with
//! [`Pool::control`](tonic_rdma_memory::Pool::control). Dropping the link returns the block. The
//! block of a link over shared memory has no RECV ring:
//!
//! ```text
//! | RECV ring: recv_slots x slot_size | SEND slots: send_slots x slot_size | staging: staging bytes |
//!                                     |<------------------- block_mut() ------------------------->|
//! ```
//!
//! The RECV ring belongs to the device. A slot is read with [`Link::recv_slot`] between its
//! [`Completion::Received`] and [`Link::repost`]. The rest of the block belongs to the driver,
//! which writes through [`Link::block_mut`] and states offsets into that part in [`Work`]. The
//! driver must not write to a range of queued work again before a [`Completion::Sent`] covers that
//! work. Breaking this rule sends wrong bytes, but is not undefined behaviour.
//!
//! The number of RECVs changes with the load: [`Link::grow`] leases memory for extra RECVs and
//! posts these RECVs, and [`Link::shrink`] removes the extra RECVs. The slots in the block may be
//! shorter than the slots that are leased later ([`LinkConfig::rest_recv_size`],
//! [`LinkConfig::rest_send_size`]), so that a connection at rest has little memory. The short RECVs
//! are then left out while extra RECVs are posted. [`Link::grow_sends`] leases separate memory for
//! the SEND slots of a busy connection, and [`Link::shrink_sends`] returns that memory.
//!
//! # Order
//!
//! Work completes in the order in which it was queued, so `Sent { id }` covers that id and every
//! earlier id. The peer sees WRITEs and SENDs in the same order: when it has received a SEND, the
//! bytes of every WRITE before it have landed (R4).
//!
//! # Runtime
//!
//! The verbs provider registers file descriptors with tokio and bounds waits with tokio's timer, so
//! this crate must be called from within a tokio runtime with both drivers enabled. Over shared
//! memory, calls that a peer can make block run on dedicated threads (`shm::socket::blocking`).
//! Neither a runtime nor the process waits for those threads to end.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod access;
pub mod addr;
#[cfg(feature = "measure")]
pub mod bare;
#[cfg(all(target_os = "linux", any(feature = "shm", feature = "verbs")))]
mod busy_poll;
#[cfg(any(
    feature = "test-util",
    all(target_os = "linux", any(feature = "shm", feature = "verbs"))
))]
mod control_block;
pub mod device;
pub mod error;
#[cfg(all(target_os = "linux", feature = "shm", feature = "test-util"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod host_snapshot;
#[cfg(not(all(target_os = "linux", feature = "verbs")))]
mod host_watch;
pub mod link;
mod link_config;
mod never;
pub mod off_worker;
pub mod provider;
#[cfg(any(feature = "test-util", all(target_os = "linux", feature = "verbs")))]
mod queue;
pub mod reject_reason;
#[cfg(any(all(target_os = "linux", feature = "shm"), feature = "test-util"))]
mod returns;
pub mod self_test;
#[cfg(all(target_os = "linux", feature = "shm"))]
pub mod shm;
#[cfg(feature = "test-util")]
pub mod sim;
pub mod timer;
pub mod turn;
#[cfg(all(target_os = "linux", feature = "verbs"))]
pub mod verbs;
pub mod wake_gate;

/// The atomics of `shm`. tests/loom.rs replaces them with loom's atomics.
#[cfg(all(target_os = "linux", feature = "shm"))]
mod atomics {
    pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};
}

pub use access::{HostProcess, Lending, ShmAccess};
pub use addr::{Addr, BadShmAddr, ShmAddr};
pub use device::{DeviceInfo, LinkLayer, LocalAddress, PortInfo, PortState, Transport};
pub use error::{ConnectError, ConnectStep, FabricError, LinkError, Verb};
pub use host_snapshot::HostSnapshot;
#[cfg(not(all(target_os = "linux", feature = "verbs")))]
pub use host_watch::{HostEvents, HostWatch};
pub use link::{
    Caps, Completion, Lent, Link, MAX_PRIVATE_DATA, PeerInfo, Posted, Shared, Work, WriteSource,
};
pub use link_config::{ACK_TIMEOUTS, LinkConfig, Takes};
pub use off_worker::off_worker;
pub use provider::{AnyLink, Connected, Fabric, Incoming, Listener};
pub use reject_reason::RejectReason;
pub use self_test::{DeviceLimits, SelfTest, SelfTestStep};
pub use timer::{Clock, Timer};
#[cfg(all(target_os = "linux", feature = "verbs"))]
pub use verbs::{HostEvents, HostWatch};
pub use wake_gate::WakeGate;
