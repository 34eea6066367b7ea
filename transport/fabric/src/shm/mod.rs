//! Connections between two processes on one host, over shared memory.
//!
//! A connection has a unix socket, which carries descriptors and shows when the peer ends. Its
//! shared memory is in files without a name (memfd) that can neither shrink nor grow:
//!
//! | memory | made and owned by | mapped by | holds |
//! |---|---|---|---|
//! | both rings, in one file | the accepting end | both ends | RECV slots: SEND copies a message into the next one |
//! | landing chunk | the receiving end's pool | the sending end, once it is granted | WRITE copies into it |
//! | control block, send arenas | each end | nobody else | bytes to send |
//! | RECV slots | the receiving end, on its heap | nobody else | received messages, once they are checked |
//!
//! ```text
//!   sender                                          receiver
//!   SEND slot --copy--> ring slot                   ring slot --copy, once--> RECV slot --> driver
//!                       tail, published on doorbell tail, read once, checked
//!   any memory --copy--> landing chunk              the same pages, handed up as Bytes after DONE
//! ```
//!
//! An end that waits sets a flag in its ring. All connections between a runtime of one process and
//! a runtime of another share a wake-up channel (`wakeup::channel`): an eventfd for each direction,
//! and a page with a bit for each connection. The sender sets the bit. If the receiving process
//! sleeps with regard to these connections, the sender also signals the eventfd, by a read that
//! never blocks. So waking a process that is awake costs no system call. Before an end waits, it
//! polls for a while (`crate::busy_poll`).
//!
//! A connection at rest has one descriptor at each end, the socket, and all connections of a
//! channel share two eventfds. Each ring of such a connection has one page. Only the sending end
//! writes to a ring, so that end frees the other pages when they hold no messages
//! ([`Link::shrink`](crate::Link::shrink)).
//!
//! A handshake has three messages. HELLO carries a ticket and no descriptor. ACCEPT carries the
//! file of both rings, which the accepting end has made, and the number of its runtime. READY
//! carries the number of the channel that the connecting end has chosen (`wakeup::channels`). If
//! the accepting end does not have this channel yet, READY also carries the channel's eventfds and
//! page. The connecting end sends at once after READY, because the accepting end already has all
//! that the connection needs. The accepting end opens no descriptor from a peer before it has
//! checked the peer's ticket. Calls that may block on such a descriptor run on dedicated threads
//! (`blocking`). In particular, no task opens, waits for or closes an unknown file: tasks wait only
//! for sockets, and for descriptors that were found to be eventfds.
//!
//! Data in shared memory is as untrusted as a packet. So `ring` reads each word once, and checks
//! the copy. A peer that breaks the rules reaches only the ring and the chunks that it was given,
//! all of which belong to its own connection.
//!
//! | module | what |
//! |---|---|
//! | `context` | state that the connections of a device share: its chunks, and with whom it shares memory; the counts of a link |
//! | `same_user` | who a peer is, and whether it could stop and read this process by other means |
//! | `listener`, `connect` | the accepting and the connecting side |
//! | `setup` | the result of a handshake |
//! | `link` | the [`Link`](crate::Link) |
//! | `ring` | the ring: its layout, its reading and its writing end |
//! | `recv_slots` | the memory of received messages until they are read |
//! | `memory` | mapped files, and landing chunks |
//! | `named` | application buffers that the peer maps and writes to |
//! | `taking` | files that the peer has given, until they are mapped |
//! | `offers` | files that the peer was offered for mapping |
//! | `lend` | messages that the peer reads in the sender's memory |
//! | `socket` | the unix socket, its messages, and threads for calls that may block |
//! | `wakeup` | waking and being woken |

mod connect;
mod context;
#[cfg(test)]
mod fork;
mod lend;
mod link;
mod listener;
mod memory;
mod named;
pub(crate) mod offers;
mod recv_slots;
pub(crate) mod ring;
mod same_user;
mod setup;
pub(crate) mod socket;
mod taking;
#[cfg(test)]
mod tests;
mod wakeup;

pub use self::link::ShmLink;
pub use self::listener::{ShmIncoming, ShmListener};
pub use crate::shm::context::ShmStats;

use std::sync::Arc;
use std::time::Duration;

use tonic_rdma_memory::{PerProcess, Pool, Registrar};

use crate::access::{Lending, ShmAccess};
use crate::addr::ShmAddr;
use crate::device::{DeviceInfo, Transport};
use crate::error::{ConnectError, FabricError};
use crate::link_config::LinkConfig;
use crate::shm::context::{DeviceContext, NAME};
use crate::shm::memory::table::ShmRegistrar;

/// The boot id of the running kernel (random(4)). Only processes with the same boot id can share
/// memory.
///
/// # Errors
/// The file in /proc cannot be read.
pub(crate) fn boot_id() -> Result<String, FabricError> {
    // The id is read once, so that a process that later runs out of descriptors still knows its
    // host. The parent's id is also the child's.
    static ID: PerProcess<String> = PerProcess::new(String::new);
    if let Some(id) = ID.get().or_else(|| ID.inherited()) {
        return Ok(id.clone());
    }
    let path = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(path).map_err(|source| FabricError::Shm {
        what: "the boot id cannot be read",
        source: Arc::new(source),
    })?;
    Ok(ID.get_or_insert(text.trim().to_owned()).clone())
}

/// This process as an end of shared-memory connections. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ShmDevice(Arc<DeviceContext>);

impl ShmDevice {
    /// Makes a separate device, with its own registrations. Opens nothing.
    pub fn new(access: ShmAccess, lending: Lending) -> ShmDevice {
        ShmDevice(Arc::new(DeviceContext::new(access, lending)))
    }

    /// Always `shm`.
    pub fn name(&self) -> &str {
        NAME
    }

    /// Reports no ports and no addresses. Never fails.
    pub fn info(&self) -> Result<DeviceInfo, FabricError> {
        Ok(DeviceInfo {
            name: NAME.to_owned(),
            transport: Transport::Shm,
            ports: Vec::new(),
            addresses: Vec::new(),
            unopened: None,
        })
    }

    /// Returns a registrar that adds landing chunks and lendable regions to the device's table, so
    /// that they can be offered to peers. The registrar pins nothing.
    pub fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::new(ShmRegistrar { table: self.0.table.clone(), scope: self.0.permit.scope() })
    }

    /// Number of live registrations that peers may write to. 0 once all pools on the device are
    /// dropped.
    pub fn registrations(&self) -> usize {
        self.0.table.live()
    }

    /// See [`Fabric::listen`](crate::Fabric::listen).
    pub fn listen(&self, addr: &ShmAddr) -> Result<ShmListener, FabricError> {
        ShmListener::new(self.0.clone(), addr)
    }

    /// See [`Fabric::connect`](crate::Fabric::connect).
    pub async fn connect(
        &self,
        addr: &ShmAddr,
        config: &LinkConfig,
        pool: &Pool,
        private_data: &[u8],
        timeout: Duration,
    ) -> Result<(ShmLink, Vec<u8>), ConnectError> {
        connect::connect(&self.0, addr, config, pool, private_data, timeout).await
    }
}
