//! Landing memory, to which peers may write, and the allocator of one connection ([`Landing`]).
//!
//! | file | what |
//! |---|---|
//! | `making` | the chunk that the landing thread makes for a connection |
//! | `pending` | the landing thread's work for an allocator |
//! | `share` | the limit on leases while other connections claim memory |
//! | `chunk` | chunks leased to connections |
//! | `piece` | the pieces of chunks that are granted to peers, and filled by them |
//! | `chunk_bitmap` | which granules of a chunk are taken, or held by the application |
//! | `held` | memory that the application holds, and the limit on it |
//! | `landed` | [`Landed`] bytes, and how they are read while a peer may write to them |

mod chunk;
mod chunk_bitmap;
mod held;
mod landed;
mod making;
mod pending;
mod piece;
mod share;

pub use self::landed::{Landed, LandedReader, Window};
pub use self::piece::LandingBuf;
pub use self::share::Reclaim;

use std::io;
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use crate::error::RegisterError;
use crate::landing::chunk::{Chunk, GRANULE, Lease};
use crate::landing::making::{AllocKind, AllocRequest, Failed, Making};
use crate::ledger::{LandingWaiter, Ledger, Waiting};
use crate::region::page::page;

/// The maximum number of retries after another pool of the process has pinned the bytes that
/// RLIMIT_MEMLOCK had left.
const MAX_RETRIES: usize = 3;
/// The maximum size of a chunk in bytes, unless a single piece is longer.
const MAX_CHUNK: usize = 4 << 20;

/// One connection's allocator of landing memory.
///
/// The allocator leases chunks from the pool as needed. It keeps a chunk until
/// [`trim`](Landing::trim) or [`return_reclaimed`](Landing::return_reclaimed) returns the chunk,
/// until [`alloc`](Landing::alloc) returns it to make room for a longer chunk, or until the
/// allocator and the last piece of the chunk are dropped.
#[derive(Debug)]
pub struct Landing {
    waiter: Arc<LandingWaiter>,
    /// The maximum number of bytes that may be leased at a time.
    limit: usize,
    chunks: Vec<Arc<Chunk>>,
    /// True while some of `chunks` are being reclaimed.
    has_reclaimed: bool,
    /// True if chunks have been selected to be reclaimed since the last call to
    /// [`enforce_share`](Landing::enforce_share).
    has_unreported: bool,
    /// True if the connection claims memory beyond its share.
    starves: bool,
    /// True once a waker is set, so that the landing thread can report that it has made a chunk.
    has_waker: bool,
    /// The chunk that the landing thread makes.
    making: Option<Making>,
    /// The last chunk that the landing thread failed to make, with the error.
    failed: Option<Failed>,
    /// The number of times that the current request was retried because another pool had pinned
    /// memory. The number is kept while the landing thread makes a chunk.
    retries: usize,
    /// The claim that other connections have been woken for. `No` if there is no such claim now.
    announced: Waiting,
    /// True if [`alloc`](Landing::alloc) found no memory only because the landing thread is still
    /// making or freeing a chunk.
    is_pending: bool,
    ledger: Arc<Ledger>,
}

impl Landing {
    pub(crate) fn new(ledger: Arc<Ledger>, limit: usize) -> Self {
        let limit = limit.min(ledger.sizes.landing);
        Landing {
            waiter: ledger.landing_waiters().add(limit),
            limit,
            chunks: Vec::new(),
            has_reclaimed: false,
            has_unreported: false,
            starves: false,
            has_waker: false,
            making: None,
            failed: None,
            retries: 0,
            announced: Waiting::No,
            is_pending: false,
            ledger,
        }
    }

