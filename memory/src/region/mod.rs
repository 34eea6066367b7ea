//! Mappings that are registered with a device.
//!
//! | file | what |
//! |---|---|
//! | `page` | page sizes |
//! | `mapping` | mapped memory |
//! | `random_address` | addresses of landing memory that peers cannot guess |
//! | [`memfd`] | memory that can be shared with another process |
//! | `file_limit` | RLIMIT_FSIZE, and signals that interrupt system calls |
//! | `lendable` | application memory that peers on this host can write to, or that can be lent to them |
//!
//! Systems other than Linux have only ordinary memory, which no peer maps. On these systems, the
//! files in `elsewhere` replace the files of the same names.

#[cfg_attr(not(target_os = "linux"), path = "elsewhere/file_limit.rs")]
pub(crate) mod file_limit;
pub(crate) mod lendable;
#[cfg_attr(not(target_os = "linux"), path = "elsewhere/mapping.rs")]
pub(crate) mod mapping;
/// The mapping of other systems, included for its tests.
#[cfg(all(test, target_os = "linux"))]
#[allow(dead_code)]
#[path = "elsewhere/mapping.rs"]
mod mapping_elsewhere;
#[cfg_attr(not(target_os = "linux"), path = "elsewhere/memfd.rs")]
pub mod memfd;
pub(crate) mod page;
#[cfg_attr(not(target_os = "linux"), path = "elsewhere/random_address.rs")]
pub(crate) mod random_address;

use std::num::NonZeroU32;
use std::ptr::NonNull;

use self::mapping::Mapping;
use crate::error::RegisterError;
use crate::file::OwnedFd;
use crate::process::Owned;
use crate::registrar::{Access, Memory, Registrar, Registration};

/// A mapping that is registered with a device. The order of the fields matters: the mapping is
/// deregistered first and unmapped second.
pub(crate) struct Region {
    registration: Owned<Box<dyn Registration>>,
    mapping: Mapping,
    /// Whether the region may be lent to peers.
    lendable: bool,
    /// The only peer to which the region may be lent, if it serves one peer.
    for_peer: Option<NonZeroU32>,
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region")
            .field("mapping", &self.mapping)
            .field("lkey", &self.lkey())
            .finish()
    }
}

impl Region {
    /// Registers a mapping. `file` is the mapped file, if any.
    pub(crate) fn new(
        mapping: Mapping,
        file: Option<OwnedFd>,
        registrar: &dyn Registrar,
        access: Access,
    ) -> Result<Self, RegisterError> {
        // Set the node before registering, because registering allocates the pages.
        if let Some(node) = registrar.numa_node() {
            mapping.prefer_node(node);
        }
        // SAFETY: the mapping lives as long as the registration: both are owned by the region,
        // which drops the registration first (R9, R12).
        let registration = unsafe {
            registrar.register(Memory { addr: mapping.ptr(), len: mapping.len(), access, file })
        }?;
        let registration = Owned::new(registration);
        Ok(Region { registration, mapping, lendable: access == Access::Lend, for_peer: None })
    }

    /// Allows lending the region only to this peer.
    pub(crate) fn for_peer(mut self, peer: NonZeroU32) -> Self {
        self.for_peer = Some(peer);
        self
    }

    pub(crate) fn peer(&self) -> Option<NonZeroU32> {
        self.for_peer
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.registration.lkey()
    }

    pub(crate) fn rkey(&self) -> u32 {
        self.registration.rkey()
    }

    /// The key under which the region can be lent to peers.
    pub(crate) fn lend_key(&self) -> Option<u32> {
        self.lendable.then(|| self.registration.rkey())
    }

    pub(crate) fn iova(&self) -> u64 {
        self.registration.iova()
    }

    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.mapping.ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.mapping.len()
    }

    pub(crate) fn start(&self) -> usize {
        self.mapping.ptr().addr().get()
    }
}
