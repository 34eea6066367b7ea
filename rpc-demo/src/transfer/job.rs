//! State that all items of one command share.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Semaphore;

use super::item::Item;
use crate::cli;
use crate::progress::Progress;
use crate::summary::Tally;

/// The kind of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Put,
    Get,
    Copy,
}

/// A transfer command: its options, and its progress.
pub(crate) struct Job {
    verb: Verb,
    /// Number of units transferred in parallel.
    pub(super) jobs: u16,
    /// Limits how many ranges are transferred in parallel between processes of this host.
    pub(super) ranges_on_one_host: Semaphore,
    /// Payload bytes of a message, if not the path's default.
    pub(super) chunk: Option<usize>,
    /// Bytes of a range.
    pub(super) range_size: u64,
    /// Whether to compare with the existing content of the target.
    pub(super) resume: bool,
    pub(super) progress: Progress,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    files: AtomicU64,
    directories: AtomicU64,
    skipped: AtomicU64,
    moved: AtomicU64,
    kept: AtomicU64,
    kept_files: AtomicU64,
}

impl Job {
    /// `total` is the number of bytes, if known.
    pub(crate) fn new(verb: Verb, transfer: &cli::Transfer, total: Option<u64>) -> Job {
        Job {
            verb,
            jobs: transfer.parallel.jobs(),
            ranges_on_one_host: Semaphore::new(transfer.parallel.ranges_on_one_host().into()),
            chunk: transfer.chunks.chunk_size,
            range_size: transfer.range_size,
            resume: transfer.resume,
            progress: Progress::start(total),
            counts: Counts::default(),
        }
    }

    /// The description of the transfer of `item` in error messages.
    pub(super) fn what(&self, item: &Item) -> String {
        let verb = match self.verb {
            Verb::Put => "put",
            Verb::Get => "get",
            Verb::Copy => "copy",
        };
        format!("cannot {verb} {} as {}", item.origin, item.target)
    }

    /// Records transferred bytes.
    pub(super) fn moved(&self, bytes: u64) {
        self.counts.moved.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Records that a file is complete.
    pub(super) fn file_done(&self) {
        self.counts.files.fetch_add(1, Ordering::Relaxed);
        self.progress.file_done();
    }

    /// Records that the target already had a file.
    pub(super) fn kept(&self, bytes: u64) {
        self.kept_range(bytes);
        self.counts.kept_files.fetch_add(1, Ordering::Relaxed);
        self.file_done();
    }

    /// Records that the target already had a part of a file.
    pub(super) fn kept_range(&self, bytes: u64) {
        self.counts.kept.fetch_add(bytes, Ordering::Relaxed);
        self.progress.kept(bytes);
    }

    pub(super) fn directory_done(&self) {
        self.counts.directories.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn skipped(&self, count: u64) {
        self.counts.skipped.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn tally(&self) -> Tally {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Counts { files, directories, skipped, moved, kept, kept_files } = &self.counts;
        Tally {
            bytes: get(moved) + get(kept),
            files: get(files),
            directories: get(directories),
            skipped: get(skipped),
            kept_bytes: get(kept),
            kept_files: get(kept_files),
        }
    }
}
