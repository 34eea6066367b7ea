//! Received messages that wait for their decoder, and pieces that the peer has lent.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tonic_rdma_memory::{Landed, LandedReader, PerProcess, Window};

use crate::methods::Method;
use crate::named::message::NamedMessage;
use crate::placeholder::{HEADER, Key};

/// Number of shards, a power of two.
const SHARDS: usize = 16;

/// A received message. The variant says how the bytes arrived.
#[derive(Debug)]
pub(super) enum ArrivedMessage {
    /// The message lies in one piece.
    Whole(Landed),
    /// The message is lent, except for its ends.
    Lent(Box<LentPiece>),
    /// A message of a call that has named a buffer.
    Named(Box<NamedMessage>),
}

impl From<Landed> for ArrivedMessage {
    fn from(landed: Landed) -> Self {
        ArrivedMessage::Whole(landed)
    }
}

impl From<Box<LentPiece>> for ArrivedMessage {
    fn from(piece: Box<LentPiece>) -> Self {
        ArrivedMessage::Lent(piece)
    }
}

impl From<NamedMessage> for ArrivedMessage {
    fn from(message: NamedMessage) -> Self {
        ArrivedMessage::Named(Box::new(message))
    }
}

/// A message that waits for its decoder.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) message: ArrivedMessage,
    /// The method to update once tonic accepts the message's length. `None` if the length is known
    /// to be accepted.
    pub(super) method: Option<Arc<Method>>,
}

/// A hasher that returns the first half of the key, which is the key's number in its thread.
#[derive(Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        let _ = bytes;
    }
    fn write_u128(&mut self, key: u128) {
        self.0 = key as u64;
    }
}

type Shard = Mutex<HashMap<u128, Kept, BuildHasherDefault<AsItIs>>>;

static TABLE: PerProcess<[Shard; SHARDS]> = PerProcess::new(Default::default);

fn shard(key: Key) -> (MutexGuard<'static, HashMap<u128, Kept, BuildHasherDefault<AsItIs>>>, u128) {
    let key = u128::from_le_bytes(key.0);
    // Select the shard by bits that the map does not use.
    let shard = &TABLE[(key >> 64) as usize % SHARDS];
    (shard.lock().unwrap_or_else(PoisonError::into_inner), key)
}

pub(super) fn put(key: Key, kept: Kept) {
    let (mut shard, key) = shard(key);
    shard.insert(key, kept);
}

/// Removes and returns the message of `key`, so that a key is valid once.
pub(super) fn take(key: Key) -> Option<Kept> {
    let (mut shard, key) = shard(key);
    shard.remove(&key)
}

pub(super) fn holds(key: Key) -> bool {
    let (shard, key) = shard(key);
    shard.contains_key(&key)
}

/// Number of received messages in this process that wait for their decoder. A message is removed
/// when it is decoded or when its body is dropped, so the number is 0 while no call is in flight.
#[cfg(feature = "test-util")]
pub fn pending_messages() -> usize {
    TABLE.iter().map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner).len()).sum()
}

/// A piece of a message with lent bytes: the bytes before them, the lent bytes, and the bytes after
/// them.
#[derive(Debug, Default)]
pub struct LentPiece {
    /// The bytes before the lent bytes, in memory that the peer cannot write to.
    pub head: Bytes,
    /// The bytes that the peer has lent.
    pub lent: Landed,
    /// The bytes after the lent bytes, received like `head`.
    pub tail: Bytes,
}

#[expect(clippy::len_without_is_empty, reason = "nothing asks")]
impl LentPiece {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.head.len() + self.lent.len() + self.tail.len()
    }

    /// Appends a copy of all bytes to `dst`.
    pub fn append_to(&self, dst: &mut BytesMut) {
        dst.put_slice(&self.head);
        self.lent.append_to(dst);
        dst.put_slice(&self.tail);
    }

    /// Returns a reader of the piece, which is one message, without the message's header.
    pub(super) fn message(self, window: &mut Window) -> LandedReader<'_> {
        let LentPiece { mut head, lent, tail } = self;
        head.advance(HEADER.min(head.len()));
        Landed::reader_of(vec![head.into(), lent, tail.into()], window)
    }
}