    /// Allocates one contiguous piece of `want` bytes or, if that is not possible now, a shorter
    /// piece of at least `min` bytes. Both lengths are rounded up to 4 KiB. If the leased chunks
    /// have no room for `want` bytes, first tries to lease another chunk within the landing budget.
    /// While another connection claims memory, this connection's [share](Landing::share) must also
    /// allow the chunk. A chunk has room for several pieces of `want` bytes, or is as long as the
    /// piece.
    ///
    /// If the registrar [is slow](crate::Registrar::is_slow) and a waker is
    /// [registered](Landing::register_waker), a thread of the pool makes the chunk.
    /// [`Landing::is_pending`] is true while only that chunk is missing, and the waker is woken
    /// when the chunk is made. In all other cases, this call makes the chunk.
    ///
    /// Returns `None` if not even a piece of `min` bytes is free now. The connection then waits:
    /// the waker given to [`Landing::register_waker`] is woken when memory that may help becomes
    /// free. If the connection has at most three quarters of its share, and the missing chunk fits
    /// into the share, the connection also claims memory. [`Landing::others_claim`] is then true
    /// for the other connections. The connection waits until the next call returns a piece or an
    /// error, or until [`Landing::stop_waiting`]. The connection also waits if other pools of the
    /// process hold all memory that RLIMIT_MEMLOCK allows: see [`Landing::waited`].
    ///
    /// # Errors
    /// The budget allowed another chunk, but the system did not map it, the device did not register
    /// it, or RLIMIT_MEMLOCK leaves no room for it and waiting cannot help. The chunks leased
    /// before are unaffected. If a thread tried to make the chunk, the next call that needs a chunk
    /// of at least this length returns the error.
    pub fn alloc(&mut self, want: usize, min: usize) -> Result<Option<LandingBuf>, RegisterError> {
        let want = want.max(min).div_ceil(GRANULE).max(1);
        let min = min.div_ceil(GRANULE).max(1);
        self.collect();
        if self.has_reclaimed {
            // Select the chunks to reclaim again, because other connections may no longer claim
            // memory.
            self.select();
        }
        let whole = self.take_whole(want);
        if whole.is_some() {
            self.stop_waiting();
            return Ok(whole);
        }
        let mut found = self.take_best_retrying(want, min);
        if matches!(found, Ok(None)) && self.make_room(self.needed(want, min)) {
            found = self.take_best_retrying(want, min);
        }
        if !matches!(found, Ok(None)) {
            self.stop_waiting();
            return found;
        }
        let state = loop {
            // Begin to wait before the last attempt, so that memory freed from now on wakes this
            // connection.
            let state = self.would_wait(self.needed(want, min));
            if self.set_waiting(state) == state {
                break state;
            }
            found = self.take_best_retrying(want, min);
            if !matches!(found, Ok(None)) {
                self.stop_waiting();
                return found;
            }
            if !self.is_pending && self.making.is_none() {
                break state;
            }
            // Decide again: the landing thread may have freed the chunks that `would_wait` counted
            // on, and another connection may have taken their memory. The last attempt may also
            // have queued a chunk to be made.
        };
        if state.is_claim() && state != self.announced {
            self.announced = state;
            let kept = if state == Waiting::Starving { 0 } else { self.share() };
            self.ledger.landing_waiters().wake_above(&self.waiter, kept);
        }
        Ok(None)
    }

    /// Like [`alloc`](Self::alloc), but for a piece of `want` bytes that the connection can do
    /// without: a chunk is leased within the share only, and the connection does not wait.
    ///
    /// # Errors
    /// The errors of [`alloc`](Self::alloc).
    pub fn alloc_spare(&mut self, want: usize) -> Result<Option<LandingBuf>, RegisterError> {
        let want = want.div_ceil(GRANULE).max(1);
        self.collect();
        let whole = self.take_whole(want);
        let bytes = want.saturating_mul(GRANULE);
        if whole.is_some() || self.leased().saturating_add(bytes) > self.share() {
            return Ok(whole);
        }
        let found = self.take_best(want, want, AllocKind::Spare);
        self.or_wait(found)
    }

    /// Like [`alloc`](Self::alloc), but for a piece of exactly `want` bytes while the connection
    /// waits for a longer piece. If there is no memory, the connection still waits for the longer
    /// piece.
    ///
    /// # Errors
    /// The errors of [`alloc`](Self::alloc).
    pub fn alloc_meanwhile(&mut self, want: usize) -> Result<Option<LandingBuf>, RegisterError> {
        // Do not call `collect`, because a chunk made since the last `alloc` belongs to the longer
        // request that waits.
        let want = want.div_ceil(GRANULE).max(1);
        let found = self.take_best(want, want, AllocKind::Meanwhile);
        self.or_wait(found)
    }

    /// Stops waiting for the piece that [`alloc`](Landing::alloc) could not return. Call this
    /// function if the piece is no longer needed, because other connections return memory while
    /// this connection claims some.
    pub fn stop_waiting(&mut self) {
        self.starves = false;
        self.is_pending = false;
        self.failed = None;
        self.set_waiting(Waiting::No);
    }

