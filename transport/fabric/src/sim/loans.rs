//! Memory that the ends of a simulated connection have lent each other. Both ends are in one
//! process, so the reader accesses the lender's memory itself, and nothing is mapped. Memory that
//! the reader may lend on to others is registered with the reader's pool while it is read.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tonic_rdma_memory::{LendableBytes, Pool, PoolRegistration};

use crate::link::Lent;
use crate::returns::Returns;
use crate::sim::state::DeviceState;

/// Lent bytes. The bytes stay in use while the reader has them, even if the lender is dropped.
#[derive(Debug)]
struct Loan {
    bytes: LendableBytes,
    hash: u64,
    /// Whether the reader still has at least one part of the bytes.
    is_read: AtomicBool,
}

impl Loan {
    fn is_same(&self) -> bool {
        hash(self.bytes.bytes()) == self.hash
    }
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// The loans of one end.
#[derive(Debug, Default)]
pub(super) struct Loans(Mutex<(u32, HashMap<u32, Arc<Loan>>)>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Loans {
    pub(super) fn add(&self, bytes: LendableBytes) -> Lent {
        let (key, addr, hash) = (bytes.key(), bytes.addr(), hash(bytes.bytes()));
        let loan = Arc::new(Loan { bytes, hash, is_read: AtomicBool::new(false) });
        let (next, loans) = &mut *lock(&self.0);
        *next = next.wrapping_add(1);
        loans.insert(*next, loan);
        Lent { lease: *next, key, addr }
    }

    /// Ends a lease.
    ///
    /// # Errors
    /// The lease has already ended, its memory is being read, or its memory has changed.
    pub(super) fn end(&self, lease: u32) -> Result<(), String> {
        let loan = lock(&self.0).1.remove(&lease).ok_or(format!("lease {lease} has ended"))?;
        match (loan.is_read.load(Ordering::Relaxed), loan.is_same()) {
            (true, _) => Err(format!("lease {lease} ends while its memory is read")),
            (_, false) => Err(format!("the memory of lease {lease} has changed")),
            _ => Ok(()),
        }
    }

    /// Returns the memory that the other end reads, or `None` if this memory is not lent or is
    /// already being read.
    pub(super) fn borrow(&self, lent: Lent, len: u32, returns: &Arc<Returns>) -> Option<Bytes> {
        let loan = lock(&self.0).1.get(&lent.lease).cloned()?;
        let is_there = (loan.bytes.key(), loan.bytes.addr(), loan.bytes.len())
            == (lent.key, lent.addr, len as usize);
        if !is_there || loan.is_read.swap(true, Ordering::Relaxed) {
            return None;
        }
        Some(Bytes::from_owner(Borrowed { lease: lent.lease, loan, returns: returns.clone() }))
    }
}

struct Borrowed {
    lease: u32,
    loan: Arc<Loan>,
    returns: Arc<Returns>,
}

impl AsRef<[u8]> for Borrowed {
    fn as_ref(&self) -> &[u8] {
        self.loan.bytes.bytes()
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        self.loan.is_read.store(false, Ordering::Relaxed);
        self.returns.push(self.lease);
    }
}

/// Borrowed memory that is registered with the reader's pool.
struct LentOn {
    bytes: Bytes,
    registration: PoolRegistration,
    device: Arc<DeviceState>,
}

/// Registers the bytes, so that they can be lent on. If the registration fails, returns the bytes
/// unregistered. The registration fails for bytes that are borrowed twice, and for memory of the
/// pool itself that was lent and has come back.
pub(super) fn to_lend_on(bytes: Bytes, pool: &Pool, device: &Arc<DeviceState>) -> Bytes {
    let Some(Ok(registration)) =
        any_file().map(|file| pool.register_lent(bytes.clone(), file.into()))
    else {
        return bytes;
    };
    device.borrowed().extend(registration.lend_key());
    Bytes::from_owner(LentOn { bytes, registration, device: device.clone() })
}

/// Returns a file for the pool, which requires a file for peers to map. In the simulation nobody
/// maps the file.
fn any_file() -> Option<File> {
    static FILE: LazyLock<Option<File>> = LazyLock::new(|| File::open("/dev/null").ok());
    FILE.as_ref()?.try_clone().ok()
}

impl AsRef<[u8]> for LentOn {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for LentOn {
    fn drop(&mut self) {
        if let Some(key) = self.registration.lend_key() {
            self.device.borrowed().remove(&key);
        }
    }
}
