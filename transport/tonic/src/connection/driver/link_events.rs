//! Handles the link's completions and errors, and the end of a connection.

use std::cell::RefCell;
use std::task::{Context, Poll, Waker};

use bytes::{BufMut, Bytes, BytesMut};
use tonic_rdma_fabric::{Completion, Link, LinkError};
use tonic_rdma_proto::{CloseCode, Side};

use crate::connection::lifecycle::Life;
use crate::connection::receive::unread::RECEIVE_CHUNK;
use crate::connection::state::ConnectionState;
use crate::path::Path;
use crate::path::reason::{Reason, ReasonCode};

/// Maximum number of polls for the completion of a connection's last message, after the driver was
/// dropped.
const GOODBYE_POLLS: usize = 1000;

impl ConnectionState {
    /// Takes and handles the link's completions. Returns true if the link has no more completions
    /// for now.
    pub(super) fn poll_link(&mut self, cx: &mut Context<'_>) -> bool {
        let mut error = self.tasks.driver.take_error();
        let mut idle = true;
        if let (Some(link), None) = (self.link.get_mut(), &error) {
            let mut completions = take_completions();
            match link.poll(cx, &mut completions) {
                Poll::Pending => {}
                Poll::Ready(result) => {
                    idle = false;
                    error = result.err();
                }
            }
            self.link.return_leases(cx, &mut self.conn);
            self.usage.polled(completions.len());
            self.tasks.work += completions.len();
            // Handle the completions even after an error, because the completions came before the
            // error.
            let result = self.complete(&completions);
            put_completions(completions);
            error = error.or(result.err());
        }
        if let Some(error) = error {
            let reason = self.end_reason_of(&error);
            tracing::debug!(%reason, "connection ended");
            self.end(Life::Dead(reason));
        }
        idle
    }

    /// Tells the peer that the connection ends, if the end costs the peer no call. A client gives
    /// up only its own calls, so it always tells the server. A server tells the client only if no
    /// call is open: if the end cuts calls off, the client should report a lost connection.
    pub(super) fn say_goodbye(&mut self) {
        let is_clean = self.conn.side() == Side::Client || self.conn.pending().streams == 0;
        if !self.lifecycle.is_open() || !is_clean {
            return;
        }
        let text = "the runtime has ended";
        self.conn.close(CloseCode::Ok, text);
        self.end(Life::Closing(Reason::new(ReasonCode::GoAway, text)));
        self.flush();
        // Poll here, because the driver no longer polls, and a device needs a moment to send. If
        // the message is not sent, the peer still notices the end.
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..GOODBYE_POLLS {
            // Flush again, because the message may have waited for a SEND slot.
            if self.conn.is_due() {
                self.flush();
            }
            if self.link.is_idle() || self.lifecycle.is_dead() {
                break;
            }
            std::thread::yield_now();
            self.poll_link(&mut cx);
        }
    }

    fn end_reason_of(&self, error: &LinkError) -> Reason {
        if let Some(reason) = self.lifecycle.end_reason() {
            return reason.clone();
        }
        match error {
            LinkError::Closed { .. }
                if self.conn.pending().streams == 0 || !self.conn.takes_streams() =>
            {
                Reason::from_peer(
                    ReasonCode::GoAway,
                    format!("disconnected ({})", self.lifecycle.peer),
                )
            }
            // Report an orderly end, because shared memory reports this error only when the peer's
            // process releases the memory. No call fails.
            LinkError::Disconnected { peer }
                if Path::of(peer) == Path::Shm
                    && self.conn.side() == Side::Server
                    && self.conn.pending().streams == 0 =>
            {
                Reason::from_peer(ReasonCode::GoAway, format!("{error}, with no call in flight"))
            }
            _ => self.lifecycle.lost(error),
        }
    }

    /// Deregisters memory that was not needed for a while (R12).
    pub(super) fn return_unused(&mut self, now: std::time::Instant) {
        if self.conn.lands_nothing(now) {
            self.landing.trim();
        }
        self.link.pool.trim(now);
    }
}

// Each thread has its own list and buffer, which serve all connections on that thread. So this
// memory stays in the cache when thousands of connections take turns, and a connection at rest
// keeps no such memory.

thread_local! {
    static COMPLETIONS: RefCell<Vec<Completion>> = const { RefCell::new(Vec::new()) };
    /// The buffer to which received messages are copied. One allocation holds many messages, and is
    /// reused once all of these messages are dropped.
    static MESSAGES: RefCell<BytesMut> = RefCell::default();
}

/// Takes the thread's list for completions, which is empty.
#[inline]
pub(super) fn take_completions() -> Vec<Completion> {
    // Use a new list while the thread ends, because the thread's list is gone.
    COMPLETIONS.try_with(RefCell::take).unwrap_or_default()
}

/// Gives the list from [`take_completions`] back to the thread.
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
