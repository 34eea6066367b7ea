//! One connection's allocator of landing memory.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Waker;

use super::chunk::{Chunk, GRANULE, LandingBuf, Lease};
use crate::error::RegisterError;
use crate::ledger::{LandingWaiter, Ledger};
use crate::region::page::page;
use crate::stats::Use;

/// Attempts to register once more after another pool of the process has pinned what was left.
const MAX_RETRIES: usize = 3;

/// One connection's allocator of landing memory.
///
/// It leases chunks from the pool as it needs them, and keeps a chunk until [`trim`](Landing::trim)
/// returns it, or until the allocator and the last piece of the chunk are dropped.
#[derive(Debug)]
pub struct Landing {
    pub(super) waiter: Arc<LandingWaiter>,
    /// Bytes that may be leased at a time.
    pub(super) limit: usize,
    pub(super) chunks: Vec<Arc<Chunk>>,
    /// Some of `chunks` are being reclaimed.
    pub(super) has_reclaimed: bool,
    pub(super) ledger: Arc<Ledger>,
}

impl Landing {
    pub(crate) fn new(ledger: Arc<Ledger>, limit: usize) -> Self {
        let limit = limit.min(ledger.sizes.landing);
        Landing {
            waiter: ledger.landing_waiters().add(),
            limit,
            chunks: Vec::new(),
            has_reclaimed: false,
            ledger,
        }
    }

    /// Allocates one contiguous piece of `want` bytes, or a shorter one of at least `min` bytes if
    /// no longer one is free. Both are rounded up to 4 KiB. Leases another chunk if the landing
    /// budget allows it and, while another connection waits, the [share](Landing::share) of this
    /// one. If `want` is longer than a chunk, it gets a chunk of its own if the budget has it.
    ///
    /// Returns `None` if there is no such piece now. The connection then waits: the waker given to
    /// [`Landing::register_waker`] is woken when memory comes free in the pool, and
    /// [`Landing::wanted_elsewhere`] tells the other connections. It waits until the next call
    /// returns a piece or an error, or until [`Landing::stop_waiting`].
    ///
    /// # Errors
    /// The budget allowed another chunk, but the system did not map it or the device did not
    /// register it. The chunks leased before are unaffected.
    pub fn alloc(&mut self, want: usize, min: usize) -> Result<Option<LandingBuf>, RegisterError> {
        let want = want.max(min).div_ceil(GRANULE).max(1);
        let min = min.div_ceil(GRANULE).max(1);
        if self.has_reclaimed {
            // Perhaps no other connection waits any longer.
            self.keep_share();
        }
        let whole = self.take_whole(want);
        if whole.is_some() {
            self.stop_waiting();
            return Ok(whole);
        }
        if self.limit < self.ledger.sizes.landing {
            if self.is_at_limit(want, min) {
                // Returning idle chunks may make room for the one that is needed.
                self.trim();
            }
            let at_limit = self.is_at_limit(want, min);
            self.waiter.set_at_limit(at_limit);
            if at_limit {
                // Only its own pieces can help it, so other connections need not make room.
                self.stop_waiting();
                return self.take_best(want, min);
            }
        }
        // Waiting begins before the last attempt: whoever frees from now on wakes this connection.
        let first = self.ledger.landing_waiters().set_waiting(&self.waiter, true);
        let mut found = self.take_best_retrying(want, min);
        if matches!(found, Ok(None)) && self.trim() > 0 {
            // Idle chunks that were each too short may have kept a longer one out of the budget.
            found = self.take_best_retrying(want, min);
        }
        match found {
            Ok(None) if first => self.ledger.landing_waiters().wake_others(&self.waiter),
            Ok(None) => {}
            _ => self.stop_waiting(),
        }
        found
    }

    /// Stops waiting for the piece that [`alloc`](Landing::alloc) did not have, because it is no
    /// longer needed. Until then other connections return memory that they could keep.
    pub fn stop_waiting(&mut self) {
        self.ledger.landing_waiters().set_waiting(&self.waiter, false);
    }

