//! The randomness of the addresses that peers write to: the virtual address of landing memory with
//! Soft-iWARP and similar devices, otherwise the iova.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use common::page;
use tonic_rdma_memory::{
    HeapRegistrar, Memory, Pool, PoolConfig, RegisterError, Registrar, Registration, random_iova,
};

const SAMPLES: usize = 1024;
const LEN: usize = 64 << 10;
const HUGE: usize = 2 << 20;

/// A registrar whose peers use virtual addresses, as with Soft-iWARP.
struct ByPlace(HeapRegistrar);

// SAFETY: as `HeapRegistrar`.
unsafe impl Registrar for ByPlace {
    fn pins(&self) -> bool {
        false
    }
    fn ignores_iova(&self) -> bool {
        true
    }
    unsafe fn register(&self, memory: Memory) -> Result<Box<dyn Registration>, RegisterError> {
        // SAFETY: the caller's guarantee.
        unsafe { self.0.register(memory) }
    }
}

/// The proportion of pairs of samples that agree in all of these bits.
fn collisions(samples: &[u64], bits: Range<u32>) -> f64 {
    let mut times = HashMap::<u64, u64>::new();
    for sample in samples {
        *times.entry((sample >> bits.start) & ((1 << bits.len()) - 1)).or_default() += 1;
    }
    let pairs: u64 = times.values().map(|n| n * (n - 1) / 2).sum();
    pairs as f64 / (samples.len() * (samples.len() - 1) / 2) as f64
}

/// Checks that every bit of the range is set about half of the time, and that ten neighbouring bits
/// collide about as often as those of random numbers (collision entropy of at least 9.6 bits). The
/// same must hold for the differences of successive samples: a sample does not predict the next.
fn is_random(samples: &[u64], bits: Range<u32>) {
    let steps: Vec<u64> = samples.windows(2).map(|pair| pair[1].wrapping_sub(pair[0])).collect();
    for numbers in [samples, &steps] {
        for bit in bits.clone() {
            let ones = numbers.iter().filter(|n| (*n >> bit) & 1 == 1).count();
            let half = numbers.len() / 2;
            assert!(
                ones.abs_diff(half) < numbers.len() / 8,
                "bit {bit}: set {ones} times of {}",
                numbers.len()
            );
        }
        for from in bits.start..=bits.end - 10 {
            let measured = -collisions(numbers, from..from + 10).log2();
            assert!(measured > 9.6, "bits {from} to {}: {measured:.2} bits of entropy", from + 9);
        }
    }
}

/// The addresses of chunks of `len` bytes. Each chunk is leased to a different connection, and
/// sixteen chunks are held at a time.
fn places(len: usize) -> Vec<u64> {
    let config = PoolConfig::default().total(256 << 20);
    let pool = Pool::new(config, Arc::new(ByPlace(HeapRegistrar::default()))).unwrap();
    let mut held = VecDeque::new();
    let mut places = Vec::new();
    for i in 0..SAMPLES {
        // A connection that is limited to less than a chunk leases only that much.
        let piece = pool.landing_up_to(len).alloc(len, len).unwrap().unwrap();
        assert_eq!(piece.capacity(), len);
        places.push(piece.addr());
        held.push_back((piece, i));
        if held.len() > 16 {
            let (piece, i) = held.pop_front().unwrap();
            let landed = piece.filled(len).lend();
            assert_eq!(landed.as_ptr().addr() as u64, places[i]);
            assert!(landed.iter().step_by(4096).all(|byte| *byte == 0));
        }
    }
    places
}

/// SECURITY.md relies on 35 bits on x86-64: the number of a page of 4 KiB in 47 bits of address
/// space. With longer pages there are fewer numbers, but a guess at a chunk succeeds equally often.
#[test]
fn landing_memory_is_mapped_at_random_places() {
    for (len, step) in [(LEN, page()), (HUGE, HUGE)] {
        let places = places(len);
        assert!(places.iter().all(|place| *place % step as u64 == 0));
        let top = u64::BITS - places.iter().max().unwrap().leading_zeros();
        if cfg!(target_arch = "x86_64") {
            assert_eq!(top, 47, "the range is the user address space");
        }
        is_random(&places, step.trailing_zeros()..top);
    }
}

/// Peers do not address send memory, so the kernel chooses its address.
#[test]
fn send_memory_is_not_mapped_at_random_places() {
    let pool =
        Pool::new(PoolConfig::default(), Arc::new(ByPlace(HeapRegistrar::default()))).unwrap();
    let stack = &raw const pool as u64;
    let far = [pool.try_alloc(LEN).unwrap(), pool.control(LEN).unwrap()]
        .into_iter()
        .filter(|buf| stack.abs_diff(buf.addr()) > 1 << 42)
        .count();
    assert_eq!(far, 0);
}

/// SECURITY.md relies on 52 bits with pages of 4 KiB, and on 43 for chunks as long as a huge page.
#[test]
fn an_iova_is_random() {
    for (len, step) in [(LEN, page()), (HUGE, HUGE)] {
        let mapped = NonNull::new(std::ptr::without_provenance_mut(0x7f12_3456_7000)).unwrap();
        let iovas: Vec<u64> = (0..SAMPLES).map(|_| random_iova(mapped, len).unwrap()).collect();
        assert!(iovas.iter().all(|iova| (iova ^ 0x7f12_3456_7000) % step as u64 == 0));
        is_random(&iovas, step.trailing_zeros()..64);
    }
}
