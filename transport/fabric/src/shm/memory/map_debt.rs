//! Charges the processor time that peers' files cost to the process that gives them (R19).
//!
//! Checking, mapping and unmapping a file costs this process time for each page, and costs the peer
//! only one short message. The number and length of mapped files are limited, so a peer that wants
//! to use up more time has to take files back and give new files. A file that the peer takes back,
//! or that could not be mapped, is a debt of the peer's process:
//!
//! | a process owes | its next file |
//! |---|---|
//! | [`MAX_DEBT`] at most | is mapped at once |
//! | more | waits in the socket, with all later messages, until the process owes at most [`MAX_DEBT`] |
//!
//! All debts together are paid off at [`PAID_PER_SECOND`], which is shared equally among the
//! debtors. So a debtor with a large debt does not make other debtors wait longer. The files of a
//! connection that ends are taken back, but the debt stays with the process. Bytes that this end
//! has written to a file, or borrowed from it, reduce the debt to a quarter, but not further: a
//! message that lends a whole file costs the peer as little as one that lends nothing.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tonic_rdma_memory::PerProcess;

/// The number of bytes of debt that are paid off per second, for all processes together. Populating
/// and unmapping that many bytes takes about a tenth of a processor.
pub(crate) const PAID_PER_SECOND: u64 = 1 << 30;
/// The number of bytes that a process may owe without waiting.
pub(crate) const MAX_DEBT: u64 = 4 << 30;
/// The number of bytes that a file costs in addition to its pages, for waking the thread that maps
/// it.
const PER_FILE: u64 = 512 << 10;
/// Even for a file that was used, the process owes at least `1 / LEAST` of the file's cost.
const LEAST: u64 = 4;
/// A page that is only checked costs `1 / UNPOPULATED` of a page that is mapped.
const UNPOPULATED: u64 = 8;

/// A peer's user and pid, according to its socket.
pub(crate) type PeerProcess = (u32, u32);

/// The debts of processes, in bytes.
#[derive(Debug)]
struct Debts {
    owed: BTreeMap<PeerProcess, u64>,
    /// The time up to which debts have been paid off.
    paid: Option<Instant>,
}

static DEBTS: PerProcess<Mutex<Debts>> = PerProcess::new(|| Mutex::new(Debts::new()));

