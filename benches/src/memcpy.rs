//! The limit within one host: one copy by one processor.

use crate::{
    measure::{Round, throughput},
    session::Contestant,
    work::{Kind, Row},
};
use anyhow::bail;
use std::{hint::black_box, time::Instant};

/// Bytes of either side of a cold copy: many times what a cache holds.
const COLD: usize = 256 << 20;

/// Copies of a row's messages.
#[derive(Debug)]
pub struct Memcpy {
    from: Vec<u8>,
    to: Vec<u8>,
    cold: bool,
}

impl Memcpy {
    /// Hot: the same two pieces of memory each time. Cold: memory that was not touched for the last 512 MiB.
    pub fn new(cold: bool) -> Self {
        Self { from: vec![1; COLD], to: vec![2; COLD], cold }
    }
}

impl Contestant for Memcpy {
    fn runs(&self, row: &Row) -> bool {
        matches!(row.kind, Kind::Bulk { .. } | Kind::Stream { .. })
    }

    fn path(&self) -> String {
        if self.cold { "memcpy, cold" } else { "memcpy, hot" }.to_owned()
    }

    async fn prepare(&mut self, _: &Row) -> anyhow::Result<()> {
        Ok(())
    }

    async fn round(&mut self, row: &Row) -> anyhow::Result<Round> {
        let (Kind::Bulk { size, .. } | Kind::Stream { size }) = row.kind else {
            bail!("there is nothing to copy in this row")
        };
        let places = if self.cold { COLD / size } else { 1 };
        let begin = Instant::now();
        for call in 0..row.calls {
            let at = call % places * size;
            let (from, to) = (&self.from[at..at + size], &mut self.to[at..at + size]);
            to.copy_from_slice(black_box(from));
            black_box(to);
        }
        Ok(throughput(row.calls, size, begin.elapsed()))
    }
}
