//! Send memory of other pools. A program fills a buffer of one device's pool before it knows which
//! device will send the call. The arena in which such a buffer lies is registered with the other
//! device as well, at its first use there.
//!
//! | an arena is | on | next |
//! |---|---|---|
//! | unknown to the device | bytes of it are looked up | being registered, on a thread if the device is slow |
//! | being registered | the device has registered it | registered |
//! | being registered | the device or the limit refuses, or no thread can be started | refused |
//! | refused | bytes of it are looked up, [`RETRY`] later | being registered |
//! | any of these | the arena is removed | deregistered, and then unmapped |

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::PoolRegistration;
use crate::ledger::Ledger;

/// Minimum time between two attempts to register an arena, so that attempts that fail again do not
/// slow each message.
const RETRY: Duration = Duration::from_secs(10);

/// The other pools whose send memory a pool registers with its device.
#[derive(Default)]
pub(crate) struct OtherPools(RwLock<Vec<Weak<Ledger>>>);

impl OtherPools {
    pub(crate) fn add(&self, other: &Arc<Ledger>) {
        let mut others = self.0.write().unwrap_or_else(PoisonError::into_inner);
        others.retain(|known| known.strong_count() > 0);
        if !others.iter().any(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(other))) {
            others.push(Arc::downgrade(other));
        }
    }

    /// The registrations of the arena that the bytes lie in, and the ledger of its pool.
    fn find(&self, bytes: &Bytes) -> Option<(Arc<FurtherRegistrations>, Arc<Ledger>)> {
        let others = self.0.read().unwrap_or_else(PoisonError::into_inner);
        others.iter().filter_map(Weak::upgrade).find_map(|other| {
            let further = other.index.further(bytes.as_ptr().addr(), bytes.len())?;
            Some((further.downcast().ok()?, other))
        })
    }

    /// Registers the arena that the bytes lie in, if it belongs to one of the other pools. Returns
    /// true if this call has registered the arena. If the device is slow, a thread registers the
    /// arena, and a later look-up finds the registration.
    pub(crate) fn register(&self, ledger: &Arc<Ledger>, bytes: &Bytes) -> bool {
        let Some((further, other)) = self.find(bytes) else { return false };
        if other.is_inherited() || !further.begin(ledger) {
            return false;
        }
        let (by, bytes, on_thread) = (ledger.clone(), bytes.clone(), further.clone());
        let register = move || {
            let made = on_thread.register(&by, &other);
            // Drop the bytes last: the bytes keep their slot, so the arena outlives its
            // registrations.
            drop((on_thread, bytes));
            made
        };
        if !ledger.registrar.is_slow() {
            return register();
        }
        if let Err(error) = thread::Builder::new().name("tonic-rdma-pin".into()).spawn(register) {
            tracing::debug!(%error, "no thread to register memory of another device's pool");
            further.end(ledger, None);
        }
        false
    }
}

/// An arena's registrations with the devices of other pools.
#[derive(Debug)]
pub(crate) struct FurtherRegistrations {
    addr: NonNull<u8>,
    len: usize,
    all: Mutex<Vec<(Weak<Ledger>, Progress)>>,
}

// SAFETY: the address is given to devices and is not read here (R8).
unsafe impl Send for FurtherRegistrations {}
// SAFETY: as above.
unsafe impl Sync for FurtherRegistrations {}

#[derive(Debug)]
enum Progress {
    Registering,
    Registered(#[expect(dead_code, reason = "held")] PoolRegistration),
    Refused(Instant),
}

impl FurtherRegistrations {
    /// Creates a value without registrations, for an arena of `len` bytes at `addr`.
    pub(crate) fn new(addr: NonNull<u8>, len: usize) -> Self {
        FurtherRegistrations { addr, len, all: Mutex::default() }
    }

    /// Returns true if the caller is to register the arena with the device of `ledger`.
    fn begin(&self, ledger: &Arc<Ledger>) -> bool {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        match of(&mut all, ledger) {
            Some(progress) => {
                let again = matches!(progress, Progress::Refused(at) if at.elapsed() >= RETRY);
                if again {
                    *progress = Progress::Registering;
                }
                again
            }
            None => {
                all.push((Arc::downgrade(ledger), Progress::Registering));
                true
            }
        }
    }

    /// Registers the arena with the device of `ledger`. `other` is the ledger of the arena's pool.
    fn register(&self, ledger: &Arc<Ledger>, other: &Ledger) -> bool {
        let range = NonNull::slice_from_raw_parts(self.addr, self.len);
        // SAFETY: the arena owns this value and drops it before its memory. A work request that
        // uses the registration also holds bytes of the arena, so the arena is not removed before
        // the work request is done (R9).
        let made = unsafe {
            PoolRegistration::of_range(ledger.clone(), range, None, 0, None, Some(other))
        };
        let made = made.inspect_err(|error| {
            crate::throttled!(
                debug, %error,
                "memory of another device's pool is not registered: messages in it are copied"
            );
        });
        let is_made = made.is_ok();
        self.end(ledger, made.ok());
        is_made
    }

    fn end(&self, ledger: &Arc<Ledger>, made: Option<PoolRegistration>) {
        let made = made.map_or_else(|| Progress::Refused(Instant::now()), Progress::Registered);
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(progress) = of(&mut all, ledger) {
            *progress = made;
        }
    }
}

fn of<'a>(
    all: &'a mut [(Weak<Ledger>, Progress)],
    ledger: &Arc<Ledger>,
) -> Option<&'a mut Progress> {
    let is_of = |known: &Weak<Ledger>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(ledger));
    all.iter_mut().find(|(known, _)| is_of(known)).map(|(_, progress)| progress)
}
