//! An upper bound for transports within one host: a single copy by one processor.

use std::hint::black_box;
use std::time::Instant;

use anyhow::bail;

use crate::contender::CopyMethod;
use crate::measure::{Round, throughput};
use crate::session::RowRunner;
use crate::work::{Row, WorkKind};

/// Bytes of each buffer of a cold copy: many times the size of a cache.
const COLD_BYTES: usize = 256 << 20;
/// The modulus of the distance between source and destination.
const PAGE: usize = 4096;

/// Copies memory of the length of a row's messages, instead of sending messages.
#[derive(Debug)]
pub struct Memcpy {
    from: Vec<u8>,
    to: Vec<u8>,
    method: CopyMethod,
}

impl Memcpy {
    /// Copies by `method`. [`CopyMethod::MemcpyHot`] copies between the same two buffers each time.
    /// Any other method copies memory that was last touched 512 MiB earlier.
    pub fn new(method: CopyMethod) -> Self {
        // Each buffer includes space for the distance and for aligning the start to a page.
        Self { from: vec![1; COLD_BYTES + 2 * PAGE], to: vec![2; COLD_BYTES + 2 * PAGE], method }
    }
}

impl RowRunner for Memcpy {
    fn supports(&self, row: &Row) -> bool {
        match row.kind {
            WorkKind::Phase { .. } => self.method != CopyMethod::MemcpyHot,
            WorkKind::Bulk { .. } | WorkKind::Stream { .. } => {
                matches!(self.method, CopyMethod::MemcpyHot | CopyMethod::MemcpyCold)
            }
            _ => false,
        }
    }

    fn path(&self) -> String {
        match self.method {
            CopyMethod::MemcpyHot => "memcpy, hot",
            CopyMethod::MemcpyCold => "memcpy, cold",
            CopyMethod::MemcpyApart => "memcpy, cold, at the row's distance",
            CopyMethod::Transport => "the transport's copy, cold",
        }
        .to_owned()
    }

    async fn prepare(&mut self, _: &Row) -> anyhow::Result<()> {
        Ok(())
    }

    async fn round(&mut self, row: &Row) -> anyhow::Result<Round> {
        let (size, distance) = match (row.kind, self.method) {
            (WorkKind::Bulk { size, .. } | WorkKind::Stream { size }, _) => (size, 0),
            (WorkKind::Phase { size, .. }, CopyMethod::MemcpyCold) => (size, 0),
            (WorkKind::Phase { size, distance }, _) => (size, distance),
            _ => bail!("there is nothing to copy in this row"),
        };
        let n_slots = if self.method == CopyMethod::MemcpyHot { 1 } else { COLD_BYTES / size };
        let start = |memory: &[u8]| memory.as_ptr().align_offset(PAGE);
        let (from, to) = (start(&self.from), start(&self.to) + distance);
        let begin = Instant::now();
        for call in 0..row.calls {
            let at = call % n_slots * size;
            let (src, dst) = (&self.from[from + at..][..size], &mut self.to[to + at..][..size]);
            match self.method {
                CopyMethod::Transport => tonic_rdma_memory::copy_slice(black_box(src), dst),
                _ => dst.copy_from_slice(black_box(src)),
            }
            black_box(dst);
        }
        Ok(throughput(row.calls, size, begin.elapsed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work;

    /// Each contender copies at the distance of the row, or at 0 as the baseline, and takes part in
    /// no other row.
    #[tokio::test]
    async fn copies_are_as_far_apart_as_the_row_says() {
        let row = Row { kind: WorkKind::Phase { size: 4096, distance: 22 }, calls: 1 };
        for (method, distance) in [
            (CopyMethod::Transport, 22),
            (CopyMethod::MemcpyApart, 22),
            (CopyMethod::MemcpyCold, 0),
        ] {
            let mut runner = Memcpy::new(method);
            assert!(runner.supports(&row));
            assert_eq!(runner.supports(&work::short()[2]), method == CopyMethod::MemcpyCold);
            runner.round(&row).await.unwrap();
            let start = runner.to.as_ptr().align_offset(PAGE);
            let (before, copied) = runner.to.split_at(start + distance);
            assert!(copied[..4096].iter().all(|byte| *byte == 1), "{method:?}");
            assert!(before.iter().chain(&copied[4096..8192]).all(|byte| *byte == 2), "{method:?}");
        }
        assert!(!Memcpy::new(CopyMethod::MemcpyHot).supports(&row));
    }
}
