//! Sizes of a pool.

use crate::error::PoolError;
use crate::memlock::Memlock;
use crate::region::page::{HUGE_PAGE, HugePages, page};

/// The smallest pool that works, in bytes.
pub const MIN_POOL: usize = 2 << 20;
/// The default size of a pool in bytes. Memory is mapped and pinned as it is needed, not before.
pub const DEFAULT_POOL: usize = 64 << 20;

/// Left to the rest of the process: half of what it may pin, at most this many bytes.
const MARGIN: u64 = 256 * 1024;
/// The lowest limit in bytes (RLIMIT_MEMLOCK) under which a pool can be made, if the process pins
/// nothing else.
pub const MIN_MEMLOCK: u64 = MIN_POOL as u64 + MARGIN;
/// The least for landing and for control blocks.
const MIN_PART: usize = MIN_POOL / 8;
const MAX_CHUNK: usize = 4 << 20;

/// How large a pool may become, and how it is divided.
///
/// ```
/// use tonic_rdma_memory::PoolConfig;
///
/// let config = PoolConfig::default().total(256 << 20).landing(160 << 20);
/// # let _ = config;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    total: usize,
    send: Option<usize>,
    landing: Option<usize>,
    huge_pages: HugePages,
}

impl Default for PoolConfig {
    fn default() -> Self {
        PoolConfig {
            total: DEFAULT_POOL,
            send: None,
            landing: None,
            huge_pages: HugePages::default(),
        }
    }
}

impl PoolConfig {
    /// Bytes that the pool may pin at most; at least [`MIN_POOL`]. Default [`DEFAULT_POOL`]. It
    /// shrinks to what RLIMIT_MEMLOCK allows.
    pub fn total(mut self, bytes: usize) -> Self {
        self.total = bytes;
        self
    }

    /// Bytes for buffers that the application fills and sends. Default a quarter of the total.
    pub fn send(mut self, bytes: usize) -> Self {
        self.send = Some(bytes);
        self
    }

    /// Bytes that peers may write to. Default half of the total.
    pub fn landing(mut self, bytes: usize) -> Self {
        self.landing = Some(bytes);
        self
    }

    /// Which pages to use. Default transparent huge ones.
    pub fn huge_pages(mut self, pages: HugePages) -> Self {
        self.huge_pages = pages;
        self
    }

    /// The limit in bytes (RLIMIT_MEMLOCK) under which a pool becomes as large as configured, if
    /// the process pins nothing else.
    pub fn memlock(&self) -> u64 {
        (self.total as u64).saturating_add(MARGIN)
    }

    /// The sizes that a pool has under a limit (None: no limit); `ignores_ipc_lock` as in
    /// [`Memlock::available`]. [`Pool::new`](crate::Pool::new) raises the soft limit to the hard
    /// one first; this takes it as it is.
    ///
    /// # Errors
    /// Those of [`Pool::new`](crate::Pool::new).
    pub fn fit(
        &self,
        memlock: Option<&Memlock>,
        ignores_ipc_lock: bool,
    ) -> Result<Sizes, PoolError> {
        if self.total < MIN_POOL {
            return Err(PoolError::TooSmall { total: self.total, min: MIN_POOL });
        }
        let (send, landing) =
            (self.send.unwrap_or(self.total / 4), self.landing.unwrap_or(self.total / 2));
        let control = self.total.saturating_sub(send).saturating_sub(landing);
        if landing < MIN_PART || control < MIN_PART {
            return Err(PoolError::Parts {
                total: self.total,
                send,
                landing,
                control,
                min: MIN_PART,
            });
        }
        let mut total = self.total;
        if let Some(memlock) = memlock
            && let Some(available) = memlock.available(ignores_ipc_lock)
        {
            let margin = (available / 2).min(MARGIN);
            let room = usize::try_from(available - margin).unwrap_or(usize::MAX);
            if room < MIN_POOL {
                return Err(PoolError::Memlock {
                    needed: MIN_MEMLOCK,
                    limit: memlock.soft.unwrap_or(u64::MAX),
                    pinned: memlock.pinned,
                });
            }
            total = total.min(room);
        }
        total -= total % page();
        // The parts keep their proportion when the whole has to shrink, as far as each stays large
        // enough.
        let scaled = |part: usize| {
            let part = (part as u128 * total as u128 / self.total as u128) as usize;
            part - part % page()
        };
        let (mut send, mut landing) = (scaled(send), scaled(landing).max(MIN_PART));
        let lack = send.saturating_add(landing).saturating_add(MIN_PART).saturating_sub(total);
        // The larger of the two can spare that: if anything lacks, it is most of the total.
        if landing > send {
            landing -= lack
        } else {
            send = send.saturating_sub(lack)
        }
        let control = total.saturating_sub(send).saturating_sub(landing);
        // Small enough that many connections get one, large enough, in a pool of default size, for
        // a message of a mebibyte. Explicit huge pages need whole ones.
        let parts = if self.huge_pages == HugePages::Explicit { 4 } else { 24 };
        let chunk = (landing / parts).clamp(MIN_PART / 4, MAX_CHUNK);
        // No odd ends: pieces are often 64 KiB, and huge pages are whole.
        let huge = chunk >= HUGE_PAGE && self.huge_pages != HugePages::Off;
        let chunk = chunk - chunk % if huge { HUGE_PAGE } else { 64 * 1024 };
        Ok(Sizes { total, send, landing, control, chunk, huge_pages: self.huge_pages })
    }
}

