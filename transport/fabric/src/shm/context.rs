//! The state that all connections of a device share.

use std::sync::Arc;

use crate::access::{Lending, ShmAccess};
use crate::shm::lend::permit::Permit;
use crate::shm::memory::table::ChunkTable;
use crate::shm::user::{is_overflow_user, own_user};

/// The name of every device of this provider.
pub(super) const NAME: &str = "shm";

/// The landing chunks of a device, and the users with which the device shares memory.
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
