//! The bytes that replace a message between codec and transport.
//!
//! | direction | bytes |
//! |---|---|
//! | out | mark, key, the message's gRPC header, its bytes without the segments, filling |
//! | in | mark, key, filling |
//!
//! Placeholders of both directions begin with an invalid protobuf tag, so that no other decoder
//! accepts them as a message. A key cannot be guessed and is valid for one message, so nothing that
//! a peer or an application writes is mistaken for a placeholder.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};

/// The mark of an outgoing message.
pub(super) const OUT: [u8; 4] = *b"\0rdO";
/// The mark of an incoming message.
pub(super) const IN: [u8; 4] = *b"\0rdI";
/// Length of mark and key in bytes.
pub(super) const LEN: usize = 20;
/// Length in bytes of a gRPC message header: a compression flag and the length.
pub const HEADER: usize = 5;

thread_local! {
    /// This thread's secret, and the number of keys made with it.
    static KEYS: (RandomState, Cell<u64>) = Default::default();
}

/// Identifies one message, and is used once. The key consists of a number and its 64-bit keyed hash
/// (SipHash), whose secret belongs to the thread. Keys that an attacker has seen reveal nothing
/// about other keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(pub(super) [u8; 16]);

impl Key {
    pub(super) fn fresh() -> Self {
        KEYS.with(|(secret, made)| {
            let number = made.replace(made.get() + 1);
            let mut key = [0; 16];
            key[..8].copy_from_slice(&number.to_ne_bytes());
            key[8..].copy_from_slice(&secret.hash_one(number).to_ne_bytes());
            Key(key)
        })
    }

    /// Reads the key that follows `mark`.
    pub(super) fn read(mark: &[u8; 4], message: &[u8]) -> Option<Self> {
        let key = message.strip_prefix(mark)?.first_chunk()?;
        Some(Key(*key))
    }
}

/// The header of an uncompressed message of `len` bytes.
pub(super) fn header(len: u32) -> [u8; HEADER] {
    let [a, b, c, d] = len.to_be_bytes();
    [0, a, b, c, d]
}

/// Reads the flag and the length of the message at the start of `bytes`.
pub(super) fn read_header(bytes: &[u8]) -> Option<(u8, usize)> {
    let [flag, a, b, c, d] = *bytes.first_chunk::<HEADER>()?;
    Some((flag, u32::from_be_bytes([a, b, c, d]) as usize))
}

/// Whether bytes that could not be decoded begin like a placeholder that was lost.
pub(super) fn is_lost(message: &[u8]) -> bool {
    message.len() >= LEN && (message.starts_with(&OUT) || message.starts_with(&IN))
}

/// The error text for placeholders that arrive changed.
pub(super) const LOST: &str = "a layer between codec and transport has buffered, split or rewritten a body that \
     tonic_rdma::codec::ProstCodec had taken messages out of; put the layer elsewhere, or use \
     tonic_prost::ProstCodec for this service";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_protobuf_message_begins_with_a_mark() {
        for mark in [OUT, IN] {
            let mut bytes = mark.to_vec();
            bytes.extend([8; 60]);
            assert!(<() as prost::Message>::decode(&bytes[..]).is_err());
        }
    }

    #[test]
    fn keys_are_read_behind_their_mark_only() {
        let key = Key::fresh();
        let bytes = [&IN[..], &key.0, b"more"].concat();
        assert_eq!(Key::read(&IN, &bytes), Some(key));
        assert_eq!(Key::read(&OUT, &bytes), None);
        assert_eq!(Key::read(&IN, &bytes[..19]), None);
    }

    #[test]
    fn a_key_tells_nothing_about_the_next_one_or_those_of_other_threads() {
        let keys = || (Key::fresh(), Key::fresh());
        let (here, there) = (keys(), std::thread::spawn(keys).join().unwrap());
        let secret = |key: Key| u64::from_ne_bytes(*key.0.last_chunk().unwrap());
        let all = [here.0, here.1, there.0, there.1].map(secret);
        for (n, a) in all.iter().enumerate() {
            // By chance two of them are equal or close once in 2^50 runs.
            assert!(all[..n].iter().all(|b| a.abs_diff(*b) > 1 << 10), "{all:x?}");
        }
    }

    #[test]
    fn headers_round_trip() {
        assert_eq!(read_header(&header(70_000)), Some((0, 70_000)));
        assert_eq!(read_header(&[0; 4]), None);
    }
}
