//! Two processes of one host, over memory that they share.
//!
//! A connection is a unix socket, by which descriptors travel and the peer's end is noticed, and
//! three kinds of memory, all of it files without a name (memfd) that can neither shrink nor grow:
//!
//! | memory | made and owned by | mapped by | holds |
//! |---|---|---|---|
//! | ring | the receiving end | the sending end | RECV slots: SEND copies a message into the next one |
//! | landing chunk | the receiving end's pool | the sending end, when it is granted | WRITE copies into it |
//! | control block, send arenas | each end | nobody else | what is sent, and received messages once they are checked |
//!
//! ```text
//!   sender                                          receiver
//!   SEND slot --copy--> ring slot                   ring slot --copy, once--> RECV slot --> driver
//!                       tail, published by ring()   tail, read once, checked
//!   any memory --copy--> landing chunk              the same pages, handed up as Bytes after DONE
//! ```
//!
//! A process that waits says so in its ring and is woken through an eventfd; one that does not wait
//! costs its peer no system call. Before it sleeps it polls for a while (`crate::busy_poll`).
//!
//! A handshake is three messages: HELLO, which carries a ticket and no descriptor; ACCEPT, with the
//! ring of the end that accepts; RING, with that of the other end. No descriptor of a peer's is
//! opened before its ticket was looked at, and what may block on one is done by threads of its own
//! (`blocking`). In particular there is no task that opens, waits for or closes a file that it does
//! not know: what tasks wait for are sockets and eventfds that this end has made.
//!
//! Everything in shared memory is as untrusted as a packet: `ring_doorbell` reads each word once, and checks
//! the copy. What a peer that breaks the rules can reach is the ring and the chunks that it was
//! given, all of them its own connection's.
//!
//! | file | what |
//! |---|---|
//! | `socket` | unix sockets with message boundaries and descriptors |
//! | `wire` | messages on them |
//! | `blocking` | threads for what a peer can make block |
//! | `same_user` | whether a peer could stop this process anyway |
//! | `map` | a file, checked and mapped |
//! | `peer_map` | a file of the peer's: mapped once, unmapped elsewhere |
//! | `chunks` | landing chunks of the peer: limits, WRITEs |
//! | `ring_doorbell` | the ring: layout, reading and writing end |
//! | `wait_flag` | the flag by which no wake-up is lost |
//! | `table` | landing chunks of this process, by remote key |
//! | `event_fd` | waking and being woken |
//! | `setup` | from a handshake to a link |
//! | `listener`, `connect` | the accepting and the connecting side |
//! | `link` | the [`Link`](crate::Link) |

mod blocking;
mod chunks;
mod connect;
mod event_fd;
mod link;
mod listener;
mod map;
mod peer_map;
pub(crate) mod ring;
mod same_user;
mod setup;
mod socket;
mod table;
mod wait_flag;
mod wake_cost;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use tonic_rdma_memory::{Pool, Registrar};

pub use self::link::{ShmLink, ShmStats};
pub use self::listener::{ShmIncoming, ShmListener};
use self::table::{ShmRegistrar, Table};
use crate::access::ShmAccess;
use crate::addr::ShmAddr;
use crate::device::{DeviceInfo, Transport};
use crate::error::{ConnectError, FabricError};
use crate::link::LinkConfig;

/// The name of the only device.
pub(crate) const NAME: &str = "shm";

/// The boot id of the running kernel (random(4)): two processes with the same one can share memory.
///
/// # Errors
/// /proc is not mounted.
pub(crate) fn boot_id() -> Result<String, FabricError> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(path).map_err(|source| FabricError::Shm {
        what: "the boot id cannot be read",
        source: Arc::new(source),
    })?;
    Ok(text.trim().to_owned())
}

/// This process as an end of shared-memory connections. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ShmDevice(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    table: Arc<Table>,
    access: ShmAccess,
}

impl ShmDevice {
    /// A device of its own, with its own registrations. Opens nothing.
    pub fn new(access: ShmAccess) -> ShmDevice {
        ShmDevice(Arc::new(Inner { table: Arc::default(), access }))
    }

    /// `shm`.
    pub fn name(&self) -> &str {
        NAME
    }

    /// No ports, no addresses.
    pub fn info(&self) -> Result<DeviceInfo, FabricError> {
        Ok(DeviceInfo {
            name: NAME.to_owned(),
            transport: Transport::Shm,
            ports: Vec::new(),
            addresses: Vec::new(),
        })
    }

    /// Makes landing chunks known, so that they can be given to peers. Pins nothing.
    pub fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::new(ShmRegistrar(self.0.table.clone()))
    }

    /// Live registrations that peers may write to: 0 when all pools on the device are gone.
    pub fn registrations(&self) -> usize {
        self.0.table.live()
    }

    /// See [`Fabric::listen`](crate::Fabric::listen).
    pub fn listen(&self, addr: &ShmAddr) -> Result<ShmListener, FabricError> {
        ShmListener::new(self.clone(), addr)
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
        connect::connect(self, addr, config, pool, private_data, timeout).await
    }

    fn table(&self) -> &Arc<Table> {
        &self.0.table
    }

    fn allows(&self, uid: u32) -> bool {
        match self.0.access {
            ShmAccess::Any => true,
            _ => self.0.access.allows(uid, own_user()) && !is_anybody(uid),
        }
    }
}

fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// In a user namespace, all users from outside of it show as one, by default 65534.
fn is_anybody(uid: u32) -> bool {
    let overflow = std::fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap_or_default();
    if uid != overflow.trim().parse().unwrap_or(65534) {
        return false;
    }
    let whole = |map: String| map.split_whitespace().eq(["0", "0", "4294967295"]);
    !std::fs::read_to_string("/proc/self/uid_map").is_ok_and(whole)
}