/// The sizes of a pool as it is, in bytes, after fitting into RLIMIT_MEMLOCK.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sizes {
    /// Everything.
    pub total: usize,
    /// For buffers that the application fills and sends.
    pub send: usize,
    /// For what peers may write to.
    pub landing: usize,
    /// For the control blocks of connections.
    pub control: usize,
    /// One landing chunk.
    pub chunk: usize,
    /// The pages in use.
    pub huge_pages: HugePages,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(soft: u64, pinned: u64) -> Memlock {
        Memlock { soft: Some(soft), hard: Some(soft), pinned, cap_ipc_lock: false }
    }

    #[test]
    fn eight_mebibytes_are_enough() {
        let sizes = PoolConfig::default().fit(Some(&limit(8 << 20, 0)), false).unwrap();
        assert_eq!(sizes.total, (8 << 20) - (256 << 10));
        assert!(sizes.send + sizes.landing + sizes.control <= sizes.total);
    }

    #[test]
    fn the_limit_that_is_named_gives_the_whole_pool() {
        let config = PoolConfig::default();
        let whole = config.fit(Some(&limit(config.memlock(), 0)), false).unwrap();
        assert_eq!(whole.total, DEFAULT_POOL);
        let less = config.fit(Some(&limit(config.memlock() - 1, 0)), false).unwrap();
        assert!(less.total < DEFAULT_POOL);
    }

    #[test]
    fn parts_keep_their_proportion() {
        let config = PoolConfig::default().total(16 << 20).landing(12 << 20).send(1 << 20);
        let sizes = config.fit(Some(&limit((4 << 20) + (256 << 10), 0)), false).unwrap();
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
                        assert!(matches!(config.fit(None, false), Err(PoolError::Parts { .. })));
                        continue;
                    }
                    for room in [MIN_POOL, MIN_POOL + 4096, 5 << 20, 2 << 30] {
                        tried += 1;
                        let memlock = limit(room as u64 + MARGIN, 0);
                        let s = config.fit(Some(&memlock), false).unwrap();
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
        assert!(matches!(huge.fit(None, false), Err(PoolError::Parts { control: 0, .. })));
    }

    #[test]
    fn errors_name_need_limit_and_cure() {
        let error = PoolConfig::default().fit(Some(&limit(64 << 10, 0)), false).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("needed 2359296 bytes"), "{text}");
        assert!(text.contains("limit is 65536 bytes"), "{text}");
        assert!(text.contains("ulimit -l 2304"), "{text}");
        let nearly = PoolConfig::default().fit(Some(&limit(8 << 20, 7 << 20)), false).unwrap_err();
        assert!(matches!(nearly, PoolError::Memlock { pinned, .. } if pinned == 7 << 20));
        assert!(matches!(
            PoolConfig::default().total(1).fit(None, false),
            Err(PoolError::TooSmall { .. })
        ));
        let parts = PoolConfig::default().landing(0).fit(None, false).unwrap_err();
        assert!(matches!(parts, PoolError::Parts { landing: 0, .. }), "{parts}");
    }

    #[test]
    fn the_smallest_limit_that_works_is_the_one_named() {
        let named = MIN_MEMLOCK;
        assert!(PoolConfig::default().fit(Some(&limit(named, 0)), false).is_ok());
        assert!(PoolConfig::default().fit(Some(&limit(named - 1, 0)), false).is_err());
    }
}
