//! The registrar of a simulated device.

use std::sync::Arc;

use tonic_rdma_memory::{Access, LendScope, Memory, RegisterError, Registrar, Registration};

use crate::sim::config::InjectedBug;
use crate::sim::memory::rkey_of;
use crate::sim::observer::Event;
use crate::sim::state::DeviceState;

/// Registers memory with a simulated device. Pins nothing.
#[derive(Debug)]
pub(crate) struct SimRegistrar {
    pub(crate) device: Arc<DeviceState>,
}

struct SimRegistration {
    device: Arc<DeviceState>,
    lkey: u32,
    iova: u64,
    len: usize,
}

impl Registration for SimRegistration {
    fn lkey(&self) -> u32 {
        self.lkey
    }
    fn rkey(&self) -> u32 {
        rkey_of(self.lkey)
    }
    fn iova(&self) -> u64 {
        self.iova
    }
}

impl Drop for SimRegistration {
    fn drop(&mut self) {
        if self.device.net.injects(InjectedBug::KeepRegistration) {
            return;
        }
        self.device.table.remove(self.lkey);
        let device = &self.device.name;
        self.device.net.emit(Event::Deregistered { device, addr: self.iova, len: self.len });
    }
}

// SAFETY: each access looks its key up under the table's lock. Dropping the Registration removes
// the key under the same lock, so the key stops working then.
unsafe impl Registrar for SimRegistrar {
    fn pins(&self) -> bool {
        false
    }

    fn lend_scope(&self) -> LendScope {
        if self.device.net.config.lends_pool { LendScope::All } else { LendScope::Registered }
    }

    fn is_slow(&self) -> bool {
        self.device.faults.is_slow()
    }

    unsafe fn register(&self, memory: Memory) -> Result<Box<dyn Registration>, RegisterError> {
        let Memory { addr, len, access, .. } = memory;
        let device = &self.device;
        let remote = matches!(access, Access::RemoteWrite);
        if remote && !device.faults.registration_passes() {
            return Err(RegisterError::new(len, std::io::ErrorKind::TimedOut.into()));
        }
        if device.faults.registration_fails() {
            return Err(RegisterError::new(len, std::io::Error::from_raw_os_error(libc::ENOMEM)));
        }
        let addr = addr.as_ptr().expose_provenance() as u64;
        let iova = if remote { device.net.fresh_iova() } else { addr };
        let lkey = device.table.add(addr, iova, len, access);
        device.net.emit(Event::Registered { device: &device.name, addr: iova, len, remote });
        Ok(Box::new(SimRegistration { device: device.clone(), lkey, iova, len }))
    }
}
