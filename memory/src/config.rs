//! The configured and the actual sizes of a pool.

use crate::error::PoolError;
use crate::memlock::Memlock;
use crate::region::page::{HUGE_PAGE, HugePages, page};
use crate::registrar::Registrar;

/// The size of the smallest pool that works, in bytes.
pub const MIN_POOL: usize = 2 << 20;
/// The default size of a pool in bytes. Memory is mapped and pinned only when it is needed.
pub const DEFAULT_POOL: usize = 64 << 20;

/// The maximum number of bytes of RLIMIT_MEMLOCK that a pool leaves to the rest of the process. A
/// pool leaves half of the bytes that may still be pinned, but at most this number.
const MAX_MARGIN: u64 = 256 * 1024;
/// The lowest RLIMIT_MEMLOCK in bytes with which a pool can be made in a process that pins nothing
/// else.
pub const MIN_MEMLOCK: u64 = MIN_POOL as u64 + MAX_MARGIN;
/// The control memory, in bytes, assumed for each connection. A connection at rest has 8 KiB, a
/// busy connection 82 KiB or more.
const CONTROL_PER_CONNECTION: u64 = 60 * 1024;
/// The minimum size in bytes of the part for landing, and of the part for control blocks.
const MIN_PART: usize = MIN_POOL / 8;
/// The maximum size of a landing chunk in bytes.
const MAX_CHUNK: usize = 4 << 20;

/// The maximum size of a pool, and its division into parts. A part that is not set is derived from
/// the total. A total that is not set is [`DEFAULT_POOL`], unless the code that makes the pool
/// chooses another.
///
/// ```
/// use tonic_rdma_memory::PoolConfig;
///
/// let config = PoolConfig::default().total(256 << 20).landing(160 << 20);
/// # let _ = config;
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolConfig {
    total: Option<usize>,
    send: Option<usize>,
    landing: Option<usize>,
    huge_pages: HugePages,
}

impl PoolConfig {
    /// Sets the maximum number of bytes that the pool may pin, at least [`MIN_POOL`]. If
    /// RLIMIT_MEMLOCK allows less, the pool shrinks to that size. Default: [`DEFAULT_POOL`], unless
    /// the code that makes the pool [chooses another](Self::or_total).
    pub fn total(mut self, bytes: usize) -> Self {
        self.total = Some(bytes);
        self
    }

    /// Sets the total if no total is set.
    pub fn or_total(mut self, bytes: usize) -> Self {
        self.total.get_or_insert(bytes);
        self
    }

    /// Sets the total, even if a total is already set. If a part was set, all parts keep their
    /// proportions, except that landing and control memory keep their minimum sizes.
    pub fn rescale(mut self, bytes: usize) -> Self {
        if self.send.is_some() || self.landing.is_some() {
            let (send, landing) = scale(self.parts(), self.bytes(), bytes);
            (self.send, self.landing) = (Some(send), Some(landing));
        }
        self.total(bytes)
    }

    /// The total that was set, if any.
    pub fn configured_total(&self) -> Option<usize> {
        self.total
    }

    /// Sets the size in bytes of the part for buffers that the application fills and sends.
    /// Default: a quarter of the total.
    pub fn send(mut self, bytes: usize) -> Self {
        self.send = Some(bytes);
        self
    }

    /// Sets the size in bytes of the part that peers may write to. Default: half of the total.
    pub fn landing(mut self, bytes: usize) -> Self {
        self.landing = Some(bytes);
        self
    }

    /// Sets which pages to use. Default: transparent huge pages.
    pub fn huge_pages(mut self, pages: HugePages) -> Self {
        self.huge_pages = pages;
        self
    }

    /// The lowest RLIMIT_MEMLOCK in bytes with which the pool has its configured size in a process
    /// that pins nothing else. Some drivers also pin memory for queues, which
    /// [`memlock_for`](Self::memlock_for) includes.
    pub fn memlock(&self) -> u64 {
        self.memlock_for(Pinning::default())
    }