    /// Sets the state in which the connection waits. Returns the previous state.
    fn set_waiting(&mut self, state: Waiting) -> Waiting {
        if state != self.announced {
            // Another connection may see that the claim has ended, so `alloc` announces the next
            // claim again.
            self.announced = Waiting::No;
        }
        self.ledger.landing_waiters().set(&self.waiter, state)
    }

    /// Reports that this connection has waited for memory until `now` (on the caller's clock). Call
    /// this function several times a second while [`alloc`](Landing::alloc) finds no memory. These
    /// calls bound the wait for memory that only other pools of the process hold. If no pool of the
    /// process returns memory for two seconds, and this pool has no landing memory, `alloc` returns
    /// an error.
    pub fn waited(&self, now: Instant) {
        self.ledger.waited(now);
    }

    /// Reports that the shortest useful piece has been missing for a long time, because readers
    /// keep this connection's memory or because the other connections' shares take all memory. From
    /// the next call to [`alloc`](Landing::alloc) on, the connection claims memory beyond its
    /// share, until it gets a piece or stops waiting. If memory is scarce, other connections return
    /// a chunk even if they are within their shares.
    pub fn starve(&mut self) {
        self.starves = true;
    }

    /// Whether a piece of `want` bytes can ever become free for this connection, within the bytes
    /// that it may lease now or in a chunk that it has leased.
    pub fn may_have(&self, want: usize) -> bool {
        let granules = want.div_ceil(GRANULE);
        want <= self.ledger.may_lease(&self.waiter)
            || self.usable_chunks().any(|chunk| chunk.bitmap.len() >= granules)
    }

    /// The total size of the chunks without granted or filled pieces.
    fn idle(&self) -> usize {
        self.chunks.iter().filter(|chunk| chunk.bitmap.is_free()).map(|chunk| chunk.bytes()).sum()
    }

    /// Returns the state in which this connection would wait for a chunk of `needed` bytes, and
    /// updates `is_pending`.
    fn would_wait(&mut self, needed: usize) -> Waiting {
        let is_made = self.is_made(needed);
        self.is_pending = is_made || self.is_freed(needed) || self.is_next(needed);
        if is_made {
            return Waiting::ForOwn;
        } else if self.is_pending {
            return Waiting::AtShare;
        }
        // Idle chunks do not count, because they are returned to make room for the needed chunk.
        let busy = self.leased() - self.idle();
        let then = busy.saturating_add(needed);
        let share = self.share();
        if then > self.limit && self.limit < self.ledger.sizes.landing {
            Waiting::ForOwn
        } else if self.starves {
            Waiting::Starving
        } else if then > share || busy > share / 4 * 3 {
            Waiting::AtShare
        } else {
            Waiting::ForShare
        }
    }

    /// The chunks that pieces may be taken from.
    fn usable_chunks(&self) -> impl Iterator<Item = &Arc<Chunk>> {
        self.chunks.iter().filter(|chunk| !chunk.is_reclaiming())
    }

    /// The longest free run: its chunk, its start and its number of granules.
    fn longest(&self) -> Option<(&Arc<Chunk>, usize, usize)> {
        self.usable_chunks()
            .filter_map(|chunk| chunk.bitmap.longest().map(|(at, run)| (chunk, at, run)))
            .max_by_key(|(_, _, run)| *run)
    }

    /// The size in bytes of the shortest new chunk that gives a longer piece than the longest free
    /// run.
    fn needed(&self, want: usize, min: usize) -> usize {
        let run = self.longest().map_or(0, |(_, _, run)| run.min(want));
        want.min(run + 1).max(min).saturating_mul(GRANULE)
    }

    /// Takes a piece of `want` granules from the chunks leased so far.
    fn take_whole(&self, want: usize) -> Option<LandingBuf> {
        let find =
            |chunk: &Arc<Chunk>| chunk.bitmap.find(want).map(|at| LandingBuf::new(chunk, at, want));
        self.usable_chunks().find_map(find)
    }