fn debts() -> MutexGuard<'static, Debts> {
    DEBTS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Debts {
    const fn new() -> Debts {
        Debts { owed: BTreeMap::new(), paid: None }
    }

    /// Pays off debts for the time until `now`.
    fn pay(&mut self, now: Instant) {
        let since = self.paid.unwrap_or(now);
        self.paid = Some(now.max(since));
        let nanos = now.saturating_duration_since(since).as_nanos();
        let paid = nanos * u128::from(PAID_PER_SECOND) / 1_000_000_000;
        let each = u64::try_from(paid / self.owed.len().max(1) as u128).unwrap_or(u64::MAX);
        self.owed.retain(|_, owed| {
            *owed = owed.saturating_sub(each);
            *owed > 0
        });
    }

    fn add(&mut self, process: PeerProcess, bytes: u64, now: Instant) {
        self.pay(now);
        let owed = self.owed.entry(process).or_default();
        *owed = owed.saturating_add(bytes);
    }

    /// The time until a process owes at most [`MAX_DEBT`]. `None` if the process already owes at
    /// most [`MAX_DEBT`].
    fn wait(&mut self, process: PeerProcess, now: Instant) -> Option<Duration> {
        self.pay(now);
        let over = self.owed.get(&process)?.checked_sub(MAX_DEBT).filter(|over| *over > 0)?;
        let nanos = u128::from(over) * self.owed.len() as u128 * 1_000_000_000;
        let nanos = nanos.div_ceil(u128::from(PAID_PER_SECOND));
        Some(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }
}

/// The time to wait before a process's next file is taken. `None` if the file need not wait.
pub(crate) fn wait(process: PeerProcess) -> Option<Duration> {
    debts().wait(process, Instant::now())
}

/// The bytes that a process owes.
#[cfg(test)]
pub(crate) fn owed(process: PeerProcess) -> u64 {
    debts().owed.get(&process).copied().unwrap_or(0)
}

/// The cost of a peer's file. Once the file is unmapped, the peer's process owes this cost, less
/// the bytes that were used, but at least a quarter.
#[derive(Debug)]
pub(crate) struct MapCost {
    process: PeerProcess,
    bytes: u64,
    used: AtomicU64,
}

impl MapCost {
    /// The cost of a file whose pages are all mapped.
    pub(crate) fn populated(process: PeerProcess, len: u64) -> MapCost {
        MapCost { process, bytes: len.saturating_add(PER_FILE), used: AtomicU64::new(0) }
    }

    /// The cost of a file whose pages are checked now, but mapped only when they are written to.
    pub(crate) fn unpopulated(process: PeerProcess, len: u64) -> MapCost {
        MapCost::populated(process, len / UNPOPULATED)
    }

    /// Counts bytes that were written to the file, or borrowed from the file.
    pub(crate) fn add_used(&self, bytes: u64) {
        self.used.fetch_add(bytes, Relaxed);
    }
}

impl Drop for MapCost {
    fn drop(&mut self) {
        let owed = self.bytes.saturating_sub(self.used.load(Relaxed)).max(self.bytes / LEAST);
        debts().add(self.process, owed, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const FILE: u64 = 200 << 20;

    /// The attack: processes give a file and take it back over and over, as often as they may.
    /// Returns the bytes that are mapped for nothing in this many seconds.
    fn flood(debts: &mut Debts, processes: u32, start: Instant, seconds: u32) -> u64 {
        let (end, mut mapped) = (start + SECOND * seconds, 0);
        let mut next: Vec<_> = (0..processes).map(|pid| ((1, pid), start)).collect();
        loop {
            let (process, at) = next.iter_mut().min_by_key(|(_, at)| *at).unwrap();
            if *at >= end {
                return mapped;
            }
            match debts.wait(*process, *at) {
                Some(wait) => *at += wait,
                None => {
                    debts.add(*process, FILE, *at);
                    mapped += FILE;
                }
            }
        }
    }

    /// The attack: a process lends a file, names all of it in messages that nobody reads, and takes
    /// the file back.
    #[test]
    fn a_file_is_owed_although_messages_named_all_of_it() {
        // Debts are paid off while the test runs.
        let expected = [FILE / 2..=FILE + PER_FILE, FILE / 8..=FILE / 3, FILE / 8..=FILE / 3];
        for (n, expected) in expected.into_iter().enumerate() {
            let process = (1, 2000 + n as u32);
            let cost = MapCost::populated(process, FILE);
            (0..n).for_each(|_| cost.add_used(FILE));
            drop(cost);
            assert!(expected.contains(&owed(process)), "{n}: {}", owed(process));
        }
    }

    #[test]
    fn files_that_are_given_and_taken_back_cost_a_tenth_of_a_processor() {
        let start = Instant::now();
        for processes in [1, 4, 64] {
            let mut debts = Debts::new();
            let mapped = flood(&mut debts, processes, start, 60);
            let most = u64::from(processes) * (MAX_DEBT + FILE) + 60 * PAID_PER_SECOND;
            assert!(mapped <= most, "{processes} processes: {mapped} of {most}");
            // Other processes are not kept waiting.
            let now = start + SECOND * 60;
            assert_eq!(debts.wait((1, 1000), now), None);
            debts.add((1, 1000), MAX_DEBT, now);
            assert_eq!(debts.wait((1, 1000), now), None);
        }
    }

    #[test]
    fn debts_are_paid_off_and_forgotten() {
        let (mut debts, start) = (Debts::new(), Instant::now());
        debts.add((1, 1), MAX_DEBT + PAID_PER_SECOND, start);
        assert_eq!(debts.wait((1, 1), start), Some(SECOND));
        debts.add((1, 2), 1, start);
        assert_eq!(debts.wait((1, 1), start), Some(SECOND * 2), "two share what is paid off");
        assert_eq!(debts.wait((1, 2), start), None);
        assert_eq!(debts.wait((1, 1), start + SECOND * 2), None);
        debts.pay(start + SECOND * 100);
        assert!(debts.owed.is_empty());
    }

    #[test]
    fn pages_that_are_only_checked_cost_less() {
        let process = (1, u32::MAX);
        drop(MapCost::unpopulated(process, FILE));
        assert!((1..=FILE / UNPOPULATED + PER_FILE).contains(&owed(process)));
    }
}
