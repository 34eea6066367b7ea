//! RDMA through rdma-core, loaded at run time: InfiniBand, RoCE (also Soft-RoCE) and iWARP (also
//! Soft-iWARP).
//!
//! | module | what |
//! |---|---|
//! | `device` | [`VerbsDevice`]: opens a device, and listens and connects on it |
//! | `host_watch` | the kernel's notices of changes to devices, interfaces and addresses |
//! | `discovery` | the libraries, devices, ports and addresses of this host |
//! | `context` | an open device: context and protection domain, shared by all objects made on it |
//! | `addr` | socket addresses in C's form |
//! | `cm` | rdma_cm: ids, and the event channel that the ids of a runtime share |
//! | `mr` | memory regions |
//! | `completion` | completion queues that queue pairs share, and the rules for polling them |
//! | `queue_pair` | queue pairs, and batches of work |
//! | `connect`, `listener` | the connecting and the accepting side |
//! | `bring_up` | the calls that bring a link up, on threads that may block |
//! | `pending` | a link whose attempt has not succeeded yet |
//! | `link` | a [`Link`](crate::Link) over a queue pair |
//! | `siw` | workarounds for Soft-iWARP: payload that TCP still reads, and a limit of about 60 connections |
//! | `self_test` | makes each object that a connection needs, for diagnosis |
//! | `wake_cost` | measures how long a wake-up takes on this machine |
//!
//! # Ownership
//!
//! Every object of libibverbs and librdmacm has one owner. The owner frees the object on drop, and
//! until then keeps alive the objects that this object needs:
//!
//! ```text
//! VerbsLink -> Qp -> CqMember -> SharedCq -> Shard (channel) -> device (context, protection domain) -> bound id
//!                 -> CmId -> its part of the hub -> Hub -> Channel
//!           -> send queue and control block, freed when the queue pair is destroyed
//! registration -> device        listener -> CmId -> Hub -> Channel
//! ```
//!
//! Both libraries wait for unacknowledged events before they destroy an object, so this provider
//! acknowledges every event.
//!
//! # Removal of a device
//!
//! The links of a removed device end with [`DeviceRemoved`](crate::LinkError::DeviceRemoved). The
//! kernel waits until every object on the device is freed, so links, pools and the [`VerbsDevice`]
//! must be dropped. librdmacm then closes its own handle when it next lists the devices. The last
//! device of the host is an exception: librdmacm keeps its handle until the process ends.

mod addr;
mod bring_up;
mod cm;
mod completion;
mod connect;
mod context;
mod device;
mod discovery;
mod host_watch;
mod link;
mod listener;
mod mr;
mod path_proof;
mod pending;
mod queue_pair;
mod self_test;
mod siw;
mod wake_cost;

pub(crate) use self::addr::local_networks;
pub use self::device::VerbsDevice;
pub(crate) use self::discovery::enumerate::places;
pub use self::discovery::enumerate::{devices, local_addresses};
pub(crate) use self::discovery::may_have_devices;
pub(crate) use self::discovery::routes::routed;
pub use self::host_watch::{HostEvents, HostWatch};
pub use self::link::VerbsLink;
pub use self::listener::{VerbsIncoming, VerbsListener};
pub use self::self_test::self_test;