    /// Like [`memlock`](Self::memlock), but includes a device's queues.
    pub fn memlock_for(&self, pinning: Pinning) -> u64 {
        let queues = queues_of(self.control(), pinning.queue_bytes);
        (self.bytes() as u64).saturating_add(queues).saturating_add(MAX_MARGIN)
    }

    /// Returns the total, or its default.
    fn bytes(&self) -> usize {
        self.total.unwrap_or(DEFAULT_POOL)
    }

    /// Returns the parts for sending and for landing, or their defaults.
    fn parts(&self) -> (usize, usize) {
        let total = self.bytes();
        (self.send.unwrap_or(total / 4), self.landing.unwrap_or(total / 2))
    }

    /// The bytes that remain for control memory.
    fn control(&self) -> usize {
        let (send, landing) = self.parts();
        self.bytes().saturating_sub(send).saturating_sub(landing)
    }

    /// Computes the sizes of a pool under a limit (`None`: no limit). Unlike
    /// [`Pool::new`](crate::Pool::new), this function does not raise the soft limit first.
    ///
    /// # Errors
    /// The errors of [`Pool::new`](crate::Pool::new).
    pub fn fit(&self, memlock: Option<&Memlock>, pinning: Pinning) -> Result<PoolSizes, PoolError> {
        let configured = self.bytes();
        if configured < MIN_POOL {
            return Err(PoolError::TooSmall { total: configured, min: MIN_POOL });
        }
        let (send, landing) = self.parts();
        let control = self.control();
        if landing < MIN_PART || control < MIN_PART {
            return Err(PoolError::Parts {
                total: configured,
                send,
                landing,
                control,
                min: MIN_PART,
            });
        }
        let mut total = configured;
        if let Some(memlock) = memlock
            && let Some(available) = memlock.available(pinning.ignores_ipc_lock)
        {
            let margin = (available / 2).min(MAX_MARGIN);
            let room = usize::try_from(available - margin).unwrap_or(usize::MAX);
            if room < MIN_POOL {
                return Err(PoolError::Memlock {
                    needed: MIN_MEMLOCK,
                    limit: memlock.soft.unwrap_or(u64::MAX),
                    pinned: memlock.pinned,
                });
            }
            // Shrink the pool so that the pool and its queues fit into `room`. The pool and its
            // queues keep the proportion that they have at the configured size.
            let with_queues =
                (configured as u64).saturating_add(queues_of(control, pinning.queue_bytes));
            let beside = room as u128 * configured as u128 / u128::from(with_queues);
            total = total.min((beside as usize).max(MIN_POOL));
        }
        total -= total % page();
        let (send, landing) = scale((send, landing), configured, total);
        let control = total.saturating_sub(send).saturating_sub(landing);
        // Chunks are small enough for many connections to get one. At the default pool size, a
        // chunk is large enough for a message of 1 MiB. Explicit huge pages need chunks of whole
        // huge pages.
        let parts = if self.huge_pages == HugePages::Explicit { 4 } else { 24 };
        let chunk = (landing / parts).clamp(MIN_PART / 4, MAX_CHUNK);
        // The size is a multiple of 64 KiB, the length of many pieces. Unless the pool is small or
        // uses no huge pages, the size is also a multiple of the size of a huge page, even if this
        // makes fewer chunks.
        let chunk = match self.huge_pages {
            HugePages::Off => chunk - chunk % (64 * 1024),
            _ if chunk < HUGE_PAGE / 2 => chunk - chunk % (64 * 1024),
            _ => (chunk - chunk % HUGE_PAGE).max(HUGE_PAGE),
        };
        Ok(PoolSizes { total, send, landing, control, chunk, huge_pages: self.huge_pages })
    }
}

