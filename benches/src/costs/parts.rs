//! The pool and the codec.

use std::hint::black_box;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use tonic_rdma::codec::fuzz::{self, Came};
use tonic_rdma_memory::{HeapRegistrar, Pool, PoolConfig};

use super::meter::{Counts, measure};
use super::scenario::Scenario;
use crate::pb::Blob;

/// The scenarios of this module, for [`super::all`].
pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "pool-4KiB",
        what: "4 KiB taken to send, frozen, given back",
        run: || send(4 << 10),
    },
    Scenario {
        name: "pool-1MiB",
        what: "1 MiB taken to send, frozen, given back",
        run: || send(1 << 20),
    },
    Scenario {
        name: "pool-resolve",
        what: "a slice of pool memory found by its address",
        run: resolve,
    },
    Scenario {
        name: "pool-landing-1MiB",
        what: "1 MiB of landing memory granted, filled, given back",
        run: landing,
    },
    Scenario {
        name: "codec-encode-64",
        what: "a message of 64 B encoded, with tonic's part",
        run: || encode(64),
    },
    Scenario {
        name: "codec-encode-1MiB",
        what: "1 MiB encoded, with tonic's part",
        run: || encode(1 << 20),
    },
    Scenario {
        name: "codec-decode-64",
        what: "a message of 64 B decoded, with tonic's part",
        run: || decode(64),
    },
    Scenario {
        name: "codec-decode-1MiB",
        what: "1 MiB that has landed decoded, with tonic's part",
        run: || decode(1 << 20),
    },
];

const TIMES: usize = 500;

fn pool() -> anyhow::Result<Pool> {
    Ok(Pool::new(PoolConfig::default(), Arc::new(HeapRegistrar::default()))?)
}

/// Runs `once` [`TIMES`] times as a warm-up, and the same number of times to be counted.
fn count(mut once: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<Counts> {
    let mut run = || (0..TIMES).try_for_each(|_| once());
    run()?;
    let mut result = Ok(());
    let counts = measure(TIMES, || result = run());
    result?;
    Ok(counts)
}

fn send(len: usize) -> anyhow::Result<Counts> {
    let pool = pool()?;
    count(|| {
        let mut buf = pool.try_alloc(len)?;
        // A device or disk would fill the buffer, so filling it is not counted.
        buf.truncate(0);
        drop(black_box(buf.freeze()));
        Ok(())
    })
}

fn resolve() -> anyhow::Result<Counts> {
    let pool = pool()?;
    let mut buf = pool.try_alloc(1 << 20)?;
    buf.resize_zeroed(1 << 20);
    let bytes = buf.freeze();
    count(|| {
        let slice = bytes.slice(4096..8192);
        black_box(pool.resolve(&slice)).context("not found")?;
        Ok(())
    })
}

fn landing() -> anyhow::Result<Counts> {
    let pool = pool()?;
    let mut landing = pool.landing();
    count(|| {
        let buf = landing.alloc(1 << 20, 1 << 20)?.context("no landing memory")?;
        drop(black_box(buf.filled(1 << 20)));
        Ok(())
    })
}

fn blob(len: usize) -> Blob {
    Blob { payload: vec![7; len].into(), reply: 0, count: 0 }
}

/// Maximum length in bytes of a message that is not split.
const WHOLE: usize = 4000;

fn encode(len: usize) -> anyhow::Result<Counts> {
    let (blob, method) = (blob(len), fuzz::OneMethod::default());
    count(|| {
        let pieces = method.encode(vec![blob.clone()], WHOLE, None)?;
        ensure!(!black_box(pieces).is_empty(), "nothing was encoded");
        Ok(())
    })
}

fn decode(len: usize) -> anyhow::Result<Counts> {
    // The codec knows the method once the first request has been encoded.
    let method = fuzz::OneMethod::default();
    let pieces = method.encode(vec![blob(len)], WHOLE, None)?;
    // The message is in one piece, like a received message.
    let message: Bytes = pieces.concat().concat().into();
    let came = if len > WHOLE { Came::Landed } else { Came::InMessages };
    count(|| {
        let decoded = method.decode::<Blob>(vec![(message.clone(), came)], usize::MAX);
        ensure!(matches!(&decoded[..], [Ok(blob)] if blob.payload.len() == len), "wrongly decoded");
        Ok(())
    })
}
