//! One connection's account of landing memory.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Waker;

use super::chunk::{Chunk, GRANULE, LandingBuf, Lease};
use crate::error::RegisterError;
use crate::ledger::{LandingWaiter, Ledger};
use crate::region::page::page;
use crate::stats::Use;

/// Times that an account tries again to register what the process's limit seemed to allow.
const LOST_RACES: usize = 3;

/// One connection's account of landing memory.
///
/// It leases chunks as it needs them and keeps them until [`trim`](Landing::trim), or until it and
/// the last piece are dropped.
#[derive(Debug)]
pub struct Landing {
    pub(crate) account: Arc<LandingWaiter>,
    /// Bytes that may be leased at a time.
    pub(crate) limit: usize,
    pub(crate) chunks: Vec<Arc<Chunk>>,
    /// Some of `chunks` are leaving.
    pub(crate) leaves: bool,
    pub(crate) ledger: Arc<Ledger>,
}

impl Landing {
    pub(crate) fn new(ledger: Arc<Ledger>, limit: usize) -> Self {
        let limit = limit.min(ledger.sizes.landing);
        Landing {
            account: ledger.landing_waiters().open(),
            limit,
            chunks: Vec::new(),
            leaves: false,
            ledger,
        }
    }

    /// One contiguous piece of `want` bytes, or of less if there is no such piece now, but of at
    /// least `min` bytes; both rounded up to 4 KiB. Leases another chunk while the landing budget
    /// allows, and, while another account waits, its [share](Landing::share); a `want` longer than
    /// a chunk gets a chunk of its own if the budget has it.
    ///
    /// None: there is no such piece now. The account waits from then on: the waker given to
    /// [`Landing::register_waker`] is woken when memory comes free in the pool, and other accounts
    /// are told through [`Landing::wanted_elsewhere`]. It waits until the next call gives a piece
    /// or an error, or until [`Landing::stop_waiting`].
    ///
    /// # Errors
    /// Another chunk was needed, the budget had it, and it could not be mapped or registered. What
    /// the account has stays.
    pub fn alloc(&mut self, want: usize, min: usize) -> Result<Option<LandingBuf>, RegisterError> {
        let want = want.max(min).div_ceil(GRANULE).max(1);
        let min = min.div_ceil(GRANULE).max(1);
        if self.leaves {
            // Perhaps nobody waits any more.
            self.keep_share();
        }
        let whole = self.whole(want);
        if whole.is_some() {
            self.stop_waiting();
            return Ok(whole);
        }
        if self.limit < self.ledger.sizes.landing {
            if self.is_full(want, min) {
                // What is leased and idle may make room for what is wanted.
                self.trim();
            }
            let full = self.is_full(want, min);
            self.account.set_full(full);
            if full {
                // Only what comes free of its own can help, so nobody else need make room.
                self.stop_waiting();
                return self.best(want, min);
            }
        }
        // Told before the last look: whoever frees from now on wakes this account.
        let first = self.ledger.landing_waiters().set_wanting(&self.account, true);
        let mut found = self.try_best(want, min);
        if matches!(found, Ok(None)) && self.trim() > 0 {
            // Chunks of its own that are idle, each too short, may have been in the way of a longer
            // one.
            found = self.try_best(want, min);
        }
        match found {
            Ok(None) if first => self.ledger.landing_waiters().wake_others(&self.account),
            Ok(None) => {}
            _ => self.stop_waiting(),
        }
        found
    }

    /// The account does not wait any longer for what [`alloc`](Landing::alloc) did not have: nobody
    /// needs it any more. Without this other accounts go on giving back what they could keep.
    pub fn stop_waiting(&mut self) {
        self.ledger.landing_waiters().set_wanting(&self.account, false);
    }

    /// Bytes that may still be leased.
    fn room(&self) -> usize {
        self.limit.saturating_sub(self.leased())
    }

    /// The chunks that pieces are taken from.
    fn kept(&self) -> impl Iterator<Item = &Arc<Chunk>> {
        self.chunks.iter().filter(|chunk| !chunk.is_leaving())
    }

    /// Whether it may not lease another chunk that is of use for `want` granules, or `min`.
    fn is_full(&self, want: usize, min: usize) -> bool {
        let longest =
            self.kept().filter_map(|chunk| chunk.granules.longest()).map(|(_, run)| run).max();
        self.room() < least(want, min, longest.unwrap_or(0).min(want))
    }

    /// Whether its share, and not its limit, keeps it from leasing `bytes` more.
    fn is_held(&self, bytes: usize) -> bool {
        self.room() >= bytes && self.cap().saturating_sub(self.leased()) < bytes
    }

    /// A piece of `want` granules from the chunks that there are.
    fn whole(&self, want: usize) -> Option<LandingBuf> {
        let find = |chunk: &Arc<Chunk>| {
            chunk.granules.find(want).map(|at| LandingBuf::new(chunk, at, want))
        };
        self.kept().find_map(find)
    }

    /// As [`best`](Self::best), again where another pool of the process was faster to pin what
    /// there was: then this one may wait.
    fn try_best(&mut self, want: usize, min: usize) -> Result<Option<LandingBuf>, RegisterError> {
        let mut found = self.best(want, min);
        for _ in 0..LOST_RACES {
            if !found.as_ref().is_err_and(RegisterError::is_limit)
                || self.ledger.landing_left().is_none()
            {
                break;
            }
            self.ledger.landing_waiters().set_wanting(&self.account, true);
            found = self.best(want, min);
        }
        found
    }