    /// Bytes that may still be leased under `limit`.
    fn lease_room(&self) -> usize {
        self.limit.saturating_sub(self.leased())
    }

    /// The chunks that pieces may be taken from.
    fn usable_chunks(&self) -> impl Iterator<Item = &Arc<Chunk>> {
        self.chunks.iter().filter(|chunk| !chunk.is_reclaiming())
    }

    /// Whether the limit rules out another chunk that would help with `want` granules, or `min`.
    fn is_at_limit(&self, want: usize, min: usize) -> bool {
        let longest = self
            .usable_chunks()
            .filter_map(|chunk| chunk.bitmap.longest())
            .map(|(_, run)| run)
            .max();
        self.lease_room() < min_chunk_bytes(want, min, longest.unwrap_or(0).min(want))
    }

    /// Whether the share, and not the limit, rules out leasing `bytes` more.
    fn is_at_share(&self, bytes: usize) -> bool {
        self.lease_room() >= bytes && self.lease_cap().saturating_sub(self.leased()) < bytes
    }

    /// A piece of `want` granules from the chunks leased so far.
    fn take_whole(&self, want: usize) -> Option<LandingBuf> {
        let find =
            |chunk: &Arc<Chunk>| chunk.bitmap.find(want).map(|at| LandingBuf::new(chunk, at, want));
        self.usable_chunks().find_map(find)
    }

    /// As [`take_best`](Self::take_best), but tries again if another pool of the process has pinned
    /// in the meantime what the limit had left: then this connection can wait instead of failing.
    fn take_best_retrying(
        &mut self,
        want: usize,
        min: usize,
    ) -> Result<Option<LandingBuf>, RegisterError> {
        let mut found = self.take_best(want, min);
        for _ in 0..MAX_RETRIES {
            if !found.as_ref().is_err_and(RegisterError::is_limit)
                || self.ledger.landing_left().is_none()
            {
                break;
            }
            self.ledger.landing_waiters().set_waiting(&self.waiter, true);
            found = self.take_best(want, min);
        }
        found
    }

    /// The longest piece of at most `want` and at least `min` granules, from the chunks leased so
    /// far or from a new one.
    fn take_best(&mut self, want: usize, min: usize) -> Result<Option<LandingBuf>, RegisterError> {
        let whole = self.take_whole(want);
        if whole.is_some() {
            return Ok(whole);
        }
        let runs =
            self.usable_chunks().filter_map(|c| c.bitmap.longest().map(|(at, run)| (c, at, run)));
        let longest = runs.max_by_key(|(_, _, run)| *run);
        // A run may have become long enough since.
        let run = longest.map_or(0, |(_, _, run)| run.min(want));
        let bytes = |granules: usize| granules.saturating_mul(GRANULE);
        let max = bytes(want).max(self.ledger.sizes.chunk);
        let max = max.checked_next_multiple_of(page()).unwrap_or(usize::MAX).min(self.lease_room());
        let needed = min_chunk_bytes(want, min, run);
        let mut at_share = self.is_at_share(needed);
        if at_share {
            self.ledger.landing_waiters().set_at_share(&self.waiter);
            at_share = self.is_at_share(needed);
        }
        let max = max.min(self.lease_cap().saturating_sub(self.leased()));
        let lease = match (run < want && !at_share).then(|| self.ledger.fit_landing(needed)) {
            Some(Some(left)) => Lease::take(&self.ledger, &self.waiter, max.min(left), needed),
            Some(None) if run < min => {
                return Err(RegisterError::new(needed, io::Error::from_raw_os_error(libc::ENOMEM)));
            }
            _ => None,
        };
        let found = longest.filter(|_| run >= min).map(|(chunk, at, _)| (chunk, at, run));
        let Some(lease) = lease else {
            return Ok(found.map(|(chunk, at, run)| LandingBuf::new(chunk, at, run)));
        };
        // The connection has its lease now. If registering fails, returning the lease must not wake
        // the connection itself.
        self.ledger.landing_waiters().set_waiting(&self.waiter, false);
        match Chunk::new(lease) {
            Ok(chunk) => {
                let chunk = Arc::new(chunk);
                let piece = LandingBuf::new(&chunk, 0, chunk.bitmap.len().min(want));
                self.chunks.push(chunk);
                self.record_leased();
                Ok(Some(piece))
            }
            Err(error) => match found {
                Some((chunk, at, run)) => {
                    tracing::debug!(%error, "no further landing chunk; using what is leased");
                    Ok(Some(LandingBuf::new(chunk, at, run)))
                }
                None => Err(error),
            },
        }
    }

