//! RDMA through rdma-core, loaded at run time: InfiniBand, RoCE (also Soft-RoCE) and iWARP (also
//! Soft-iWARP).
//!
//! | module | what |
//! |---|---|
//! | `lib_probe` | are libibverbs and librdmacm there |
//! | `enumerate` | which devices, ports and addresses there are |
//! | `device` | an open device: context and protection domain |
//! | `mr` | memory regions |
//! | `cm` | rdma_cm: event channels, ids, events |
//! | `cq` | completion queues and their channels |
//! | `qp`, `post` | queue pairs, and batches of work for them |
//! | `connect`, `listener` | making connections |
//! | `link` | a [`Link`](crate::Link) over all that |
//! | `siw` | what keeps Soft-iWARP from having more than some 60 connections |
//! | `self_test` | making all that one by one, for diagnosis |
//!
//! # Who keeps whom alive
//!
//! Every object of the library has one owner whose drop frees it, and holds what it was made on:
//!
//! ```text
//! VerbsLink -> Qp -> Cq -> CompChannel -> device (context, protection domain) -> anchor id
//!                 -> CmId -> Channel
//!           -> books and control block, freed when the queue pair is destroyed
//! registration -> device        listener -> CmId -> Channel
//! ```
//!
//! Events are acknowledged as they are taken, because both libraries wait, in destroying, for those
//! that are not.
//!
//! # Removal of a device
//!
//! Its links end with [`DeviceRemoved`](crate::LinkError::DeviceRemoved). The kernel waits for all
//! that was made on it: links, pools and the [`VerbsDevice`] must be dropped. librdmacm then closes
//! its own handle when it next looks at the devices, except for the last device of the host, which
//! it keeps until the process ends.

mod addr;
mod cm;
mod connect;
mod cq;
mod device;
mod enumerate;
mod lib_probe;
mod link;
mod listener;
mod mr;
mod post;
mod qp;
mod self_test;
mod siw;
mod wake_cost;

pub(crate) use self::addr::local_ips;
pub use self::device::VerbsDevice;
pub use self::enumerate::{devices, local_addresses};
pub use self::link::VerbsLink;
pub use self::listener::{VerbsIncoming, VerbsListener};
pub use self::self_test::self_test;
