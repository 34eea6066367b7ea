//! Application memory that peers can write to.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::error::{RegionError, RegisterError};
use crate::file::OwnedFd;
use crate::ledger::Ledger;
use crate::registered::{freeing, pin};
use crate::registrar::{Access, Memory, Registration};

/// Registered application memory.
pub(super) struct Pinned {
    /// `None` once the registration has been dropped.
    registration: Option<Box<dyn Registration>>,
    len: usize,
    ledger: Arc<Ledger>,
}

impl Pinned {
    /// Registers bytes for a peer to write to. `file` is the file that peers map, for a registrar
    /// that wants a file.
    ///
    /// # Safety
    /// The bytes are mapped and writable until this value is dropped.
    pub(super) unsafe fn new(
        ledger: &Arc<Ledger>,
        addr: NonNull<u8>,
        len: usize,
        file: Option<&Arc<OwnedFd>>,
    ) -> Result<Self, RegionError> {
        let (access, file) = match file.filter(|_| ledger.registrar.wants_file()) {
            None => (Access::RemoteWrite, None),
            Some(file) => {
                let file = file.try_clone().map_err(|error| RegisterError::new(len, error))?;
                (Access::RemoteWriteInTurn, Some(file))
            }
        };
        let registration = pin(ledger, NonNull::slice_from_raw_parts(addr, len), None, || {
            // SAFETY: the caller keeps the bytes mapped and writable. No code of this process reads
            // or writes granted bytes (R8, R9).
            unsafe { ledger.registrar.register(Memory { addr, len, access, file }) }
        })?;
        ledger.counters.registrations.fetch_add(1, Relaxed);
        ledger.counters.application.fetch_add(len, Relaxed);
        Ok(Pinned { registration: Some(registration), len, ledger: ledger.clone() })
    }

    pub(super) fn is_of(&self, ledger: &Arc<Ledger>) -> bool {
        Arc::ptr_eq(&self.ledger, ledger)
    }

    pub(super) fn iova(&self) -> u64 {
        self.registration.as_deref().map_or(0, Registration::iova)
    }

    pub(super) fn rkey(&self) -> u32 {
        self.registration.as_deref().map_or(0, Registration::rkey)
    }

    /// Ends the registration and then drops `behind`, on a dedicated thread if the device is slow.
    pub(super) fn end_before(self: Arc<Self>, behind: impl Send + 'static) {
        if self.ledger.is_inherited() {
            return std::mem::forget((self, behind));
        }
        let registrar = &self.ledger.registrar;
        let (is_slow, pinned) = (registrar.is_slow(), if registrar.pins() { self.len } else { 0 });
        // The fields of a tuple are dropped in order.
        match is_slow {
            true => freeing::free(pinned, (self, behind)),
            false => drop((self, behind)),
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.registration = None;
        self.ledger.counters.application.fetch_sub(self.len, Relaxed);
        // Wake the pools that wait until the process may pin more memory.
        self.ledger.deregistered();
    }
}
