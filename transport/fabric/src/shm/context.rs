//! The state that all connections of a device share, and the counters of one connection.

use std::sync::Arc;

use crate::access::{Lending, ShmAccess};
use crate::shm::lend::Permit;
use crate::shm::memory::table::ChunkTable;
use crate::shm::same_user::{is_overflow_user, own_user};

/// The name of every device of this provider.
pub(super) const NAME: &str = "shm";

/// The landing chunks of a device, the rules for lending, and the users with whom the device shares
/// memory.
#[derive(Debug)]
pub(super) struct DeviceContext {
    pub(super) table: Arc<ChunkTable>,
    pub(super) permit: Arc<Permit>,
    access: ShmAccess,
}

impl DeviceContext {
    pub(super) fn new(access: ShmAccess, lending: Lending) -> DeviceContext {
        let permit = Arc::new(Permit::new(lending));
        DeviceContext { table: Arc::default(), permit, access }
    }

    /// Whether memory may be shared with this user.
    pub(super) fn allows(&self, uid: u32) -> bool {
        match self.access {
            ShmAccess::Any => true,
            _ => self.access.allows(uid, own_user()) && !is_overflow_user(uid),
        }
    }
}

/// Counters of a link's work since it was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ShmStats {
    /// Number of messages sent.
    pub sends: u64,
    /// Number of WRITEs, each of which is one copy.
    pub writes: u64,
    /// The number of bytes that WRITEs have copied.
    pub write_bytes: u64,
    /// Number of times that the peer's process slept and was woken. Each wake-up is one system
    /// call.
    pub wakes: u64,
    /// Number of times that messages were published without a system call, because the peer did not
    /// wait or its process was awake.
    pub wakes_spared: u64,
    /// Number of times that this end began to wait.
    pub waits: u64,
    /// Number of times that a message arrived while this end polled.
    pub polled: u64,
    /// The number of the peer's files that had to wait, because earlier files were mapped and never
    /// used.
    pub deferred_files: u64,
}