    /// Sets the waker. It is woken when memory comes free after [`alloc`](Landing::alloc) had none,
    /// and when another connection begins to wait. It stays set until it is replaced.
    pub fn register_waker(&mut self, waker: &Waker) {
        if !self.waiter.has_waker(waker) {
            self.waiter.set_waker(Some(waker.clone()));
        }
    }

    /// Deregisters the chunks without granted or filled pieces and returns them to the pool.
    /// Returns their bytes.
    pub fn trim(&mut self) -> usize {
        let mut bytes = 0;
        self.chunks.retain(|chunk| {
            let idle = chunk.bitmap.is_free();
            bytes += if idle { chunk.bytes() } else { 0 };
            !idle
        });
        if bytes > 0 {
            self.record_leased();
        }
        bytes
    }

    /// Publishes how much is leased, for the shares of the other connections.
    fn record_leased(&self) {
        self.ledger.landing_waiters().record_leased(&self.waiter, self.leased());
    }

    /// Whether another connection waits for landing memory. If so, [`trim`](Landing::trim) should
    /// return what is idle here.
    pub fn wanted_elsewhere(&self) -> bool {
        self.ledger.landing_waiters().others_wait(&self.waiter)
    }

    /// Whether more than 7/8 of the pool's landing budget, or of what this connection may lease, is
    /// leased, and no chunk of this connection is idle. If readers hold on to what lands now, this
    /// or another connection may find no memory at all, however little of the chunks is in use.
    pub fn is_spent(&self) -> bool {
        let landing = self.ledger.landing_budget();
        let leased = self.ledger.budgets.used(Use::Landing);
        let own = self.limit < self.ledger.sizes.landing && self.leased() > self.limit / 8 * 7;
        (own || leased > landing / 8 * 7) && !self.chunks.iter().any(|chunk| chunk.bitmap.is_free())
    }

    /// Whether less than a quarter of the pool's landing budget is free. What lands should then be
    /// copied out, so that readers that hold on to it do not starve other connections.
    pub fn under_pressure(&self) -> bool {
        let counters = &self.ledger.counters;
        let used = counters.granted.load(Relaxed).saturating_add(counters.filled.load(Relaxed));
        used > self.ledger.landing_budget() / 4 * 3 || self.is_nearly_full()
    }

    /// Whether this connection has a limit below the pool's landing memory, of which less than a
    /// quarter is free.
    fn is_nearly_full(&self) -> bool {
        let free =
            |chunk: &Arc<Chunk>| chunk.bitmap.runs().map(|(_, run)| run * GRANULE).sum::<usize>();
        self.limit < self.ledger.sizes.landing
            && self.leased() - self.chunks.iter().map(free).sum::<usize>() > self.limit / 4 * 3
    }
}

/// Bytes of the shortest new chunk that gives a longer piece than the longest free run, which has
/// `run` granules.
fn min_chunk_bytes(want: usize, min: usize, run: usize) -> usize {
    want.min(run + 1).max(min).saturating_mul(GRANULE)
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.ledger.landing_waiters().remove(&self.waiter);
    }
}
