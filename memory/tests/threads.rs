//! Many threads on one pool.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes};
use common::{RecordingRegistrar, assert_unused, of_rkey, small};
use tonic_rdma_memory::{Access, Landing, Pool, PoolError};

const THREADS: usize = 6;
const ROUNDS: usize = 2_000;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn waker() -> Waker {
    Waker::from(Arc::new(Unpark(thread::current())))
}

/// Blocks on a future. After a lost wake-up the test does not end.
fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = waker();
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

/// Lengths that differ for neighbouring `i`.
fn len(i: usize) -> usize {
    [1, 4_000, 5_000, 60_000, 200_000, 300_000, 500_000][i % 7]
}

#[test]
fn send_memory() {
    let (pool, registrar) = small();
    let (budget, control) = (pool.config().send, pool.config().control);
    thread::scope(|scope| {
        let (frozen, others) = mpsc::channel::<(Bytes, u8)>();
        for t in 0..THREADS {
            let (pool, frozen, registrar) = (pool.clone(), frozen.clone(), registrar.clone());
            scope.spawn(move || {
                for i in 0..ROUNDS {
                    let (len, mark) = (len(i * (t + 1)), (i + t) as u8);
                    let buf = match (i + t) % 4 {
                        0 => pool.try_alloc(len),
                        // The future is dropped after its first poll.
                        1 => {
                            let mut alloc = pin!(pool.alloc(len));
                            match alloc.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                                Poll::Ready(result) => result,
                                Poll::Pending => continue,
                            }
                        }
                        _ => Ok(block_on(pool.alloc(len)).unwrap()),
                    };
                    let mut buf = match buf {
                        Ok(buf) => buf,
                        Err(PoolError::Exhausted { .. }) => continue,
                        Err(error) => panic!("{error}"),
                    };
                    buf.put_bytes(mark, len.min(100));
                    thread::yield_now();
                    assert!(registrar.bytes_of(Access::Local) <= budget + control);
                    frozen.send((buf.freeze(), mark)).unwrap();
                }
            });
        }
        drop(frozen);
        // Bytes are freed by a thread that did not allocate them.
        scope.spawn(move || {
            for (bytes, mark) in others {
                assert!(bytes.iter().all(|byte| *byte == mark));
            }
        });
    });
    assert!(pool.stats().waits > 0);
    assert_unused(&pool);
    assert!(registrar.most() <= budget);
    assert!(pool.try_alloc(budget).is_ok());
    drop(pool);
    registrar.assert_settled();
}

/// Allocates as a driver does, which keeps to its share while others claim memory.
fn grant(landing: &mut Landing, want: usize) -> tonic_rdma_memory::LandingBuf {
    loop {
        if landing.others_claim() {
            landing.enforce_share();
            landing.return_reclaimed();
        }
        if let Some(piece) = landing.alloc(want, 4096).unwrap() {
            return piece;
        }
        thread::park();
    }
}

#[test]
fn landing_memory() {
    let (pool, registrar) = small();
    landing_memory_of(pool, &registrar);
}

/// Runs `landing_memory` with a landing thread that makes and frees the chunks.
#[test]
fn landing_memory_by_the_landing_thread() {
    let (pool, registrar) = small();
    registrar.slow();
    landing_memory_of(pool, &registrar);
}

fn landing_memory_of(pool: Pool, registrar: &Arc<RecordingRegistrar>) {
    let budget = pool.config().landing;
    thread::scope(|scope| {
        let (landed, readers) = mpsc::channel::<(Bytes, u8)>();
        for t in 0..THREADS {
            let (pool, landed, registrar) = (pool.clone(), landed.clone(), registrar.clone());
            scope.spawn(move || {
                let mut landing = pool.landing();
                landing.register_waker(&waker());
                for i in 0..ROUNDS {
                    let (len, mark) = (len(i * (t + 1)), (i + t) as u8);
                    let piece = grant(&mut landing, len);
                    let fill = piece.capacity().min(200);
                    let place = registrar.place(of_rkey(piece.rkey()), piece.addr());
                    // SAFETY: the piece is mapped, and granted to nobody else.
                    unsafe { std::ptr::write_bytes(place, mark, fill) };
                    match i % 3 {
                        0 => drop(piece),
                        _ => landed.send((piece.filled(fill).lend(), mark)).unwrap(),
                    }
                    if i % 50 == 0 {
                        landing.trim();
                    }
                }
                // The connection is dropped here, while its landed bytes live on.
            });
        }
        drop(landed);
        let registrar = registrar.clone();
        scope.spawn(move || {
            for (bytes, mark) in readers {
                assert!(bytes.iter().all(|byte| *byte == mark));
                assert!(registrar.bytes_of(Access::RemoteWrite) <= budget);
            }
        });
    });
    assert_unused(&pool);
    let begin = Instant::now();
    while pool.stats().leased > 0 {
        assert!(registrar.is_slow() && begin.elapsed() < Duration::from_secs(20));
        thread::yield_now();
    }
    assert!(registrar.most() <= budget);
    drop(pool);
    registrar.assert_settled();
}

/// All uses together stay below the pinning limit, beyond which the registrar would fail.
#[test]
fn all_parts_at_once_stay_below_the_limit() {
    let (pool, registrar) = small();
    thread::scope(|scope| {
        for t in 0..THREADS {
            let pool = pool.clone();
            scope.spawn(move || {
                let mut landing = pool.landing();
                for i in 0..ROUNDS {
                    let len = len(i + t);
                    let results = [pool.try_alloc(len), pool.control(len)];
                    let piece = landing.alloc(len, 1).unwrap();
                    for error in results.iter().filter_map(|r| r.as_ref().err()) {
                        assert!(matches!(error, PoolError::Exhausted { .. }), "{error}");
                    }
                    drop(piece);
                    landing.trim();
                }
            });
        }
    });
    assert_unused(&pool);
    assert!(registrar.most() <= pool.config().total);
    drop(pool);
    registrar.assert_settled();
}