/// Scales the parts for sending and landing from a pool of `from` bytes to a pool of `to` bytes.
/// The parts keep their proportions, except that landing and control memory get at least MIN_PART.
fn scale((send, landing): (usize, usize), from: usize, to: usize) -> (usize, usize) {
    let scaled = |part: usize| {
        let part = part as u128 * to as u128 / (from as u128).max(1);
        let part = usize::try_from(part).unwrap_or(usize::MAX);
        part - part % page()
    };
    let (mut send, mut landing) = (scaled(send), scaled(landing).max(MIN_PART));
    let missing = send.saturating_add(landing).saturating_add(MIN_PART).saturating_sub(to);
    // The larger part gives up the missing bytes. Bytes are missing only if the two parts leave
    // less than MIN_PART of the total. Then the larger part has nearly half of the total or more,
    // and can spare them.
    if landing > send {
        landing = landing.saturating_sub(missing)
    } else {
        send = send.saturating_sub(missing)
    }
    (send, landing)
}

/// Returns the number of bytes that the queues of all connections pin, if connections use all
/// `control` bytes.
fn queues_of(control: usize, queue_bytes: usize) -> u64 {
    (control as u64 / CONTROL_PER_CONNECTION).saturating_mul(queue_bytes as u64)
}

/// The memory that a device pins for itself, and how RLIMIT_MEMLOCK applies to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pinning {
    /// The value of [`Registrar::ignores_ipc_lock`](crate::Registrar::ignores_ipc_lock).
    pub ignores_ipc_lock: bool,
    /// The value of [`Registrar::queue_bytes`](crate::Registrar::queue_bytes).
    pub queue_bytes: usize,
}

impl Pinning {
    /// Describes the memory that a device pins. The device may have to measure this memory with a
    /// queue pair, which it creates and destroys.
    pub fn of(registrar: &dyn Registrar) -> Pinning {
        Pinning {
            ignores_ipc_lock: registrar.ignores_ipc_lock(),
            queue_bytes: registrar.queue_bytes(),
        }
    }
}

/// The actual sizes of a pool in bytes, after it was fitted into RLIMIT_MEMLOCK.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolSizes {
    /// The size of the whole pool in bytes.
    pub total: usize,
    /// The number of bytes for buffers that the application fills and sends.
    pub send: usize,
    /// The number of bytes for memory that peers may write to.
    pub landing: usize,
    /// The number of bytes for the control blocks of connections.
    pub control: usize,
    /// The size of one landing chunk in bytes.
    pub chunk: usize,
    /// Which pages the pool uses.
    pub huge_pages: HugePages,
}

/// The size classes, in bytes, of control blocks that share a page if pages are longer than 4 KiB.
/// A connection at rest has a block of 8 KiB over RDMA, and a block of 4 KiB over shared memory.
const SMALL_CONTROL: [usize; 5] = [2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10];
/// The page size of most systems. On systems with this page size, each block gets separate pages.
const USUAL_PAGE: usize = 4 << 10;

