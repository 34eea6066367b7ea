//! Payload bytes that reveal loss, displacement and repetition.
//!
//! The pattern of a seed is a window into an endlessly repeated block of random bytes. The length
//! of the block is a prime, so that offsets that a transport could confuse (multiples of pages,
//! slots or chunks) have different bytes. Filling and checking copy and compare whole blocks, so
//! that a debug build checks 64 MiB in milliseconds.

use std::sync::OnceLock;

use bytes::{Bytes, BytesMut};
use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};

const PERIOD: usize = 65_521;

fn block() -> &'static [u8] {
    static BLOCK: OnceLock<Vec<u8>> = OnceLock::new();
    BLOCK.get_or_init(|| {
        let mut block = vec![0; PERIOD];
        SmallRng::seed_from_u64(0x5eed).fill_bytes(&mut block);
        block
    })
}

fn start(seed: u64) -> usize {
    // A multiplicative hash, so that neighbouring seeds start far apart.
    (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) % PERIOD as u64) as usize
}

/// The first `len` bytes of the pattern of `seed`.
pub fn make(seed: u64, len: usize) -> Bytes {
    let mut out = BytesMut::with_capacity(len);
    let mut at = start(seed);
    while out.len() < len {
        let part = &block()[at..(at + len - out.len()).min(PERIOD)];
        out.extend_from_slice(part);
        at = (at + part.len()) % PERIOD;
    }
    out.freeze()
}

/// Checks that `bytes` equal the pattern of `seed`.
///
/// # Errors
/// A text that gives the offset of the first byte that differs.
pub fn check(seed: u64, bytes: &[u8]) -> Result<(), String> {
    let mut at = start(seed);
    let mut done = 0;
    while done < bytes.len() {
        let part = &block()[at..(at + bytes.len() - done).min(PERIOD)];
        let got = &bytes[done..done + part.len()];
        if got != part {
            let off = got.iter().zip(part).position(|(a, b)| a != b);
            return Err(format!(
                "payload of {} bytes with seed {seed} differs from byte {}",
                bytes.len(),
                done + off.unwrap_or(0)
            ));
        }
        done += part.len();
        at = (at + part.len()) % PERIOD;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_moved_or_foreign_byte_is_found() {
        let len = 300_000;
        let good = make(7, len);
        assert_eq!(good.len(), len);
        check(7, &good).unwrap();
        check(7, &good[..1]).unwrap();
        check(7, &[]).unwrap();
        assert!(check(8, &good).is_err());
        let mut bad = good.to_vec();
        bad[200_000] ^= 1;
        assert!(check(7, &bad).unwrap_err().ends_with("200000"));
        for page in [4096, 65_536, 131_072] {
            assert!(check(7, &good[page..]).is_err());
        }
    }
}