    /// Like [`take_best`](Self::take_best), but tries again if another pool of the process has just
    /// pinned the bytes that RLIMIT_MEMLOCK had left. This connection can then wait instead of
    /// failing.
    fn take_best_retrying(
        &mut self,
        want: usize,
        min: usize,
    ) -> Result<Option<LandingBuf>, RegisterError> {
        let mut found = self.take_best(want, min, AllocKind::Needed);
        while self.retries < MAX_RETRIES
            && found.as_ref().is_err_and(|error| self.ledger.exceeded_memlock(error))
        {
            self.retries += 1;
            let state = self.would_wait(self.needed(want, min));
            self.set_waiting(state);
            found = self.take_best(want, min, AllocKind::Needed);
        }
        if self.making.is_none() {
            self.retries = 0;
        }
        self.or_wait(found)
    }

    /// Turns an error into "no memory now" if other pools of the process hold the memory that
    /// RLIMIT_MEMLOCK allows. Those pools took the memory between the decision to register and the
    /// attempt.
    fn or_wait(
        &self,
        found: Result<Option<LandingBuf>, RegisterError>,
    ) -> Result<Option<LandingBuf>, RegisterError> {
        match found {
            Err(error)
                if self.ledger.exceeded_memlock(&error) && self.ledger.waits_for_others() =>
            {
                self.ledger.pause_landing();
                Ok(None)
            }
            found => found,
        }
    }

    /// Takes up to `want` granules of the longest free run, if the run has at least `min` granules.
    fn take_longest(&self, want: usize, min: usize) -> Option<LandingBuf> {
        let (chunk, at, run) = self.longest()?;
        let run = run.min(want);
        (run >= min).then(|| LandingBuf::new(chunk, at, run))
    }

    /// Takes the longest piece of at most `want` and at least `min` granules, from the chunks
    /// leased so far or from a new chunk.
    fn take_best(
        &mut self,
        want: usize,
        min: usize,
        kind: AllocKind,
    ) -> Result<Option<LandingBuf>, RegisterError> {
        let whole = self.take_whole(want);
        if whole.is_some() {
            return Ok(whole);
        }
        let request = AllocRequest { kind, needed: self.needed(want, min) };
        if self.is_made(request.needed) {
            return Ok(None);
        }
        let made = match self.take_failed(request) {
            Some(error) => Err(error),
            None => match self.lease_for(want, min, request.needed)? {
                Some(lease) if self.uses_thread() => {
                    self.begin_making(lease, request);
                    return Ok(None);
                }
                Some(lease) => {
                    // The connection has its lease now. If registering fails, returning the lease
                    // must not wake the connection itself.
                    self.set_waiting(Waiting::No);
                    Chunk::new(lease)
                }
                None => return Ok(self.take_longest(want, min)),
            },
        };
        match made {
            Ok(chunk) => {
                let chunk = Arc::new(chunk);
                let piece = LandingBuf::new(&chunk, 0, chunk.bitmap.len().min(want));
                self.chunks.push(chunk);
                self.record_leased();
                Ok(Some(piece))
            }
            Err(error) => match self.take_longest(want, min) {
                Some(piece) => {
                    tracing::debug!(%error, "no further landing chunk; leased chunks are used");
                    Ok(Some(piece))
                }
                None => Err(error),
            },
        }
    }

    /// Takes the lease of a chunk of at least `needed` bytes for a piece of `want` granules. Fails
    /// if no run of `min` granules is free, no lease is free, and waiting for a lease cannot help.
    fn lease_for(
        &self,
        want: usize,
        min: usize,
        needed: usize,
    ) -> Result<Option<Lease>, RegisterError> {
        if self.making.is_some() || !self.may_lease_more(needed) {
            return Ok(None);
        }
        let left = self.ledger.fit_landing(needed);
        // Look again, because a run may have become long enough since the first look.
        let run = self.longest().map_or(0, |(_, _, run)| run.min(want));
        match left {
            Some(left) if run < want => Ok(self.lease(want, needed, left)),
            None if run < min => {
                Err(RegisterError::new(needed, io::Error::from_raw_os_error(libc::ENOMEM)))
            }
            _ => Ok(None),
        }
    }

    /// Whether `bytes` more may be leased within this connection's limit and, while others claim
    /// memory, within the share.
    fn may_lease_more(&self, bytes: usize) -> bool {
        self.leased().saturating_add(self.freeing()).saturating_add(bytes) <= self.lease_cap()
    }