/// Returns the size classes of control blocks, and the size of their arenas in bytes. A block that
/// is longer than the largest class has a dedicated arena, because a control block lasts as long as
/// its connection.
pub(crate) fn control_classes(page: usize) -> (Vec<usize>, usize) {
    let small = |slot: &usize| page > USUAL_PAGE && *slot < page;
    (SMALL_CONTROL.into_iter().filter(small).collect(), page)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(soft: u64, pinned: u64) -> Memlock {
        Memlock { soft: Some(soft), hard: Some(soft), pinned, cap_ipc_lock: false }
    }

    #[test]
    fn a_limit_of_8_mib_is_enough() {
        let sizes =
            PoolConfig::default().fit(Some(&limit(8 << 20, 0)), Pinning::default()).unwrap();
        assert_eq!(sizes.total, (8 << 20) - (256 << 10));
        assert!(sizes.send + sizes.landing + sizes.control <= sizes.total);
    }

    #[test]
    fn memlock_is_the_lowest_limit_for_the_whole_pool() {
        let config = PoolConfig::default();
        let whole = config.fit(Some(&limit(config.memlock(), 0)), Pinning::default()).unwrap();
        assert_eq!(whole.total, DEFAULT_POOL);
        let less = config.fit(Some(&limit(config.memlock() - 1, 0)), Pinning::default()).unwrap();
        assert!(less.total < DEFAULT_POOL);
    }

    /// A default pool that a limit has shrunk to 48 MiB still has chunks of whole huge pages.
    /// Smaller pools have smaller chunks, because only few connections would get a chunk of a whole
    /// huge page.
    #[test]
    fn chunks_are_whole_huge_pages_if_there_are_enough() {
        let chunk = |mib: usize, huge_pages| {
            let config = PoolConfig::default().total(mib << 20).huge_pages(huge_pages);
            let sizes = config.fit(None, Pinning::default()).unwrap();
            (sizes.chunk, sizes.landing / sizes.chunk)
        };
        assert_eq!(chunk(64, HugePages::Transparent), (HUGE_PAGE, 16));
        assert_eq!(chunk(512, HugePages::Transparent), (2 * HUGE_PAGE, 64));
        for mib in [48, 49, 63, 95, 96, 97, 128, 200, 1 << 14] {
            let (chunk, chunks) = chunk(mib, HugePages::Transparent);
            assert!(chunk.is_multiple_of(HUGE_PAGE) && chunks >= 12, "{mib}: {chunks} of {chunk}");
        }
        for mib in [8, 16, 47] {
            let (chunk, chunks) = chunk(mib, HugePages::Transparent);
            assert!(chunk < HUGE_PAGE && chunks >= 15, "{mib}: {chunks} of {chunk}");
        }
        assert_eq!(chunk(64, HugePages::Off).1, 24);
    }

    #[test]
    fn queues_are_reserved_for() {
        let config = PoolConfig::default();
        let pinning = Pinning { queue_bytes: 84 << 10, ..Pinning::default() };
        let sizes = config.fit(Some(&limit(8 << 20, 0)), pinning).unwrap();
        let connections = sizes.control / (60 << 10);
        let with_queues = sizes.total + connections * pinning.queue_bytes;
        assert!(with_queues <= (8 << 20) - (256 << 10), "{sizes:?}");
        assert!(with_queues > 7 << 20 && connections >= 20, "{sizes:?}");
        // With the limit that `memlock_for` states, the pool has its whole size.
        let whole = config.memlock_for(pinning);
        assert!(whole > config.memlock() + (20 << 20), "{whole}");
        assert_eq!(config.fit(Some(&limit(whole, 0)), pinning).unwrap().total, DEFAULT_POOL);
        // The smallest limit gives the smallest pool that works.
        let least = config.fit(Some(&limit(MIN_MEMLOCK, 0)), pinning).unwrap();
        assert_eq!(least.total, MIN_POOL);
    }

    #[test]
    fn a_total_that_is_not_set_is_what_makes_the_pool_chooses() {
        let sizes = |config: PoolConfig| config.fit(None, Pinning::default()).unwrap();
        let one_knob = PoolConfig::default().huge_pages(HugePages::Off);
        assert_eq!(one_knob.configured_total(), None);
        assert_eq!(sizes(one_knob.clone()).total, DEFAULT_POOL);
        let chosen = sizes(one_knob.or_total(2 << 30));
        assert_eq!((chosen.total, chosen.landing, chosen.send), (2 << 30, 1 << 30, 512 << 20));
        assert_eq!(chosen.huge_pages, HugePages::Off);
        let set = PoolConfig::default().total(8 << 20);
        assert_eq!(sizes(set.or_total(2 << 30)).total, 8 << 20);
    }

    #[test]
    fn a_rescaled_pool_keeps_the_proportions_of_its_parts() {
        let parts = |config: PoolConfig| {
            let sizes = config.fit(None, Pinning::default()).unwrap();
            (sizes.total >> 20, sizes.landing >> 20, sizes.send >> 20)
        };
        let config = PoolConfig::default().total(64 << 20).landing(48 << 20).send(4 << 20);
        assert_eq!(parts(config.clone().rescale(32 << 20)), (32, 24, 2));
        assert_eq!(parts(config.clone().rescale(256 << 20)), (256, 192, 16));
        let least = config.rescale(MIN_POOL).fit(None, Pinning::default()).unwrap();
        assert!(least.landing >= MIN_PART && least.control >= MIN_PART, "{least:?}");
        assert_eq!(parts(PoolConfig::default().rescale(16 << 20)), (16, 8, 4));
        // Rescaling does not hide that the parts do not fit.
        let bad = PoolConfig::default().total(8 << 20).send(usize::MAX).landing(usize::MAX);
        let refused = bad.rescale(4 << 20).fit(None, Pinning::default());
        assert!(matches!(refused, Err(PoolError::Parts { .. })), "{refused:?}");
    }

    #[test]
    fn shrunk_parts_keep_their_proportions() {
        let config = PoolConfig::default().total(16 << 20).landing(12 << 20).send(1 << 20);
        let sizes =
            config.fit(Some(&limit((4 << 20) + (256 << 10), 0)), Pinning::default()).unwrap();
        assert_eq!((sizes.total, sizes.landing, sizes.send), (4 << 20, 3 << 20, 256 << 10));
    }

    #[test]
    fn every_part_stays_large_enough() {
        let mut tried = 0;
        for total in [MIN_POOL, MIN_POOL + 4096, 3 << 20, 8 << 20, 1 << 30] {
            for send in [0, 1, MIN_PART, total / 2, total - 2 * MIN_PART, total - MIN_PART] {
                for landing in [MIN_PART, MIN_PART + 1, total / 3, total - 2 * MIN_PART] {
                    let config = PoolConfig::default().total(total).send(send).landing(landing);
                    if send + landing + MIN_PART > total {
                        assert!(matches!(
                            config.fit(None, Pinning::default()),
                            Err(PoolError::Parts { .. })
                        ));
                        continue;
                    }
                    for room in [MIN_POOL, MIN_POOL + 4096, 5 << 20, 2 << 30] {
                        tried += 1;
                        let memlock = limit(room as u64 + MAX_MARGIN, 0);
                        let s = config.fit(Some(&memlock), Pinning::default()).unwrap();
                        assert!(s.send + s.landing + s.control <= s.total, "{s:?}");
                        assert!(s.landing >= MIN_PART && s.control >= MIN_PART, "{s:?}");
                        assert!(s.total <= room.min(total) && s.send <= send, "{s:?}");
                        assert!(
                            s.chunk <= s.landing
                                && s.chunk >= 64 << 10
                                && s.chunk % (64 << 10) == 0
                        );
                    }
                }
            }
        }
        assert!(tried > 100);
        let huge = PoolConfig::default().total(usize::MAX).send(usize::MAX);
        assert!(matches!(
            huge.fit(None, Pinning::default()),
            Err(PoolError::Parts { control: 0, .. })
        ));
    }

    #[test]
    fn errors_state_need_limit_and_remedy() {
        let error =
            PoolConfig::default().fit(Some(&limit(64 << 10, 0)), Pinning::default()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("needed 2359296 bytes"), "{text}");
        assert!(text.contains("limit is 65536 bytes"), "{text}");
        assert!(text.contains("ulimit -l 2304"), "{text}");
        let nearly = PoolConfig::default()
            .fit(Some(&limit(8 << 20, 7 << 20)), Pinning::default())
            .unwrap_err();
        assert!(matches!(nearly, PoolError::Memlock { pinned, .. } if pinned == 7 << 20));
        assert!(matches!(
            PoolConfig::default().total(1).fit(None, Pinning::default()),
            Err(PoolError::TooSmall { .. })
        ));
        let parts = PoolConfig::default().landing(0).fit(None, Pinning::default()).unwrap_err();
        assert!(matches!(parts, PoolError::Parts { landing: 0, .. }), "{parts}");
    }

    #[test]
    fn min_memlock_is_the_lowest_limit_that_works() {
        let named = MIN_MEMLOCK;
        assert!(PoolConfig::default().fit(Some(&limit(named, 0)), Pinning::default()).is_ok());
        assert!(PoolConfig::default().fit(Some(&limit(named - 1, 0)), Pinning::default()).is_err());
    }
}
