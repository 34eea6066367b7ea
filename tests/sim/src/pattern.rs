//! The payload of messages. Both ends derive a message's payload from its call, its direction and
//! its index. The payload is pseudo-random, so misplaced bytes are detected.

use bytes::Bytes;

/// Identifies a message of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) call: usize,
    /// Whether the message goes from the server to the client.
    pub(crate) down: bool,
    pub(crate) index: usize,
}

/// Fills a message with its payload.
pub(crate) fn fill(key: Key, out: &mut [u8]) {
    let mut state = (key.call as u64) << 24 ^ (key.index as u64) << 1 ^ u64::from(key.down);
    state = state.wrapping_mul(0xd134_2543_de82_ef95) ^ 0x5bf0_3635_c7d8_f1a1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut words = out.chunks_exact_mut(8);
    for word in &mut words {
        word.copy_from_slice(&next().to_le_bytes());
    }
    let rest = words.into_remainder();
    let len = rest.len();
    rest.copy_from_slice(&next().to_le_bytes()[..len]);
}

pub(crate) fn message(key: Key, len: usize) -> Bytes {
    let mut bytes = vec![0; len];
    fill(key, &mut bytes);
    bytes.into()
}

/// Checks a message's payload. The error says what is wrong.
pub(crate) fn check(key: Key, len: usize, got: &[u8]) -> Result<(), String> {
    if got.len() != len {
        return Err(format!("{key:?}: {} bytes in place of {len}", got.len()));
    }
    let expected = message(key, len);
    match expected.iter().zip(got).position(|(a, b)| a != b) {
        Some(at) => Err(format!("{key:?}: byte {at} of {len} is wrong")),
        None => Ok(()),
    }
}