    /// Takes the lease of a chunk with room for several pieces of `want` granules, or else for at
    /// least `needed` bytes. `left` is the number of bytes that RLIMIT_MEMLOCK leaves.
    ///
    /// A connection that has leased more memory gets longer chunks. No chunk has a remainder that
    /// is too short for a piece, and a chunk beyond the share has room for only one piece.
    fn lease(&self, want: usize, needed: usize, left: usize) -> Option<Lease> {
        let piece = want.saturating_mul(GRANULE).checked_next_multiple_of(page());
        let piece = piece.unwrap_or(usize::MAX);
        let (leased, cap) = (self.leased(), self.lease_cap());
        let room = cap.saturating_sub(leased + self.freeing()).min(left);
        // If RLIMIT_FSIZE allows less than is needed, go on: the attempt to make the chunk reports
        // the error.
        let room = match self.ledger.longest_chunk() {
            Some(longest) if longest >= needed => room.min(longest),
            _ => room,
        };
        // Limit the length, because a reader that holds one piece keeps the whole chunk from other
        // connections.
        let longest = MAX_CHUNK.min(self.ledger.sizes.landing / 8);
        let usual = self.ledger.sizes.chunk.max(leased.min(longest));
        let usual = usual.min(self.share().saturating_sub(leased)).min(room);
        let several = (usual / piece).max(1).saturating_mul(piece);
        let take = |max, min, unit| Lease::take(&self.ledger, &self.waiter, max, min, unit);
        if several <= room
            && let Some(lease) = take(several, piece, piece)
        {
            return Some(lease);
        }
        take(piece.min(room), needed, page())
    }

    /// Sets the waker. The waker is woken when memory becomes free after [`alloc`](Landing::alloc)
    /// found none, when a thread of the pool has made a chunk, and when this connection has to
    /// [give memory back](Landing::return_reclaimed). The waker stays set until it is replaced.
    pub fn register_waker(&mut self, waker: &Waker) {
        if !self.waiter.has_waker(waker) {
            self.waiter.set_waker(Some(waker.clone()));
        }
        self.has_waker = true;
    }

    /// Deregisters the chunks without granted or filled pieces, returns them to the pool, and
    /// returns their size in bytes. Unless the connection waits, also gives up the chunk that is
    /// being made.
    pub fn trim(&mut self) -> usize {
        self.collect();
        if self.waiter.state() == Waiting::No && self.making.take().is_some() {
            self.record_leased();
        }
        self.return_free(|_| true)
    }

    /// Returns to the pool the chunks that `which` selects and that have no granted or filled
    /// pieces. Returns their size in bytes.
    fn return_free(&mut self, mut which: impl FnMut(&Chunk) -> bool) -> usize {
        let mut bytes = 0;
        self.chunks.retain(|chunk| {
            let goes = chunk.bitmap.is_free() && which(chunk);
            bytes += if goes { chunk.bytes() } else { 0 };
            !goes
        });
        if bytes > 0 {
            self.record_leased();
        }
        bytes
    }

    /// Makes room for a chunk of `needed` bytes by returning idle chunks to the pool, if they
    /// suffice. Returns whether chunks were returned.
    fn make_room(&mut self, needed: usize) -> bool {
        if self.making.is_some() || self.freeing() > 0 {
            return false;
        }
        let room = self.lease_cap().saturating_sub(self.leased()).min(self.ledger.landing_free());
        if room >= needed || room.saturating_add(self.idle()) < needed {
            return false;
        }
        let mut missing = needed - room;
        self.return_free(|chunk| {
            let goes = missing > 0;
            missing = missing.saturating_sub(chunk.bytes());
            goes
        }) > 0
    }

    pub(crate) fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    pub(crate) fn waiter(&self) -> &Arc<LandingWaiter> {
        &self.waiter
    }

    /// Publishes the number of leased bytes, which the shares of the other connections depend on.
    fn record_leased(&self) {
        self.ledger.landing_waiters().record_leased(&self.waiter, self.leased());
    }

    /// Whether another connection claims memory. If so, [`enforce_share`](Landing::enforce_share)
    /// tells whether this connection has to give memory back.
    pub fn others_claim(&self) -> bool {
        self.ledger.landing_waiters().others_claim(&self.waiter)
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if !self.ledger.is_inherited() {
            self.ledger.landing_waiters().remove(&self.waiter);
        }
    }
}
