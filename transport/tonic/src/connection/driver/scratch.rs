//! Memory that a driver needs only while it runs.
//!
//! The memory belongs to the thread and serves all connections. So the memory stays in the cache
//! when thousands of connections take turns, and a connection at rest keeps no such memory.

use std::cell::RefCell;

use bytes::{BufMut, Bytes, BytesMut};
use tonic_rdma_fabric::Completion;

use crate::connection::receive::unread::RECEIVE_CHUNK;

thread_local! {
    static COMPLETIONS: RefCell<Vec<Completion>> = const { RefCell::new(Vec::new()) };
    /// The buffer to which received messages are copied. One allocation holds many messages, and is
    /// reused once all of these messages are dropped.
    static MESSAGES: RefCell<BytesMut> = RefCell::default();
}

/// Takes the empty list of completions.
#[inline]
pub(super) fn take_completions() -> Vec<Completion> {
    // Use a new list while the thread ends, because the thread's list is gone.
    COMPLETIONS.try_with(RefCell::take).unwrap_or_default()
}

/// Returns the list from [`take_completions`].
#[inline]
pub(super) fn put_completions(mut completions: Vec<Completion>) {
    completions.clear();
    let _ = COMPLETIONS.try_with(|shared| shared.replace(completions));
}

/// Copies a received message. The copy keeps a buffer of [`RECEIVE_CHUNK`] bytes alive, which also
/// holds other messages.
#[inline]
pub(super) fn copy_message(data: &[u8]) -> Bytes {
    let copied = MESSAGES.try_with(|messages| {
        let mut messages = messages.borrow_mut();
        if messages.capacity() - messages.len() < data.len() {
            messages.reserve(RECEIVE_CHUNK.max(data.len()));
        }
        messages.put_slice(data);
        messages.split().freeze()
    });
    copied.unwrap_or_else(|_| Bytes::copy_from_slice(data))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_share_a_buffer_which_is_used_again() {
        let first = copy_message(&[1; 100]);
        let at = first.as_ptr() as usize;
        for n in 0..10_000_u32 {
            let message = copy_message(&n.to_le_bytes());
            assert_eq!(message, n.to_le_bytes().as_slice());
            let distance = (message.as_ptr() as usize).wrapping_sub(at);
            assert!(n > 1_000 || distance < RECEIVE_CHUNK, "{n}");
        }
        assert_eq!(first, [1; 100].as_slice(), "it is kept, and so is its buffer");
        let places: std::collections::BTreeSet<_> =
            (0..10_000_u32).map(|n| copy_message(&n.to_le_bytes()).as_ptr() as usize).collect();
        assert!(places.len() <= 2 * RECEIVE_CHUNK / 4, "{}", places.len());
        let long = copy_message(&vec![3; 3 * RECEIVE_CHUNK]);
        assert_eq!(long.len(), 3 * RECEIVE_CHUNK);
    }

    #[test]
    fn completions_are_gone_when_they_are_given_back() {
        let mut completions = take_completions();
        completions.push(Completion::Sent { id: 1 });
        let (capacity, nested) = (completions.capacity(), take_completions());
        assert!(nested.is_empty() && nested.capacity() == 0);
        put_completions(nested);
        put_completions(completions);
        let again = take_completions();
        assert!(again.is_empty() && again.capacity() == capacity);
    }
}