    /// The longest piece up to `want` granules, and not below `min`, from the chunks that there are
    /// or from a new one.
    fn best(&mut self, want: usize, min: usize) -> Result<Option<LandingBuf>, RegisterError> {
        let whole = self.whole(want);
        if whole.is_some() {
            return Ok(whole);
        }
        let runs = self.kept().filter_map(|c| c.granules.longest().map(|(at, run)| (c, at, run)));
        let longest = runs.max_by_key(|(_, _, run)| *run);
        // One may have become long enough since.
        let run = longest.map_or(0, |(_, _, run)| run.min(want));
        let bytes = |granules: usize| granules.saturating_mul(GRANULE);
        let most = bytes(want).max(self.ledger.sizes.chunk);
        let most = most.checked_next_multiple_of(page()).unwrap_or(usize::MAX).min(self.room());
        let least = least(want, min, run);
        let mut held = self.is_held(least);
        if held {
            self.ledger.landing_waiters().set_held(&self.account);
            held = self.is_held(least);
        }
        let most = most.min(self.cap().saturating_sub(self.leased()));
        let lease = match (run < want && !held).then(|| self.ledger.fit_landing(least)) {
            Some(Some(left)) => Lease::take(&self.ledger, &self.account, most.min(left), least),
            Some(None) if run < min => {
                return Err(RegisterError::new(least, io::Error::from_raw_os_error(libc::ENOMEM)));
            }
            _ => None,
        };
        let old = longest.filter(|_| run >= min).map(|(chunk, at, _)| (chunk, at, run));
        let Some(lease) = lease else {
            return Ok(old.map(|(chunk, at, run)| LandingBuf::new(chunk, at, run)));
        };
        // It has its part now. Should registering fail, it must not wake itself when it gives that
        // back.
        self.ledger.landing_waiters().set_wanting(&self.account, false);
        match Chunk::new(lease) {
            Ok(chunk) => {
                let chunk = Arc::new(chunk);
                let piece = LandingBuf::new(&chunk, 0, chunk.granules.len().min(want));
                self.chunks.push(chunk);
                self.book();
                Ok(Some(piece))
            }
            Err(error) => match old {
                Some((chunk, at, run)) => {
                    tracing::debug!(%error, "landing memory stays as it is");
                    Ok(Some(LandingBuf::new(chunk, at, run)))
                }
                None => Err(error),
            },
        }
    }

    /// The task to wake: when memory comes free after [`alloc`](Landing::alloc) had none, and when
    /// another account begins to wait. Kept until it is replaced.
    pub fn register_waker(&mut self, waker: &Waker) {
        if !self.account.has_waker(waker) {
            self.account.set_waker(Some(waker.clone()));
        }
    }

    /// Gives chunks without granted or filled pieces back to the pool, deregistered. Returns their
    /// bytes.
    pub fn trim(&mut self) -> usize {
        let mut bytes = 0;
        self.chunks.retain(|chunk| {
            let idle = chunk.granules.is_free();
            bytes += if idle { chunk.bytes() } else { 0 };
            !idle
        });
        if bytes > 0 {
            self.book();
        }
        bytes
    }

    /// Others see what is leased here.
    fn book(&self) {
        self.ledger.landing_waiters().book(&self.account, self.leased());
    }

    /// Whether another account waits for memory: what is idle here should go back.
    pub fn wanted_elsewhere(&self) -> bool {
        self.ledger.landing_waiters().others_wait(&self.account)
    }

    /// Whether nearly all of the pool's landing budget, or of what this account may lease, is
    /// leased, and no chunk of this account could be given back: if what lands now is held, another
    /// account, or this one, may find nothing at all, however little of the chunks is in use.
    pub fn is_spent(&self) -> bool {
        let landing = self.ledger.landing_budget();
        let leased = self.ledger.budgets.used(Use::Landing);
        let own = self.limit < self.ledger.sizes.landing && self.leased() > self.limit / 8 * 7;
        (own || leased > landing / 8 * 7)
            && !self.chunks.iter().any(|chunk| chunk.granules.is_free())
    }

    /// Whether less than a quarter of the pool's landing budget is free: what lands should be
    /// copied out, so that readers that hold on to it do not starve the rest.
    pub fn under_pressure(&self) -> bool {
        let counters = &self.ledger.counters;
        let used = counters.granted.load(Relaxed).saturating_add(counters.filled.load(Relaxed));
        used > self.ledger.landing_budget() / 4 * 3 || self.is_nearly_full()
    }

    /// Whether less than a quarter is free of what this account may lease, if that is less than
    /// there is.
    fn is_nearly_full(&self) -> bool {
        let free =
            |chunk: &Arc<Chunk>| chunk.granules.runs().map(|(_, run)| run * GRANULE).sum::<usize>();
        self.limit < self.ledger.sizes.landing
            && self.leased() - self.chunks.iter().map(free).sum::<usize>() > self.limit / 4 * 3
    }
}

/// Bytes of the shortest new chunk that is worth it where the longest run is of `run` granules.
fn least(want: usize, min: usize, run: usize) -> usize {
    want.min(run + 1).max(min).saturating_mul(GRANULE)
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.ledger.landing_waiters().close(&self.account);
    }
}
